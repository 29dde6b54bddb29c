"""The static step: the eager answers, nothing stale, nothing overwritten, and clear refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lab
from lab.clocks import time_call
from lab.envs import record_frames
from lab.errors import InputError
from lab.parity import MaskedEagerStep, compare_answers, compare_games, repeats
from lab.steps import CompiledStep, EagerStep, StaticStep
from lab.steps.compiled import compiler

GOLDEN = Path(__file__).parent / "golden"
FRAMES = np.load(GOLDEN / "frames.npz")
QUESTIONS = json.loads((GOLDEN / "questions.json").read_text())
SINGLE = [name for name in FRAMES.files if not name.startswith("doom")]


def question(key="pong"):
    return lab.Question(QUESTIONS[key]["type"], QUESTIONS[key]["instructions"], QUESTIONS[key]["criteria"])


@pytest.fixture(scope="module")
def golden():
    return lab.load_model(str(GOLDEN))


def pairs(batch, frames):
    """uint8 [batch, frames, 210, 160, 3], oldest frame first."""
    names = ("pong_a", "pong_b", "breakout_a", "boxing_a")[:batch]
    return np.stack([np.stack([FRAMES[f"{name}_prev"], FRAMES[name]])[-frames:] for name in names])


@pytest.mark.parametrize("pixels", ["device", "processor"])
@pytest.mark.parametrize("attention", ["causal", "block"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("frames", [1, 2])
def test_equals_the_eager_step(golden, frames, batch, attention, pixels):
    step = StaticStep(golden, question(), frames, batch, attention, pixels)
    eager = EagerStep(golden, question(), frames, attention, pixels)
    for inputs in (pairs(batch, frames), pairs(batch, frames)[:, :, ::-1].copy()):
        got, expected = step.decide(inputs), eager.decide(inputs)
        np.testing.assert_allclose(got.logits, expected.logits, atol=2e-5, rtol=0)
        np.testing.assert_allclose(got.probabilities, expected.probabilities, atol=2e-5, rtol=0)
        np.testing.assert_allclose(got.p_act, expected.p_act, atol=2e-5, rtol=0)
        assert got.value == expected.value


@pytest.mark.parametrize("frames", [3, 8])
def test_up_to_eight_frames(golden, frames):
    inputs = np.stack([FRAMES[name] for name in SINGLE[:frames]])[None]
    got = StaticStep(golden, question("doom_basic"), frames).decide(inputs)
    expected = EagerStep(golden, question("doom_basic"), frames).decide(inputs)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "asked", [lab.Question("score", "How near is the ball?", ["far", "near", "here"]), lab.Question("noul", "Is it?")]
)
def test_every_question_type(golden, asked):
    got = StaticStep(golden, asked).decide(pairs(1, 1))
    np.testing.assert_allclose(got.logits, EagerStep(golden, asked).decide(pairs(1, 1)).logits, atol=2e-5, rtol=0)


def test_bf16_stays_close_to_its_eager_step():
    model = lab.load_model(str(GOLDEN), dtype="bf16")
    parity = compare_answers(EagerStep(model, question()), StaticStep(model, question()), [pairs(1, 1)])
    assert parity.max_logit <= 2e-5


def test_eight_frames_give_eight_answers(golden):
    step, eager = StaticStep(golden, question()), EagerStep(golden, question())
    inputs = [FRAMES[name][None, None] for name in SINGLE[:8]]
    answers = [step.decide(one).logits for one in inputs]
    for i, (answer, one) in enumerate(zip(answers, inputs, strict=True)):
        np.testing.assert_allclose(answer, eager.decide(one).logits, atol=2e-5, rtol=0)
        if not any(np.array_equal(one, inputs[k]) for k in range(i)):
            assert all(np.abs(answer - other).max() > 1e-3 for other in answers[:i])


def test_an_answer_comes_back_bit_for_bit_and_is_not_overwritten(golden):
    step = StaticStep(golden, question())
    first = step.decide(FRAMES["pong_a"][None, None])
    kept = first.logits.copy()
    step.decide(FRAMES["boxing_a"][None, None])
    np.testing.assert_array_equal(first.logits, kept)
    np.testing.assert_array_equal(step.decide(FRAMES["pong_a"][None, None]).logits, kept)
    assert repeats(step, FRAMES["pong_b"][None, None])


def test_fifty_decisions_on_one_step_equal_fifty_fresh_ones(golden):
    rng = np.random.default_rng(0)
    step = StaticStep(golden, question("breakout"))
    for number in range(50):
        frame = FRAMES[SINGLE[number % len(SINGLE)]].copy()
        frame[rng.integers(200), rng.integers(150)] = rng.integers(256, size=3)
        fresh = StaticStep(golden, question("breakout")).decide(frame[None, None])
        np.testing.assert_array_equal(step.decide(frame[None, None]).logits, fresh.logits)


def test_reuse_encodes_one_frame_and_answers_as_encoding_both(golden):
    """The same chosen option on 200 real frames. Logits differ by no more than encoding one by one instead of both does."""
    frames = record_frames("atari:Pong", 200, seed=3)
    both, reusing = StaticStep(golden, question(), 2), StaticStep(golden, question(), 2, reuse=True)
    encoded = []
    original = reusing.newest_frame.work
    reusing.newest_frame.work = lambda: encoded.append(1) or original()
    margin = np.inf
    for previous, current in zip(frames[:-1], frames[1:], strict=True):
        inputs = np.stack([previous, current])[None]
        expected, got = both.decide(inputs), reusing.decide(inputs)
        np.testing.assert_allclose(got.logits, expected.logits, atol=1e-4, rtol=0)
        assert got.value == expected.value
        lead = np.sort(expected.probabilities[0])[::-1]
        margin = min(margin, lead[0] - lead[1])
    assert len(encoded) == len(frames) - 2
    pixels = both.pixels(frames[:2])
    noise = (golden.images(pixels) - torch.cat([golden.images(pixels[:1]), golden.images(pixels[1:])])).abs().max()
    print(f"smallest margin {margin:.4f}; image rows, two at once against one by one: {noise:.1e}")


def test_reuse_encodes_all_where_the_earlier_frame_is_another(golden):
    step, fresh = StaticStep(golden, question(), 2, reuse=True), EagerStep(golden, question(), 2)
    a, b, c = (FRAMES[name] for name in ("pong_a", "pong_b", "pong_c"))
    for previous, current in ((a, b), (c, a), (a, a), (b, c)):
        inputs = np.stack([previous, current])[None]
        np.testing.assert_allclose(step.decide(inputs).logits, fresh.decide(inputs).logits, atol=1e-4, rtol=0)
    step.reset([0])
    assert step.seen is None


def test_reuse_goes_by_row_and_a_reset_forgets_no_other(golden):
    step = StaticStep(golden, question(), 2, batch=2, reuse=True)
    a, b, c, d = (FRAMES[name] for name in ("pong_a", "pong_b", "pong_c", "breakout_a"))
    fresh, spared = EagerStep(golden, question(), 2), []
    for first, second, reset in (
        ((a, b), (c, d), None),
        ((b, c), (d, a), None),  # both windows slide: one new frame a row
        ((c, a), (b, c), None),  # the second row jumps to what the first had: nothing of it is the second's
        ((a, a), (c, c), [1]),  # the second begins anew on one picture: one to encode, the first stands still
    ):
        if reset:
            step.reset(reset)
            assert step.known.tolist() == [True, False]
        inputs = np.stack([np.stack(first), np.stack(second)])
        np.testing.assert_allclose(step.decide(inputs).logits, fresh.decide(inputs).logits, atol=1e-4, rtol=0)
        spared.append(step.reuse_counts()["spared"])
    assert spared == [0, 2, 2, 4]
    with pytest.raises(InputError, match=r"no rows \[2\] in a batch of 2"):
        step.reset([2])


def test_reuse_keeps_no_reference_to_the_callers_frames(golden):
    """One buffer, refilled for every decision: compared with itself, every frame would seem known."""
    step, fresh = StaticStep(golden, question(), 2, reuse=True), EagerStep(golden, question(), 2)
    buffer = np.zeros((1, 2, *FRAMES["pong_a"].shape), np.uint8)
    for previous, current in (("pong_a", "pong_b"), ("breakout_a", "breakout_b"), ("pong_c", "pong_a")):
        buffer[0] = FRAMES[previous], FRAMES[current]
        np.testing.assert_allclose(step.decide(buffer).logits, fresh.decide(buffer).logits, atol=1e-4, rtol=0)
    assert step.reuse_counts() == {"encoded": 6, "spared": 0}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.scorer[1].weight.data.__class__ and model.scorer[1].weight.add_(0.1),
        lambda model: setattr(model.scorer[1], "weight", torch.nn.Parameter(model.scorer[1].weight.clone())),
        lambda model: model.encoder.text_model.norm.weight.set_(model.encoder.text_model.norm.weight.clone()),
        lambda model: setattr(model, "config", model.config.__class__(image_size=128, temperature=(2.0, 1.0, 1.0))),
    ],
    ids=["written in place", "replaced", "other storage", "temperature"],
)
def test_a_changed_model_is_noticed(change):
    model = lab.load_model(str(GOLDEN))
    step = StaticStep(model, question())
    step.decide(pairs(1, 1))
    with torch.no_grad():
        change(model)
    with pytest.raises(InputError, match="changed since this step was built; build a new step"):
        step.decide(pairs(1, 1))


def test_nothing_is_built_in_a_decision(golden, monkeypatch):
    step = StaticStep(golden, question())
    step.decide(pairs(1, 1))
    for name in ("row", "merge"):
        monkeypatch.setattr(type(golden), name, lambda *_: pytest.fail("called in a decision"))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a constant was made in a decision"))
    step.decide(pairs(1, 1))


@pytest.mark.parametrize(
    ("settings", "inputs", "words"),
    [
        ({}, pairs(2, 1), "2 inputs were given, this step takes a batch of 1"),
        ({"frames": 2}, pairs(1, 1), "lacks its earlier frames: 1 per decision, this step takes 2"),
        ({}, pairs(1, 2), "has frames too many: 2 per decision, this step takes 1"),
        ({}, pairs(1, 1).astype(np.float32), "dtype float32"),
        ({}, FRAMES["doom_a"][None, None], "240x320, this step was set up for 210x160"),
    ],
)
def test_wrong_frames_are_refused(golden, settings, inputs, words):
    step = StaticStep(golden, question(), **settings)
    step.decide(pairs(1, settings.get("frames", 1)))
    with pytest.raises(InputError, match=words):
        step.decide(inputs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"capture": True}, "capture=True needs a CUDA device"),
        ({"batch": 0}, "batch is 0"),
        ({"reuse": True}, "with one frame per decision there are none"),
        ({"option_attention": "full"}, "option_attention is 'full'"),
        ({"frames": 9}, "9 frames per decision"),
    ],
)
def test_settings_that_cannot_be_are_refused(golden, settings, words):
    with pytest.raises(InputError, match=words):
        StaticStep(golden, question(), **settings)


def test_an_explicit_mask_changes_nothing_on_the_cpu(golden):
    eager = EagerStep(golden, question(), option_attention="causal")
    masked = MaskedEagerStep(golden, question(), option_attention="causal")
    assert compare_answers(eager, masked, [pairs(2, 1)]).max_logit < 1e-4


def test_parity_sees_a_flip(golden):
    eager, other = (EagerStep(golden, question(), option_attention=name) for name in ("causal", "block"))
    parity = compare_answers(eager, other, [FRAMES[name][None, None] for name in SINGLE])
    assert parity.n == len(SINGLE) and parity.max_logit > 0.1
    assert 0 < parity.flips.value <= 1 and parity.flips.low <= parity.flips.value <= parity.flips.high


def test_games_say_where_they_diverge(golden):
    asked = lab.load_workloads()["breakout"].question
    eager, static = EagerStep(golden, asked), StaticStep(golden, asked)
    same = compare_games(eager, static, "atari:Breakout", max_decisions=20)
    assert same.diverged == [None]
    other = compare_games(
        eager, EagerStep(golden, asked, option_attention="block"), "atari:Breakout", max_decisions=40, choose="sampled"
    )
    assert other.diverged[0] is not None


@pytest.mark.skipif(not compiler(), reason="no C++ compiler: compiled arms are not run here")
def test_compiled_equals_eager_and_compiles_once(golden):
    step = CompiledStep(golden, question("doom_basic"))
    inputs = [FRAMES[name][None, None] for name in ("doom_a", "doom_b")]
    assert compare_answers(EagerStep(golden, question("doom_basic")), step, inputs * 2).max_logit < 2e-4
    timed = time_call(step.decide, inputs[0])
    assert {"copy_in", "compiled", "readback"} == set(timed) - {"total"}
    cost = step.start_cost()
    assert (cost["graphs"], cost["graph_breaks"], cost["recompiles"]) == (1, 0, 0) and cost["compile_s"] > 0


def test_compiling_without_a_compiler_is_refused(golden, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        CompiledStep(golden, question())
    with pytest.raises(InputError, match="mode is 'fast'"):
        CompiledStep(golden, question(), mode="fast")


# ------------------------------------------------------------------------------------------------ with a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("frames", [1, 2])
def test_replay_equals_its_eager_twin(dtype, frames):
    model = lab.load_model(str(GOLDEN), device="cuda", dtype=dtype)
    captured, twin = StaticStep(model, question(), frames), StaticStep(model, question(), frames, capture=False)
    for name in SINGLE[:4]:
        inputs = np.stack([FRAMES[name]] * frames)[None]
        np.testing.assert_allclose(captured.decide(inputs).logits, twin.decide(inputs).logits, atol=1e-6, rtol=0)
    assert captured.all_frames.graph is not None
    rows = captured.image_rows.nbytes  # what a graph holds is more than the image rows that it writes
    assert rows < captured.start_cost()["graph_bytes"] < 2**30


@pytest.mark.cuda
def test_a_replayed_decision_launches_one_graph():
    from lab.activity import activity

    model = lab.load_model(str(GOLDEN), device="cuda")
    seen = activity(StaticStep(model, question()), pairs(1, 1))
    assert seen["graph"] == "used" and seen["graph_launches"] >= 1 and seen["kernel_launches"] <= 10


@pytest.mark.cuda
def test_captured_steps_reuse_frames_and_do_not_go_stale():
    model = lab.load_model(str(GOLDEN), device="cuda")
    reusing, eager = StaticStep(model, question(), 2, reuse=True), EagerStep(model, question(), 2)
    names = SINGLE[:6]
    for previous, current in zip(names[:-1], names[1:], strict=True):
        inputs = np.stack([FRAMES[previous], FRAMES[current]])[None]
        np.testing.assert_allclose(reusing.decide(inputs).logits, eager.decide(inputs).logits, atol=1e-3, rtol=0)
