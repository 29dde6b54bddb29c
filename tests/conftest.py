import os
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

# Tiny models gain nothing from a second thread, and on a busy machine its spinning costs a hundredfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Two workers share the machine (see Makefile), and times do not matter here: each gets its own measurement lock.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    own = Path(tempfile.gettempdir()) / f"refrain-tests-{worker}"
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)

PARAMETERS = 'profile = "standard"\nseed = 0\nrows = ""\nsteps = 3\nrate = 0.5\nfast = False\nsizes = [1, 2]'
SAVE = """
import json, os, pathlib
values = {"profile": profile, "seed": seed, "rows": rows, "steps": steps, "rate": rate, "fast": fast, "sizes": sizes}
answer = f"{steps} steps at seed {seed}."
text = json.dumps({"notebook": NAME, "parameters": values, "results": {"answer": answer}})
written = pathlib.Path(os.environ["LAB_RUN_FOLDER"], f"{NAME}.json").write_text(text)
"""


@pytest.fixture
def make_notebook(tmp_path):
    """make_notebook("01_name", "code", ..., save=True, tags=["parameters"]) writes a small notebook of these cells."""

    def make(name: str, *cells: str, save: bool = True, tag: int | None = 0, parameters: str = PARAMETERS) -> Path:
        sources = [parameters, *cells, *([SAVE.replace("NAME", repr(name))] if save else [])]
        code = [new_code_cell(source) for source in sources]
        if tag is not None:
            code[tag].metadata["tags"] = ["parameters"]
        title = new_markdown_cell(f"# Title of {name}\n\nIs it *so*?\n\nMore words.")
        notebook = new_notebook(cells=[title, *code])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
        return path

    return make


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """Tests marked `cuda` need a GPU; elsewhere they are skipped. A file's tests share a worker, for what they prepare is
    costly; so do those of one notebook, and all that share the browser."""
    import torch

    for item in items:
        group = {"browser": "browser"}.get(item.path.parent.name, item.path.stem)
        if item.path.parent.name == "notebooks":
            group = item.callspec.params["name"]
        if item.path.stem == "test_under_fire":  # long, and its tests share nothing that takes time
            group = item.name
        item.add_marker(pytest.mark.xdist_group(group))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(scope="session")
def mini():
    """A decision model of a few milliseconds whose answers depend on every picture: 64 px, one image token."""
    import torch

    from lab.models.checkpoints import FRESH, _build
    from lab.models.vision import DecisionConfig

    shape = {
        "image_size": 64,
        "vision": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1},
        "text": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        },
    }
    model = _build(shape, DecisionConfig(image_size=64, head_layers=1, **FRESH), 0, "mini").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            norm = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + norm)
    return model.requires_grad_(False)
