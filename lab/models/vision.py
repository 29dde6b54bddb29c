"""The vision decision model: transformers' vision tower, connector and text model under one question's heads.

The three parts are called one by one and the image rows merged here. The outer forward of transformers is not used: its
arguments changed between 5.17 and 5.24, and an argument it no longer knows is ignored without a word, which leaves
answers that do not depend on the frame.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaModel

from lab.errors import InputError
from lab.models.heads import DecisionHeads, temperature_for
from lab.pixels import INTERPOLATIONS, PREPROCESS, Pixels, make_pixels
from lab.tokens import CLS, MASK, SEP, Row, build_row, image_tokens, load_tokenizer
from lab.workloads import QUESTION_TYPES, Question

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTION_ATTENTION = ("causal", "block")
# The layouts that a checkpoint can be taught in, by where its options are read out.
READOUTS = {"terminator": ("terminator", "question_first"), "mask": ("mask",)}
# A model that reads both ways does so everywhere.
ATTENTIONS = {"terminator": OPTION_ATTENTION, "mask": ("causal",)}
# transformers 5.24 renamed the argument; the new name is silently swallowed by 5.17, which then keeps nothing.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class DecisionConfig:
    """What a decision checkpoint says besides its weights, under the published names (`vlm_agent_config.json`).

    `layout`, a name of our own, is the order of segments that the text model was taught in. The defaults are a published
    checkpoint's that leaves them out: `preprocess` then means the model's own processor.
    """

    image_size: int = 512
    option_attention: str = "causal"
    preprocess: str = "processor"
    image_interpolation: str = "processor"
    image_split_edge: int = 0
    readout: str = "terminator"
    layout: str = "terminator"
    head_layers: int = 2
    n_act: int = 2
    max_len: int = 1024
    head_max_len: int = 256
    temperature: tuple[float, ...] = (1.0, 1.0, 1.0)
    temperature_by_options: Mapping[str, float] = field(default_factory=dict)

    @property
    def pixels(self) -> str:
        """The pixel path that `preprocess` names: device or processor."""
        return PREPROCESS[self.preprocess]

    @property
    def filter(self) -> str:
        """The device path's filter that `image_interpolation` names."""
        return INTERPOLATIONS[self.image_interpolation]


class DecisionModel(DecisionHeads):
    """A backbone (SmolVLM, Idefics3 or ModernVBERT classes, any size) with decision heads.

    `encoder` holds the backbone in its dtype, the heads are fp32. `weights` says in words which weights these are;
    `folder` is the checkpoint's, None for a model without one. `tokenizer` makes its rows, with `markers` (CLS, SEP and
    MASK) for a model that reads out at masks.
    """

    def __init__(
        self,
        encoder,
        config: DecisionConfig,
        weights: str,
        name: str,
        tokenizer_of: Callable[[], Tokenizer] = load_tokenizer,
        markers: Sequence[str] = (CLS, SEP, MASK),
        folder: Path | None = None,
    ):
        super().__init__(encoder.config.text_config.hidden_size, config.head_layers, config.n_act)
        self.encoder = encoder
        self.config = config
        self.weights = weights
        self.name = name
        self.folder = folder
        self.markers = tuple(markers)
        self._tokenizer_of = tokenizer_of
        shape = encoder.config
        self._patching = (
            shape.vision_config.patch_size,
            getattr(shape, "scale_factor", None) or shape.pixel_shuffle_factor,
        )
        self.image_tokens = image_tokens(config.image_size, *self._patching)
        # SmolVLM's tower fits its positions to the picture; a plain SigLIP's must be asked to.
        resized = "interpolate_pos_encoding" in inspect.signature(encoder.vision_model.forward).parameters
        self._tower = {"interpolate_pos_encoding": True} if resized else {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer_of()

    @property
    def device(self) -> torch.device:
        return self.type_emb.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def to_dtype(self, dtype: str) -> "DecisionModel":
        """Cast the backbone to `fp32` or `bf16`; the heads stay fp32."""
        self.encoder.to(DTYPES[dtype])
        return self

    def at_size(self, size: int) -> "DecisionModel":
        """The same model, weights shared, shown pictures of `size` x `size` pixels: (size / patch / scale factor)^2 image
        tokens each. Raises InputError for a size that is no multiple of patch times scale factor, or larger than the
        model's own."""
        unit = math.prod(self._patching)
        if not isinstance(size, int) or not unit <= size <= self.config.image_size or size % unit:
            raise InputError(f"size is {size!r}; give a multiple of {unit} pixels up to {self.config.image_size}.")
        other = copy.copy(self)
        other.config = replace(self.config, image_size=size)
        other.image_tokens = image_tokens(size, *self._patching)
        return other

    def row(self, question: Question, frames: int = 1, state=None, layout: str | None = None) -> Row:
        """The question's token row for this model, by default in its own layout; see `lab.tokens.build_row`."""
        if not isinstance(question, Question):
            raise InputError(
                f"A step asks a lab.Question, not {question!r:.60}; a workload holds its own in `.question`."
            )
        config, layout = self.config, layout or self.config.layout
        budgets = config.max_len, config.head_max_len
        return build_row(self.tokenizer, question, frames, self.image_tokens, state, *budgets, layout, self.markers)

    def make_pixels(self, path: str | None = None, filter: str | None = None) -> Pixels:
        """Frames to this model's pixel values, by default as its checkpoint says; see `lab.pixels`."""
        path, filter = path or self.config.pixels, filter or self.config.filter
        return make_pixels(path, self.config.image_size, self.device, self.dtype, filter)

    def temperature_of(self, question: Question) -> float:
        return temperature_for(question, self.config.temperature, self.config.temperature_by_options)

    def images(self, pixels: Tensor) -> Tensor:
        """Image rows after the connector, [images, image tokens, width], of pixels [images, 3, size, size]."""
        hidden = self.encoder.vision_model(pixel_values=pixels, **self._tower).last_hidden_state
        return self.encoder.connector(hidden)

    def merge(self, ids: Tensor, positions: Tensor, image_rows: Tensor) -> Tensor:
        """Input embeddings [batch, length, width]: embedded ids [batch, length] with image rows at `positions`.

        positions int64 [image positions per row], the same in every row; image_rows [batch * frames, tokens, width].
        """
        embeds = self.encoder.text_model.get_input_embeddings()(ids)
        rows = image_rows.reshape(len(ids), -1, embeds.shape[-1]).to(embeds.dtype)
        if rows.shape[1] != len(positions):
            raise RuntimeError(f"{rows.shape[1]} image rows for {len(positions)} image positions.")
        return embeds.index_copy(1, positions, rows)

    def language(self, embeds: Tensor, mask: Tensor | None = None, cache=None) -> Tensor:
        """The text model's last hidden states (after its final norm), [batch, length, width].

        mask: None for plain causal, bool [batch, keys] padding, or additive [batch, 1, queries, keys]. With a
        key/value `cache` of transformers the embeddings continue what it holds, and their keys and values are added.
        """
        kept = {"use_cache": False} if cache is None else {"use_cache": True, CACHE_ARGUMENT: cache}
        if self.config.readout == "mask":
            kept = {}  # a model that reads both ways keeps nothing
        return self.encoder.text_model(inputs_embeds=embeds, attention_mask=mask, **kept).last_hidden_state

    def describe(self) -> dict:
        return {
            "model": self.name,
            "weights": self.weights,
            "dtype": self.dtype_name,
            "device": self.device.type,
            "attention": self.encoder.text_model.config._attn_implementation,
            "image_size": self.config.image_size,
        }


def block_mask(row: Row, dtype: torch.dtype, device, length: int | None = None) -> Tensor:
    """Additive attention mask [1, 1, length, length]: causal, and both ways among the tokens of the options.

    0 where a query may see a key, the dtype's lowest number elsewhere. `length` is the row's own unless it is padded on
    the right; nobody sees padding but the padding itself, whose softmax must not be empty.
    """
    place = torch.arange(length or len(row), device=device)
    inside = (place >= row.option_span[0]) & (place < row.option_span[1])
    allowed = (place[None, :] <= place[:, None]) | (inside[None, :] & inside[:, None])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def whole_mask(row: Row, option_attention: str, dtype: torch.dtype, device) -> Tensor:
    """The additive mask [1, 1, length, length] of either option attention, written out for `causal` too."""
    return block_mask(row if option_attention == "block" else replace(row, option_span=(0, 0)), dtype, device)


def type_id(question: Question) -> int:
    return QUESTION_TYPES.index(question.type)
