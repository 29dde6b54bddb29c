"""Where models come from: presets, checkpoint folders in the published naming, hub names."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from lab.errors import InputError
from lab.models.folders import BACKBONE, BACKBONES, CONFIG, HEAD, TOKENIZER, WEIGHTS, load_folder, pretrained, seeded
from lab.models.vision import DTYPES, DecisionConfig, DecisionModel
from lab.tokens import SMOLVLM_TOKENS, TEXT_VOCABULARY, cache_folder, offline_weights, write_atomically
from lab.workloads import DATA

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
# What a model without a checkpoint is asked with: the options see each other, the device resizes.
FRESH = {"option_attention": "block", "preprocess": "gpu"}


def load_model(
    name: str = "smolvlm-256m", device: str = "cpu", dtype: str = "fp32", seed: int = 0, weights: str = "default"
) -> DecisionModel:
    """A decision model in evaluation mode.

    `name` is a preset (`smolvlm-256m`, `tiny`), a trained checkpoint that comes with the package (`pocket`,
    `pocket-question-first`; see `lab.training`), a folder with a checkpoint in the published naming (with all weights, or
    with the heads alone beside the name of their backbone) or with a backbone alone, or a hub name of either (a backbone
    gets fresh heads from `seed`). For the preset `smolvlm-256m` the
    text model takes SmolLM2-135M-Instruct's weights from the offline package (4-bit, dequantised) and the rest is random
    from `seed`; with `weights="random"` all of it is. `dtype` (`fp32`, `bf16`) is the backbone's, heads are fp32. Raises
    InputError for an unknown name, device or dtype, for missing weights, and for a checkpoint that does not fit: missing or
    extra keys, weights that are not finite, settings that cannot be, a tokenizer without the layout's tokens.
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
        model = load_folder(TRAINED[name])
        model.name, model.weights = name, "trained by imitation of scripted experts (lab train pocket)"
    elif weights == "random":
        raise InputError(f"weights='random' goes with a preset ({', '.join(PRESETS)}), not with {name!r}.")
    elif Path(name).is_dir() and not _backbone_alone(Path(name)):
        model = load_folder(Path(name))
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


def pocket_model(seed: int, layout: str = "terminator") -> DecisionModel:
    """An untrained pocket model, weights from `seed`, for training."""
    config = DecisionConfig(image_size=POCKET["image_size"], head_layers=1, layout=layout, **FRESH)
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
    with seeded(seed):
        return DecisionModel(SmolVLMModel(backbone), config, f"random, seed {seed}", name)


def _preset(name: str, seed: int, weights: str) -> DecisionModel:
    shape = PRESETS[name]
    model = _build(shape, DecisionConfig(image_size=shape["image_size"], **FRESH), seed, name)
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
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file()


def _hub(name: str, seed: int) -> DecisionModel:
    if "/" not in name and not Path(name).is_dir():
        raise InputError(
            f"Unknown model {name!r}: it is no model of ours ({', '.join(KNOWN)}), no folder, and no hub name (owner/name)."
        )
    if released := None if Path(name).is_dir() else _released(name):
        model = load_folder(released)
        model.name, model.weights = name, f"checkpoint {name}"
        return model
    encoder = pretrained(name)
    if BACKBONES[encoder.config.model_type] != "terminator":
        raise InputError(f"{name} is a {encoder.config.model_type!r}, whose markers only a decision checkpoint names.")
    with seeded(seed):
        return DecisionModel(encoder, DecisionConfig(**FRESH), f"{name}; heads random, seed {seed}", name)


def _released(name: str) -> Path | None:
    """The folder of a released decision checkpoint, from the hub or its cache; None where the hub holds none by that name
    or cannot be reached."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hf_hub_download(name, CONFIG)
        wanted = [CONFIG, BACKBONE, WEIGHTS, HEAD, *TOKENIZER, "added_tokens.json"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError, HfHubHTTPError):
        return None
