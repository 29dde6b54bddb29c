"""Four families of vision-language models, each over transformers' own classes, as a resumed prompt needs them.

| family | tower calls | positions | state |
|---|---|---|---|
| `smolvlm` | one per image | plain | can be cut back |
| `qwen2_5_vl` | one per image | M-RoPE | can be cut back |
| `gemma4` | one per image | plain; both ways inside an image | not past its sliding window |
| `qwen3_5` | runs by patch budget | M-RoPE | recurrent: never cut back |

All but `smolvlm` are tiny and seeded random: they are here for their rules, not for their answers.
"""

from importlib import import_module

from lab.errors import InputError
from lab.models.families.base import Family, Request

FAMILIES = {"smolvlm": "smolvlm", "qwen2_5_vl": "qwen", "gemma4": "gemma4", "qwen3_5": "qwen"}

__all__ = ["FAMILIES", "Family", "Request", "load_family"]


def load_family(name: str, device: str = "cpu", dtype: str = "fp32", seed: int = 0, **options) -> Family:
    """A family by name. `smolvlm` also takes `preset` (tiny or smolvlm-256m) and `weights`, as `lab.load_model` does.

    Raises InputError for an unknown name, device or dtype.
    """
    if name not in FAMILIES:
        raise InputError(f"Unknown family {name!r}; choose one of {', '.join(FAMILIES)}.")
    from lab.models.checkpoints import check_device
    from lab.models.vision import DTYPES

    check_device(device)
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    module = import_module(f"lab.models.families.{FAMILIES[name]}")
    return module.load(name, device, dtype, seed, **options)
