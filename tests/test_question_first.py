"""The question first: cached answers equal uncached ones, the cache stays as it was, and nothing is shared."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode

import lab
from lab.errors import InputError
from lab.measure import time_call
from lab.models.heads import Decisions
from lab.models.vision import whole_mask
from lab.parity import compare_answers, option_orders, repeats
from lab.steps import (
    CompiledQuestionFirstStep,
    CompiledSplitStep,
    EagerStep,
    QuestionFirstStep,
    SplitStep,
    StaticSplitStep,
    StaticStep,
)
from lab.steps.compiled import compiler
from lab.steps.keyvalues import restore
from lab.tokens import build_row, encode, load_tokenizer, option_labels

GOLDEN = Path(__file__).parent / "golden"
FRAMES = np.load(GOLDEN / "frames.npz")
QUESTIONS = json.loads((GOLDEN / "questions.json").read_text())
SINGLE = [name for name in FRAMES.files if not name.startswith("doom")]
KINDS = ("static", "slots", "dynamic")


def question(key="pong"):
    return lab.Question(QUESTIONS[key]["type"], QUESTIONS[key]["instructions"], QUESTIONS[key]["criteria"])


def many(count):
    return lab.Question("choice", "Which one?", {f"B{i}": f"way {i}" for i in range(count)})


def eight(batch=1, frames=1):
    """Eight different inputs uint8 [batch, frames, 210, 160, 3] from a few recorded frames."""
    rng, inputs = np.random.default_rng(0), []
    for number in range(8):
        picked = [FRAMES[SINGLE[(number + k) % len(SINGLE)]].copy() for k in range(batch * frames)]
        picked[-1][20:60, 20:60] = rng.integers(256, size=3)
        inputs.append(np.stack(picked).reshape(batch, frames, *picked[0].shape))
    return inputs


def logits(step, inputs):
    return np.stack([step.decide(one).logits for one in inputs])


def prefix_of(step):
    kept = step.row.kept
    return [part[:, :, :kept].clone() for layer in step.cache.layers for part in (layer.keys, layer.values)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The models are tiny: a second thread costs more than it brings, and much more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def golden():
    return lab.load_model(str(GOLDEN))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


# ------------------------------------------------------------------------------------------------ the layout


def test_segments_and_what_can_be_kept(tokenizer):
    row = build_row(tokenizer, question(), layout="question_first")
    assert [(segment.name, segment.fixed) for segment in row.segments] == [
        ("prefix", True),
        ("question", True),
        ("options", True),
        ("image", False),
        ("cue", True),
        ("readouts", True),
    ]
    assert [len(row.segment(name)) for name in ("image", "cue", "readouts")] == [67, 5, 6]
    assert row.kept == row.segment("image").start and build_row(tokenizer, question()).kept == 3
    assert (row.ids[row.image_positions] == 49190).all() and (row.ids == 49190).sum() == 64
    assert row.option_span == (len(row) - 6, len(row)) and row.readouts.tolist() == list(range(*row.option_span))
    text = tokenizer.decode(row.ids[: row.kept].tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>User:\nchoice question: ") and "\nOptions:\n A NOOP: " in text
    lines = text.split("\nOptions:\n")[1].splitlines()
    assert [line[:3] for line in lines] == [" A ", " B ", " C ", " D ", " E ", " F "]
    assert tokenizer.decode(row.ids[row.readouts].tolist()) == " A B C D E F"


def test_a_state_belongs_to_the_frame(tokenizer):
    row = build_row(tokenizer, question(), 2, state="ammo 3", layout="question_first")
    names = [segment.name for segment in row.segments]
    assert names == ["prefix", "question", "options", "image", "state", "cue", "readouts"]
    assert not row.segment("state").fixed and row.kept == row.segment("image").start
    assert len(row.segment("image")) == 134


@pytest.mark.parametrize("count", [2, 26, 27, 100, 255])
def test_labels_are_distinct_single_tokens(tokenizer, count):
    labels = option_labels(tokenizer, count)
    texts = [tokenizer.decode([label]) for label in labels]
    assert len(set(labels)) == count == len(set(texts))
    assert all(encode(tokenizer, text) == [label] for text, label in zip(texts, labels, strict=True))
    assert texts[:26] == [f" {letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:count]


def test_a_vocabulary_without_labels_is_refused():
    small = Tokenizer(models.WordLevel({"A": 0, "C": 1, "?": 2}, unk_token="?"))
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(InputError, match="single tokens to label 3 options, not 4"):
        option_labels(small, 4)


def test_an_unknown_layout_is_refused(tokenizer, golden):
    with pytest.raises(InputError, match="layout is 'answer_first'"):
        build_row(tokenizer, question(), layout="answer_first")
    with pytest.raises(InputError, match="layout is 'terminator'"):
        QuestionFirstStep(golden, question(), layout="terminator")


@pytest.mark.parametrize(
    ("name", "per_frame", "kept"),
    [
        ("breakout", 71, 3 + 82),
        ("pong", 73, 3 + 106),
        ("boxing", 85, 3 + 233),
        ("doom_basic", 70, 3 + 82),
        ("doom_deadly_corridor", 74, 3 + 111),
        ("pong_two_frames", 140, 3 + 106),
    ],
)
def test_the_published_simulation_has_the_published_counts(tokenizer, name, per_frame, kept):
    workload = lab.load_workloads()[name]
    row = build_row(tokenizer, workload.question, workload.frames, layout="published_simulation")
    assert (len(row) - row.kept, row.kept) == (per_frame, kept)
    assert set(row.ids[row.readouts]) == set(encode(tokenizer, "\n"))
    labelled = build_row(tokenizer, workload.question, workload.frames, layout="question_first")
    assert len(labelled) - labelled.kept == per_frame + 5
    published = build_row(tokenizer, workload.question, workload.frames)
    assert len(labelled.segment("options")) == len(published.segment("options"))


def test_readouts_see_everything_and_the_rest_only_what_came_before(tokenizer):
    row = build_row(tokenizer, question(), image_tokens=4, layout="question_first")
    seen = whole_mask(row, "block", torch.float32, "cpu")[0, 0] == 0
    first = row.readouts[0]
    assert seen[first:].all()
    assert torch.equal(seen[:first], torch.ones(len(row), len(row), dtype=torch.bool).tril()[:first])


# ------------------------------------------------------------------------------------------------ the same answers


@pytest.mark.parametrize("layout", ["question_first", "published_simulation"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_on_eight_frames_which_differ(golden, kind, layout):
    got = logits(QuestionFirstStep(golden, question(), layout=layout, cache=kind), eight())
    expected = logits(QuestionFirstStep(golden, question(), layout=layout, cache=None), eight())
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    for i in range(8):
        assert all(np.abs(expected[i] - expected[k]).max() > 1e-3 for k in range(i))
        assert all(np.abs(got[i] - got[k]).max() > 1e-3 for k in range(i))


@pytest.mark.parametrize("options", [3, 12, 30])
@pytest.mark.parametrize("frames", [1, 2])
def test_frames_and_options(golden, frames, options):
    inputs = eight(frames=frames)[:3]
    expected = logits(QuestionFirstStep(golden, many(options), frames, cache=None), inputs)
    for kind in KINDS:
        got = logits(QuestionFirstStep(golden, many(options), frames, cache=kind), inputs)
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
    assert expected.shape == (3, 1, options)


def test_the_uncached_twin_agrees_with_the_models_own_calls(golden):
    """Against the library's text model and its own masks, not the steps' loop over layers."""
    step, one = QuestionFirstStep(golden, question(), option_attention="causal"), eight()[0]
    row = step.row
    with torch.inference_mode():
        ids = torch.from_numpy(row.ids)[None]
        positions = torch.from_numpy(row.image_positions)
        hidden = golden.language(golden.merge(ids, positions, golden.images(step.pixels(one[0]))))[:, row.kept :]
        readouts = torch.from_numpy(row.readouts - row.kept)[None]
        present = torch.ones(hidden.shape[:2], dtype=torch.bool)
        expected, _ = golden.score(hidden, 0, readouts, torch.tensor([hidden.shape[1] - 1]), present)
    np.testing.assert_allclose(step.decide(one).logits, expected.numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_batch_is_answered_as_alone(golden, kind):
    inputs = eight(batch=2, frames=2)[:4]
    both = logits(QuestionFirstStep(golden, question(), 2, batch=2, cache=kind), inputs)
    alone = QuestionFirstStep(golden, question(), 2, cache=kind)
    for row in range(2):
        one = logits(alone, [given[row : row + 1] for given in inputs])
        np.testing.assert_allclose(both[:, row : row + 1], one, atol=1e-4, rtol=0)


def test_without_the_two_way_mask_the_answers_are_others(golden):
    two_way, one_way = (QuestionFirstStep(golden, question(), option_attention=name) for name in ("block", "causal"))
    assert compare_answers(two_way, one_way, eight()).max_logit > 0.1


@pytest.mark.parametrize(
    "asked", [many(2), lab.Question("score", "How near?", list("abc")), lab.Question("noul", "Is it?")]
)
def test_every_question_type(golden, asked):
    step, twin = QuestionFirstStep(golden, asked), QuestionFirstStep(golden, asked, cache=None)
    assert compare_answers(twin, step, eight()[:2]).max_logit < 1e-4


def test_reuse_encodes_only_the_newest_frame_and_answers_as_encoding_both(golden):
    both, reusing = (QuestionFirstStep(golden, question(), 2, reuse=reuse) for reuse in (False, True))
    encoded, original = [], reusing.newest_frame.work
    reusing.newest_frame.work = lambda: encoded.append(1) or original()
    frames = [one[0, 0] for one in eight()]
    for previous, current in zip(frames[:-1], frames[1:], strict=True):
        inputs = np.stack([previous, current])[None]
        np.testing.assert_allclose(reusing.decide(inputs).logits, both.decide(inputs).logits, atol=1e-4, rtol=0)
    assert len(encoded) == len(frames) - 2


def test_bf16_stays_close_to_its_uncached_twin():
    model = lab.load_model(str(GOLDEN), dtype="bf16")
    step, twin = QuestionFirstStep(model, question()), QuestionFirstStep(model, question(), cache=None)
    parity = compare_answers(twin, step, eight())
    assert step.cache.layers[0].keys.dtype == torch.bfloat16
    assert parity.max_probability < 0.1 and parity.max_logit < 1


# ------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_prefix_is_the_same_bits_after_fifty_frames(golden, kind):
    step, rng = QuestionFirstStep(golden, question("breakout"), cache=kind), np.random.default_rng(0)
    before = prefix_of(step)
    assert all(part.abs().sum() > 0 for part in before)
    inputs = eight()
    first = step.decide(inputs[0]).logits
    for number in range(50):
        frame = inputs[number % 8].copy()
        frame[..., rng.integers(200), rng.integers(150), :] = rng.integers(256, size=3)
        step.decide(frame)
    assert all(torch.equal(now, then) for now, then in zip(prefix_of(step), before, strict=True))
    np.testing.assert_array_equal(step.decide(inputs[0]).logits, first)
    assert repeats(step, inputs[1], 3)


class Seen(TorchDispatchMode):
    """The largest tensor, in elements, that any operation but a view returned."""

    def __init__(self):
        super().__init__()
        self.largest, self.names = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result) and not function.is_view:
            self.largest = max(self.largest, result.numel())
            self.names.append(str(function))
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_restoring_copies_no_key_and_no_value(golden, kind):
    step = QuestionFirstStep(golden, question(), cache=kind)
    held = [(part.data_ptr(), part.stride()) for layer in step.cache.layers for part in (layer.keys, layer.values)]
    step.decide(eight()[0])
    with Seen() as seen:
        restore(step.cache, step.row.kept)
    assert seen.largest <= 1, seen.names  # one number per layer is set, or nothing at all
    if kind != "dynamic":
        now = [(part.data_ptr(), part.stride()) for layer in step.cache.layers for part in (layer.keys, layer.values)]
        assert now == held


@pytest.mark.parametrize("kind", KINDS)
def test_forgetting_to_restore_cannot_pass_unseen(golden, kind, monkeypatch):
    step = QuestionFirstStep(golden, question(), cache=kind)
    step.decide(eight()[0])
    monkeypatch.setattr("lab.steps.question_first.restore", lambda *_: None)
    with pytest.raises((IndexError, RuntimeError)):
        step.decide(eight()[1])


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_pass_leaves_no_trace(golden, kind, monkeypatch):
    step, inputs = QuestionFirstStep(golden, question(), cache=kind), eight()
    expected = step.decide(inputs[0]).logits
    with monkeypatch.context() as broken:
        broken.setattr(golden.encoder.text_model.layers[1], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.decide(inputs[1])
    np.testing.assert_array_equal(step.decide(inputs[0]).logits, expected)


def test_questions_models_and_dtypes_share_nothing(golden):
    tiny = [lab.load_model("tiny", seed=seed) for seed in (0, 1)]
    half = lab.load_model(str(GOLDEN), dtype="bf16")
    made = [(golden, "pong"), (golden, "breakout"), (half, "pong"), (tiny[0], "pong"), (tiny[1], "pong")]
    steps = [QuestionFirstStep(model, question(key)) for model, key in made]
    places = [part.data_ptr() for step in steps for layer in step.cache.layers for part in (layer.keys, layer.values)]
    assert len(set(places)) == len(places)
    inputs = eight()[:3]
    mixed = [[step.decide(one).logits for step in steps] for one in inputs]
    for number, (model, key) in enumerate(made):
        alone = QuestionFirstStep(model, question(key))
        for one, answers in zip(inputs, mixed, strict=True):
            np.testing.assert_array_equal(alone.decide(one).logits, answers[number])
    for one in mixed:
        assert np.abs(one[0] - one[2]).max() > 0 and np.abs(one[3] - one[4]).max() > 1e-3


@pytest.mark.parametrize("part", ["encoder.text_model.layers.0.self_attn.k_proj.weight", "scorer.1.weight"])
def test_a_changed_weight_is_noticed(part):
    model = lab.load_model(str(GOLDEN))
    steps = QuestionFirstStep(model, question()), StaticSplitStep(model, question())
    for step in steps:
        step.decide(eight()[0])
    with torch.no_grad():
        model.get_parameter(part).mul_(1.01)
    for step in steps:
        with pytest.raises(InputError, match=f"{part} changed since this step was built; build a new step"):
            step.decide(eight()[0])


# ------------------------------------------------------------------------------------------------ split, stages, arms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["causal", "block"])
def test_the_static_split_equals_whole_and_eager_split(golden, attention, kind):
    step = StaticSplitStep(golden, question(), 2, 2, attention, cache=kind)
    inputs = eight(batch=2, frames=2)[:3]
    for other in (StaticStep(golden, question(), 2, 2, attention), SplitStep(golden, question(), 2, attention)):
        assert compare_answers(other, step, inputs).max_logit < 1e-4


def test_the_static_split_reuses_frames(golden):
    step, whole = StaticSplitStep(golden, question(), 2, reuse=True), StaticStep(golden, question(), 2)
    frames = [one[0, 0] for one in eight()[:4]]
    inputs = [np.stack(pair)[None] for pair in zip(frames[:-1], frames[1:], strict=True)]
    assert compare_answers(whole, step, inputs).max_logit < 1e-4


def test_stages(golden):
    common = {"copy_in", "resize", "vision", "restore", "heads", "readback", "total"}
    for step, language in (
        (QuestionFirstStep(golden, question()), {"language"}),
        (StaticSplitStep(golden, question()), {"language_prefix", "language_question"}),
    ):
        step.decide(eight()[0])
        assert set(time_call(step.decide, eight()[0])) == common | language


def test_arms_differ_in_what_they_say(golden):
    steps = [
        QuestionFirstStep(golden, question(), layout=layout, cache=kind)
        for layout in ("question_first", "published_simulation")
        for kind in (*KINDS, None)
    ] + [StaticSplitStep(golden, question(), cache=kind) for kind in KINDS]
    assert len({json.dumps(step.describe(), sort_keys=True) for step in steps}) == len(steps)
    assert len({step.name for step in steps}) == len(steps)
    first, uncached = steps[0], steps[3]
    cost = first.start_cost()
    assert cost["cache_s"] > 0 and first.describe()["tokens_per_frame"] == 7 + 5 + 6
    held = first.cache.layers[0].keys
    assert cost["cache_bytes"] == 2 * len(first.cache.layers) * held.nbytes and held.shape[2] == len(first.row)
    assert uncached.start_cost()["cache_bytes"] == 0 and uncached.describe()["tokens_per_frame"] == len(first.row)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (QuestionFirstStep, {"cache": "paged"}, "cache is 'paged'"),
        (QuestionFirstStep, {"cache": "dynamic", "capture": True}, "which a graph cannot hold"),
        (QuestionFirstStep, {"capture": True}, "capture=True needs a CUDA device"),
        (QuestionFirstStep, {"reuse": True}, "with one frame per decision there are none"),
        (StaticSplitStep, {"cache": "paged"}, "cache is 'paged'"),
        (StaticSplitStep, {"cache": "dynamic", "capture": True}, "which a graph cannot hold"),
        (CompiledQuestionFirstStep, {"cache": "dynamic"}, "compile over cache='static'"),
        (CompiledSplitStep, {"mode": "fast"}, "mode is 'fast'"),
    ],
)
def test_settings_that_cannot_be_are_refused(golden, make, settings, words):
    with pytest.raises(InputError, match=words):
        make(golden, question(), **settings)


@pytest.mark.skipif(not compiler(), reason="no C++ compiler: compiled arms are not run here")
@pytest.mark.parametrize("make", [CompiledQuestionFirstStep, CompiledSplitStep])
def test_compiled_equals_its_twin_and_compiles_once(golden, make):
    twin = QuestionFirstStep if make is CompiledQuestionFirstStep else StaticSplitStep
    step = make(golden, question("doom_basic"))
    assert compare_answers(twin(golden, question("doom_basic")), step, eight()[:4]).max_logit < 2e-4
    cost = step.start_cost()
    assert (cost["graphs"], cost["graph_breaks"], cost["recompiles"]) == (1, 0, 0)
    assert step.name.endswith(", compiled, default") and step.describe()["compiled"] == "default"


# ------------------------------------------------------------------------------------------------ option orders


class Fixed:
    """A step whose probabilities hang on the options' names, or on their places."""

    name = "fixed"

    def __init__(self, asked, by_place):
        self.asked, self.by_place = asked, by_place

    def decide(self, inputs):
        scores = np.arange(3.0)[None] if self.by_place else np.array([[len(name) for name in self.asked.names]], float)
        p = np.exp(scores) / np.exp(scores).sum()
        return Decisions(self.asked, scores, p, np.ones(1))


def test_option_orders_match_options_by_name():
    asked = lab.Question("choice", "Which?", ["a", "bb", "ccc"])
    by_name = option_orders(lambda q: Fixed(q, False), asked, [None, None])
    assert (by_name.orders, by_name.n, by_name.flips.value) == (5, 10, 0) and by_name.max_probability < 1e-12
    by_place = option_orders(lambda q: Fixed(q, True), asked, [None, None])
    p = np.exp(np.arange(3)) / np.exp(np.arange(3)).sum()
    assert by_place.max_probability == pytest.approx(p[2] - p[0])
    assert by_place.flips.value == pytest.approx(4 / 5)  # the last option stays last in one of the five other orders
    assert 0 < by_place.mean_probability < by_place.max_probability


def test_option_orders_change_answers_and_repeat(golden):
    inputs = eight()[:2]
    arms = {
        "causal": lambda q: EagerStep(golden, q, option_attention="causal"),
        "block": lambda q: EagerStep(golden, q),
        "question first": lambda q: QuestionFirstStep(golden, q),
    }
    for make in arms.values():
        seen = option_orders(make, question(), inputs, orders=3)
        assert seen == option_orders(make, question(), inputs, orders=3)
        assert (seen.orders, seen.n) == (3, 6) and 0 < seen.mean_probability <= seen.max_probability <= 1
    with pytest.raises(InputError, match="orders is 0"):
        option_orders(arms["block"], question(), inputs, orders=0)


# ------------------------------------------------------------------------------------------------ with a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["static", "slots"])
@pytest.mark.parametrize("make", [QuestionFirstStep, StaticSplitStep])
def test_replay_equals_its_eager_twin(make, kind, dtype):
    model = lab.load_model(str(GOLDEN), device="cuda", dtype=dtype)
    captured, twin = (make(model, question(), 2, cache=kind, reuse=True, capture=capture) for capture in (True, False))
    frames = [one[0, 0] for one in eight()]
    for previous, current in zip(frames[:-1], frames[1:], strict=True):
        inputs = np.stack([previous, current])[None]
        np.testing.assert_allclose(captured.decide(inputs).logits, twin.decide(inputs).logits, atol=1e-6, rtol=0)
    assert captured.all_frames.graph is not None and captured.newest_frame.graph is not None
    kept = [part for layer in captured.cache.layers for part in (layer.keys, layer.values)]
    assert all(torch.isfinite(part).all() for part in kept)
