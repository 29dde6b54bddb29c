"""Padded batches: the same answers from a bounded number of fixed-batch steps."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

import lab
from lab.errors import InputError
from lab.models.heads import Decisions
from lab.steps import PaddedStep, StaticStep

GOLDEN = Path(__file__).parent / "golden"
FRAMES = np.load(GOLDEN / "frames.npz")
QUESTION = lab.Question("choice", "Which button?", ["left", "right", "fire"])
PICTURES = np.stack([FRAMES[name] for name in FRAMES.files if FRAMES[name].shape == (210, 160, 3)])


@pytest.fixture(scope="module")
def model():
    return lab.load_model(str(GOLDEN))


def inputs(batch: int, frames: int = 1) -> np.ndarray:
    return np.stack([[PICTURES[(row + frame) % len(PICTURES)] for frame in range(frames)] for row in range(batch)])


class Fixed:
    """A step with a fixed batch that answers with its inputs' first bytes, and notes what it was asked."""

    name, question, frames = "fixed", QUESTION, 1

    def __init__(self, batch: int):
        self.batch, self.resets, self.seen = batch, [], []

    def decide(self, frames) -> Decisions:
        assert len(frames) == self.batch
        self.seen.append([int(np.asarray(frame).flat[0]) for frame in frames])
        logits = np.array([[number, 1, 2] for number in self.seen[-1]], np.float32)
        return Decisions(QUESTION, logits, logits / logits.sum(1, keepdims=True), logits[:, 0])

    def reset(self, rows=None):
        self.resets.append(rows)

    def describe(self) -> dict:
        return {"step": "Fixed", "batch": self.batch}

    def start_cost(self) -> dict:
        return {"build_s": 0.5, "graph_bytes": 100 * self.batch}


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint8).reshape(-1, 1, 1, 1, 1)


def test_every_batch_size_gets_the_eager_answers_from_few_steps(model):
    """A sweep of sizes builds at most one step per size of the set, and keeps fewer."""
    eager = lab.EagerStep(model, QUESTION)
    step = PaddedStep(lambda batch: StaticStep(model, QUESTION, batch=batch), sizes=(1, 2, 4, 8, 16), keep=3)
    expected = eager.decide(inputs(16)).logits
    for batch in range(16, 0, -1):
        answer = step.decide(inputs(batch))
        np.testing.assert_allclose(answer.logits, expected[:batch], atol=5e-5, rtol=0)
        assert answer.probabilities.shape == (batch, 3) and answer.p_act.shape == (batch,)
        assert len(step.costs()) <= 3
    assert step.built == [1, 16, 8, 4, 2, 1]  # the smallest at the start, dropped for the large ones, built again


def test_any_order_of_sizes_builds_each_once_where_all_are_kept(model):
    step = PaddedStep(lambda batch: StaticStep(model, QUESTION, batch=batch), sizes=(1, 2, 4), keep=3)
    for batch in np.random.default_rng(0).integers(1, 5, 20).tolist():
        step.decide(inputs(batch))
    assert sorted(step.built) == [1, 2, 4]


def test_steps_let_go_are_freed(model):
    made = []

    def make(batch):
        step = StaticStep(model, QUESTION, batch=batch)
        made.append(weakref.ref(step))
        return step

    gc.disable()  # a captured graph must not wait for the next collection
    try:
        step = PaddedStep(make, sizes=(1, 2, 4), keep=1)
        for batch in (1, 2, 4):
            step.decide(inputs(batch))
    finally:
        gc.enable()
    assert [ref() is None for ref in made] == [True, True, False]


def test_room_is_made_before_the_next_step_is_built():
    alive = []

    def make(batch):
        alive.append(sum(ref() is not None for ref in refs))
        step = Fixed(batch)
        refs.append(weakref.ref(step))
        return step

    refs: list[weakref.ref] = []
    step = PaddedStep(make, sizes=(1, 2, 4, 8), keep=2)
    for batch in (2, 4, 8):
        step.decide(numbers(*range(batch)))
    assert alive == [0, 1, 1, 1]


def test_least_recently_used_goes_first():
    step = PaddedStep(Fixed, sizes=(1, 2, 4), keep=2)
    for batch in (1, 2, 1, 4):
        step.decide(numbers(*range(batch)))
    assert sorted(step.costs()) == [1, 4]


def test_the_last_input_fills_the_batch():
    made = {}
    step = PaddedStep(lambda batch: made.setdefault(batch, Fixed(batch)), sizes=(4, 1))
    answer = step.decide(numbers(7, 8, 9))
    assert made[4].seen == [[7, 8, 9, 9]]
    assert answer.logits[:, 0].tolist() == [7, 8, 9]
    step.decide([frame for frame in numbers(5, 6)])  # a list of inputs as well
    assert made[4].seen[-1] == [5, 6, 6, 6]


def test_reset_reaches_the_row_and_its_padding():
    made = {}
    step = PaddedStep(lambda batch: made.setdefault(batch, Fixed(batch)), sizes=(1, 2, 4))
    step.decide(numbers(1, 2, 3))
    made[4].resets.clear()
    step.reset([0])
    step.reset([0, 2])
    step.reset()
    assert made[4].resets == [[0], [0, 2, 3], None]
    assert made[1].resets == []


def test_a_step_taken_up_again_forgets_what_it_kept():
    made = {}
    step = PaddedStep(lambda batch: made.setdefault(batch, Fixed(batch)), sizes=(1, 2))
    for batch in (2, 2, 1, 2):
        step.decide(numbers(*range(batch)))
    assert made[2].resets == [None, None] and made[1].resets == [None]


def test_kept_frame_features_stay_right_while_the_batch_changes(model):
    """Steps that reuse the earlier frame's rows: each answer as if every image were encoded."""
    eager = lab.EagerStep(model, QUESTION, frames=2)
    step = PaddedStep(lambda batch: StaticStep(model, QUESTION, 2, batch, reuse=True), sizes=(1, 2, 4))
    for time, rows in enumerate([(0, 1, 2), (0, 1, 2), (0, 2), (0, 2), (2,), (2,), (0, 1, 2), (0, 1, 2)]):
        frames = np.stack([PICTURES[[(3 * row + time) % 12, (3 * row + time + 1) % 12]] for row in rows])
        np.testing.assert_allclose(step.decide(frames).logits, eager.decide(frames).logits, atol=5e-5, rtol=0)


def test_costs_are_told_by_size_and_in_total():
    step = PaddedStep(Fixed, sizes=(1, 2, 4), keep=2)
    step.decide(numbers(1, 2, 3))
    assert step.costs() == {1: {"build_s": 0.5, "graph_bytes": 100}, 4: {"build_s": 0.5, "graph_bytes": 400}}
    assert step.start_cost() == {"build_s": 1.0, "graph_bytes": 500}


def test_describes_what_runs_whatever_the_batch(model):
    step = PaddedStep(lambda batch: StaticStep(model, QUESTION, batch=batch), sizes=(4, 1, 2))
    before = step.describe()
    step.decide(inputs(3))
    assert step.describe() == before
    assert before["step"] == "PaddedStep of StaticStep" and before["sizes"] == [1, 2, 4] and "batch" not in before
    assert before["dtype"] == "fp32"
    assert step.name == "static, padded"


def test_a_failing_build_leaves_a_step_that_can_go_on():
    broken = True

    def make(batch):
        if batch == 2 and broken:
            raise MemoryError
        return Fixed(batch)

    step = PaddedStep(make, sizes=(1, 2), keep=1)
    with pytest.raises(MemoryError):
        step.decide(numbers(1, 2))
    step.reset()
    assert step.describe()["step"] == "PaddedStep of Fixed"
    broken = False
    assert len(step.decide(numbers(1, 2))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sizes": ()}, "needs batch sizes"),
        ({"sizes": (0, 1)}, "a batch size is 0"),
        ({"sizes": (1, 2.0)}, "a batch size is 2.0"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        PaddedStep(Fixed, **arguments)


def test_batches_that_do_not_fit_are_refused():
    step = PaddedStep(Fixed, sizes=(1, 2))
    with pytest.raises(InputError, match="A batch of 3 exceeds the largest size, 2"):
        step.decide(numbers(1, 2, 3))
    with pytest.raises(InputError, match="batch is empty"):
        step.decide(numbers())
