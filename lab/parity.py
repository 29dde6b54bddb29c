"""Same answer? Two steps over the same frames or the same games: logits, probabilities, flips, first diverging action,
and what the order of the options changes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lab.errors import InputError
from lab.stats import Estimate, share_interval
from lab.steps.eager import EagerStep, Inputs
from lab.workloads import Question


@dataclass(frozen=True)
class Parity:
    """How far apart two steps' answers lie over `n` decisions.

    The largest absolute differences of logits, probabilities and P(act); `flips`, the share of decisions whose chosen
    option differs, with its exact binomial interval; `smallest_margin`, the first step's smallest lead of the most
    probable option over the second: flips are to be expected only where a difference of probabilities exceeds it. What is
    not a number agrees with nothing: such an answer is a flip, and as far away as can be.
    """

    first: str
    second: str
    n: int
    max_logit: float
    max_probability: float
    max_p_act: float
    flips: Estimate
    smallest_margin: float

    def __str__(self) -> str:
        return (
            f"{self.second} against {self.first}, {self.n} decisions: logits within {self.max_logit:.1e}, probabilities "
            f"within {self.max_probability:.1e}, {self.flips.value:.1%} [{self.flips.low:.1%}, {self.flips.high:.1%}] "
            f"flipped; smallest margin {self.smallest_margin:.1e}."
        )


def compare_answers(first, second, inputs) -> Parity:
    """Decide every one of `inputs` (each uint8 [batch, frames, height, width, 3]) with both steps; see `Parity`."""
    ones, others = ([step.decide(one) for one in inputs] for step in (first, second))

    def both(name: str) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.concatenate([getattr(answer, name) for answer in answers]) for answers in (ones, others))

    logits, probabilities, p_act, choice = map(both, ("logits", "probabilities", "p_act", "choice"))
    ranked = np.sort(probabilities[0], axis=1)
    numbers = np.all([np.isfinite(part).all(1) for part in (*logits, *probabilities)], axis=0)
    flipped = int(((choice[0] != choice[1]) | ~numbers).sum())
    return Parity(
        first.name,
        second.name,
        len(choice[0]),
        _furthest(logits),
        _furthest(probabilities),
        _furthest(p_act),
        share_interval(flipped, len(choice[0])),
        float((ranked[:, -1] - ranked[:, -2]).min()),
    )


class Remembering:
    """A step whose answers are kept by its inputs' bytes, so that one step compared with several decides once.

    Only for steps that keep nothing from one call to the next. Whatever else is asked of it, the step answers.
    """

    def __init__(self, step):
        self._step, self._known = step, {}

    def decide(self, inputs):
        key = (inputs.shape, inputs.tobytes())
        if key not in self._known:
            self._known[key] = self._step.decide(inputs)
        return self._known[key]

    def __getattr__(self, name: str):
        return getattr(self._step, name)


def repeats(step, inputs, times: int = 10) -> bool:
    """Whether `times` decisions on the same inputs give the same logits, bit for bit."""
    answers = [step.decide(inputs).logits for _ in range(times)]
    return all(np.array_equal(answers[0], answer) for answer in answers[1:])


@dataclass(frozen=True)
class OptionOrders:
    """How far the answers depend on the order of the options, over `n` decisions in other orders than the given one.

    The largest and the mean absolute change of an option's probability against the given order, options matched by
    name; `flips`, the share of those decisions that choose another option, with its exact binomial interval (which takes
    decisions as independent; those on one frame, or in one order, are not quite).
    """

    name: str
    orders: int
    n: int
    max_probability: float
    mean_probability: float
    flips: Estimate


def option_orders(
    make_step: Callable[[Question], object], question: Question, inputs, orders: int = 20, seed: int = 0
) -> OptionOrders:
    """Decide every one of `inputs` with the options in up to `orders` distinct random orders other than the given one.

    `make_step` builds the step for a question with its options reordered; `inputs` each uint8 [batch, frames, H, W, 3].
    Three options have five other orders, two have one: then there are fewer than asked for. Raises InputError for
    `orders` below 1.
    """
    if orders < 1:
        raise InputError(f"orders is {orders}; give 1 or more.")
    given, count, rng = tuple(range(len(question.options))), len(question.options), np.random.default_rng(seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < min(orders, math.factorial(min(count, 20)) - 1):
        order = tuple(rng.permutation(count).tolist())
        if order != given:
            drawn[order] = None
    step = make_step(question)
    expected = np.concatenate([step.decide(one).probabilities for one in inputs])
    changes, flips = [], 0
    for order in drawn:
        other = make_step(question.reordered(order))
        shuffled = np.concatenate([other.decide(one).probabilities for one in inputs])
        got = shuffled[:, np.argsort(order)]
        changes.append(np.abs(got - expected))
        numbers = np.isfinite(got).all(1) & np.isfinite(expected).all(1)
        flips += int(((got.argmax(1) != expected.argmax(1)) | ~numbers).sum())
    n = len(drawn) * len(expected)
    return OptionOrders(
        step.name, len(drawn), n, float(np.max(changes)), float(np.mean(changes)), share_interval(flips, n)
    )


@dataclass(frozen=True)
class Games:
    """The same games played twice. For each episode: the first decision at which the actions differ (None: never),
    the lengths and the scores."""

    diverged: list[int | None]
    lengths: list[tuple[int, int]] = field(repr=False)
    scores: list[tuple[float, float]] = field(repr=False)


def compare_games(first: Callable[[int], object], second: Callable[[int], object], source: str, **settings) -> Games:
    """Play the same seeded episodes with each step (or maker of fixed-batch steps); `settings` as for `policy.play`."""
    from lab.policy import play

    one, other = (play(step, source, **settings) for step in (first, second))
    diverged = []
    for a, b in zip(one.actions, other.actions, strict=True):
        shared = min(len(a), len(b))
        apart = np.flatnonzero(a[:shared] != b[:shared])
        diverged.append(int(apart[0]) if len(apart) else None if len(a) == len(b) else shared)
    pairs = (list(zip(x, y, strict=True)) for x, y in ((one.lengths, other.lengths), (one.scores, other.scores)))
    return Games(diverged, *pairs)


class MaskedEagerStep(EagerStep):
    """EagerStep with its mask written out in full, causal too.

    Under capture transformers passes an explicit mask where in eager mode it passes none, and with it perhaps another
    attention kernel. A difference between the two belongs to the mask, not to the graph.
    """

    def __init__(self, *args, name: str | None = None, **kwargs):
        super().__init__(*args, name=name or "eager, explicit mask", **kwargs)

    def _inputs(self, batch: int, states=None) -> Inputs:
        inputs = super()._inputs(batch, states)
        if self.setting.option_attention == "block":
            return inputs  # explicit already
        length, dtype = inputs.ids.shape[1], self.model.dtype
        ahead = torch.ones(length, length, dtype=torch.bool, device=inputs.ids.device).triu(1)
        mask = torch.zeros(length, length, dtype=dtype, device=ahead.device).masked_fill(ahead, torch.finfo(dtype).min)
        return replace(inputs, attention=mask.expand(len(inputs.ids), 1, -1, -1))


def _furthest(pair: tuple[np.ndarray, np.ndarray]) -> float:
    apart = np.abs(pair[0] - pair[1])
    return float(np.where(np.isnan(apart), np.inf, apart).max())
