"""The tuned step: the same answers as eager, whichever backend multiplies, and what it says of itself."""

import numpy as np
import pytest
import torch

from lab.envs import frames_for
from lab.errors import InputError
from lab.models import load_model
from lab.parity import compare_answers
from lab.steps import EagerStep, StaticStep, TunedStep, tuned
from lab.workloads import get_workload

QUESTION = get_workload("pong").question
BACKENDS = [
    "torch",
    pytest.param("onednn", marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")),
]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Every product by one backend, whichever would be faster."""
    ways = tuned._ways()
    monkeypatch.setattr(tuned, "_ways", lambda: {request.param: ways[request.param]})
    return request.param


def frames(count: int, batch: int = 1, each: int = 1) -> np.ndarray:
    workload = get_workload("pong" if each == 1 else "pong_two_frames")
    found = frames_for(workload, count * batch, 0)
    return (
        found.reshape(count, batch, *found.shape[1:]) if each > 1 else found.reshape(count, batch, 1, *found.shape[-3:])
    )


@pytest.mark.parametrize("attention", ["causal", "block"])
@pytest.mark.parametrize(("each", "batch"), [(1, 1), (2, 1), (1, 4)])
def test_answers_are_eagers(backend, attention, each, batch):
    model = load_model("tiny")
    step = TunedStep(model, QUESTION, each, batch, attention)
    found = compare_answers(EagerStep(model, QUESTION, each, attention), step, frames(3, batch, each))
    assert found.max_logit < 1e-4 and found.max_probability < 1e-5 and not found.flips.value
    assert set(step.describe()["products"].values()) == {backend}


def test_peaked_answers_and_reused_frames_are_eagers(backend):
    model = load_model("pocket")
    stream = frames(9)[:, 0]
    pairs = np.concatenate([stream[:-1], stream[1:]], axis=1)[:, None]
    found = compare_answers(EagerStep(model, QUESTION, 2), TunedStep(model, QUESTION, 2, reuse=True), pairs)
    assert found.max_logit < 1e-4 and not found.flips.value


def test_more_pictures_than_are_encoded_at_once(monkeypatch):
    monkeypatch.setattr(tuned, "ROWS", 3 * 64)  # three of the tiny pictures, so five are two groups, one not full
    model = load_model("tiny")
    found = compare_answers(EagerStep(model, QUESTION), TunedStep(model, QUESTION, 1, 5), frames(2, 5))
    assert found.max_logit < 1e-4


def test_a_second_decision_does_not_disturb_the_first_answer():
    model = load_model("tiny")
    step, inputs = TunedStep(model, QUESTION), frames(2)
    first = step.decide(inputs[0])
    kept = first.logits.copy()
    assert not np.array_equal(step.decide(inputs[1]).logits, kept)
    np.testing.assert_array_equal(first.logits, kept)
    np.testing.assert_array_equal(step.decide(inputs[0]).logits, kept)


def test_gelu_is_torchs():
    x, bias = 4 * torch.randn(700, 40), torch.randn(40)
    x[0, :2] = torch.tensor([60.0, -60.0])
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    torch.testing.assert_close(tuned._gelu_(x.clone(), bias), expected, atol=2e-6, rtol=2e-6)


def test_the_faster_backend_is_chosen(monkeypatch):
    slow = lambda make: lambda *args: (call := make(*args)) and (lambda *a: [call(*a) for _ in range(30)][-1])  # noqa: E731
    ways = tuned._ways()
    monkeypatch.setattr(tuned, "_ways", lambda: {"slow": slow(ways["torch"]), "torch": ways["torch"]})
    products = tuned.Products()
    products.make(torch.randn(256, 256), 256)
    assert list(products.chosen.values()) == ["torch"] and products.seconds > 0


def test_it_says_what_it_is_and_what_it_cost():
    model = load_model("tiny")
    step = TunedStep(model, QUESTION)
    assert step.name == "tuned" and step.describe() != StaticStep(model, QUESTION).describe()
    cost = step.start_cost()
    assert cost["build_s"] > cost["choose_s"] > 0 and cost["packed_bytes"] > 0


def test_what_it_refuses():
    model = load_model("tiny")
    with pytest.raises(InputError, match="CPU in fp32"):
        TunedStep(load_model("tiny", dtype="bf16"), QUESTION)
    with pytest.raises(InputError, match="lab.load_model"):
        TunedStep(object(), QUESTION)
    model.encoder.config.vision_config.hidden_act = "gelu"
    with pytest.raises(InputError, match="StaticStep"):
        TunedStep(model, QUESTION)


def test_a_changed_weight_is_refused():
    model = load_model("tiny")
    step = TunedStep(model, QUESTION)
    step.decide(frames(1)[0])
    with torch.no_grad():
        model.encoder.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(1.1)
    with pytest.raises(InputError, match="fc1.weight changed"):
        step.decide(frames(1)[0])
