"""The text model against transformers' own forward, its published shapes, its folders, and the options of its step."""

import json
import shutil

import numpy as np
import pytest
import torch

import lab
from lab.envs.snake import NAMES, boards
from lab.envs.snake import Snake as Game
from lab.envs.snake_prompts import decide, prompt
from lab.errors import InputError, NotFinite
from lab.models.heads import answer_features
from lab.models.text import TRAINED, load_text_model, text_preset
from lab.question_tokens import TextPrompt
from lab.steps.compiled import compiler
from lab.steps.text import TextStep

LONG = " ".join(f"word{i}" for i in range(150))
needs_compiler = pytest.mark.skipif(not compiler(), reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    return load_text_model("tiny")


@pytest.fixture(scope="module")
def trained():
    return load_text_model("snake")


def prompts(count=12, kind="compact"):
    games = [Game.at(board) for board in boards([9], 10 * count)[::10]]
    return [prompt(game, game.plan(), kind) for game in games]


def close(got, expected, atol):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=atol, rtol=0)
        np.testing.assert_allclose(one.probabilities, other.probabilities, atol=atol, rtol=0)
        np.testing.assert_allclose(one.p_act, other.p_act, atol=atol, rtol=0)


def arrays(answers):
    return [array for one in answers for array in (one.logits, one.probabilities, one.p_act)]


# ------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize(
    "name, parameters, layers", [("english", 421_293_827, (10, 18)), ("multilingual", 321_908_995, (8, 14))]
)
def test_the_published_shapes_have_the_published_size(name, parameters, layers):
    with torch.device("meta"):
        model = text_preset(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    kinds = model.encoder.config.layer_types
    assert (kinds.count("full_attention"), kinds.count("sliding_attention")) == layers and kinds[0] == "full_attention"


@pytest.mark.parametrize("length", [40, 200])
def test_the_encoder_is_transformers_own(tiny, length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 49000, (2, length), generator=generator)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, length - 17 :] = False
    with torch.no_grad():
        got = tiny.encode(tiny.encoder.embeddings.tok_embeddings(ids), mask)
        expected = tiny.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(got[mask], expected[mask], atol=2e-5, rtol=0)
    assert got.isfinite().all()


def test_a_row_answers_the_same_alone_and_among_others(tiny):
    asked = prompts(1)[0]
    together = TextStep(tiny).decide(asked)
    alone = [TextStep(tiny).decide(TextPrompt(asked.state, (one,)))[0] for one in asked.questions]
    close(together, alone, 2e-5)
    assert [len(answer.logits[0]) for answer in together] == [4, 2, 2]
    for answer in together:
        assert answer.probabilities.sum() == pytest.approx(1, abs=1e-6)


def test_what_is_padding_cannot_be_told(tiny):
    prepared = TextStep(tiny, pad_to_multiple=16).prepare(prompts(1)[0])
    inputs = [torch.from_numpy(array) for array in prepared.arrays()]
    with torch.no_grad():
        expected = tiny(*inputs)
        inputs[0] = torch.where(inputs[1], inputs[0], 4711)
        got = tiny(*inputs)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_features_of_rows_with_unequal_options():
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.3, -0.2, -1e4, -1e4]])
    present = torch.tensor([[True] * 4, [True, True, False, False]])
    got = answer_features(logits, present)
    torch.testing.assert_close(got[0], answer_features(logits[:1])[0])
    torch.testing.assert_close(got[1], answer_features(logits[1:, :2])[0])


def test_temperatures_apply_by_type_and_number_of_options(tiny, monkeypatch):
    from dataclasses import replace

    plain = TextStep(tiny).decide(prompts(1)[0])
    config = replace(tiny.config, temperature=(2.0, 1.0, 3.0), temperature_by_options={"choice:3-5": 0.5})
    monkeypatch.setattr(tiny, "config", config)
    for got, before, heat in zip(TextStep(tiny).decide(prompts(1)[0]), plain, (0.5, 3.0, 3.0), strict=True):
        np.testing.assert_array_equal(got.logits, before.logits)
        expected = torch.from_numpy(before.logits / np.float32(heat)).softmax(-1).numpy()
        np.testing.assert_allclose(got.probabilities, expected, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- folders


def test_a_trained_checkpoint_prefers_what_the_planner_prefers(trained):
    step, right = TextStep(trained), 0
    games = [Game.at(board) for board in boards([77], 90)]
    for game in games:
        plan = game.plan()
        move, safe, _ = step.decide(prompt(game, plan))
        right += NAMES[move.choice[0]] == plan.preferred
        assert safe.value[0] > 0.5
    assert right >= 88
    assert "lab train snake" in trained.weights


def test_a_folder_with_a_vocabulary_of_its_own(tmp_path, trained):
    folder = tmp_path / "own"
    shutil.copytree(TRAINED["snake"], folder)
    (folder / "tokenizer").mkdir()
    trained.tokens.tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"cls": "<|im_start|>", "sep": {"content": "<|im_end|>"}, "mask": "<image>", "pad": "<|endoftext|>"}
    said = {f"{name}_token": token for name, token in names.items()}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(said))
    model = load_text_model(str(folder))
    tokens = model.tokens
    assert (tokens.cls, tokens.sep, tokens.pad, tokens.mask_text) == (1, 2, 0, "<image>")
    ids = TextStep(model).prepare(TextPrompt("see <image>", (lab.Question("noul", "Is it?"),))).ids[0]
    assert ids[0] == 1 and ids[-1] == 2 and (ids == tokens.mask).sum() == 2
    del said["mask_token"]
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="mask_token"):
        load_text_model(str(folder))


@pytest.mark.parametrize("missing", ["rl_agent_config.json", "model.safetensors", "encoder/config.json"])
def test_a_folder_that_is_not_whole_is_refused(tmp_path, missing):
    shutil.copytree(TRAINED["snake"], tmp_path / "part")
    (tmp_path / "part" / missing).unlink()
    with pytest.raises(InputError, match=missing):
        load_text_model(str(tmp_path / "part"))


def test_weights_of_another_shape_are_refused(tmp_path):
    shutil.copytree(TRAINED["snake"], tmp_path / "odd")
    path = tmp_path / "odd" / "encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(InputError, match="does not fit"):
        load_text_model(str(tmp_path / "odd"))
    path.write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match="modernbert"):
        load_text_model(str(tmp_path / "odd"))


@pytest.mark.parametrize(
    "changed, said", [({"max_len": "long"}, "max_len"), ({"temperature": 1.0}, "temperature"),
                      ({"option_layout": "parallel"}, "layout")]
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(tmp_path, changed, said):
    shutil.copytree(TRAINED["snake"], tmp_path / "odd")
    path = tmp_path / "odd" / "rl_agent_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(InputError, match=said):
        load_text_model(str(tmp_path / "odd"))


@pytest.mark.parametrize("arguments", [("huge",), ("tiny", "tpu"), ("tiny", "cpu", "fp8")])
def test_unknown_names_are_refused(arguments):
    with pytest.raises(InputError):
        load_text_model(*arguments)


# -------------------------------------------------------------------------------------------------------------- step


@pytest.mark.parametrize("multiple", [1, 16, 48, 96])
@pytest.mark.parametrize("kind", ["compact", "verbose"])
def test_padding_changes_the_length_and_nothing_else(tiny, multiple, kind):
    step, plain = TextStep(tiny, pad_to_multiple=multiple), TextStep(tiny)
    for one in prompts(3, kind):
        padded, bare = step.prepare(one), plain.prepare(one)
        length = bare.ids.shape[1]
        assert padded.ids.shape == (3, -(-length // multiple) * multiple) and padded.tokens == bare.tokens
        assert (padded.ids[:, :length] == bare.ids).all() and (padded.mask[:, :length] == bare.mask).all()
        assert not padded.mask[:, length:].any() and padded.readouts.shape == bare.readouts.shape
        close(step.decide(one), plain.decide(one), 2e-4)


def test_padding_stops_at_what_the_model_reads(trained):
    one = TextPrompt(LONG, (lab.Question("noul", "Is it?"),))
    assert TextStep(trained, pad_to_multiple=48).prepare(one).ids.shape == (1, 256)  # 6 * 48 is more than max_len


@needs_compiler
@pytest.mark.parametrize("how", ["whole", "layers"])
def test_compiled_answers_are_those_of_eager(trained, how):
    step, eager = TextStep(trained, compile=how, pad_to_multiple=64), TextStep(trained)
    for one in prompts(6) + prompts(2, "verbose"):
        close(step.decide(one), eager.decide(one), 2e-4)
    assert set(step.shapes) == {(3, 64, 4), (3, 128, 4)}
    assert step.counts["graph_breaks"] == 0
    first = arrays(step.decide(prompts(1)[0]))
    for _ in range(9):
        for one, other in zip(arrays(step.decide(prompts(1)[0])), first, strict=True):
            np.testing.assert_array_equal(one, other)
    cost = step.start_cost()
    assert cost["shapes"] == 2 and cost["compile_s"] > 0


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple": 16}, {"cache_prompts": True}])
def test_ten_repeats_are_identical(tiny, options):
    step, one = TextStep(tiny, **options), prompts(1)[0]
    first = arrays(step.decide(one))
    for _ in range(9):
        for got, expected in zip(arrays(step.decide(one)), first, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_kept_prompts_answer_exactly_the_same(tiny):
    step, plain = TextStep(tiny, cache_prompts=True), TextStep(tiny)
    for one in prompts(8) * 2:
        for got, expected in zip(arrays(step.decide(one)), arrays(plain.decide(one)), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert step.parts.hits > step.parts.misses > 0


@pytest.mark.parametrize("options", [{}, {"cache_prompts": True, "pad_to_multiple": 16}])
def test_changed_weights_are_noticed(options):
    model = load_text_model("snake")
    step = TextStep(model, **options)
    step.decide(prompts(1)[0])
    model.scorer[1].weight.mul_(1.5)
    with pytest.raises(InputError, match="scorer.1.weight changed"):
        step.decide(prompts(1)[0])
    TextStep(model, **options).decide(prompts(1)[0])
    model.encoder.layers[0].mlp.Wi = torch.nn.Linear(64, 256, bias=False)
    with pytest.raises(InputError, match="changed"):
        step.decide(prompts(1)[0])


def test_changed_temperatures_are_noticed(monkeypatch):
    from dataclasses import replace

    model = load_text_model("snake")
    step = TextStep(model)
    model.config = replace(model.config, temperature=(2.0, 1.0, 1.0))
    with pytest.raises(InputError, match="temperature"):
        step.decide(prompts(1)[0])


@pytest.mark.parametrize("broken", ["scorer.3.bias", "act_head.2.bias", "encoder.final_norm.weight"])
def test_an_output_that_is_not_finite_raises(broken):
    model = load_text_model("snake")
    model.get_parameter(broken).fill_(float("nan"))
    game = Game()
    before = game.board()
    with pytest.raises(NotFinite):
        decide(game.plan(), *TextStep(model).decide(prompt(game, game.plan())))
    assert game.board() == before


@pytest.mark.parametrize(
    "options", [{"compile": "fast"}, {"pad_to_multiple": 0}, {"pad_to_multiple": True}, {"pad_to_multiple": 1.5},
                {"cache_prompts": 128}]
)  # fmt: skip
def test_options_that_cannot_be_are_refused(trained, options):
    with pytest.raises(InputError):
        TextStep(trained, **options)


def test_a_prompt_without_questions_and_a_vision_model_are_refused(trained):
    with pytest.raises(InputError, match="no question"):
        TextStep(trained).decide(TextPrompt("state", ()))
    with pytest.raises(InputError, match="load_text_model"):
        TextStep(torch.nn.Linear(2, 2))


def test_the_three_options_are_off_and_told_apart(trained):
    assert {"compile", "pad_to_multiple", "cache_prompts"} <= set(TextStep(trained).describe())
    assert TextStep(trained).describe()["cache_prompts"] is None and TextStep(trained).name == "eager"
    told = [TextStep(trained, **o).describe() for o in ({}, {"pad_to_multiple": 16}, {"cache_prompts": True})]
    assert all(one != other for i, one in enumerate(told) for other in told[:i])
