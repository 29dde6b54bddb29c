"""Any batch size with a few fixed-batch steps: the batch is padded up to the next of a small set of sizes."""

import gc
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from lab.errors import InputError
from lab.measure import stage
from lab.models.heads import Decisions
from lab.steps.one_thread import one_thread
from lab.steps.setting import check_rows

SIZES = (1, 2, 4, 8, 16)


class PaddedStep:
    """A step for batches of any size up to the largest of `sizes`, over steps with a fixed batch (`StaticStep`).

    `make(size)` builds the step for one size, when a batch first needs it; the one for the smallest size is built here,
    so that what cannot work is refused early. A batch is padded up to the next size with copies of its last input, whose
    answers are dropped. At most `keep` steps are kept: before another is built, the one used longest ago is let go and
    its memory freed. With `keep` below the number of sizes, a batch that goes up and down can build a size again; `built`
    lists the sizes in the order they were built. Raises InputError for sizes that are not whole numbers of 1 or more, for
    a `keep` below 1, and, from `decide`, for a batch that is empty or larger than the largest size.
    """

    def __init__(
        self, make: Callable[[int], object], sizes: Sequence[int] = SIZES, keep: int = 3, name: str | None = None
    ):
        sizes = tuple(sizes)
        for what, number in [("keep", keep), *(("a batch size", size) for size in sizes)]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(f"{what} is {number!r}; give a whole number of 1 or more.")
        if not sizes:
            raise InputError("PaddedStep needs batch sizes, for example sizes=(1, 2, 4).")
        self.make, self.sizes, self.keep = make, tuple(sorted(set(sizes))), keep
        self.built: list[int] = []
        self._steps: OrderedDict[int, object] = OrderedDict()  # by size, last used last
        self._size, self._batch = self.sizes[0], self.sizes[0]
        self._shape: tuple | None = None  # of one input, whatever the batch; from the first call on
        step = self._step(self._size)
        self.question, self.frames, self.device = step.question, step.frames, getattr(step, "device", None)
        self.name = name or f"{step.name}, padded"
        self._about = {**step.describe(), "sizes": list(self.sizes), "keep": keep}
        self._about.pop("batch", None)
        self._about["step"] = f"PaddedStep of {self._about['step']}"

    @one_thread
    def decide(self, inputs) -> Decisions:
        """Answer on as many inputs as there are, for example frames uint8 [batch, frames, height, width, 3]."""
        if not hasattr(inputs, "__len__"):
            raise InputError(f"A padded step answers a batch of inputs, not {inputs!r:.60}.")
        batch = len(inputs)
        if batch < 1:
            raise InputError("The batch is empty; give one input or more.")
        if batch > self.sizes[-1]:
            raise InputError(
                f"A batch of {batch} exceeds the largest size, {self.sizes[-1]}; give sizes that reach it."
            )
        shape = tuple(getattr(inputs, "shape", ())[1:])
        if shape and self._shape not in (None, shape):
            raise InputError(
                f"The inputs are {list(shape)}, this step was set up for {list(self._shape)}; build a new one."
            )
        size = self.sizes[bisect_left(self.sizes, batch)]
        step = self._step(size)
        if size != self._size:
            step.reset()  # what it kept for its rows is from before other steps had them
        self._size, self._batch = size, batch
        if size > batch:
            with stage("build_inputs"):
                padded = [min(place, batch - 1) for place in range(size)]
                inputs = inputs[padded] if hasattr(inputs, "shape") else [inputs[place] for place in padded]
        answer = step.decide(inputs)
        self._shape = shape or self._shape
        return Decisions(answer.question, answer.logits[:batch], answer.probabilities[:batch], answer.p_act[:batch])

    def _step(self, size: int):
        if size not in self._steps:
            while len(self._steps) >= self.keep:
                self._steps.popitem(last=False)
                gc.collect()  # a step and its graph's work refer to each other
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
            self._steps[size] = self.make(size)
            self.built.append(size)
        self._steps.move_to_end(size)
        return self._steps[size]

    @one_thread
    def reset(self, rows: Sequence[int] | None = None) -> None:
        """A new episode begins in these rows of the batch given last (all by default); its padding follows its last row."""
        if rows is not None:
            rows = check_rows(rows, self.sizes[-1])
            follows = range(self._batch, self._size) if self._batch - 1 in rows else ()
            rows = [row for row in (*rows, *follows) if row < self._size]  # of later ones nothing is kept
        if self._size in self._steps:
            self._steps[self._size].reset(rows)  # the others are reset when they are next used

    def describe(self) -> dict:
        return dict(self._about)

    def start_cost(self) -> dict:
        """Seconds and bytes that the steps kept now have cost, added up; `costs` tells them apart."""
        total: dict[str, float] = {}
        for cost in self.costs().values():
            for key, value in cost.items():
                total[key] = total.get(key, 0) + value
        return total

    def costs(self) -> dict[int, dict]:
        """What each step kept now cost to start, by its batch size: seconds to build and capture, graph bytes."""
        return {size: self._steps[size].start_cost() for size in sorted(self._steps)}
