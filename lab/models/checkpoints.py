"""Where models come from: presets, checkpoint folders in the published naming, hub names."""

import json
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from lab.errors import InputError
from lab.models.vision import DTYPES, OPTION_ATTENTION, DecisionConfig, DecisionModel
from lab.tokens import SMOLVLM_TOKENS, TEXT_VOCABULARY, cache_folder, offline_weights, write_atomically
from lab.workloads import DATA, QUESTION_TYPES

VOCABULARY = TEXT_VOCABULARY + len(SMOLVLM_TOKENS)
# SmolVLM-256M's shape (its published config); `tiny` is the same classes with three heads per layer, as odd as the
# real nine, so that torch takes the same attention path.
PRESETS = {
    "smolvlm-256m": {
        "image_size": 512,
        "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        "text": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    },
    "tiny": {
        "image_size": 128,
        "vision": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
        "text": {
            "hidden_size": 192,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    },
}
# What `lab train pocket` teaches. One head of 64 in the text model, as odd as the real nine.
POCKET = {
    "image_size": 128,
    "vision": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3},
    "text": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,  # of the embedding rows; beside image rows of size 1 the usual 0.02 is nothing
    },
}
# Trained checkpoints that come with the package, by the layout that their text model was taught in.
TRAINED = {"pocket": DATA / "pocket" / "terminator", "pocket-question-first": DATA / "pocket" / "question_first"}
KNOWN = (*PRESETS, *TRAINED)
BACKBONES = ("smolvlm", "idefics3")
CHECKPOINT = ("vlm_agent_config.json", "backbone/config.json", "model.safetensors")


def load_model(
    name: str = "smolvlm-256m", device: str = "cpu", dtype: str = "fp32", seed: int = 0, weights: str = "default"
) -> DecisionModel:
    """A decision model in evaluation mode.

    `name` is a preset (`smolvlm-256m`, `tiny`), a trained checkpoint that comes with the package (`pocket`,
    `pocket-question-first`; see `lab.training`), a folder with a checkpoint in the published naming or with a SmolVLM
    backbone alone, or a hub name of either (a backbone gets fresh heads from `seed`). For the preset `smolvlm-256m` the
    text model takes SmolLM2-135M-Instruct's weights from the offline package (4-bit, dequantised) and the rest is random
    from `seed`; with `weights="random"` all of it is. `dtype` (`fp32`, `bf16`) is the backbone's, heads are fp32. Raises
    InputError for an unknown name, device or dtype, for missing weights, and for a checkpoint with missing or extra keys.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if weights not in ("default", "random"):
        raise InputError(f"weights is {weights!r}; choose default or random.")
    check_device(device)
    if not isinstance(seed, int):
        raise InputError(f"seed is {seed!r}; give a whole number.")
    name = str(name)
    if name in PRESETS:
        model = _preset(name, seed, weights)
    elif name in TRAINED and weights == "default":
        model = _folder(TRAINED[name])
        model.name, model.weights = name, "trained by imitation of scripted experts (lab train pocket)"
    elif weights == "random":
        raise InputError(f"weights='random' goes with a preset ({', '.join(PRESETS)}), not with {name!r}.")
    elif Path(name).is_dir() and not _backbone_alone(Path(name)):
        model = _folder(Path(name))
    else:
        model = _hub(name, seed)
    return model.to_dtype(dtype).to(device).eval().requires_grad_(False)


def weights_source() -> str:
    """Which weights the preset `smolvlm-256m` takes, in words; raises InputError where the offline package is missing."""
    return f"text model: SmolLM2-135M-Instruct, 4-bit dequantised ({offline_weights().name}); vision tower: random"


def check_device(device: str) -> None:
    """Raise InputError for a device that is neither the CPU nor a CUDA GPU that torch sees."""
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError):
        asked = None
    if asked is None or asked.type not in ("cpu", "cuda"):
        raise InputError(f"Unknown device {device!r}; use cpu or cuda.")
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise InputError("The device cuda was asked for, but torch sees no CUDA GPU here; use --device cpu.")
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise InputError(f"There is no {device}; torch sees {torch.cuda.device_count()} CUDA GPU(s), counted from 0.")


@contextmanager
def _seeded(seed: int):
    """Random weights from `seed`, the caller's generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def pocket_model(seed: int, layout: str = "terminator") -> DecisionModel:
    """An untrained pocket model, weights from `seed`, for training."""
    config = DecisionConfig(image_size=POCKET["image_size"], option_attention="block", head_layers=1, layout=layout)
    return _build(POCKET, config, seed, "pocket")


def _build(shape: dict, config: DecisionConfig, seed: int, name: str) -> DecisionModel:
    from transformers import SmolVLMConfig, SmolVLMModel

    backbone = SmolVLMConfig(
        vision_config={**shape["vision"], "image_size": shape["image_size"], "patch_size": 16},
        text_config={
            **shape["text"],
            "model_type": "llama",
            "head_dim": 64,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "max_position_embeddings": 8192,
            "pad_token_id": 2,
        },
        scale_factor=4,
        image_token_id=TEXT_VOCABULARY + SMOLVLM_TOKENS.index("<image>"),
        pad_token_id=2,
    )
    with _seeded(seed):
        return DecisionModel(SmolVLMModel(backbone), config, f"random, seed {seed}", name)


def _preset(name: str, seed: int, weights: str) -> DecisionModel:
    shape = PRESETS[name]
    model = _build(shape, DecisionConfig(image_size=shape["image_size"]), seed, name)
    if name == "smolvlm-256m" and weights == "default":
        kept = _offline_text_weights(model.encoder.text_model)
        embedding = kept.pop("embed_tokens.weight")
        model.encoder.text_model.load_state_dict(kept, strict=False)
        model.encoder.text_model.embed_tokens.weight.data[: len(embedding)] = embedding
        model.weights = f"text SmolLM2-135M-Instruct (4-bit, dequantised); vision and heads {model.weights}"
    return model


def _offline_text_weights(text_model) -> dict[str, torch.Tensor]:
    """SmolLM2's weights by the text model's names; dequantised once and kept in the user's cache folder as fp16."""
    kept = cache_folder() / "smollm2-135m-text.safetensors"
    try:
        found = load_file(kept)
        if set(found) != set(text_model.state_dict()):
            raise ValueError("another model's names")
        return found
    except Exception:  # a missing, torn or foreign file alike is made again
        pass
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    print("Dequantising the text model's weights (once, about ten seconds) ...", file=sys.stderr, flush=True)
    with torch.device("meta"):
        named = LlamaForCausalLM(text_model.config)
    tensors = load_gguf_checkpoint(str(offline_weights()), return_tensors=True, model_to_load=named)["tensors"]
    tensors = {name.removeprefix("model."): torch.as_tensor(value).half() for name, value in tensors.items()}
    write_atomically(kept, save(tensors))
    return tensors


def _backbone_alone(folder: Path) -> bool:
    """Whether a folder holds a backbone as transformers saves it, and no decision checkpoint."""
    return (folder / "config.json").is_file() and not (folder / "vlm_agent_config.json").is_file()


def _folder(folder: Path) -> DecisionModel:
    from transformers import AutoConfig, AutoModel

    for needed in CHECKPOINT:
        if not (folder / needed).is_file():
            raise InputError(f"The folder {folder} holds no {needed}, so it is no decision checkpoint.")
    config = _decision_config(folder / "vlm_agent_config.json")
    try:
        backbone = AutoConfig.from_pretrained(folder / "backbone")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{folder}/backbone/config.json cannot be read as a backbone's config: {reason}") from None
    if backbone.model_type not in BACKBONES:
        raise InputError(
            f"The backbone in {folder} is a {backbone.model_type!r}; decision checkpoints here are {' or '.join(BACKBONES)}."
        )
    added = tuple(SMOLVLM_TOKENS)
    if (folder / "added_tokens.json").is_file():
        ids = _json_table(folder / "added_tokens.json")
        if set(ids.values()) != set(range(TEXT_VOCABULARY, TEXT_VOCABULARY + len(ids))):
            raise InputError(
                f"{folder}/added_tokens.json must number its tokens from {TEXT_VOCABULARY} on, without gaps."
            )
        added = tuple(sorted(ids, key=ids.get))
    with _seeded(0):
        model = DecisionModel(AutoModel.from_config(backbone), config, f"checkpoint {folder.name}", folder.name, added)
    state = _read_state(folder / "model.safetensors", model.state_dict())
    missing, extra = set(model.state_dict()) - set(state), set(state) - set(model.state_dict())
    if missing or extra:
        said = [
            f"{len(keys)} {word} ({min(keys)}, ...)" for keys, word in ((missing, "missing"), (extra, "extra")) if keys
        ]
        raise InputError(f"{folder}/model.safetensors does not fit this model: {' and '.join(said)}.")
    for name, value in state.items():
        if value.shape != model.state_dict()[name].shape:
            raise InputError(
                f"{folder}/model.safetensors: {name} is {tuple(value.shape)}, the config says "
                f"{tuple(model.state_dict()[name].shape)}."
            )
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model


def _read_state(path: Path, expected: dict) -> dict[str, torch.Tensor]:
    """All tensors of a file; the rest of a table stored as `<name>.ids` and `<name>.rows` is as
    expected, that is as it was before training, from a seed."""
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}.") from None
    for name in [name.removesuffix(".ids") for name in state if name.endswith(".ids")]:
        if f"{name}.rows" not in state:
            raise InputError(f"{path} holds {name}.ids but no {name}.rows; it is not complete.")
        ids, rows = state.pop(f"{name}.ids").long(), state.pop(f"{name}.rows")
        if len(ids) != len(rows) or (
            name in expected and len(ids) and not 0 <= ids.min() <= ids.max() < len(expected[name])
        ):
            raise InputError(f"{path}: {name}.ids does not fit its rows or the table of {name}.")
        if name in expected:
            state[name] = expected[name].float().index_copy(0, ids, rows.float())
    return state


def _decision_config(path: Path) -> DecisionConfig:
    said = _json_table(path)
    said = {field.name: said[field.name] for field in fields(DecisionConfig) if field.name in said}
    # The old name of block attention.
    if said.get("option_attention") == "bidirectional":
        said["option_attention"] = "block"
    if said.get("option_attention", "causal") not in OPTION_ATTENTION:
        raise InputError(f"{path}: option_attention is {said['option_attention']!r}; it is causal or block.")
    for field in fields(DecisionConfig):
        if field.type is int and type(said.get(field.name, 0)) is not int:
            raise InputError(f"{path}: {field.name} is {said[field.name]!r}; it is a whole number.")
    temperature = said.get("temperature", [1.0] * len(QUESTION_TYPES))
    if not isinstance(temperature, list) or len(temperature) != len(QUESTION_TYPES):
        raise InputError(f"{path}: temperature is {temperature!r}; it is a list, one for {', '.join(QUESTION_TYPES)}.")
    return DecisionConfig(**{**said, "temperature": tuple(temperature)})


def _json_table(path: Path) -> dict:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(said, dict):
        raise InputError(f"{path} holds no table of names and values.")
    return said


def _hub(name: str, seed: int) -> DecisionModel:
    from transformers import AutoModel

    if "/" not in name and not Path(name).is_dir():
        raise InputError(
            f"Unknown model {name!r}: it is no model of ours ({', '.join(KNOWN)}), no folder, and no hub name (owner/name)."
        )
    if released := None if Path(name).is_dir() else _released(name):
        model = _folder(released)
        model.name, model.weights = name, f"checkpoint {name}"
        return model
    try:
        encoder = AutoModel.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"The model {name!r} is no folder here, not in the hub's cache, and the hub did not give it ({reason}); "
            f"name one of ours ({', '.join(KNOWN)}) or a checkpoint folder, or fetch it where there is a network."
        ) from None
    if encoder.config.model_type not in BACKBONES:
        raise InputError(
            f"{name} is a {encoder.config.model_type!r}; decisions are taken with {' or '.join(BACKBONES)}."
        )
    with _seeded(seed):
        return DecisionModel(encoder, DecisionConfig(), f"{name}; heads random, seed {seed}", name)


def _released(name: str) -> Path | None:
    """The folder of a released decision checkpoint, from the hub or its cache; None where the hub holds none by that name
    or cannot be reached."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hf_hub_download(name, CHECKPOINT[0])
        return Path(snapshot_download(name, allow_patterns=[*CHECKPOINT, "added_tokens.json"]))
    except (OSError, ValueError, HfHubHTTPError):
        return None
