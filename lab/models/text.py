"""The text decision model: transformers' ModernBERT under the decision heads that the vision model has.

Encoder layers are called one by one, with masks made here: the stock forward asks on the host whether a mask hides
anything and then drops it, so that a padded row would run another kernel than one that is not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from lab.errors import InputError, foreign, whole
from lab.models.checkpoints import VOCABULARY, check_device
from lab.models.folders import check_vocabulary, json_table, read_state, seeded, temperatures
from lab.models.heads import DecisionHeads, temperature_for
from lab.models.vision import DTYPES
from lab.question_tokens import PAD, TextTokens
from lab.workloads import DATA, Question

# The published shapes, `tiny` with both kinds of attention in three layers, and `snake`, which `lab train snake` teaches.
PRESETS = {
    "english": {
        "encoder": {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16,
                    "vocab_size": 50368},
        "config": {"max_len": 512, "head_max_len": 192},
    },
    "multilingual": {
        "encoder": {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
                    "vocab_size": 256000},
        "config": {"max_len": 1024, "head_max_len": 256},
        "local_theta": 160000.0,
    },
    "tiny": {
        "encoder": {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3},
        "config": {"max_len": 1024, "head_max_len": 256},
    },
    "snake": {
        "encoder": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 1},
        "config": {"max_len": 256, "head_max_len": 192, "head_layers": 1},
    },
}  # fmt: skip
PUBLISHED = ("english", "multilingual")
# Checkpoints that come with the package: the same recipe, the second from a tenth of the data.
TRAINED = {"snake": DATA / "snake" / "whole", "snake-tenth": DATA / "snake" / "tenth"}
CONFIG = "rl_agent_config.json"
TEMPERATURES = (0.5, 5.0)  # the published limits: a fitted temperature near 0 would call a coin flip certain


@dataclass(frozen=True)
class TextConfig:
    """What a text checkpoint says besides its weights, under the published names (`rl_agent_config.json`)."""

    max_len: int = 512
    head_max_len: int = 192
    head_layers: int = 2
    n_act: int = 2
    temperature: tuple[float, ...] = (1.0, 1.0, 1.0)
    temperature_by_options: Mapping[str, float] = field(default_factory=dict)


class TextModel(DecisionHeads):
    """A ModernBERT `encoder` in its dtype with decision heads in fp32; `tokens` makes its rows."""

    def __init__(self, encoder, config: TextConfig, tokens: TextTokens, weights: str, name: str):
        super().__init__(encoder.config.hidden_size, config.head_layers, config.n_act)
        self.encoder, self.config, self.tokens, self.weights, self.name = encoder, config, tokens, weights, name

    @property
    def device(self) -> torch.device:
        return self.type_emb.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def encode(self, embeds: Tensor, mask: Tensor, layers: Sequence[Callable] | None = None) -> Tensor:
        """Last hidden states (after the final norm) [batch, length, width] of embedded tokens; mask bool [batch, length],
        False on padding. Padded keys are hidden from every query; a padded query sees all valid keys, so that no row of
        the softmax is empty, and nobody reads it. `layers` stand in for the encoder's own."""
        encoder, length = self.encoder, embeds.shape[1]
        place = torch.arange(length, device=embeds.device)
        near = (place[:, None] - place[None, :]).abs() <= encoder.config.local_attention // 2
        masks = {
            "full_attention": mask[:, None, None, :].expand(-1, 1, length, -1),
            "sliding_attention": (mask[:, None, :] & (near | ~mask[:, :, None]))[:, None],
        }
        hidden = encoder.embeddings(inputs_embeds=embeds)
        rotary = {kind: encoder.rotary_emb(hidden, place[None], kind) for kind in set(encoder.config.layer_types)}
        for kind, layer in zip(encoder.config.layer_types, layers or encoder.layers, strict=True):
            hidden = layer(hidden, attention_mask=masks[kind], position_embeddings=rotary[kind])
        return encoder.final_norm(hidden)

    def forward(
        self, ids: Tensor, mask: Tensor, types: Tensor, readouts: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits fp32 [batch, options], -1e4 where a row has no option, and act logits fp32 [batch, 2].

        ids int64 and mask bool [batch, length]; types int64 [batch]; readouts int64 and present bool [batch, options].
        """
        return self.answer(self.encoder.embeddings.tok_embeddings(ids), mask, types, readouts, present)

    def answer(
        self, embeds: Tensor, mask: Tensor, types: Tensor, readouts: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`forward` on embedded tokens [batch, length, width]."""
        first = torch.zeros(len(embeds), dtype=torch.int64, device=embeds.device)
        return self.score(self.encode(embeds, mask), types, readouts, first, mask, present)

    def temperature_of(self, question: Question) -> float:
        return temperature_for(question, self.config.temperature, self.config.temperature_by_options, TEMPERATURES)

    def describe(self) -> dict:
        return {
            "model": self.name,
            "weights": self.weights,
            "dtype": self.dtype_name,
            "device": self.device.type,
            "attention": self.encoder.config._attn_implementation,
        }


def load_text_model(name: str = "snake", device: str = "cpu", dtype: str = "fp32", seed: int = 0) -> TextModel:
    """A text decision model in evaluation mode.

    `name` is a published shape with random weights (`english`, `multilingual`), `tiny`, a trained checkpoint that comes
    with the package (`snake`, `snake-tenth`), or a folder in the published naming: `rl_agent_config.json`,
    `model.safetensors`, `encoder/config.json`, and `tokenizer/` where it has a vocabulary of its own. `dtype` is the
    encoder's. Raises InputError for an unknown name, device or dtype, and for a checkpoint that does not fit.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    check_device(device)
    if name in TRAINED:
        model = _folder(TRAINED[name])
        model.name, model.weights = name, "trained by imitation of the planner (lab train snake)"
    elif name in PRESETS:
        model = text_preset(name, seed)
    elif Path(name).is_dir():
        model = _folder(Path(name))
    else:
        raise InputError(
            f"Unknown text model {name!r}: it is none of ours ({', '.join(known())}) and no folder with a checkpoint."
        )
    model.encoder.to(DTYPES[dtype])
    return model.to(device).eval().requires_grad_(False)


def known() -> list[str]:
    """The names that `load_text_model` knows, trained ones first."""
    return [*TRAINED, *(name for name in PRESETS if name not in TRAINED)]


def text_preset(name: str, seed: int = 0) -> TextModel:
    """A preset's shape with random weights from `seed`."""
    from transformers import ModernBertConfig

    shape = PRESETS[name]
    theta = {"full_attention": 160000.0, "sliding_attention": shape.get("local_theta", 10000.0)}
    tokens = TextTokens.own()
    config = ModernBertConfig(
        **{"vocab_size": VOCABULARY, **shape["encoder"]},
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in theta.items()},
        pad_token_id=PAD,
        **dict.fromkeys(("cls_token_id", "bos_token_id"), tokens.cls),
        **dict.fromkeys(("sep_token_id", "eos_token_id"), tokens.sep),
    )
    with seeded(seed):
        return TextModel(_encoder(config), TextConfig(**shape["config"]), tokens, f"random, seed {seed}", name)


def _encoder(config):
    """An encoder with torch's own random weights, of about the size that transformers would draw (a deviation of 0.02 at a
    width of 768): its truncated normal takes minutes on a quarter of a milliard of embeddings."""
    from transformers import ModernBertModel

    class Encoder(ModernBertModel):
        def _init_weights(self, module) -> None:
            pass

    return Encoder(config)


# ---------------------------------------------------------------------------------------------------- checkpoint folder


def _folder(folder: Path) -> TextModel:
    from transformers import AutoConfig

    for needed in (CONFIG, "encoder/config.json", "model.safetensors"):
        if not (folder / needed).is_file():
            raise InputError(f"The folder {folder} holds no {needed}, so it is no text checkpoint.")
    with foreign(f"{folder}/encoder/config.json cannot be read"):
        shape = AutoConfig.from_pretrained(folder / "encoder", trust_remote_code=False)
    if shape.model_type != "modernbert":
        raise InputError(f"The encoder in {folder} is a {shape.model_type!r}; a text checkpoint's is a modernbert.")
    tokens = TextTokens.of(folder / "tokenizer") if (folder / "tokenizer").is_dir() else TextTokens.own()
    with seeded(0), foreign(f"{folder}/encoder/config.json describes no encoder that can be built"):
        encoder = _encoder(shape)
        check_vocabulary(folder, tokens.tokenizer, encoder)
        whole(f"{folder}/encoder/config.json: local_attention", shape.local_attention, 1)
        state = read_state(folder / "model.safetensors", {f"encoder.{k}": v for k, v in encoder.state_dict().items()})
        config = _config(folder / CONFIG, state)
        model = TextModel(encoder, config, tokens, f"checkpoint {folder.name}", folder.name)
    expected = model.state_dict()
    wrong = [
        n
        for n in sorted({*state, *expected})
        if getattr(state.get(n), "shape", 0) != getattr(expected.get(n), "shape", 0)
    ]
    if wrong:
        raise InputError(
            f"{folder}/model.safetensors does not fit this model: {len(wrong)} missing, extra or of another shape "
            f"({wrong[0]}, ...)."
        )
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model


def _config(path: Path, state: dict[str, Tensor]) -> TextConfig:
    """The config file; how many head layers and act logits there are is read off the weights."""
    table = json_table(path)
    said = {f.name: table[f.name] for f in fields(TextConfig) if f.name in table}
    layers = {name.split(".")[2] for name in state if name.startswith("head.layers.")}
    act = state.get("act_head.2.weight")
    if said.get("head_layers", len(layers)) != len(layers):
        raise InputError(f"{path}: head_layers is {said['head_layers']!r}, and the weights hold {len(layers)}.")
    said |= {"head_layers": len(layers), "n_act": 2 if act is None else len(act)}
    for name in ("max_len", "head_max_len"):
        whole(f"{path}: {name}", said.get(name, 1), 1)
    if table.get("option_layout", "sequential") != "sequential":
        raise InputError(f"{path} asks for another option layout than the sequential one, which is not supported.")
    return TextConfig(**said | temperatures(path, said, TEMPERATURES))
