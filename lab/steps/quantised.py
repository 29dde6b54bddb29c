"""The static step with its linear layers in int8: weights quantised once, activations anew in every call, on the CPU."""

import copy
import time
import warnings

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from torch.ao.quantization import per_channel_dynamic_qconfig

from lab.errors import InputError
from lab.models.vision import DecisionModel
from lab.steps.static import StaticStep
from lab.workloads import Question

ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")  # of int8 kernels, in the order looked for; qnnpack is made for ARM
PARTS = {"vision": ("vision_model", "connector"), "language": ("text_model",)}
PARTS["all"] = PARTS["vision"] + PARTS["language"]


class QuantisedStep(StaticStep):
    """StaticStep on a copy of the model whose linear layers multiply in int8; everything else is shared with the model.

    `parts` says whose: `vision` (tower and connector), `language` (the text model) or `all`; embeddings, norms, the patch
    convolution, attention and the decision heads stay fp32. The given model stays as it is, so its fp32 weights remain in
    memory beside the int8 ones.

    Weights have one scale per output, in eight bits; activations one per call of a layer, in seven, since kernels
    without VNNI would saturate. Images are encoded one by one, so that an image's rows do not depend on what is encoded
    with it; an answer still moves a little with the rest of its batch, and a lot where a few values dwarf the others:
    SmolLM2's text model has such, and its readouts' hidden states move by a third. See what the answers become
    (`lab.parity`) before counting the time won.

    Raises InputError for unknown `parts`, for a model that is not on the CPU in fp32, for a torch without int8 kernels,
    and wherever StaticStep does: a weight of the given model that changed is noticed in `decide`.
    """

    def __init__(self, model: DecisionModel, question: Question, *args, parts: str = "all", **kwargs):
        if parts not in list(PARTS):
            raise InputError(f"parts is {parts!r}; choose one of {', '.join(PARTS)}.")
        self.engine = next((name for name in ENGINES if name in torch.backends.quantized.supported_engines), None)
        if self.engine is None:
            raise InputError(f"This torch has no int8 kernels ({', '.join(ENGINES)}); use StaticStep.")
        if isinstance(model, DecisionModel) and (model.device.type != "cpu" or model.dtype != torch.float32):
            raise InputError(
                f"int8 layers run on the CPU beside fp32, and this model is {model.dtype} on {model.device}; "
                "load it with device='cpu', dtype='fp32'."
            )
        self.parts, self.title = parts, f"int8 {parts}"
        super().__init__(model, question, *args, **kwargs)  # which watches the given model's weights
        start = time.perf_counter()
        self.model, weights = quantised(model, parts, self.engine)
        self.model.temperature_of = model.temperature_of  # the given model's, so that a change is noticed
        self._quantise_seconds, self._weights = time.perf_counter() - start, weights

    def _encode(self, pixels: Tensor) -> Tensor:
        return torch.cat([super(QuantisedStep, self)._encode(one[None]) for one in pixels])

    def describe(self) -> dict:
        return {**super().describe(), "quantised": f"int8 dynamic, {self.engine}, {self.parts}"}

    def start_cost(self) -> dict:
        """Beside StaticStep's: the quantised weights' bytes, without their scales, and what they take in fp32."""
        sizes = {"quantised_bytes": self._weights, "fp32_bytes": 4 * self._weights}
        return {**super().start_cost(), "quantise_s": self._quantise_seconds, **sizes}


@torch.no_grad()
def quantised(model: DecisionModel, parts: str, engine: str) -> tuple[DecisionModel, int]:
    """A copy of the model with int8 layers where `parts` has linear ones, and how many weights these have.

    All tensors of the layers that stay are the given model's own.
    """
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    before, weights = torch.backends.quantized.engine, 0
    torch.backends.quantized.engine = engine  # packs the weights for its kernels, which are called whatever it is later
    try:
        for name in PARTS[parts]:
            for holder in list(getattr(twin.encoder, name).modules()):
                for key, layer in holder.named_children():
                    if type(layer) is nn.Linear:
                        weights += layer.weight.numel()
                        setattr(holder, key, _int8(layer, engine))
    finally:
        torch.backends.quantized.engine = before
    return twin, weights


def _int8(layer: nn.Linear, engine: str) -> dynamic.Linear:
    # torch.ao is deprecated in favour of torchao, but that one's int8 layers need torch.compile: without it they took
    # thirty times as long as fp32 on a CPU. From torch 2.13 on the quantised tensors themselves warn, hence the filter.
    layer.qconfig = per_channel_dynamic_qconfig
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        made = dynamic.Linear.from_float(layer)
    if engine == "qnnpack":
        made.version = 3  # before the narrower activations that the other kernels need; qnnpack warns if asked for them
    return made
