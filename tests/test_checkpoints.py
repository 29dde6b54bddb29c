"""The checkpoint decides how it is asked; what is wrong with one is said at the border, by `lab check` in full."""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import CASES, FRAMES, GOLDEN, OUTPUTS, StoredPixels, frame_names, question_of
from tokenizers import Tokenizer

import lab
from lab.cli import main
from lab.errors import InputError, NotFinite
from lab.models.checkpoints import TRAINED
from lab.models.heads import Decisions
from lab.models.text import TRAINED as TEXT_TRAINED
from lab.models.text import load_text_model
from lab.parity import compare_answers
from lab.pixels import DevicePixels
from lab.steps import QuestionFirstStep, StaticStep, StockStep, TunedStep
from lab.steps.setting import Setting
from lab.tokens import CLS, MASK, SEP, encode

QUESTION = lab.Question("choice", "Which way?", {"LEFT": "go left", "RIGHT": "go right", "STAY": ""})
OWN = [case for case in CASES if (case["option_attention"], case["path"]) == ("causal", "gpu")]


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden checkpoint that a test may spoil."""
    for name in ("model.safetensors", "vlm_agent_config.json", "added_tokens.json", "backbone/config.json"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDEN / name, tmp_path / "mine" / name)
    return tmp_path / "mine"


def configure(folder, drop=(), **said):
    path = next(folder.glob("*_agent_config.json"))
    whole = json.loads(path.read_text()) | said
    path.write_text(json.dumps({key: value for key, value in whole.items() if key not in drop}))


def spoil(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


# ------------------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize("case", OWN, ids=lambda case: case["key"])
def test_golden_cases_of_the_checkpoints_own_settings_need_nothing_by_hand(case):
    model = lab.load_model(str(GOLDEN))
    frames = np.stack([[FRAMES[name] for name in pair] for pair in frame_names(case)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = [
            lab.EagerStep(model, question_of(case), case["frames"]),
            StaticStep(model, question_of(case), case["frames"], len(frames)),
        ]
    steps[0].pixels = StoredPixels(case)
    for step, tolerance in zip(steps, (5e-5, 4e-4), strict=True):  # an own resize may flip a grey level at a tie
        np.testing.assert_allclose(
            step.decide(frames).probabilities, OUTPUTS[f"{case['key']}_probs"], atol=tolerance, rtol=0
        )


@pytest.mark.parametrize(
    "said",
    [
        {"option_attention": "block", "preprocess": "processor"},
        {"option_attention": "causal", "image_interpolation": "lanczos"},
        {"option_attention": "block", "image_interpolation": "bicubic", "layout": "question_first"},
        {"preprocess": None},
    ],
)
def test_every_step_asks_as_the_checkpoint_says(folder, said):
    configure(folder, **{key: value for key, value in said.items() if value is not None})
    configure(folder, drop=[key for key, value in said.items() if value is None])
    model = lab.load_model(str(folder))
    pixels = "processor" if said.get("preprocess", "gpu") in ("processor", None) else "device"
    filter = {"processor": "processor"}.get(pixels, said.get("image_interpolation", "composed"))
    expected = {
        "option_attention": said.get("option_attention", "causal"),
        "pixels": pixels,
        "filter": filter,
        "layout": said.get("layout", "terminator"),
    }
    frame = FRAMES["pong_a"][None, None]
    plain = lab.EagerStep(model, QUESTION)
    others = [StaticStep(model, QUESTION), TunedStep(model, QUESTION), StockStep(model, QUESTION)]
    others += (
        [lab.SplitStep(model, QUESTION)] if expected["layout"] == "terminator" else [QuestionFirstStep(model, QUESTION)]
    )
    for step in (plain, *others):
        assert expected.items() <= step.describe().items() and "overrides" not in step.describe()
        np.testing.assert_allclose(step.decide(frame).logits, plain.decide(frame).logits, atol=1e-4, rtol=0)


def test_a_setting_by_hand_overrides_and_is_said_once(folder):
    model = lab.load_model(str(folder))
    with pytest.warns(UserWarning, match="mine is asked otherwise than it was taught: option_attention block .*causal"):
        step = StaticStep(model, QUESTION, option_attention="block")
    assert step.describe()["overrides"] == "option_attention block (the checkpoint's: causal)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lab.EagerStep(model, QUESTION, option_attention="block")
        lab.EagerStep(model, QUESTION, option_attention="causal")
    one, other = (lab.EagerStep(model, QUESTION, option_attention=name) for name in ("causal", "block"))
    frame = FRAMES["pong_a"][None, None]
    assert np.abs(one.decide(frame).logits - other.decide(frame).logits).max() > 0.1


def test_presets_without_a_checkpoint_keep_their_defaults_and_have_nothing_to_override():
    model = lab.load_model("tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (lab.EagerStep(model, QUESTION), lab.EagerStep(model, QUESTION, option_attention="causal")):
            assert step.describe()["pixels"] == "device" and step.describe()["filter"] == "composed"
    assert Setting.of(model).option_attention == "block"


def test_single_hop_lanczos_is_one_matrix_an_axis_and_another_resize():
    frame = FRAMES["pong_a"][None]
    single, composed = DevicePixels(128, "lanczos").uint8(frame), DevicePixels(128).uint8(frame)
    rows, columns = DevicePixels(128, "lanczos").operators(210, 160)
    assert rows.shape == (128, 210) and torch.allclose(columns.sum(1), torch.ones(128))
    from PIL import Image

    viewed = np.asarray(Image.fromarray(FRAMES["pong_a"]).resize((128, 128), Image.Resampling.LANCZOS))
    apart = (single[0].permute(1, 2, 0).int() - torch.from_numpy(viewed.astype(int))).abs()
    assert apart.max() <= 1 and (single != composed).any()


def test_temperatures_are_kept_within_the_published_limits(folder, tmp_path):
    configure(folder, temperature=[1e-5, 9.0, 1.0])
    model = lab.load_model(str(folder))
    assert [model.temperature_of(lab.Question(kind, "?", ["a", "b"])) for kind in ("choice", "score")] == [1e-3, 9.0]
    shutil.copytree(TEXT_TRAINED["snake"], tmp_path / "text")
    configure(tmp_path / "text", temperature=[1.0, 9.0, 1.0], temperature_by_options={"choice:11+": 0.1006})
    with pytest.warns(UserWarning, match="kept within 0.5 to 5: score 9, choice:11.* 0.1006"):
        text = load_text_model(str(tmp_path / "text"))
    many = lab.Question("choice", "?", [str(i) for i in range(12)])
    assert [text.temperature_of(one) for one in (many, lab.Question("score", "?", ["a", "b"]))] == [0.5, 5.0]


def test_heads_alone_are_put_on_the_backbone_that_they_name(folder):
    whole, case = lab.load_model(str(folder)), OWN[0]
    whole.encoder.save_pretrained(folder / "somewhere")
    state = {name: value.contiguous() for name, value in whole.state_dict().items() if not name.startswith("encoder.")}
    save_file(state, folder / "head.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="is no folder here|cannot be|not in the hub"):
        lab.load_model(str(folder))
    configure(folder, backbone="somewhere")
    model = lab.load_model(str(folder))
    assert "heads of checkpoint mine on somewhere" in model.weights
    frames = np.stack([[FRAMES[name] for name in pair] for pair in frame_names(case)])
    one, other = (lab.EagerStep(each, question_of(case), case["frames"]).decide(frames) for each in (whole, model))
    np.testing.assert_array_equal(one.logits, other.logits)


def test_a_shipped_text_checkpoint_has_the_keys_that_the_published_loader_asks_for():
    for folder in TEXT_TRAINED.values():
        said = json.loads((folder / "rl_agent_config.json").read_text())
        assert isinstance(said["encoder"], str) and len(said["act_costs"]) + 1 == said["n_act"]


# ---------------------------------------------------------------------------------------------- what is refused


def heads_alone(folder):
    """The golden checkpoint as heads on a backbone of its own folder; the folder that holds the backbone."""
    whole = lab.load_model(str(GOLDEN))
    whole.encoder.save_pretrained(folder / "somewhere")
    save_file(
        {name: value.contiguous() for name, value in whole.state_dict().items() if not name.startswith("encoder.")},
        folder / "head.safetensors",
    )
    (folder / "model.safetensors").unlink()
    configure(folder, backbone="somewhere")
    return folder / "somewhere"


def test_a_backbone_that_lacks_weights_is_not_filled_with_random_ones(folder):
    beside = heads_alone(folder)
    state = load_file(beside / "model.safetensors")
    state.pop(next(name for name in state if name.endswith("layers.0.self_attn.q_proj.weight")))
    save_file(state, beside / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 of the backbone's weights"):
        lab.load_model(str(folder))


def test_heads_that_bring_weights_of_the_backbone_are_refused(folder):
    heads_alone(folder)
    state = load_file(folder / "head.safetensors")
    state["encoder.text_model.norm.weight"] = torch.zeros(192)
    save_file(state, folder / "head.safetensors")
    with pytest.raises(InputError, match="1 extra .encoder.text_model.norm.weight"):
        lab.load_model(str(folder))


@pytest.mark.parametrize("part", ["backbone", "text"])
def test_no_code_of_a_checkpoint_runs(folder, tmp_path, part, monkeypatch):
    if part == "text":
        shutil.copytree(TEXT_TRAINED["snake"], tmp_path / "text")
        folder, config = tmp_path / "text", tmp_path / "text" / "encoder" / "config.json"
    else:
        config = folder / "backbone" / "config.json"
    config.write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.E"}}))
    (config.parent / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass E: pass")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError):
        (load_text_model if part == "text" else lab.load_model)(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("text_config", {"hidden_size": "64"}),
        ("text_config", {"num_attention_heads": 0}),
        ("text_config", {"hidden_act": "nosuch"}),
        ("vision_config", {"patch_size": 0}),
        (None, {"scale_factor": None}),
        (None, {"text_config": []}),
        (None, {"model_type": []}),
    ],
)
def test_an_odd_backbone_is_one_sentence(folder, part, said):
    path = folder / "backbone" / "config.json"
    config = json.loads(path.read_text())
    (config[part] if part else config).update(said)
    path.write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        lab.load_model(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_what_a_tokenizer_file_says_of_batches_is_not_obeyed(tmp_path):
    shutil.copytree(TEXT_TRAINED["snake"], tmp_path / "text")
    own = load_text_model("snake").tokens.tokenizer
    cut = Tokenizer.from_str(own.to_str())
    cut.enable_truncation(4)
    cut.enable_padding(length=64)
    (tmp_path / "text" / "tokenizer").mkdir()
    cut.save(str(tmp_path / "text" / "tokenizer" / "tokenizer.json"))
    named = dict(zip(("cls_token", "sep_token", "mask_token"), (CLS, SEP, MASK), strict=True)) | {
        "pad_token": "<|im_end|>"
    }
    (tmp_path / "text" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    tokens = load_text_model(str(tmp_path / "text")).tokens
    assert tokens.encode("one two three four five six") == encode(own, "one two three four five six")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"layout": "nosuch"}, "layout is 'nosuch'"),
        ({"preprocess": "fast"}, "preprocess is 'fast'; .* gpu or processor"),
        ({"image_interpolation": "lancsoz"}, "image_interpolation is 'lancsoz'"),
        ({"option_attention": "both"}, "option_attention is 'both'"),
        ({"temperature": [0, 1, 1]}, "temperature of choice is 0; it is a number above 0"),
        ({"temperature": [1, float("nan"), 1]}, "temperature of score is nan"),
        ({"temperature_by_options": {"choice:2": "warm"}}, "temperature of choice:2 is 'warm'"),
        ({"max_len": 0}, "max_len is 0"),
        ({"readout": "mask"}, "reads out at 'terminator', not at 'mask'"),
        ({"readout": []}, "readout is"),
        ({"image_size": 256}, "image_size is 256; .* up to the 128 pixels"),
        ({"head_layers": 10**5}, "head_layers is 100000"),
        ({"temperature": [10**400, 1, 1]}, "temperature of choice is 1000"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder, said, words):
    configure(folder, **said)
    with pytest.raises(InputError, match=words):
        lab.load_model(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, tmp_path, value):
    spoil(folder, lambda state: state["scorer.1.bias"].fill_(value))
    with pytest.raises(InputError, match="scorer.1.bias holds weights that are not finite"):
        lab.load_model(str(folder))
    shutil.copytree(TEXT_TRAINED["snake"], tmp_path / "text")
    spoil(tmp_path / "text", lambda state: state["scorer.1.bias"].fill_(value))
    with pytest.raises(InputError, match="not finite"):
        load_text_model(str(tmp_path / "text"))


def test_weights_of_whole_numbers_are_refused(folder):
    spoil(folder, lambda state: state.update({"scorer.1.bias": torch.ones(192, dtype=torch.int8)}))
    with pytest.raises(InputError, match="scorer.1.bias is int8; weights are floating point"):
        lab.load_model(str(folder))


def test_complex_weights_are_refused(folder):
    spoil(folder, lambda state: state.update({"scorer.1.bias": torch.ones(192, dtype=torch.complex64)}))
    with pytest.raises(InputError, match="not finite"):
        lab.load_model(str(folder))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({}, "reads '<fake_token_around_image>' as . tokens"),
        ({"<fake_token_around_image>": 49152, "<end_of_utterance>": 49153, "<image>": 49154, "<global-img>": 49155},
         "numbers <image> 49154, the backbone 49153"),
        ({"<fake_token_around_image>": 49152, "<image>": 49153, "<end_of_utterance>": 49154, "<global-img>": 49155,
          "<more>": 49156}, "numbers its tokens up to 49156, and the model knows 49156"),
        ({"the": 49152, "<image>": 49153, "<end_of_utterance>": 49154, "<global-img>": 49155}, "adds 'the', which"),
    ],
)  # fmt: skip
def test_a_tokenizer_without_the_layouts_tokens_is_refused(folder, tokens, words):
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    with pytest.raises(InputError, match=words):
        lab.load_model(str(folder))


# -------------------------------------------------------------------------------------------------- NaN, parity


def test_an_answer_that_is_not_finite_is_no_decision():
    model = lab.load_model("tiny")
    model.scorer[3].bias.fill_(float("nan"))
    for step in (lab.EagerStep(model, QUESTION), StaticStep(model, QUESTION)):
        with pytest.raises(NotFinite, match="NaN or infinity"):
            step.decide(FRAMES["pong_a"][None, None])


def test_a_decision_is_a_copy_that_nobody_can_change():
    logits = np.zeros((1, 3), np.float32)
    answer = Decisions(QUESTION, logits, logits + 1 / 3, np.ones(1, np.float32))
    logits[:] = 5
    assert answer.logits.max() == 0
    with pytest.raises(ValueError):
        answer.logits[0, 0] = 1


def test_the_finite_check_costs_less_than_a_tenth_of_a_millisecond():
    from timeit import repeat

    given = np.zeros((1, 18), np.float32), np.full((1, 18), 1 / 18, np.float32), np.ones(1, np.float32)
    asked = lab.load_workloads()["boxing"].question
    assert min(repeat(lambda: Decisions(asked, *given), number=100, repeat=5)) / 100 < 1e-4


class Answers:
    """A foreign step that answers what it is told, whatever it is."""

    def __init__(self, logits):
        self.name, self.logits = "told", np.array([logits], np.float32)
        self.probabilities, self.p_act = self.logits, np.ones(1, np.float32)
        self.choice = self.logits.argmax(-1)

    def decide(self, _):
        return self


def test_parity_counts_nan_as_agreeing_with_nothing():
    nan = Answers([np.nan, 0, 0])
    for pair in ((nan, nan), (Answers([1, 0, 0]), nan), (nan, Answers([1, 0, 0]))):
        found = compare_answers(*pair, [None])
        assert found.flips.value == 1 and found.max_logit == np.inf
    assert compare_answers(Answers([1, 0, 0]), Answers([1, 0, 0]), [None]).flips.value == 0


def test_a_game_with_a_model_that_answers_nan_ends_in_one_sentence(capsys, monkeypatch):
    model = lab.load_model("tiny")
    model.scorer[3].bias.fill_(float("nan"))
    monkeypatch.setattr("lab.models.load_model", lambda *args, **kwargs: model)
    with pytest.raises(SystemExit) as left:
        main(["play", "--model", "tiny", "--steps", "3"])
    said = capsys.readouterr()
    assert left.value.code not in (0, None) and "NaN or infinity" in said.out + said.err


# ---------------------------------------------------------------------------------------------------- lab check


def checked(capsys, name, *more):
    with pytest.raises(SystemExit) as left:
        main(["check", str(name), *more])
    return left.value.code, capsys.readouterr()


@pytest.mark.parametrize("name", [*TRAINED, "snake", GOLDEN])
def test_check_finds_nothing_wrong_with_ours(capsys, name):
    code, said = checked(capsys, name, "--json")
    found = json.loads(said.out.splitlines()[-1])
    assert code == 0 and found["ok"] and {one["state"] for one in found["findings"]} <= {"ok", "note"}
    assert found["peaked"]["top_probability"] > 1.5 * found["peaked"]["even_share"]
    exact = [one for arm, one in found["agreement"].items() if "pixels" not in arm]
    assert exact and all(one["max_probability"] < 1e-4 and one["flips"] == 0 for one in exact)
    sources = {one["source"] for one in found["settings"].values()}
    assert sources & {"vlm_agent_config.json", "rl_agent_config.json"}


def test_check_says_where_each_setting_comes_from(capsys, folder):
    configure(folder, drop=["preprocess", "option_attention"], temperature_by_options={"choice:6-10": 0.9})
    code, said = checked(capsys, folder, "--json")
    found = json.loads(said.out.splitlines()[-1])
    assert found["settings"]["preprocess"] == {"value": "processor", "source": "default"}
    assert found["settings"]["option_attention"] == {"value": "causal", "source": "default"}
    assert found["settings"]["max_len"] == {"value": 1024, "source": "vlm_agent_config.json"}
    assert found["temperatures"]["choice:6-10"] == 0.9 and found["temperatures"]["choice:3-5"] == 1.3
    assert found["special_tokens"]["<image>"] == 49153 and "device pixels" in found["agreement"] and code == 0


def test_check_of_a_hub_name_reads_what_the_hub_gave(capsys, folder, monkeypatch):
    monkeypatch.setattr("lab.models.checkpoints._released", lambda name: folder if name == "some/one" else None)
    code, said = checked(capsys, "some/one", "--json")
    found = json.loads(said.out.splitlines()[-1])
    assert code == 0 and found["settings"]["option_attention"]["source"] == "vlm_agent_config.json"


BROKEN = {
    "NaN weight": (lambda f: spoil(f, lambda s: s["scorer.1.bias"].fill_(float("nan"))), "scorer.1.bias"),
    "missing weight": (lambda f: spoil(f, lambda s: s.pop("scorer.0.weight")), "1 missing (scorer.0.weight"),
    "unknown layout": (lambda f: configure(f, layout="nosuch"), "layout is 'nosuch'"),
    "temperature 0": (lambda f: configure(f, temperature=[0, 1, 1]), "temperature of choice is 0"),
    "no layout tokens": (lambda f: (f / "added_tokens.json").write_text("{}"), "<fake_token_around_image>"),
    "torn config": (lambda f: (f / "vlm_agent_config.json").write_text("{"), "not valid JSON"),
    "room for no question": (lambda f: configure(f, max_len=40), "model reads 40"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_names_what_is_wrong_with_a_broken_copy(capsys, folder, fault):
    spoiled, words = BROKEN[fault]
    spoiled(folder)
    code, said = checked(capsys, folder, "--json")
    found = json.loads(said.out.splitlines()[-1])
    wrong = [one for one in found["findings"] if one["state"] == "wrong"]
    assert code == 1 and not found["ok"] and len(wrong) == 1 and words in wrong[0]["found"] and wrong[0]["remedy"]


def test_check_names_keys_that_nobody_reads(capsys, folder):
    configure(folder, optionattention="block")
    code, said = checked(capsys, folder, "--json")
    notes = [
        one["found"] for one in json.loads(said.out.splitlines()[-1])["findings"] if one["what"] == "keys not used"
    ]
    assert code == 0 and notes == ["optionattention"]


def test_check_of_nothing_is_a_mistake_in_the_call(capsys, tmp_path):
    code, said = checked(capsys, tmp_path / "none")
    assert code == 2 and "There is no checkpoint" in said.err and len(said.err.splitlines()) == 1
    code, said = checked(capsys, "x" * 5000)
    assert code == 2 and "There is no checkpoint" in said.err and len(said.err.splitlines()) == 1


def test_check_sees_a_step_that_answers_otherwise(capsys, monkeypatch):
    """What it is there for: a static step whose answers are not the plain decision's."""
    import lab.check

    monkeypatch.setattr(lab.check, "StaticStep", lambda model, question, **_: Doubled(model, question))
    code, said = checked(capsys, "pocket")
    assert code == 1 and "wrong: static" in said.out


class Doubled(lab.EagerStep):
    def decide(self, frames):
        answer = super().decide(frames)
        return replace(answer, probabilities=answer.probabilities[:, ::-1])
