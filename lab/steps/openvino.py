"""The static step's device work, run by the OpenVINO runtime on the CPU."""

import sys
import time
import warnings
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

from lab.clocks import stage
from lab.errors import InputError
from lab.models.vision import DecisionModel, type_id
from lab.steps.setting import Setting
from lab.steps.static import StaticStep, encode_images, run_text
from lab.workloads import Question


class OpenVinoStep(StaticStep):
    """StaticStep with all from pixel values to probabilities converted at construction and run by OpenVINO.

    In fp32 on the CPU, with as many threads as torch has at construction (no more than there are cores). The answers
    equal StaticStep's to 1e-4. Resizing stays torch's, so that no grey level rounds another way. The runtime packs the
    weights anew for itself, beside torch's. Needs the extra `openvino`.

    Raises InputError without that extra, for a model elsewhere than on the CPU, of another dtype or whose weights ask
    for gradients, and for all that StaticStep refuses, a changed weight included.
    """

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        batch: int = 1,
        option_attention: str | None = None,
        pixels: str | None = None,
        filter: str | None = None,
        name: str | None = None,
    ):
        Setting.of(model, option_attention, pixels, filter)
        if (model.device.type, model.dtype) != ("cpu", torch.float32):
            raise InputError(
                f"OpenVinoStep runs fp32 on the CPU, and this model is {model.dtype_name} on {model.device}; "
                "load it with device='cpu', dtype='fp32'."
            )
        if any(weight.requires_grad for weight in model.parameters()):
            raise InputError(
                "Weights that ask for gradients cannot be converted; call model.requires_grad_(False) first."
            )
        openvino = runtime()
        super().__init__(
            model, question, frames, batch, option_attention, pixels, False, filter=filter, name=name or "openvino"
        )
        self.compiled = self._compiled(openvino)
        self.all_frames.work = self._run

    def _compiled(self, openvino):
        size = self.model.config.image_size
        pixels = torch.zeros(self.batch * self.frames, 3, size, size)
        start = time.perf_counter()
        with torch.no_grad(), warnings.catch_warnings():
            for said in (torch.jit.TracerWarning, DeprecationWarning):  # shapes become constants: they are fixed here
                warnings.simplefilter("ignore", said)
            # A function, not a module: the weights become constants that share torch's memory. Torch's own check would
            # decide twice more.
            traced = torch.jit.trace(self._answer, pixels, check_trace=False)
            model = openvino.convert_model(traced, input=[(list(pixels.shape), openvino.Type.f32)])
        converted = time.perf_counter()
        compiled = openvino.Core().compile_model(
            model,
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",  # one decision at a time, all threads on it
                "NUM_STREAMS": 1,
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),  # as the arms beside it
                "ENABLE_CPU_PINNING": False,  # nor are torch's threads; two processes would meet on the first core
                "INFERENCE_PRECISION_HINT": "f32",  # the default is bf16 where the CPU has it
            },
        )
        self.convert_s, self.compile_s = converted - start, time.perf_counter() - converted
        return compiled

    def _answer(self, pixels: Tensor) -> Tensor:
        """What is converted: from pixels [batch * frames, 3, size, size] to fp32 [batch, 2 * options + 1]."""
        rows = encode_images(self.model, pixels, self.patch_positions).view(self.batch, -1, self.embeds.shape[-1])
        embeds = self.embeds.index_copy(1, self.positions, rows)
        hidden = run_text(self.model, embeds, self.mask, self.rotary)[:, self.start :]
        logits, act = self.model.score(hidden, type_id(self.question), self.readouts, self.pooled, self.present)
        return torch.cat([logits, (logits / self.temperature).softmax(-1), act.softmax(-1)[:, :1]], dim=1)

    def _run(self) -> Tensor:
        pixels = self.frames_in.flatten(0, 1)
        if self.setting.pixels == "device":
            with stage("resize"):
                pixels = self.pixels(pixels)
        with stage("openvino"):
            return torch.from_numpy(self.compiled(pixels.numpy(), share_inputs=True)[0])

    def describe(self) -> dict:
        effective = self.compiled.get_property
        return {
            **super().describe(),
            "runtime": f"OpenVINO {version('openvino')}",
            "precision": effective("INFERENCE_PRECISION_HINT").to_string(),
            "threads": effective("INFERENCE_NUM_THREADS"),
        }

    def start_cost(self) -> dict:
        return {**super().start_cost(), "convert_s": self.convert_s, "compile_s": self.compile_s}


def runtime():
    """The `openvino` package, imported without its telemetry; InputError where the extra is not installed."""
    if find_spec("openvino") is None:
        raise InputError("OpenVinoStep needs OpenVINO; install it with `pip install 'refrain-lab[openvino]'`.")
    # Every import and conversion would be reported over the network, unasked. Without its reporter it does without; one
    # that was loaded before is silenced.
    if reporter := sys.modules.setdefault("openvino_telemetry", None):
        reporter.main.TelemetrySender.send = lambda *_: None
    import openvino

    return openvino
