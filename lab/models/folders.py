"""A decision checkpoint's folder in the published naming: read, checked at the border, and built.

What is wrong with one is said in a sentence that names the file and the remedy, before any of it is used. No code of a
checkpoint is ever run, and weights are read as safetensors only.
"""

import functools
import json
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open

from lab.errors import InputError, foreign, whole
from lab.models.vision import ATTENTIONS, READOUTS, DecisionConfig, DecisionModel
from lab.pixels import INTERPOLATIONS, PREPROCESS
from lab.tokens import (
    IMAGE,
    SMOLVLM_TOKENS,
    TEXT_VOCABULARY,
    load_tokenizer,
    needed_tokens,
    read_tokenizer,
    token_id,
)
from lab.workloads import QUESTION_TYPES

# Where a decision is read out, by backbone.
BACKBONES = {"smolvlm": "terminator", "idefics3": "terminator", "modernvbert": "mask"}
CONFIG, BACKBONE, WEIGHTS, HEAD = (
    "vlm_agent_config.json",
    "backbone/config.json",
    "model.safetensors",
    "head.safetensors",
)
TOKENIZER = ("processor/tokenizer.json", "processor/tokenizer_config.json")


@contextmanager
def seeded(seed: int):
    """Random weights from `seed`, the caller's generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def load_folder(folder: Path) -> DecisionModel:
    from transformers import AutoModel

    alone = (folder / HEAD).is_file() and not (folder / WEIGHTS).is_file()
    for needed in (CONFIG, HEAD) if alone else (CONFIG, BACKBONE, WEIGHTS):
        if not (folder / needed).is_file():
            raise InputError(f"The folder {folder} holds no {needed}, so it is no decision checkpoint.")
    said = json_table(folder / CONFIG)
    with seeded(0), foreign(f"{folder} describes no model that can be built"):
        if alone:
            encoder, weights = _named_backbone(folder, said)
        else:
            weights, shape = f"checkpoint {folder.name}", _backbone_config(folder)
            encoder = AutoModel.from_config(shape, trust_remote_code=False)
        config = _decision_config(folder / CONFIG, said, encoder.config)
        tokenizer, markers = _own_tokenizer(folder, config, encoder.config)
        check_vocabulary(folder, tokenizer(), encoder.text_model)
        model = DecisionModel(encoder, config, weights, folder.name, tokenizer, markers, folder)
    expected = model.state_dict()
    state = read_state(folder / (HEAD if alone else WEIGHTS), expected)
    missing, extra = set(expected) - set(state), set(state) - set(expected)
    if alone:
        missing = {name for name in missing if not name.startswith("encoder.")}
        extra |= {name for name in state if name.startswith("encoder.")}  # the backbone is the one it names
    file = f"{folder}/{HEAD if alone else WEIGHTS}"
    if missing or extra:
        wrong = [
            f"{len(keys)} {word} ({min(keys)}, ...)" for keys, word in ((missing, "missing"), (extra, "extra")) if keys
        ]
        raise InputError(f"{file} does not fit this model: {' and '.join(wrong)}.")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InputError(f"{file}: {name} is {tuple(value.shape)}, the config says {tuple(expected[name].shape)}.")
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=not alone)
    return model


def _backbone_config(folder: Path):
    from transformers import AutoConfig

    with foreign(f"{folder}/{BACKBONE} cannot be read as a backbone's config"):
        config = AutoConfig.from_pretrained(folder / "backbone", trust_remote_code=False)
    _check_backbone(config.model_type, f"The backbone in {folder}")
    return config


def _check_backbone(model_type: str, what: str) -> None:
    if model_type not in BACKBONES:
        raise InputError(f"{what} is a {model_type!r}; decision checkpoints here are {' or '.join(BACKBONES)}.")


def check_vocabulary(folder: Path, tokenizer, text_model) -> None:
    """Raise InputError where a checkpoint's tokenizer has ids that its text model has no embeddings for."""
    most, rows = max(tokenizer.get_vocab().values()), len(text_model.get_input_embeddings().weight)
    if most >= rows:
        raise InputError(
            f"{folder}: the tokenizer numbers its tokens up to {most}, and the model knows {rows}; use the tokenizer that "
            "the checkpoint was trained with."
        )


def _named_backbone(folder: Path, said: dict):
    """The backbone that a checkpoint of heads alone names, by a folder beside it or a hub name, and the weights in words."""
    named = said.get("backbone")
    if not isinstance(named, str) or not named:
        raise InputError(f"{folder}/{CONFIG} names no backbone, which heads alone need; add the key 'backbone'.")
    beside = folder / named
    encoder = pretrained(str(beside) if beside.is_dir() else named, said.get("backbone_revision"))
    return encoder, f"heads of checkpoint {folder.name} on {named}"


def _own_tokenizer(folder: Path, config: DecisionConfig, backbone) -> tuple[Callable, tuple[str, ...]]:
    """What makes the checkpoint's tokenizer, and the markers of its `mask` layout.

    Its own in `processor/` where there is one; else SmolLM2's vocabulary with the tokens of `added_tokens.json`, by default
    SmolVLM's. Raises InputError where a token that the layout needs is not exactly one token, or the image's has another
    number than the backbone gives it: the row would say something else than what was taught.
    """
    masked = config.readout == "mask"
    markers, added = (), tuple(SMOLVLM_TOKENS)
    if (folder / TOKENIZER[0]).is_file():
        tokenizer, named = read_tokenizer(folder / "processor", ("cls", "sep", "mask") if masked else ())
        make, markers = (lambda: tokenizer), tuple(named.values())
    elif masked:
        raise InputError(f"{folder} reads out at masks and holds no {TOKENIZER[0]}, which says what its markers are.")
    else:
        if (folder / "added_tokens.json").is_file():
            ids = json_table(folder / "added_tokens.json")
            if set(ids.values()) != set(range(TEXT_VOCABULARY, TEXT_VOCABULARY + len(ids))):
                raise InputError(
                    f"{folder}/added_tokens.json must number its tokens from {TEXT_VOCABULARY} on, without gaps."
                )
            added = tuple(sorted(ids, key=ids.get))
        make = functools.partial(load_tokenizer, added)
        tokenizer = make()
        for number, token in enumerate(added, TEXT_VOCABULARY):
            if tokenizer.token_to_id(token) != number:
                raise InputError(f"{folder}/added_tokens.json adds {token!r}, which the vocabulary holds already.")
    try:
        for token in needed_tokens(masked, markers):
            token_id(tokenizer, token)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    place = getattr(backbone, "image_token_id", None)
    if place is not None and token_id(tokenizer, IMAGE) != place:
        raise InputError(
            f"{folder}: the tokenizer numbers {IMAGE} {token_id(tokenizer, IMAGE)}, the backbone {place}; use the tokenizer "
            "that the checkpoint was trained with."
        )
    return make, markers


def read_state(path: Path, expected: dict) -> dict[str, torch.Tensor]:
    """All tensors of a file. Of a table stored as `<name>.ids` and `<name>.rows`, the rows that training changed, the others
    are those of `expected`, from a seed. InputError for a file that cannot be read, and for weights
    that are not real and finite: no answer of theirs would be one."""
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        raise InputError(f"{path} cannot be read as safetensors: {error}.") from None
    for name, value in state.items():
        table = name.endswith(".ids") and name.removesuffix(".ids") in expected
        if value.is_complex() or not value.float().isfinite().all():
            raise InputError(f"{path}: {name} holds weights that are not finite numbers; take a sound copy.")
        if value.is_floating_point() == table:
            raise InputError(
                f"{path}: {name} is {str(value.dtype).removeprefix('torch.')}; weights are floating point."
            )
    tables = [name.removesuffix(".ids") for name in state if name.endswith(".ids")]
    for name in [name for name in tables if name in expected]:
        if f"{name}.rows" not in state:
            raise InputError(f"{path} holds {name}.ids but no {name}.rows; it is not complete.")
        ids, rows = state.pop(f"{name}.ids").long(), state.pop(f"{name}.rows")
        fits = ids.ndim == 1 and rows.shape == (len(ids), *expected[name].shape[1:])
        if not fits or (len(ids) and not 0 <= ids.min() <= ids.max() < len(expected[name])):
            raise InputError(f"{path}: {name}.ids does not fit its rows or the table of {name}.")
        state[name] = expected[name].float().index_copy(0, ids, rows.float())
    return state


def _decision_config(path: Path, said: dict, backbone) -> DecisionConfig:
    """A checkpoint's settings, checked; what it leaves out is as in the published loader."""
    said = {key: value for key, value in said.items() if value is not None}
    # The old name of block attention.
    if said.get("option_attention") == "bidirectional":
        said["option_attention"] = "block"
    readout = str(said.setdefault("readout", BACKBONES[backbone.model_type]))
    said.setdefault("layout", READOUTS.get(readout, [""])[0])
    for name, known in (
        ("readout", READOUTS),
        ("layout", READOUTS.get(readout, ())),
        ("option_attention", ATTENTIONS.get(readout, ())),
        ("preprocess", PREPROCESS),
        ("image_interpolation", INTERPOLATIONS),
    ):
        if name in said and said[name] not in list(known):
            raise InputError(f"{path}: {name} is {said[name]!r}; with readout {readout!r} it is {' or '.join(known)}.")
    if BACKBONES[backbone.model_type] != readout:
        raise InputError(
            f"{path}: a {backbone.model_type} backbone reads out at {BACKBONES[backbone.model_type]!r}, not at {readout!r}."
        )
    heat = temperatures(path, said)
    for name, least in (("max_len", 1), ("head_max_len", 1), ("head_layers", 0), ("n_act", 1), ("image_split_edge", 0)):
        whole(f"{path}: {name}", said.get(name, least), least)
    for name, most in (("head_layers", 64), ("n_act", 1024)):
        if said.get(name, 0) > most:
            raise InputError(f"{path}: {name} is {said[name]}; a checkpoint has {most} at most.")
    size, learned = said.get("image_size", 512), backbone.vision_config.image_size
    if type(size) is not int or size > learned:
        raise InputError(
            f"{path}: image_size is {size!r}; it is a whole number, up to the {learned} pixels at which the backbone "
            "learned its positions."
        )
    if said.get("image_split_edge") and said.get("preprocess") == "gpu":
        raise InputError(f"{path} splits images, which only preprocess 'processor' does, and says preprocess 'gpu'.")
    return DecisionConfig(**{f.name: said[f.name] for f in fields(DecisionConfig) if f.name in said} | heat)


def temperatures(path: Path, said: dict, limits: tuple[float, float] | None = None) -> dict:
    """`temperature` and `temperature_by_options` of a checkpoint's config `path`, which holds `said`.

    Raises InputError for what is no finite number above 0, and for types missing. Where some lie outside of `limits`, a
    warning says so: they are kept as they are, and brought within when used.
    """
    by_type = said.get("temperature", [1.0] * len(QUESTION_TYPES))
    by_options = said.get("temperature_by_options", {})
    if not isinstance(by_type, list) or len(by_type) != len(QUESTION_TYPES):
        raise InputError(f"{path}: temperature is {by_type!r}; it is a list, one for {', '.join(QUESTION_TYPES)}.")
    if not isinstance(by_options, dict):
        raise InputError(
            f"{path}: temperature_by_options is {by_options!r}; it is a table such as {{'choice:2': 1.0}}."
        )
    named = dict(zip(QUESTION_TYPES, by_type, strict=True)) | by_options
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InputError(f"{path}: the temperature of {name} is {value!r}; it is a number above 0.")
    outside = {name: value for name, value in named.items() if limits and not limits[0] <= value <= limits[1]}
    if outside:
        listed = ", ".join(f"{name} {value:g}" for name, value in outside.items())
        warnings.warn(f"{path}: temperatures are kept within {limits[0]:g} to {limits[1]:g}: {listed}.", stacklevel=2)
    return {"temperature": tuple(by_type), "temperature_by_options": by_options}


def json_table(path: Path) -> dict:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(said, dict):
        raise InputError(f"{path} holds no table of names and values.")
    return said


def pretrained(name: str, revision: str | None = None):
    """A backbone with its weights, from a folder or the hub, in fp32."""
    from transformers import AutoModel

    try:
        encoder, loaded = AutoModel.from_pretrained(
            name, revision=revision, dtype=torch.float32, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # whatever a stranger's files and the hub make of it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"The model {name!r} is no folder here, not in the hub's cache, and the hub did not give it ({reason}); "
            "name a preset or a checkpoint folder, or fetch it where there is a network."
        ) from None
    _check_backbone(encoder.config.model_type, name)
    if lacking := sorted(loaded["missing_keys"]):
        raise InputError(
            f"{name} lacks {len(lacking)} of the backbone's weights ({lacking[0]}, ...); take a whole copy."
        )
    for part, value in encoder.state_dict().items():
        if not value.isfinite().all():
            raise InputError(f"{name}: {part} holds weights that are not finite numbers; take a sound copy.")
    return encoder
