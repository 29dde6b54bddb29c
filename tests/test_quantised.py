"""The int8 step: near the fp32 answers, the given model untouched and watched, and clear refusals."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.nn.quantized import dynamic

import lab
from lab.envs import recorded_frames
from lab.errors import InputError
from lab.parity import compare_answers, repeats
from lab.steps import QuantisedStep, StaticStep
from lab.steps import quantised as module

BREAKOUT = lab.load_workloads()["breakout"]
FRAMES = recorded_frames(BREAKOUT.source)[:, None, None]  # each one input, uint8 [1, 1, height, width, 3]
PARTS = ("vision", "language", "all")


@pytest.fixture(scope="module")
def tiny():
    return lab.load_model("tiny")


@pytest.fixture(scope="module")
def pocket():
    return lab.load_model("pocket")


def int8(part):
    return [layer for layer in part.modules() if isinstance(layer, dynamic.Linear)]


def test_the_given_model_stays_bit_for_bit(tiny):
    before = {key: value.clone() for key, value in tiny.state_dict().items()}
    layers, engine = list(map(type, tiny.modules())), torch.backends.quantized.engine
    answer = StaticStep(tiny, BREAKOUT.question).decide(FRAMES[0])
    QuantisedStep(tiny, BREAKOUT.question).decide(FRAMES[0])
    assert all(torch.equal(before[key], value) for key, value in tiny.state_dict().items())
    assert list(map(type, tiny.modules())) == layers and torch.backends.quantized.engine == engine
    assert not any(hasattr(layer, "qconfig") for layer in tiny.modules())
    np.testing.assert_array_equal(StaticStep(tiny, BREAKOUT.question).decide(FRAMES[0]).logits, answer.logits)


@pytest.mark.parametrize("parts", PARTS)
def test_only_the_parts_asked_for_are_int8_and_the_rest_is_shared(tiny, parts):
    step, encoder = QuantisedStep(tiny, BREAKOUT.question, parts=parts), tiny.encoder
    expected = 0
    for name, holds in (("vision_model", "vision"), ("connector", "vision"), ("text_model", "language")):
        linear = [layer for layer in getattr(encoder, name).modules() if isinstance(layer, nn.Linear)]
        asked = linear if parts in (holds, "all") else []
        assert len(int8(getattr(step.model.encoder, name))) == len(asked) and linear
        expected += sum(layer.weight.numel() for layer in asked)
    given = {tensor.data_ptr() for tensor in tiny.parameters()}
    assert all(tensor.data_ptr() in given for tensor in step.model.parameters())
    cost = step.start_cost()
    assert (cost["quantised_bytes"], cost["fp32_bytes"]) == (expected, 4 * expected) and cost["quantise_s"] > 0
    static = StaticStep(tiny, BREAKOUT.question)
    for one in (step, static):
        one.decide(FRAMES[0])
    assert torch.equal(step.image_rows, static.image_rows) == (parts == "language")


def test_every_layer_errs_by_no_more_than_its_rounding(tiny):
    """An output moves by one step of the activations per weight, and half a step of the weights per activation."""
    step, inputs = QuantisedStep(tiny, BREAKOUT.question), {}
    layers = {name: layer for name, layer in tiny.encoder.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [
        layer.register_forward_hook(lambda _, args, __, name=name: inputs.update({name: args[0]}))
        for name, layer in layers.items()
    ]
    StaticStep(tiny, BREAKOUT.question).decide(FRAMES[0])
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        x, weight = inputs[name].flatten(0, -2), layer.weight
        activation = (x.max().clamp_min(0) - x.min().clamp_max(0)) / 127  # seven bits
        scale = weight.abs().amax(1) / 127
        bound = activation * (weight.abs() + scale[:, None] / 2).sum(1) + x.abs().sum(1, keepdim=True) * scale / 2
        error = (step.model.encoder.get_submodule(name)(x) - layer(x)).abs()
        assert (error <= bound + 1e-5).all() and error.max() > 0, name


@pytest.mark.parametrize("parts", PARTS)
def test_answers_are_near_but_not_the_same(tiny, parts):
    """Seven bits are 2 % of a layer's output; the logits here, which other weights move by 0.5, may move by 5 % of that."""
    step = QuantisedStep(tiny, BREAKOUT.question, parts=parts)
    assert 0 < compare_answers(StaticStep(tiny, BREAKOUT.question), step, FRAMES[::6]).max_logit < 0.025


@pytest.mark.parametrize("parts", PARTS)
def test_peaked_answers_keep_their_choice(pocket, parts):
    """No probability moves by even half of the smallest lead, so no frame here comes near to another choice."""
    step = QuantisedStep(pocket, BREAKOUT.question, parts=parts)
    parity = compare_answers(StaticStep(pocket, BREAKOUT.question), step, FRAMES[::2])
    assert parity.flips.value == 0 and 0 < parity.max_probability < parity.smallest_margin / 2
    assert repeats(step, FRAMES[0], 3)


@pytest.mark.parametrize(
    "engine", [name for name in module.ENGINES if name in torch.backends.quantized.supported_engines]
)
def test_every_engine_answers_without_a_warning(pocket, monkeypatch, capfd, engine):
    monkeypatch.setattr(module, "ENGINES", (engine,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = QuantisedStep(pocket, BREAKOUT.question)
        parity = compare_answers(StaticStep(pocket, BREAKOUT.question), step, FRAMES[::6])
    assert 0 < parity.max_probability < parity.smallest_margin / 2
    assert step.describe()["quantised"] == f"int8 dynamic, {engine}, all" and capfd.readouterr().err == ""


def test_a_reused_frame_has_the_rows_of_a_frame_encoded_alone(pocket):
    """One scale per call: rows of two frames encoded at once differ a little, rows of one frame do not."""
    step, alone = QuantisedStep(pocket, BREAKOUT.question, 2, reuse=True), QuantisedStep(pocket, BREAKOUT.question)
    for i in range(3):
        step.decide(np.concatenate(FRAMES[i : i + 2], axis=1))
    for place, frame in enumerate(FRAMES[2:4]):
        alone.decide(frame)
        assert torch.equal(step.image_rows[:, place], alone.image_rows[:, 0])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.encoder.text_model.layers[0].mlp.up_proj.weight.add_(0.1),
        lambda model: setattr(model.scorer[1], "weight", nn.Parameter(model.scorer[1].weight.clone())),
        lambda model: setattr(model, "config", model.config.__class__(image_size=128, temperature=(2.0, 1.0, 1.0))),
    ],
    ids=["quantised weight", "shared weight replaced", "temperature"],
)
def test_a_change_of_the_given_model_is_refused(change):
    model = lab.load_model("pocket")
    step = QuantisedStep(model, BREAKOUT.question)
    step.decide(FRAMES[0])
    with torch.no_grad():
        change(model)
    with pytest.raises(InputError, match="changed since this step was built; build a new step"):
        step.decide(FRAMES[0])


def test_what_cannot_be_is_refused(pocket, monkeypatch):
    with pytest.raises(InputError, match="parts is 'heads'; choose one of vision, language, all"):
        QuantisedStep(pocket, BREAKOUT.question, parts="heads")
    with pytest.raises(InputError, match="torch.bfloat16 on cpu; load it with device='cpu', dtype='fp32'"):
        QuantisedStep(lab.load_model("pocket", dtype="bf16"), BREAKOUT.question)
    elsewhere = lab.load_model("pocket").to("meta")  # as good as CUDA: any device that is not the CPU
    with pytest.raises(InputError, match="torch.float32 on meta"):
        QuantisedStep(elsewhere, BREAKOUT.question)
    with pytest.raises(InputError, match="takes a model from lab.load_model"):
        QuantisedStep("pocket", BREAKOUT.question)
    monkeypatch.setattr(module, "ENGINES", ("none such",))
    with pytest.raises(InputError, match="has no int8 kernels"):
        QuantisedStep(pocket, BREAKOUT.question)


def test_two_arms_differ_in_what_they_say(pocket):
    steps = [StaticStep(pocket, BREAKOUT.question)]
    steps += [QuantisedStep(pocket, BREAKOUT.question, parts=parts) for parts in PARTS]
    for said in ([step.describe() for step in steps], [step.name for step in steps]):
        assert all(one != other for i, one in enumerate(said) for other in said[:i])
