"""The replay path on a CPU, over a stand-in for CUDA graphs: captured steps answer as uncaptured ones, bit for bit."""

import numpy as np
import pytest
import torch
from graph_double import NotInAGraph, double_graphs

import lab
from lab.errors import InputError
from lab.steps import QuestionFirstStep, StaticSplitStep, StaticStep
from lab.steps.replay import Replay

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (9, 24, 20, 3), dtype=np.uint8)
QUESTION = lab.Question("choice", "Which way?", {"LEFT": "go left", "RIGHT": "go right", "STAY": ""})
KINDS = {
    "static": (StaticStep, {}),
    "split": (StaticSplitStep, {}),
    "split, slots": (StaticSplitStep, {"cache": "slots"}),
    "question first": (QuestionFirstStep, {}),
    "question first, slots": (QuestionFirstStep, {"cache": "slots"}),
    "question first, uncached": (QuestionFirstStep, {"cache": None}),
}


@pytest.fixture
def graphs(monkeypatch):
    return double_graphs(monkeypatch)


def play(frames, batch):
    """Sliding windows, a repeat, a jump, a row's reset in the middle, all through one buffer that is refilled."""
    buffer = np.zeros((batch, frames, *PICTURES.shape[1:]), np.uint8)
    for moment, reset in ((0, None), (1, None), (2, None), (2, None), (3, [0]), (4, None), (0, None), (1, [batch - 1])):
        for row in range(batch):
            buffer[row] = PICTURES[[(moment + row + i) % len(PICTURES) for i in range(frames)]]
        yield buffer, reset
        buffer[:] = 7  # what the caller does with its array afterwards


@pytest.mark.parametrize(("frames", "batch"), [(1, 2), (2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_its_uncaptured_twin(mini, graphs, kind, frames, batch):
    make, settings = KINDS[kind]
    for reuse in (False, True)[:frames]:
        built = [make(mini, QUESTION, frames, batch, capture=how, reuse=reuse, **settings) for how in (True, False)]
        answers = []
        for given, reset in play(frames, batch):
            if reset:
                for step in built:
                    step.reset(reset)
            answers.append([step.decide(given) for step in built])
        for captured, twin in answers:  # looked at only now: a later replay must not have changed them
            for name in ("logits", "probabilities", "p_act"):
                np.testing.assert_array_equal(getattr(captured, name), getattr(twin, name))
        assert built[0].reuse_counts() == built[1].reuse_counts()
        apart = np.ptp([one.logits for _, one in answers], axis=0)
        assert apart.max() > 0.01, "the answers follow the frames"
    assert len(graphs) == 1 + 2 * (frames > 1)
    assert sum(graph.replays for graph in graphs) == 8 * (1 + (frames > 1))


def test_both_graphs_are_captured_before_any_state_is_kept(mini, graphs):
    step = StaticStep(mini, QUESTION, 2, reuse=True, capture=True)
    step.decide(PICTURES[None, :2])
    assert [graph.replays for graph in graphs] == [1, 0]
    step.decide(PICTURES[None, 1:3])
    assert [graph.replays for graph in graphs] == [1, 1] and len(graphs) == 2


def test_the_stand_in_sees_a_capture_over_kept_state(mini, graphs, monkeypatch):
    """The fault that both graphs at once mend: warm-up runs of the second shift what the first decision kept."""
    monkeypatch.setattr(Replay, "prepare", lambda self: None)
    monkeypatch.setattr(Replay, "__call__", late)
    late_step, twin = (StaticStep(mini, QUESTION, 3, reuse=True, capture=how) for how in (True, False))
    inputs = [PICTURES[None, i : i + 3] for i in range(3)]
    answers = [[step.decide(one).logits for one in inputs] for step in (late_step, twin)]
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    assert np.abs(answers[0][1] - answers[1][1]).max() > 0.01


def late(self):
    if self.capture and self.graph is None:
        self._capture()
    if not self.capture:
        return self.work()
    self.graph.replay()
    return self.output


@pytest.mark.parametrize(
    "fault",
    [
        lambda hidden: hidden * hidden.sum().item(),
        lambda hidden: hidden[hidden > -9e9].view_as(hidden),
        lambda hidden: hidden + torch.tensor(1.0),
    ],
    ids=["reads a value", "boolean index", "host data"],
)
def test_what_a_graph_cannot_hold_is_refused(mini, graphs, fault):
    class Planted(StaticStep):
        def _language(self):
            return fault(super()._language())

    with pytest.raises((NotInAGraph, InputError), match="graph is captured"):
        Planted(mini, QUESTION, capture=True).decide(PICTURES[None, :1])


def test_what_a_replay_did_not_write_is_seen(mini, graphs):
    """A step that hands out its graph's own output gives answers which the next replay spoils."""
    step = StaticStep(mini, QUESTION, capture=True)
    step.decide(PICTURES[None, :1])
    kept = step.all_frames.output
    before = kept.clone()
    step.decide(PICTURES[None, 1:2])
    assert not torch.equal(kept, before)
