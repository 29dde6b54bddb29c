"""The reference step: everything done anew for every decision, as the published eager path does."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.caches import FrameFeatures
from lab.errors import InputError, whole
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel, block_mask, type_id
from lab.pixels import check_frames
from lab.steps.one_thread import one_thread
from lab.steps.replay import Watch
from lab.steps.setting import Setting
from lab.tokens import Row
from lab.workloads import Question


@dataclass(frozen=True)
class Inputs:
    """The collated rows of a batch, on the model's device, padded on the right to the longest.

    ids int64 [rows, length]; mask bool [rows, length], False on padding; attention: what the text model takes as its
    mask; positions int64 [image positions per row]; readouts int64 [rows, options]; pooled int64 [rows]. The heads see
    the tokens from `start` on.
    """

    ids: Tensor
    mask: Tensor
    attention: Tensor
    positions: Tensor
    readouts: Tensor
    pooled: Tensor
    start: int = 0


def collate(model: DecisionModel, rows: Sequence[Row], setting: Setting) -> Inputs:
    """Stack rows (one question, any order of its options, any state behind the images) into device tensors."""
    device, length = model.device, max(map(len, rows))
    ids, mask = np.zeros((len(rows), length), np.int64), np.zeros((len(rows), length), bool)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = row.ids, True
    ids, mask = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
    attention = mask
    if setting.option_attention == "block":
        alike = len({row.option_span for row in rows}) == 1
        masks = [block_mask(row, model.dtype, device, length) for row in (rows[:1] if alike else rows)]
        attention = torch.cat(masks).expand(len(rows), -1, -1, -1)
    return Inputs(
        ids=ids,
        mask=mask,
        attention=attention,
        positions=torch.from_numpy(rows[0].image_positions).to(device),
        readouts=torch.from_numpy(np.stack([row.readouts for row in rows])).to(device),
        pooled=torch.tensor([row.pooled % len(row) for row in rows], device=device),
        start=rows[0].start,
    )


class EagerStep:
    """Rows built and collated, frames resized, all images encoded and the whole sequence run, at every call.

    `frames` per decision are given oldest first. `option_attention` (`causal`, `block`), `pixels` (`device`: one resize
    operator on the model's device; `processor`: the model's own image processor, on the CPU), `filter` and `layout` are
    the checkpoint's unless given, see `lab.steps.setting`; with the checkpoint's own this is the plain decision. With
    `orders` > 1 the answer is averaged over that many option orders: as given, reversed, then shuffles from a generator
    seeded 0, none twice. With `features`, a cache of its own, only frames are encoded that it does not hold; the answers
    stay equal up to the noise of encoding another number of frames at once, and `decide` raises InputError once the
    weights that made its rows have changed. Raises InputError for a model that splits images, for unknown settings, and
    for a cache that another step uses.
    """

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        option_attention: str | None = None,
        pixels: str | None = None,
        orders: int = 1,
        filter: str | None = None,
        features: FrameFeatures | None = None,
        layout: str | None = None,
        name: str | None = None,
    ):
        start = time.perf_counter()
        self.setting = Setting.of(model, option_attention, pixels, filter, layout)
        whole("orders", orders, 1)
        # a question or budget that cannot work is refused here, not mid-loop
        self.row = model.row(question, frames, layout=self.setting.layout)
        self.model, self.question, self.frames = model, question, frames
        self.orders = _orders(len(question.options), orders)
        kept = "" if features is None else ", frame features kept"
        self.name = name or ("eager" if orders == 1 else f"eager, {orders} orders") + kept
        self.pixels = model.make_pixels(self.setting.pixels, self.setting.filter)
        self.temperature = model.temperature_of(question)
        self.features = features
        if features is not None:
            features.claim(self)
            self._watches = [Watch(part) for part in (model.encoder.vision_model, model.encoder.connector)]
        self._build_seconds = time.perf_counter() - start

    @one_thread
    @torch.inference_mode()
    def decide(self, frames, states: Sequence | None = None) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3]; see `lab.pixels.check_frames` for what is refused.

        `states`, one for each row of the batch, are told beside the frames: a text, a table, a list of turns, or None.
        """
        frames = check_frames(frames)
        if frames.shape[1] != self.frames:
            raise InputError(f"{frames.shape[1]} frames per decision were given, this step takes {self.frames}.")
        if states is not None and len(states) != len(frames):
            raise InputError(f"{len(states)} states were given for {len(frames)} inputs; give one each.")
        with stage("build_inputs"):
            inputs = self._inputs(len(frames), states)
        image_rows = self._image_rows(frames.reshape(-1, *frames.shape[2:]))
        hidden = self._language(inputs, image_rows)
        with stage("heads"):
            answer = self._answer(hidden, inputs)
        with stage("readback"):
            return Decisions(self.question, *(value.cpu().numpy() for value in answer))

    def _inputs(self, batch: int, states: Sequence | None = None) -> Inputs:
        rows = [
            self.model.row(self.question.reordered(order), self.frames, state, self.setting.layout)
            for order in self.orders
            for state in (states or [None] * batch)
        ]
        return collate(self.model, rows, self.setting)

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
        start = inputs.start
        places = inputs.readouts - start, inputs.pooled - start
        logits, act = self.model.score(hidden[:, start:], kind, *places, inputs.mask[:, start:])
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
            **self.setting.describe(),
            "orders": len(self.orders),
            "features_capacity": 0 if self.features is None else self.features.capacity,
        }

    def start_cost(self) -> dict:
        return {"build_s": self._build_seconds}


def _orders(options: int, count: int) -> list[list[int]]:
    """Up to `count` distinct orders, by the published rule: as given, reversed, then shuffles; 100 are tried."""
    orders = [list(range(options)), list(range(options))[::-1]][:count]
    shuffled = random.Random(0)
    for _ in range(100):
        if len(orders) >= count:
            break
        order = list(range(options))
        shuffled.shuffle(order)
        if order not in orders:
            orders.append(order)
    return orders
