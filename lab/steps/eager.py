"""The reference step: everything done anew for every decision, as the published eager path does."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.caches import FrameFeatures
from lab.errors import InputError
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel, block_mask, check_model_supports, type_id
from lab.pixels import check_frames, make_pixels
from lab.steps.replay import Watch
from lab.tokens import Row
from lab.workloads import Question


@dataclass(frozen=True)
class Inputs:
    """The collated rows of a batch, on the model's device; all rows have one length.

    ids int64 [rows, length]; mask bool [rows, length]; attention: what the text model takes as its mask; positions int64
    [image positions per row]; readouts int64 [rows, options]; pooled int64 [rows], the last token.
    """

    ids: Tensor
    mask: Tensor
    attention: Tensor
    positions: Tensor
    readouts: Tensor
    pooled: Tensor


def collate(model: DecisionModel, rows: Sequence[Row], option_attention: str) -> Inputs:
    """Stack rows of equal length (one question, any order of its options) into device tensors."""
    device = model.device
    ids = torch.from_numpy(np.stack([row.ids for row in rows])).to(device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    attention = mask
    if option_attention == "block":
        attention = block_mask(rows[0], model.dtype, device).expand(len(rows), -1, -1, -1)
    return Inputs(
        ids=ids,
        mask=mask,
        attention=attention,
        positions=torch.from_numpy(rows[0].image_positions).to(device),
        readouts=torch.from_numpy(np.stack([row.readouts for row in rows])).to(device),
        pooled=torch.full((len(rows),), len(rows[0]) - 1, device=device),
    )


class EagerStep:
    """Rows built and collated, frames resized, all images encoded and the whole sequence run, at every call.

    `frames` per decision are given oldest first. `option_attention` is `causal` or `block`. `pixels` is `device` (one
    resize operator on the model's device) or `processor` (the model's own image processor, on the CPU). With `orders` > 1
    the answer is averaged over that many option orders: as given, reversed, then shuffles from a generator seeded 0.
    With `features`, a cache of its own, only frames are encoded that it does not hold; the answers stay equal up to the
    noise of encoding another number of frames at once, and `decide` raises InputError once the weights that made its
    rows have changed. Raises InputError for a model that reads out elsewhere or splits images, for unknown settings, and
    for a cache that another step uses.
    """

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        option_attention: str = "block",
        pixels: str = "device",
        orders: int = 1,
        filter: str = "composed",
        features: FrameFeatures | None = None,
        name: str | None = None,
    ):
        start = time.perf_counter()
        check_model_supports(model, option_attention, pixels)
        if not isinstance(orders, int) or orders < 1:
            raise InputError(f"orders is {orders!r}; give a whole number of 1 or more.")
        self.row = model.row(question, frames)  # a question or budget that cannot work is refused here, not mid-loop
        self.model, self.question, self.frames = model, question, frames
        self.option_attention, self.orders = option_attention, _orders(len(question.options), orders)
        kept = "" if features is None else ", frame features kept"
        self.name = name or ("eager" if orders == 1 else f"eager, {orders} orders") + kept
        self.pixels_path = pixels
        self.pixels = make_pixels(
            pixels, model.config.image_size, device=model.device, dtype=model.dtype, filter=filter
        )
        self.filter = filter if pixels == "device" else "processor"
        self.temperature = model.temperature_of(question)
        self.features = features
        if features is not None:
            features.claim(self)
            self._watches = [Watch(part) for part in (model.encoder.vision_model, model.encoder.connector)]
        self._build_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3]; see `lab.pixels.check_frames` for what is refused."""
        frames = check_frames(frames)
        if frames.shape[1] != self.frames:
            raise InputError(f"{frames.shape[1]} frames per decision were given, this step takes {self.frames}.")
        with stage("build_inputs"):
            inputs = self._inputs(len(frames))
        image_rows = self._image_rows(frames.reshape(-1, *frames.shape[2:]))
        hidden = self._language(inputs, image_rows)
        with stage("heads"):
            answer = self._answer(hidden, inputs)
        with stage("readback"):
            return Decisions(self.question, *(value.cpu().numpy() for value in answer))

    def _inputs(self, batch: int) -> Inputs:
        rows = [
            self.model.row(self.question.reordered(order), self.frames) for order in self.orders for _ in range(batch)
        ]
        return collate(self.model, rows, self.option_attention)

    def _image_rows(self, frames: np.ndarray) -> Tensor:
        if self.features is None:
            return self._encode(frames)
        with stage("features"):  # which the encoding of missing frames interrupts
            for watch in self._watches:
                watch.check()
            return self.features.rows(frames, self._encode)

    def _encode(self, frames: np.ndarray) -> Tensor:
        with stage("resize"):
            pixels = self.pixels(frames)
        with stage("vision"):
            return self.model.images(pixels)

    def _embed(self, inputs: Inputs, image_rows: Tensor) -> Tensor:
        return self.model.merge(inputs.ids, inputs.positions, image_rows.repeat(len(self.orders), 1, 1))

    def _language(self, inputs: Inputs, image_rows: Tensor) -> Tensor:
        with stage("language"):
            return self.model.language(self._embed(inputs, image_rows), inputs.attention)

    def _answer(self, hidden: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        kind = type_id(self.question)
        logits, act = self.model.score(hidden, kind, inputs.readouts, inputs.pooled, inputs.mask)
        if len(self.orders) > 1:
            places = torch.tensor(np.argsort(self.orders, axis=1), device=logits.device)
            logits = logits.view(len(self.orders), -1, logits.shape[-1])
            logits = logits.gather(2, places[:, None].expand_as(logits)).mean(0)
        p_act = act.softmax(-1)[:, 0].view(len(self.orders), -1).mean(0)
        return logits, (logits / self.temperature).softmax(-1), p_act

    def reset(self, rows=None) -> None:
        """Nothing is kept between decisions but frame features, which hold in any episode."""

    def describe(self) -> dict:
        return {
            "step": type(self).__name__,
            **self.model.describe(),
            "tokens": len(self.row),
            "frames": self.frames,
            "option_attention": self.option_attention,
            "pixels": self.pixels_path,
            "filter": self.filter,
            "orders": len(self.orders),
            "features_capacity": 0 if self.features is None else self.features.capacity,
        }

    def start_cost(self) -> dict:
        return {"build_s": self._build_seconds}


def _orders(options: int, count: int) -> list[list[int]]:
    shuffled = np.random.default_rng(0)
    orders = [list(range(options)), list(range(options))[::-1]]
    while len(orders) < count:
        orders.append(shuffled.permutation(options).tolist())
    return orders[:count]
