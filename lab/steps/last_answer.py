"""Answering a repeated frame from the last answer: exact, because a decision depends on nothing but its frames."""

from collections.abc import Sequence

import numpy as np

from lab.models.heads import Decisions
from lab.pixels import check_frames
from lab.steps.one_thread import one_thread


class LastAnswerStep:
    """`step`, asked only where the frames are not those of the last call, byte for byte.

    Otherwise the last answer is given again. `hits` and `misses` count calls. A new episode in a row makes the next call
    one that is asked, and `reset` passes it on to `step`.
    """

    def __init__(self, step, name: str | None = None):
        self.step, self.question = step, step.question
        self.name = name or f"{step.name}, repeats answered"
        self.device = getattr(step, "device", None)
        self.hits = self.misses = 0
        self._frames: np.ndarray | None = None
        self._answer: Decisions | None = None

    @one_thread
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3]."""
        frames = check_frames(frames)
        if self._frames is not None and np.array_equal(frames, self._frames):
            self.hits += 1
            return self._answer
        answer = self.step.decide(frames)
        self._frames, self._answer = frames.copy(), answer  # a copy: an environment may draw into one array
        self.misses += 1
        return answer

    @one_thread
    def reset(self, rows: Sequence[int] | None = None) -> None:
        self._frames = self._answer = None
        self.step.reset(rows)

    def describe(self) -> dict:
        return {**self.step.describe(), "repeats": "answered from the last answer"}

    def start_cost(self) -> dict:
        return self.step.start_cost()

    def counts(self) -> dict[str, int]:
        """For `Arm(counts=...)`."""
        return {"hits": self.hits, "misses": self.misses}
