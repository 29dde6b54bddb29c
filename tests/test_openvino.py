"""The step run by OpenVINO: the static step's answers and refusals, no telemetry, and converting told apart."""

import runpy
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lab
from lab.clocks import time_call
from lab.errors import InputError
from lab.parity import compare_answers, repeats
from lab.steps import OpenVinoStep, StaticStep
from lab.steps.openvino import runtime

FRAMES = np.load(Path(__file__).parent / "golden" / "frames.npz")
ATARI = np.stack([FRAMES[name] for name in FRAMES.files if not name.startswith("doom")])
QUESTION = lab.load_workloads()["breakout"].question
model = cache(lab.load_model)


def inputs(batch=1, frames=1):
    """All 14 Atari frames once, some again to fill the last one up: each uint8 [batch, frames, 210, 160, 3]."""
    count = -(-len(ATARI) // (batch * frames)) * batch * frames
    return list(np.resize(ATARI, (count, *ATARI.shape[1:])).reshape(-1, batch, frames, *ATARI.shape[1:]))


@pytest.fixture(scope="module")
def step():
    return OpenVinoStep(model("pocket"), QUESTION)


@pytest.mark.parametrize(
    ("preset", "frames", "batch", "attention", "pixels"),
    [
        ("tiny", 1, 4, "block", "device"),
        ("tiny", 2, 1, "causal", "processor"),
        ("pocket", 2, 4, "causal", "device"),
    ],
)
def test_equals_the_static_step(preset, frames, batch, attention, pixels):
    settings = model(preset), QUESTION, frames, batch, attention, pixels
    static, step = StaticStep(*settings), OpenVinoStep(*settings)
    parity = compare_answers(static, step, inputs(batch, frames)[:2])
    assert max(parity.max_logit, parity.max_probability, parity.max_p_act) < 1e-4 and parity.flips.value == 0


def test_no_peaked_answer_flips(step):
    static = StaticStep(model("pocket"), QUESTION)
    assert len({static.decide(one).value[0] for one in inputs()}) >= 3
    parity = compare_answers(static, step, inputs())
    assert parity.flips.value == 0 and parity.max_logit < 1e-4 < parity.smallest_margin


def test_an_answer_comes_back_and_is_not_overwritten(step):
    first, other = inputs()[0], inputs()[-1]
    answer = step.decide(first)
    kept = answer.logits.copy()
    assert np.abs(step.decide(other).logits - kept).max() > 0.1
    np.testing.assert_array_equal(answer.logits, kept)
    assert repeats(step, first)


def test_converting_is_told_apart_and_done_once(step, monkeypatch):
    cost = step.start_cost()
    assert min(cost["build_s"], cost["convert_s"], cost["compile_s"], cost["check_s"]) > 0
    monkeypatch.setattr(runtime(), "convert_model", lambda *_, **__: pytest.fail("converted in a decision"))
    timed = time_call(step.decide, inputs()[0])
    assert set(timed) == {"copy_in", "resize", "openvino", "readback", "total"} and step.start_cost() == cost


def test_it_says_what_runs_it(step):
    said, static = step.describe(), StaticStep(model("pocket"), QUESTION).describe()
    assert said["runtime"].startswith("OpenVINO 20")
    assert (said["precision"], said["threads"]) == ("f32", torch.get_num_threads())
    assert set(said) - set(static) == {"runtime", "precision", "threads"} and step.name == "openvino"


def test_a_changed_weight_is_refused(step, monkeypatch):
    scorer = model("pocket").scorer[1]
    with monkeypatch.context() as patch:
        patch.setitem(scorer._parameters, "weight", torch.nn.Parameter(scorer.weight + 1, requires_grad=False))
        with pytest.raises(InputError, match="scorer.1.weight changed since this step was built; build a new step"):
            step.decide(inputs()[0])
    step.decide(inputs()[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (inputs(batch=2)[0], "2 inputs were given, this step takes a batch of 1"),
        (inputs(frames=2)[0], "has frames too many"),
        (FRAMES["doom_a"][None, None], "240x320, this step was set up for 210x160"),
    ],
)
def test_other_frames_are_refused(step, given, words):
    step.decide(inputs()[0])
    with pytest.raises(InputError, match=words):
        step.decide(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.to_dtype("bf16"), "runs fp32 on the CPU, and this model is bf16 on cpu"),
        (lambda model: model.to("meta"), "runs fp32 on the CPU, and this model is fp32 on meta"),
        (lambda model: model.requires_grad_(True), "ask for gradients"),
    ],
)
def test_another_device_or_dtype_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        OpenVinoStep(change(lab.load_model("tiny")), QUESTION)


def test_without_the_extra_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    runpy.run_path(sys.modules[OpenVinoStep.__module__].__file__)  # the file itself asks for nothing
    with pytest.raises(InputError, match=r"needs OpenVINO; install it with `pip install 'refrain-lab\[openvino\]'`"):
        OpenVinoStep(model("tiny"), QUESTION)


def test_nothing_is_reported(monkeypatch):
    runtime()
    assert sys.modules["openvino.tools.ovc.telemetry_utils"].tm.__name__.endswith("telemetry_stub")
    sent = []
    sender = type("TelemetrySender", (), {"send": lambda self, *message: sent.append(message)})
    loaded = SimpleNamespace(main=SimpleNamespace(TelemetrySender=sender))
    monkeypatch.setitem(sys.modules, "openvino_telemetry", loaded)  # whoever loaded it before has it silenced
    runtime()
    sender().send("backend", "an import")
    assert not sent
