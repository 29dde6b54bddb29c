"""One game, played by one step, a decision at a time: what the live panel, notebook 10 and `lab play` stand on.

Light to import: torch comes with the first session.
"""

import threading
import time
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import numpy as np

from lab.envs import make
from lab.errors import InputError
from lab.live_choices import DEFAULT_MODEL, DEFAULT_SOURCE, STEPS, check_settings, question_for, remark
from lab.moments import Moment, Recording
from lab.workloads import Question

WARM_UPS = 3
SLOW_S = 1.0  # a decision that takes longer needs no second one to warm up
SMALL = 20_000_000  # parameters up to which a second thread costs more than it brings
KEEP_BYTES = 64_000_000
_GPU = threading.RLock()


class Episode(NamedTuple):
    """One episode as it went; `ended` is False where the cap or a restart cut it."""

    number: int
    seed: int
    decisions: int
    score: float
    ended: bool


class Times:
    """Times in ms, all that were taken (8 bytes each)."""

    def __init__(self):
        self._taken = array("d")

    def add(self, ms: float) -> None:
        self._taken.append(ms)

    def __len__(self) -> int:
        return len(self._taken)

    def last(self, count: int) -> np.ndarray:
        return np.array(self._taken[-count:])

    def percentiles(self, last: int | None = None) -> dict[str, float]:
        """{"p50", "p95", "p99"} of the `last` times (all by default); empty where there are none."""
        values = self.last(last or len(self._taken))
        return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if len(values) else {}

    @property
    def total(self) -> float:
        return float(np.sum(self._taken))


class Session:
    """One game being played by one step.

    `source` is a game ("atari:Pong", "doom:basic"); `model` a name for `lab.load_model`, which takes `device` and `dtype`,
    or a loaded model, which has its own; `step` a name in `STEPS`; `frames` the frames per decision (1 to 8). `question` is
    by default the source's own (`question_for`); its options are the game's actions. Episode i is the one that
    `lab.play(..., seed=seed)` plays as its i-th, by the same rules: auto-fire, `choose` (greedy or sampled),
    `max_decisions` an episode.

    Building it starts the emulator, loads the model, builds the step and warms it up (capture and compilation fall there):
    `start_s` holds the seconds by part, and none of them is in `decision_ms`, the times of the decisions. `emulator_ms`
    holds the game's time per decision, resets left out; `recording` the last moments, up to `keep_bytes`. `say` is told
    what is going on meanwhile. A small model runs on one thread of torch, whatever the caller's setting, which comes back.

    Raises InputError, with nothing left running, for an unknown game, model, step, device or dtype, for settings out of
    range, and for a question that the model cannot be asked. One thread at a time may use a session.
    """

    def __init__(
        self,
        source: str = DEFAULT_SOURCE,
        model=DEFAULT_MODEL,
        step: str = "static",
        device: str = "cpu",
        dtype: str = "fp32",
        frames: int = 1,
        choose: str = "greedy",
        seed: int = 0,
        question: Question | None = None,
        max_decisions: int | None = None,
        keep_bytes: int = KEEP_BYTES,
        say: Callable[[str], None] = lambda what: None,
    ):
        check_settings(step, frames, seed, max_decisions)
        say("loading torch")
        import_module("lab.policy").check_choose(choose)
        self.source, self.kind, self.choose, self.seed, self.frames = source, step, choose, seed, frames
        self.start_s: dict[str, float] = {}
        say("starting the game")
        with self._starts("emulator"):
            self.env = make(source)
        self._close = weakref.finalize(self, self.env.close)  # also when the program ends
        try:
            say("loading the model")
            with self._starts("model") if isinstance(model, str) else nullcontext():
                self.model = self._load(model, device, dtype)
            self.threads = threads_for(self.model)
            self.max_decisions = max_decisions or import_module("lab.policy").MAX_DECISIONS
            self.keep_bytes, self.step = keep_bytes, None
            self.restart()
            say("warming up")
            self.ask(question or self.usual_question())
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _starts(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.start_s[what] = time.perf_counter() - start

    # ---------------------------------------------------------------------------------------------- of this kind of game

    def _load(self, model, device: str, dtype: str):
        return import_module("lab.models").load_model(model, device, dtype) if isinstance(model, str) else model

    def usual_question(self) -> Question:
        """What is asked where nothing else is given."""
        return question_for(self.source, self.env.actions)

    def _make_step(self, question: Question):
        kind = getattr(import_module("lab.steps"), STEPS[self.kind].step)
        return kind(self.model, question, self.frames)

    def _seeds(self, number: int) -> tuple[int, np.random.Generator | None]:
        """The environment's seed and the generator that choices are drawn from, of episode `number`."""
        return import_module("lab.policy").episode_seeds(self.seed, number, self.choose)

    def _take(self, answer) -> None:
        """Act on an answer."""
        self._running.take(answer.logits[0], answer.probabilities[0], answer.p_act[0])

    def _torch(self) -> AbstractContextManager:
        """Around every use of the model: its number of threads, and on a GPU nobody else meanwhile, for while one session
        captures its graph no other thread may call the device."""
        return _GPU if self.model.device.type == "cuda" else threads(self.threads)

    # ---------------------------------------------------------------------------------------------- playing

    def restart(self, seed: int | None = None) -> None:
        """Begin anew with episode 0, of another seed where one is given; counts, times and the recording start over."""
        self.seed = self.seed if seed is None else seed
        self.decisions = 0
        self.taken: Counter[str] = Counter()
        self.decision_ms, self.emulator_ms = Times(), Times()
        self.recording = Recording(self.keep_bytes)
        self.episodes: list[Episode] = []
        self._pace: deque[float] = deque(maxlen=40)
        self._running, self._number = None, -1
        if self.step is not None:
            self._begin()

    def ask(self, question: Question) -> None:
        """Ask another question from now on, in the middle of an episode too: build its step and warm it up.

        Raises InputError, with the old question kept, where it cannot be asked or its options are not the actions.
        """
        import_module("lab.policy").check_actions(question.names, self.env)
        with self._torch():
            with self._starts("step"):
                step = self._make_step(question)
            if self._running is None:
                self.step = step
                self._begin()
            with self._starts("warm_up"):
                for call in range(WARM_UPS):
                    start = time.perf_counter()
                    step.decide(self._inputs())
                    if time.perf_counter() - start > SLOW_S and (call or "compiled" not in self.kind):
                        break
        step.reset()
        self.step, self.question = step, question
        self._running.asks(question)

    def _begin(self) -> None:
        """The next episode; one that auto-fire alone ended is counted and passed over."""
        policy = import_module("lab.policy")
        for _ in range(100):
            self._number += 1
            seed, generator = self._seeds(self._number)
            self._running = policy.Running(
                self.env, seed, self.max_decisions, generator, self.step, auto_fire=True, gate=False, record=False
            )
            self._running.begin(seed)
            self.step.reset()
            if not self._running.over:
                return
            self._finish()
        raise InputError(f"{self.source} ends before its first decision, every time; it cannot be played.")

    def _finish(self) -> None:
        one = self._running
        self.episodes.append(Episode(self._number, one.seed, len(one.actions), one.score, one.ended))

    def _inputs(self) -> np.ndarray:
        return np.stack(self._running.window)[None]

    def tick(self) -> Moment:
        """Take one decision and act on it; an episode that is over is followed by the next."""
        if self._running.over:
            self._begin()
        running = self._running
        frame = running.window[-1]
        with self._torch():
            start = time.perf_counter()
            answer = self.step.decide(self._inputs())
            decided = time.perf_counter()
        self._take(answer)
        acted = time.perf_counter()
        self.decisions += 1
        action = self.env.actions[running.actions[-1]]
        self.taken[action] += 1
        self.decision_ms.add(1e3 * (decided - start))
        self.emulator_ms.add(1e3 * (acted - decided))
        self._pace.append(acted)
        moment = replace(
            self._moment(frame, answer, 1e3 * (decided - start)),
            action=action,
            reward=running.rewards[-1],
            score=running.score,
            emulator_ms=1e3 * (acted - decided),
            over=running.over,
        )
        self.recording.add(moment)
        if running.over:
            self._finish()
        return moment

    def look(self) -> Moment:
        """Ask about what is on the screen without acting: a moment with no action, in no count and no figure."""
        if self._running.over:
            self._begin()
        with self._torch():
            start = time.perf_counter()
            answer = self.step.decide(self._inputs())
            spent = time.perf_counter() - start
        return self._moment(self._running.window[-1], answer, 1e3 * spent)

    def _moment(self, frame: np.ndarray, answer, ms: float) -> Moment:
        return Moment(
            number=self.decisions,
            episode=self._number,
            frame=frame,
            names=tuple(answer.names),
            probabilities=answer.probabilities[0],
            confidence=float(answer.confidence[0]),
            p_act=float(answer.p_act[0]),
            score=self._running.score,
            decision_ms=ms,
        )

    # ---------------------------------------------------------------------------------------------- about it

    @property
    def rate(self) -> float:
        """Decisions a second of late, emulator, drawing and waiting included: over the last forty at most; 0 at first."""
        pace = list(self._pace)
        return (len(pace) - 1) / (pace[-1] - pace[0]) if len(pace) > 1 else 0.0

    def rest(self) -> None:
        """Play pauses here: the time until it goes on is in no rate."""
        self._pace.clear()

    @property
    def score(self) -> float:
        """The running episode's score so far."""
        return self._running.score

    @property
    def unfinished(self) -> Episode | None:
        """The running episode, where it has taken a decision and is not over."""
        one = self._running
        if one is None or one.over or not one.actions:
            return None
        return Episode(self._number, one.seed, len(one.actions), one.score, False)

    def facts(self) -> dict:
        """What is to be read beside a moment: percentiles and last times of decisions (ms), the median of the emulator's,
        `rate`, `possible` (decisions a second if they were all), decisions, how often each action was taken, episodes."""
        return {
            "percentiles": self.decision_ms.percentiles(last=10_000),
            "times": self.decision_ms.last(120),
            "emulator_ms": self.emulator_ms.percentiles(last=1000).get("p50", 0.0),
            "rate": self.rate,
            "possible": 1e3 / self.decision_ms.last(1000).mean() if len(self.decision_ms) else 0.0,
            "decisions": self.decisions,
            "taken": dict(self.taken),
            "scores": [episode.score for episode in self.episodes],
        }

    @property
    def title(self) -> str:
        return f"{self.source}, {self.model.name}, {self.step.name}"

    def remark(self) -> str:
        """What keeps the answers from meaning much: untrained weights, a game or layout not trained on; else empty."""
        return remark(self.model, self.source, self.kind, self.frames)

    def describe(self) -> dict:
        """The effective configuration, for rows and records."""
        return {**self.step.describe(), "choose": self.choose, "threads": self.threads, "game": self.env.describe()}

    def close(self) -> None:
        """Stop the emulator; what was played stays readable."""
        self._close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_session(source: str = DEFAULT_SOURCE, **settings) -> Session:
    """The session for a game: a `SnakeSession` for Snake, whose model reads text, else a `Session`."""
    if source.partition(":")[0] == "snake":
        return import_module("lab.live_snake").SnakeSession(source, **settings)
    return Session(source, **settings)


# ---------------------------------------------------------------------------------------------- threads of torch


def threads_for(model) -> int | None:
    """1 for a small model on a CPU; None leaves torch's setting alone."""
    small = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
    return 1 if small and model.device.type == "cpu" else None


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the calling thread's torch operations on `count` threads; the setting before comes back."""
    import torch

    before = torch.get_num_threads()
    if count in (None, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
