"""Steps, stores and caches under random sequences of what a loop may do to them: every answer is a fresh one's.

A sequence shows a step new pictures, sliding windows, repeats and another row's window, all through one buffer that is
overwritten after each call; it resets some rows, shrinks the batch, gives pictures of another size, and lets a decision
fail midway. Every answer of an exact step must be the plain decision's within what the step promises; an approximate
step's, that of its own fresh twin. Earlier answers must not change.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, partialmethod

import numpy as np
import pytest
import torch
from graph_double import double_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lab
from lab.caches import FrameFeatures, KeptStates
from lab.conversations import OPENINGS, Server
from lab.errors import InputError
from lab.models.families import load_family
from lab.models.text import text_preset
from lab.pixels import DevicePixels
from lab.question_tokens import QuestionTokens, TextPrompt
from lab.steps import (
    CompiledStep,
    EagerStep,
    LastAnswerStep,
    OpenVinoStep,
    PaddedStep,
    QuantisedStep,
    QuestionFirstStep,
    SplitStep,
    StaticSplitStep,
    StaticStep,
    StockStep,
    TextStep,
    TunedStep,
)

RNG = np.random.default_rng(7)
PICTURES = RNG.integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)
LARGER = RNG.integers(0, 256, (6, 14, 12, 3), dtype=np.uint8)
QUESTION = lab.Question("choice", "Which way?", {"LEFT": "go left", "RIGHT": "go right", "STAY": ""})
BATCH = 3
CLOSE = 1e-4  # on logits, what the loosest exact step promises

MOVES = st.sampled_from(["slide", "slide", "repeat", "new", "stand", "other's", "back"])
DECISION = st.tuples(st.just("decide"), st.tuples(*[MOVES] * BATCH), st.integers(0, 5))
OPERATIONS = st.one_of(
    *[DECISION] * 4,
    st.tuples(st.just("reset"), st.sets(st.integers(0, BATCH - 1))),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("shrink"), st.integers(1, BATCH)),
    st.tuples(st.just("larger")),
    st.tuples(st.just("fail"), st.sampled_from(["score", "_levels"])),
)
SEQUENCES = st.lists(OPERATIONS, min_size=3, max_size=6)


def sequences(number: int):
    """`number` sequences a test, the same ones in every run."""
    return settings(
        max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


class Failure(Exception):
    pass


class Plain:
    """The plain decision's logits of one input, kept: a window of picture numbers, of one size or the other."""

    def __init__(self, model, frames: int, layout: str | None = None):
        self.step, self.known = EagerStep(model, QUESTION, frames, layout=layout), {}

    def __call__(self, windows, pictures) -> np.ndarray:
        return np.concatenate([self.one(tuple(window), pictures) for window in windows])

    def one(self, window, pictures):
        if (window, pictures is PICTURES) not in self.known:
            self.known[window, pictures is PICTURES] = self.step.decide(pictures[list(window)][None]).logits
        return self.known[window, pictures is PICTURES]


class Twin:
    """What a fresh step of the same making answers on the whole batch, kept."""

    def __init__(self, make):
        self.make, self.known = make, {}

    def __call__(self, windows, pictures) -> np.ndarray:
        key = tuple(map(tuple, windows))
        if key not in self.known:
            self.known[key] = self.make().decide(np.stack([pictures[window] for window in windows])).logits
        return self.known[key]


@dataclass
class Loop:
    """A loop over up to three rows around one step. `any_batch`, `any_size`: what the step takes beside its own."""

    step: object
    expected: Callable
    frames: int
    model: object
    any_batch: bool = False
    any_size: bool = False
    answers: list = field(default_factory=list)

    def __post_init__(self):
        self.batch = getattr(self.step, "batch", BATCH)
        self.windows = [[(row + i) % 6 for i in range(self.frames)] for row in range(BATCH)]
        self.buffer = np.zeros((BATCH, self.frames, *PICTURES.shape[1:]), np.uint8)
        self.step.reset()

    def play(self, sequence) -> None:
        for name, *told in [*sequence, ("decide", ("slide",) * BATCH, 0)]:
            getattr(self, name)(*told)
        for answer, was in self.answers:  # no later call may have changed it
            np.testing.assert_array_equal(answer.logits, was)

    def shown(self, pictures=PICTURES) -> np.ndarray:
        """The pictures of all rows; those of the usual size in the one buffer that is used over and over."""
        filled = np.stack([pictures[window] for window in self.windows[: self.batch]])
        if pictures is not PICTURES:
            return filled
        self.buffer[: self.batch] = filled
        return self.buffer[: self.batch]

    def answer(self, pictures=PICTURES) -> None:
        shown = self.shown(pictures)
        answer = self.step.decide(shown)
        shown[:] = 99  # the caller's array is the caller's
        expected = self.expected(self.windows[: self.batch], pictures)
        np.testing.assert_allclose(answer.logits, expected, atol=CLOSE, rtol=0)
        self.answers.append((answer, answer.logits.copy()))

    def decide(self, moves, number) -> None:
        before = [list(window) for window in self.windows]
        for row, (move, window) in enumerate(zip(moves, self.windows, strict=True)):
            window[:] = {
                "slide": [*window[1:], (number + row) % 6],
                "back": [(number + row) % 6, *window[:-1]],
                "stand": [*window[1:], window[-1]],
                "new": [(number + row + 2 * i) % 6 for i in range(self.frames)],
                "other's": before[(row + 1) % BATCH],
                "repeat": window,
            }[move]
        self.answer()

    def reset(self, rows) -> None:
        self.step.reset(None if rows is None else sorted(row for row in rows if row < self.batch))

    def shrink(self, batch) -> None:
        if self.any_batch:
            self.batch = batch
        elif batch != self.batch:
            with pytest.raises(InputError):
                self.step.decide(self.buffer[:batch])

    def larger(self) -> None:
        if not (self.answers or self.any_size):
            return  # the first call fixes the size
        try:
            self.answer(LARGER)
        except InputError:
            assert not self.any_size and self.answers, "a step refuses only what differs from its first call"

    def fail(self, where) -> None:
        """A decision that ends midway, on pictures of which some may come again."""
        inner = getattr(self.step, "step", self.step)
        owner = DevicePixels if where == "_levels" else getattr(inner, "model", self.model)
        with pytest.MonkeyPatch.context() as patch, suppress(Failure):
            patch.setattr(owner, where, _raising)
            self.windows.reverse()
            self.step.decide(self.shown())


def _raising(*_, **__):
    raise Failure


# ------------------------------------------------------------------------------------------------------------- steps


def static(kind=StaticStep, **settings):
    return lambda model, frames, batch, **more: kind(model, QUESTION, frames, batch, **settings, **more)


def question_first(cache, **settings):
    return static(QuestionFirstStep, cache=cache, **settings)


def of_any_batch(make):
    return lambda model, frames, batch: make(model, frames)


# How each is made, and what it takes beside its own batch and size.
ANY = {"any_batch": True, "any_size": True}
STEPS = {
    "eager": (of_any_batch(lambda model, frames: EagerStep(model, QUESTION, frames)), ANY),
    "features": (
        of_any_batch(lambda model, frames: EagerStep(model, QUESTION, frames, features=FrameFeatures(frames + 1))),
        ANY,
    ),
    "split": (of_any_batch(lambda model, frames: SplitStep(model, QUESTION, frames)), ANY),
    "stock": (lambda model, frames, batch: StockStep(model, QUESTION, frames, batch), {"any_size": True}),
    "static": (static(), {}),
    "static, reusing": (static(reuse=True), {}),
    "static split": (static(StaticSplitStep), {}),
    "static split, slots, reusing": (static(StaticSplitStep, cache="slots", reuse=True), {}),
    "static split, dynamic": (static(StaticSplitStep, cache="dynamic"), {}),
    "question first, reusing": (question_first("static", reuse=True), {"layout": "question_first"}),
    "question first, slots": (question_first("slots"), {"layout": "question_first"}),
    "question first, dynamic, reusing": (question_first("dynamic", reuse=True), {"layout": "question_first"}),
    "question first, uncached": (question_first(None), {"layout": "question_first"}),
    "tuned, reusing": (static(TunedStep, reuse=True), {}),
    "padded over reusing": (
        lambda model, frames, batch: PaddedStep(
            lambda size: StaticStep(model, QUESTION, frames, size, reuse=True), sizes=(1, 2, 4), keep=2
        ),
        {"any_batch": True},
    ),
    "last answer over eager": (
        of_any_batch(lambda model, frames: LastAnswerStep(EagerStep(model, QUESTION, frames))),
        ANY,
    ),
    "last answer over reusing": (
        lambda model, frames, batch: LastAnswerStep(StaticStep(model, QUESTION, frames, batch, reuse=True)),
        {},
    ),
    "int8, reusing": (static(QuantisedStep, reuse=True), {"approximate": True}),
}


@pytest.fixture(scope="module")
def plain(mini):
    kept: dict = {}
    return lambda frames, layout=None: kept.setdefault((frames, layout), Plain(mini, frames, layout))


def check(make, model, plain, frames, batch, sequence, about, kept=None):
    """One sequence around a step made now, or around one of `kept`."""
    about = dict(about)
    layout, approximate = about.pop("layout", None), about.pop("approximate", False)
    if kept is None or (frames, batch) not in kept:
        made = make(model, frames, batch)
        if kept is not None:
            kept[frames, batch] = made
    step = made if kept is None else kept[frames, batch]
    expected = plain(frames, layout)
    if approximate:
        expected = TWINS.setdefault((frames, batch), Twin(lambda: make(model, frames, batch)))
    loop = Loop(step, expected, frames, model, **about)
    loop.batch = batch
    loop.play(sequence)


TWINS: dict = {}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_answers_as_a_fresh_plain_decision(mini, plain, name):
    make, about = STEPS[name]

    @sequences(91)
    @given(st.integers(1, 3), st.integers(1, BATCH), SEQUENCES)
    def holds(frames, batch, sequence):
        check(make, mini, plain, max(frames, 2 if "reusing" in name else 1), batch, sequence, about)

    holds()


@pytest.mark.parametrize("name", ["static, reusing", "static split, slots, reusing", "question first, reusing"])
def test_a_captured_step_answers_as_a_fresh_plain_decision(mini, plain, monkeypatch, name):
    make, about = STEPS[name]
    graphs = double_graphs(monkeypatch)

    @sequences(30)
    @given(st.integers(2, 3), st.integers(1, 2), SEQUENCES)
    def holds(frames, batch, sequence):
        check(partial(make, capture=True), mini, plain, frames, batch, sequence, about)

    holds()
    assert sum(graph.replays for graph in graphs) > 60


@pytest.mark.parametrize("name", ["compiled, reusing", "openvino"])
def test_a_step_that_is_costly_to_build_answers_so_too(mini, plain, monkeypatch, name):
    """One step per shape for all sequences. Compiled up to where C++ would be written: what is traced and made
    functional is torch.compile's own."""
    make = static(CompiledStep, reuse=True) if name.startswith("compiled") else static(OpenVinoStep)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(CompiledStep, "__init__", partialmethod(CompiledStep.__init__, mode="default"))
    kept: dict = {}

    # what lets a decision fail would be compiled anew each time
    whole = SEQUENCES.map(lambda sequence: [one for one in sequence if one[0] != "fail"])

    @sequences(70)
    @given(st.integers(1, 2), whole)
    def holds(batch, sequence):
        check(make, mini, plain, 2, batch, sequence, {}, kept)

    holds()


# -------------------------------------------------------------------------------------------------- texts and turns


TEXT_QUESTIONS = [
    lab.Question("choice", "Which way now?", {"UP": "go up", "DOWN": "go down"}),
    lab.Question("choice", "Which way now?", {"DOWN": "go down", "UP": "go up"}),
    lab.Question("score", "How near is it?", ["far", "near", "here"]),
    lab.Question("noul", "Is a way free?"),
]
TEXT_STATES = ["a way is free", "none is", {"free": 1}, ["a", {"b": 2}], "word " * 400, ""]


def test_a_text_step_answers_as_a_fresh_plain_one():
    model = text_preset("tiny").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for _, weight in sorted(model.named_parameters()):
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1 + (weight.mean() > 0.9))
    plain, known = TextStep(model), {}

    def expected(state, asked):
        if (state, asked) not in known:
            prompt = TextPrompt(TEXT_STATES[state], (TEXT_QUESTIONS[asked],))
            known[state, asked] = plain.decide(prompt)[0].logits
        return known[state, asked]

    one = st.tuples(st.integers(0, len(TEXT_STATES) - 1), st.lists(st.integers(0, 3), min_size=1, max_size=3))

    @sequences(100)
    @given(st.integers(1, 3), st.sampled_from([None, 16]), st.lists(one, min_size=1, max_size=4))
    def holds(capacity, multiple, prompts):
        parts = QuestionTokens(capacity)
        steps = [TextStep(model, pad_to_multiple=multiple, cache_prompts=parts), TextStep(model, cache_prompts=parts)]
        for number, (state, asked) in enumerate(prompts):
            prompt = TextPrompt(TEXT_STATES[state], tuple(TEXT_QUESTIONS[i] for i in asked))
            for i, answer in zip(asked, steps[number % 2].decide(prompt), strict=True):
                np.testing.assert_allclose(answer.logits, expected(state, i), atol=CLOSE, rtol=0)
        assert len(parts) <= capacity and parts.hits + parts.misses == sum(len(asked) for _, asked in prompts)

    holds()


def test_a_resumed_conversation_answers_as_a_cold_one():
    """Prompts that share beginnings, pictures and texts, in a store that holds much or little; some turns fail midway."""
    family = load_family("smolvlm")
    cold, known, texts = Server(family), {}, [family.text(text) for text in ("left?", "and now?", "what?")]
    turn = st.lists(st.sampled_from([("picture", 0), ("picture", 1), *(("text", i) for i in range(3))]), max_size=4)

    @sequences(60)
    @given(
        st.sampled_from([30_000, 10**9]), st.sampled_from(OPENINGS), st.lists(turn, min_size=1, max_size=3), st.data()
    )
    def holds(most, opening, turns, data):
        server, buffer = Server(family, KeptStates(most), opening=opening), np.empty_like(PICTURES[0])
        for parts in turns:
            request = None
            for kind, number in [*parts, ("text", 0)]:
                if kind == "picture":
                    buffer[:] = PICTURES[number]
                request = family.request([buffer if kind == "picture" else texts[number]], request)
            buffer[:] = 5  # the caller's array is the caller's
            key = tuple(parts)
            if key not in known:
                known[key] = cold.reply(request, tokens=2)
            if data.draw(st.booleans()):
                with pytest.MonkeyPatch.context() as patch, pytest.raises(Failure):
                    patch.setattr(family, "logits", _raising)
                    server.reply(request, tokens=2)
            reply = server.reply(request, tokens=2)
            assert reply.tokens == known[key].tokens and server.kept.lent == 0
            torch.testing.assert_close(reply.logits, known[key].logits, atol=CLOSE, rtol=0)

    holds()
