"""Other vision-language models: segments found by comparing two frames, stages of their own forward, tiny and random."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import lab
from lab.clocks import time_call
from lab.errors import InputError
from lab.experiments import other_models, token_layout
from lab.models.other import FILL, TINY, OtherStep, ask, find_segments, load_other
from lab.tokens import FAKE, GLOBAL, IMAGE, encode, load_tokenizer
from lab.workloads import get_workload

PONG = get_workload("pong")
RULES = {"tiny-idefics3": 4, "tiny-qwen2_5_vl": 12, "tiny-gemma3": 4}  # tokens that a 210 x 160 frame fills


@functools.cache
def model_of(name):
    return load_other(name)


@pytest.fixture(params=TINY)
def model(request):
    return model_of(request.param)


def frames(count, seed=0, size=(210, 160)):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), dtype=np.uint8)


def test_what_changes_is_the_pictures_place_and_nothing_else(model):
    row = find_segments(model, PONG.question, frames(1, 0), frames(1, 1))
    fill = encode(load_tokenizer(), IMAGE if model.name == "tiny-idefics3" else FILL)[0]
    assert row.image_positions.tolist() == np.flatnonzero(row.ids == fill).tolist()
    assert len(row.image_positions) == RULES[model.name]
    prefix, image, question = row.segments
    assert [s.name for s in row.segments] == ["prefix", "image", "question"]
    assert (prefix.start, prefix.stop, image.stop, question.stop) == (0, image.start, question.start, len(row))
    assert [s.fixed for s in row.segments] == [True, False, True]
    said = load_tokenizer().decode(row.ids[question.start :].tolist())
    assert said.endswith(ask(PONG.question, load_tokenizer())) and "F. LEFTFIRE: left with the button" in said
    line = token_layout.line(model.name, row)
    assert line["total"] == len(row) and line["image"] == RULES[model.name]


def test_a_change_in_one_frame_of_two_is_placed_there(model):
    before = frames(2)
    after = np.stack([before[0], frames(1, 1)[0]])
    row, both = (find_segments(model, PONG.question, before, other) for other in (after, frames(2, 2)))
    assert len(row.image_positions) == RULES[model.name] and len(both.image_positions) == 2 * RULES[model.name]
    assert row.image_positions.tolist() == both.image_positions[RULES[model.name] :].tolist()


def test_idefics3s_processor_is_its_own():
    """The prompt that the tiny one reads is that of transformers' processor over our tokenizer."""
    model = model_of("tiny-idefics3")
    ids, _ = model.given(frames(1), "What now?")
    text = f"User:{FAKE}{GLOBAL}{IMAGE * 4}{FAKE}What now?"
    assert ids.tolist() == encode(load_tokenizer(), text)


def test_equal_frames_and_frames_of_two_sizes_are_refused(model):
    with pytest.raises(InputError, match="Nothing that .* reads differs"):
        find_segments(model, PONG.question, frames(1), frames(1))
    if model.name == "tiny-qwen2_5_vl":
        with pytest.raises(InputError, match="give frames of one size"):
            find_segments(model, PONG.question, frames(1), frames(1, 1, (64, 256)))


def test_the_answer_is_the_forwards_own_and_follows_the_frame(model):
    step = OtherStep(model, PONG.question)
    answer = step.decide(frames(2)[:, None])
    assert answer.logits.shape == (2, 6) and np.allclose(answer.probabilities.sum(1), 1)
    with torch.inference_mode():
        inputs = model.inputs([frames(2)[1]], step.text)
        logits = model.model(**inputs).logits[0, -1, step.labels]
    assert np.allclose(answer.logits[1], logits.numpy(), atol=1e-5)
    assert np.abs(answer.logits[0] - answer.logits[1]).max() > 1e-3
    with pytest.raises(InputError, match="2 frames per decision were given"):
        step.decide(frames(2)[None])


def test_stages_are_inside_the_decision(model):
    step = OtherStep(model, PONG.question)
    step.decide(frames(1)[None])
    times = time_call(step.decide, frames(1)[None])
    assert set(times) == {"build_inputs", "vision", "language", "heads", "readback", "total"}
    assert all(ms > 0 for ms in times.values())
    assert sum(ms for name, ms in times.items() if name != "total") <= times["total"]
    # looking at what the text model is given leaves no stage open
    model.given(frames(1), "What now?")
    assert set(time_call(step.decide, frames(1)[None])) == set(times)


def test_models_are_timed_beside_each_other_and_laid_out(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = other_models.names_of("tiny-gemma3, tiny-idefics3")
    rows = other_models.run(names, out=tmp_path / "rows.jsonl", blocks=5)
    table = other_models.times(rows)
    assert list(dict.fromkeys(table["arm"])) == names
    assert {"vision", "language", "total"} <= set(table["stage"]) and (table["share"] <= 1).all()
    assert lab.figures.stage_bars({"other": table}).axes
    laid_out = other_models.layouts(names, PONG)
    assert {name: len(row.image_positions) for name, row in laid_out.items()} == dict.fromkeys(names, 4)
    monkeypatch.setattr(other_models, "frames_for", lambda *_: np.zeros((20, 1, 40, 40, 3), np.uint8))
    assert len(other_models.layouts(names[:1], PONG)[names[0]].image_positions) == 4, "a camera that sees nothing move"


def test_a_checkpoint_and_its_processor_load_from_a_folder(tmp_path):
    model = model_of("tiny-idefics3")
    model.model.save_pretrained(tmp_path / "saved")
    model.prepare.processor.save_pretrained(tmp_path / "saved")
    again = load_other(str(tmp_path / "saved"))
    inputs = again.inputs(list(frames(1)), "What now?")
    ours = model.inputs(list(frames(1)), "What now?")
    assert ours["input_ids"][0].tolist() == [*encode(load_tokenizer(), "User:"), *inputs["input_ids"][0].tolist()]
    assert torch.equal(inputs["pixel_values"], ours["pixel_values"])
    with torch.inference_mode():
        assert torch.equal(again.model(**inputs).logits, model.model(**inputs).logits)
    row = find_segments(again, PONG.question, frames(1, 0), frames(1, 1))
    assert len(row.image_positions) == 4 and OtherStep(again, PONG.question).decide(frames(1)[None]).choice.shape == (
        1,
    )


def test_unknown_models_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no retries against a hub out of reach
    for name, sentence in (("no/such", "neither a folder nor the hub gave it"), ("tests/golden", "neither a folder")):
        with pytest.raises(InputError, match=sentence):
            load_other(name)
    with pytest.raises(InputError, match="dtype is 'fp8'"):
        load_other("tiny-gemma3", dtype="fp8")
    with pytest.raises(InputError, match="other names no model"):
        other_models.names_of(" , ")


# --- SmolVLM checkpoints, from the hub or a folder ----------------------------------------------------------------------


def test_a_backbone_alone_loads_from_a_folder_with_fresh_heads(tmp_path):
    tiny = lab.load_model("tiny", seed=3)
    tiny.encoder.save_pretrained(tmp_path / "backbone")
    loaded = lab.load_model(str(tmp_path / "backbone"), seed=1)
    assert loaded.weights.endswith("heads random, seed 1")
    for (name, ours), theirs in zip(
        tiny.encoder.state_dict().items(), loaded.encoder.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_released_decision_checkpoint_loads_by_its_hub_name(monkeypatch):
    asked = []

    def download(name, file):
        asked.append((name, file))
        if name != "owner/decisions":
            raise FileNotFoundError("not in the hub's cache")
        return f"tests/golden/{file}"

    golden = Path(__file__).parent / "golden"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: str(golden))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded, local = lab.load_model("owner/decisions"), lab.load_model(str(golden))
    assert (loaded.name, loaded.weights) == ("owner/decisions", "checkpoint owner/decisions")
    assert asked == [("owner/decisions", "vlm_agent_config.json")]
    for (name, ours), theirs in zip(local.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(InputError, match="nobody/nothing' is no folder here, not in the hub's cache"):
        lab.load_model("nobody/nothing")
