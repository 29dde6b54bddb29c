"""The plain forward of transformers, for comparison: what it costs, and what in it a graph cannot hold."""

import inspect
import time

import numpy as np
import torch

from lab.errors import InputError
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel
from lab.pixels import check_frames
from lab.steps.eager import EagerStep
from lab.steps.one_thread import one_thread
from lab.workloads import Question

ARGUMENTS = ("input_ids", "attention_mask", "pixel_values", "use_cache")  # the same in 5.17 and 5.24


class StockStep(EagerStep):
    """A decision by the backbone's own outer forward, its vision tower included, with the decision heads on top.

    For `batch` inputs of `frames` frames each; rows and masks are built once, so that what is left is the frames' way to
    the device and the library's forward (stage `forward`). The answers equal EagerStep's to 2e-5 in fp32. Raises
    InputError for what EagerStep refuses, for another batch, and where this transformers' forward does not know an
    argument by its name: it would ignore it without a word.
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
        start = time.perf_counter()
        known = inspect.signature(type(model.encoder).forward).parameters
        if missing := [argument for argument in ARGUMENTS if argument not in known]:
            raise InputError(
                f"{type(model.encoder).__name__}.forward does not know {', '.join(missing)}; use transformers 5.17 to 5.24."
            )
        super().__init__(model, question, frames, option_attention, pixels, filter=filter, name=name or "stock")
        self.batch, self.inputs = batch, self._inputs(batch)
        self._build_seconds = time.perf_counter() - start

    @one_thread
    @torch.inference_mode()
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3]; see `lab.pixels.check_frames` for what is refused."""
        frames = check_frames(frames)
        if frames.shape[:2] != (self.batch, self.frames):
            raise InputError(
                f"{frames.shape[0]} inputs of {frames.shape[1]} frames were given, this step takes {self.batch} of "
                f"{self.frames}."
            )
        pictures = np.require(frames.reshape(-1, *frames.shape[2:]), requirements=["C", "W"])
        on_device = self.setting.pixels == "device"
        with stage("copy_in"):
            given = torch.from_numpy(pictures).to(self.model.device) if on_device else self.pixels(pictures)
        with stage("resize"):
            pixels = self.pixels(given) if on_device else given
        with stage("forward"):
            hidden = self.model.encoder(
                input_ids=self.inputs.ids,
                attention_mask=self.inputs.attention,
                pixel_values=pixels.view(self.batch, self.frames, *pixels.shape[1:]),
                use_cache=False,
            ).last_hidden_state
        with stage("heads"):
            answer = self._answer(hidden, self.inputs)
        with stage("readback"):
            return Decisions(self.question, *(value.cpu().numpy() for value in answer))

    def describe(self) -> dict:
        return {**super().describe(), "batch": self.batch}
