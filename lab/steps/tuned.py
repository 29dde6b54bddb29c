"""The static step's arithmetic with fewer passes over memory, each matrix product by the backend that is faster here."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from lab.errors import InputError
from lab.measure import stage
from lab.models.vision import DecisionModel
from lab.steps.static import StaticStep

ROUNDS = 5  # how often each backend is tried at construction; the fastest try counts
ROWS = 1024  # patches encoded at once: those of one real picture, whose buffers a last-level cache holds
GELU_ROWS = 256


class TunedStep(StaticStep):
    """StaticStep's decision on a CPU in fp32, arranged for speed; the same answers to 1e-4 on logits.

    What is done otherwise: one product for queries, keys and values, and one for both halves of a gated layer; biases and
    residuals added in place instead of copied; a key's bias left out, of which a softmax over keys takes no notice, and a
    value's moved behind the attention, whose weights sum to 1; the tanh in GELU written as the sigmoid that it is; hidden
    states contiguous; large results in buffers made once. Which backend multiplies, torch's own or oneDNN over a
    prepacked weight (with GELU fused), is found at construction by timing both at every shape; `describe` says which.
    Fused and prepacked weights are copies, `packed_bytes` of them.

    Raises InputError for what StaticStep refuses, off the CPU, for another dtype than fp32, and for layers of another
    kind than SmolVLM's (GELU by tanh in the vision tower, gated SiLU without biases in the text model).
    """

    def __init__(self, model, question, *args, name: str | None = None, **kwargs):
        if isinstance(model, DecisionModel) and (model.device.type, model.dtype) != ("cpu", torch.float32):
            raise InputError(
                f"A tuned step runs on the CPU in fp32, and this model is {model.dtype_name} on {model.device}; "
                "load it with device='cpu', dtype='fp32'."
            )
        self.products = Products()
        super().__init__(model, question, *args, capture=False, name=name, **kwargs)

    def _name(self, how: str) -> str:
        return super()._name("tuned")

    def _fix_text(self) -> None:
        super()._fix_text()
        _check_layers(self.model.encoder)
        self.text = _Text(self.model.encoder.text_model, self.embeds.shape, self.rotary, self.mask, self.products)

    def _fix_vision(self) -> None:
        super()._fix_vision()
        self.vision = _Vision(self.model.encoder, self.patch_positions, self.batch * self.frames, self.products)

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels)

    def _language(self) -> Tensor:
        with stage("language"):
            return self.text(self._merged())[:, self.start :]

    def describe(self) -> dict:
        return {**super().describe(), "products": self.products.chosen}

    def start_cost(self) -> dict:
        return {**super().start_cost(), "choose_s": self.products.seconds, "packed_bytes": self.products.bytes}


def _check_layers(encoder) -> None:
    vision, text = encoder.config.vision_config, encoder.config.text_config
    biased = any(part.bias is not None for part in encoder.text_model.layers.modules() if isinstance(part, nn.Linear))
    if vision.hidden_act != "gelu_pytorch_tanh" or text.hidden_act != "silu" or biased:
        raise InputError("This model's layers are of another kind than SmolVLM's; use StaticStep.")


# ------------------------------------------------------------------------------------------------------- the layers


class _Vision:
    """Image rows [images, image tokens, width] of pixels [images, 3, size, size], up to `ROWS` patches at a time."""

    def __init__(self, encoder, positions: Tensor, images: int, products: "Products"):
        tower = encoder.vision_model
        self.tower, self.connector, self.positions = tower, encoder.connector, positions
        patches, width = positions.shape[-2:]
        self.group = max(1, min(images, ROWS // patches))
        self.layers = [_VisionLayer(layer, self.group * patches, products) for layer in tower.encoder.layers]

    def __call__(self, pixels: Tensor) -> Tensor:
        return self.connector(torch.cat([self._tower(part) for part in pixels.split(self.group)]))

    def _tower(self, pixels: Tensor) -> Tensor:
        patches = self.tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        # a convolution leaves the channels in front, and every sum and norm after it would keep to that order
        hidden = patches.contiguous().add_(self.positions)
        for layer in self.layers:
            layer(hidden)
        return self.tower.post_layernorm(hidden)


class _VisionLayer:
    def __init__(self, layer, rows: int, products: "Products"):
        attention, mlp = layer.self_attn, layer.mlp
        queries, keys, values, out = (getattr(attention, f"{part}_proj") for part in ("q", "k", "v", "out"))
        self.norms, self.heads = (layer.layer_norm1, layer.layer_norm2), attention.num_heads
        self.query_bias = queries.bias
        self.out_bias = out.bias + out.weight @ values.bias
        self.attend_in = products.make(torch.cat([queries.weight, keys.weight, values.weight]), rows, copied=True)
        self.attend_out = products.make(out.weight, rows, "add")
        self.up, self.down = (
            products.make(mlp.fc1.weight, rows, "gelu", mlp.fc1.bias),
            products.make(mlp.fc2.weight, rows, "add"),
        )
        self.down_bias = mlp.fc2.bias

    def __call__(self, hidden: Tensor) -> None:
        """Add the layer's work to hidden [images, patches, width], in place."""
        images, patches, width = hidden.shape
        flat = hidden.view(-1, width)
        joint = self.attend_in(self.norms[0](flat))
        joint[:, :width].add_(self.query_bias)
        queries, keys, values = joint.view(images, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values).transpose(1, 2).reshape(flat.shape)
        self.attend_out(mixed, flat.add_(self.out_bias))
        wide = self.up(self.norms[1](flat))
        self.down(wide, flat.add_(self.down_bias))


class _Text:
    """Last hidden states [batch, length, width] of the text model's input embeddings, which it overwrites."""

    def __init__(self, text, shape, rotary: tuple[Tensor, Tensor], mask: Tensor | None, products: "Products"):
        rows = shape[0] * shape[1]
        self.norm = text.norm
        self.layers = [_TextLayer(layer, rows, rotary, mask, products) for layer in text.layers]

    def __call__(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            layer(hidden)
        return self.norm(hidden)


class _TextLayer:
    def __init__(self, layer, rows: int, rotary: tuple[Tensor, Tensor], mask: Tensor | None, products: "Products"):
        attention, mlp = layer.self_attn, layer.mlp
        parts = [getattr(attention, f"{part}_proj").weight for part in ("q", "k", "v")]
        self.norms, self.size, self.mask = (
            (layer.input_layernorm, layer.post_attention_layernorm),
            attention.head_dim,
            mask,
        )
        self.heads, self.kept_heads = (len(part) // self.size for part in parts[:2])
        self.cos, self.sin = (part[0, :, None] for part in rotary)  # [length, 1, head size]
        self.attend_in = products.make(torch.cat(parts), rows, copied=True)
        self.attend_out = products.make(attention.o_proj.weight, rows, "add")
        self.gated = products.make(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), rows, copied=True)
        self.down = products.make(mlp.down_proj.weight, rows, "add")

    def __call__(self, hidden: Tensor) -> None:
        """Add the layer's work to hidden [batch, length, width], in place."""
        flat, heads = hidden.view(-1, hidden.shape[-1]), self.heads + self.kept_heads
        joint = self.attend_in(_rms(flat, self.norms[0])).view(*hidden.shape[:2], heads + self.kept_heads, self.size)
        turned = self._rotated(joint[:, :, :heads])
        queries = turned[:, :, : self.heads].transpose(1, 2)
        keys, values = (
            part.transpose(1, 2).repeat_interleave(self.heads // self.kept_heads, dim=1)
            for part in (turned[:, :, self.heads :], joint[:, :, heads:])
        )
        mixed = scaled_dot_product_attention(queries, keys, values, self.mask, is_causal=self.mask is None)
        self.attend_out(mixed.transpose(1, 2).reshape(len(flat), -1), flat)
        gate, up = self.gated(_rms(flat, self.norms[1])).chunk(2, dim=-1)
        self.down(silu(gate).mul_(up), flat)

    def _rotated(self, heads: Tensor) -> Tensor:
        """Queries and keys [batch, length, heads, size] turned by their positions."""
        half, turned = self.size // 2, heads * self.cos
        turned[..., :half].addcmul_(heads[..., half:], self.sin[..., :half], value=-1)
        turned[..., half:].addcmul_(heads[..., :half], self.sin[..., half:])
        return turned


def _rms(hidden: Tensor, norm) -> Tensor:
    return rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


# ------------------------------------------------------------------------------------------------- matrix products


class Products:
    """Makes matrix products with fixed weights, each by the backend that proved faster at its shape.

    `chosen` has the backend by shape (rows x in x out) and kind, `seconds` is what choosing and packing took, `bytes` what
    the copies of weights hold.
    """

    def __init__(self):
        self.chosen: dict[str, str] = {}
        self.seconds, self.bytes = 0.0, 0
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def make(self, weight: Tensor, rows: int, kind: str = "plain", bias: Tensor | None = None, copied: bool = False):
        """A function of x [up to `rows`, in] with weight [out, in]: `plain` gives x · weightᵀ; `gelu`, with a bias,
        GELU(x · weightᵀ + bias); `add` adds x · weightᵀ to its second argument, in place. What it gives is overwritten by
        the next product of that shape. `copied` says that the weight is itself a copy."""
        start, out = time.perf_counter(), self._buffer(rows, len(weight))
        name = f"{rows}x{weight.shape[1]}x{weight.shape[0]}" + ("" if kind == "plain" else f", {kind}")
        if name not in self.chosen:
            self.chosen[name] = _faster(
                {way: make(weight, bias, kind, out) for way, make in _ways().items()}, weight, kind, out
            )
        made = _ways()[self.chosen[name]](weight, bias, kind, out)
        self.bytes += weight.nbytes if copied or self.chosen[name] == "onednn" else 0
        self.seconds += time.perf_counter() - start
        return made

    def _buffer(self, rows: int, width: int) -> Tensor:
        if (rows, width) not in self._buffers:
            self._buffers[rows, width] = torch.empty(rows, width)
        return self._buffers[rows, width]


def _ways() -> dict[str, Callable]:
    return {"torch": _plain} | ({"onednn": _prepacked} if torch.backends.mkldnn.is_available() else {})


def _plain(weight: Tensor, bias: Tensor | None, kind: str, out: Tensor) -> Callable:
    turned = weight.t()
    if kind == "add":
        return lambda x, onto: onto.addmm_(x, turned)
    if kind == "gelu":
        return lambda x: _gelu_(torch.mm(x, turned, out=out[: len(x)]), bias)
    return lambda x: torch.mm(x, turned, out=out[: len(x)])


def _prepacked(weight: Tensor, bias: Tensor | None, kind: str, out: Tensor) -> Callable:
    linear = torch.ops.mkldnn._linear_pointwise
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), len(out))
    if kind == "add":
        return lambda x, onto: onto.add_(linear(x, packed, None, "none", [], ""))
    if kind == "gelu":
        return lambda x: linear(x, packed, bias, "gelu", [], "tanh")
    return lambda x: linear(x, packed, None, "none", [], "")


def _gelu_(x: Tensor, bias: Tensor) -> Tensor:
    """GELU by tanh of x + bias, in place: x (1 + tanh u) / 2 = x sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).

    A vector unit takes three times as long for torch's tanh as for its sigmoid.
    """
    slope = 2 * math.sqrt(2 / math.pi)
    first = x.new_tensor(slope)
    for part in x.split(GELU_ROWS):  # few enough rows to stay in the cache between the passes
        part.add_(bias)
        part.mul_(torch.addcmul(first, part, part, value=0.044715 * slope).mul_(part).sigmoid_())
    return x


def _faster(made: dict[str, Callable], weight: Tensor, kind: str, out: Tensor) -> str:
    """The name of the function that took least, all tried in turn."""
    x = torch.ones(len(out), weight.shape[1])
    args = (x, torch.zeros_like(out)) if kind == "add" else (x,)
    least = dict.fromkeys(made, math.inf)
    for round in range(ROUNDS + 1):
        for name, call in made.items():
            start = time.perf_counter()
            call(*args)
            if round:  # the first is for warming up
                least[name] = min(least[name], time.perf_counter() - start)
    return min(least, key=least.get)
