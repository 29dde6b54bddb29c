"""The mask layout, what moves in a model that reads both ways, and the time of the embedding lookup."""

import numpy as np
import pytest
import torch

import lab
from lab import figures
from lab.errors import InputError
from lab.experiments import bidirectional
from lab.experiments.bidirectional import BOTH_WAYS, QUESTION_FIRST, gather_ms, gather_rows, load_both_ways, movement
from lab.tokens import CLS, MASK, SEP, build_row, load_tokenizer

QUESTION = lab.Question("choice", "Which way now?", {"LEFT": "go left", "RIGHT": "", "STAY": "do not move at all"})


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def frames():
    return np.random.default_rng(0).integers(0, 256, (2, 1, 210, 160, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def table(frames):
    return movement("pong", frames)


def mask_row(tokenizer, state=None, frames=1):
    return build_row(tokenizer, QUESTION, frames, image_tokens=4, state=state, layout="mask")


def test_a_mask_row_reads_each_option_at_the_marker_in_front_of_it(tokenizer):
    row = mask_row(tokenizer, {"lives": 3}, frames=2)
    cls, sep, mask = map(tokenizer.token_to_id, (CLS, SEP, MASK))
    assert row.pooled == 0 and row.ids[0] == cls
    assert np.flatnonzero(row.ids == mask).tolist() == row.readouts.tolist()
    assert len(row.readouts) == 3 and row.option_span[0] == row.readouts[0]
    texts = np.split(row.ids[: row.option_span[1]], row.readouts)[1:]
    assert [tokenizer.decode(ids[1:].tolist()) for ids in texts] == [f" {text}" for text in QUESTION.rendered]
    assert [segment.name for segment in row.segments] == ["prefix", "image", "question", "options", "state"]
    ends = [row.segment(name).stop - 1 for name in ("question", "options", "state")]
    assert np.flatnonzero(row.ids == sep).tolist() == ends and ends[-1] == len(row) - 1
    assert (row.ids[row.image_positions] == tokenizer.token_to_id("<image>")).all() and len(row.image_positions) == 8


def test_a_text_cannot_add_a_marker(tokenizer):
    row = mask_row(tokenizer, f"{MASK}{SEP}{CLS}<image>")
    assert (row.ids == tokenizer.token_to_id(MASK)).sum() == 3
    assert (row.ids == tokenizer.token_to_id("<image>")).sum() == 4


def test_markers_react_to_the_state_behind_them(tokenizer):
    model = load_both_ways()
    pixels = torch.zeros(1, 3, 128, 128)
    answers = []
    for state in ("3", "7"):
        row = mask_row(tokenizer, state)
        hidden = model.text_model(inputs_embeds=bidirectional.merged(model, row, pixels)).last_hidden_state[0]
        answers.append(hidden[row.readouts])
    assert (answers[0] - answers[1]).abs().amax(dim=-1).min() > 1e-4


def test_both_ways_everything_but_the_embeddings_moves(table):
    lines = table[table["model"] == BOTH_WAYS]
    assert lines["layer"].tolist() == list(range(bidirectional.LAYERS))
    moved = lines[["keys", "values", "hidden"]].to_numpy()
    assert (moved[0] == 0).all()
    assert (moved[1:] > 1e-5).all() and (moved < 1).all()


def test_a_causal_question_ahead_of_the_image_stays_to_the_last_bit(table):
    lines = table[table["model"] == QUESTION_FIRST]
    assert len(lines) == 3
    assert (lines[["keys", "values", "hidden"]].to_numpy() == 0).all()


def test_the_image_itself_moves_in_both_from_the_embeddings_on(frames):
    image = movement("pong", frames, segments=["image"])
    assert (image[["keys", "values", "hidden"]].to_numpy() > 0).all()


def test_movement_repeats_itself(table, frames):
    assert movement("pong", frames).equals(table)


def test_movement_takes_the_frames_of_a_workload_itself():
    found = movement("pong_two_frames", seed=1)
    assert found.loc[found["model"] == BOTH_WAYS, "keys"].gt(0).tolist() == [False] + [True] * 5


def test_movement_refuses_frames_that_do_not_differ(frames):
    with pytest.raises(InputError, match="differ"):
        movement("pong", frames[[0, 0]])
    with pytest.raises(InputError, match="two inputs"):
        movement("pong", frames[:1])


def test_the_answer_is_read_from_the_table(table):
    assert "from layer 1 of 0 to 5 on" in bidirectional.answer(table)
    assert "none of its 3 layers" in bidirectional.answer(table)
    swapped = table.replace({"model": {BOTH_WAYS: QUESTION_FIRST, QUESTION_FIRST: BOTH_WAYS}})
    assert "move in none of its 3 layers, to the last bit in a model that reads both" in bidirectional.answer(swapped)


def test_movement_is_drawn_with_its_zero(table):
    (axes,) = figures.movement_lines(table).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == [BOTH_WAYS, f"{QUESTION_FIRST}: exactly 0"]
    low, high = axes.get_ylim()
    assert low < 0 < table[["keys", "values"]].max().max() < high


def test_the_lookup_of_question_and_options_is_timed(tmp_path):
    rows = gather_rows("pong", blocks=20, out=tmp_path / "rows.jsonl")
    gather = rows[rows["arm"] == bidirectional.GATHER]["describe"].iloc[0]
    assert gather["tokens"] == 106 and gather["table"] == [49280, 576]
    saved = gather_ms(rows)
    assert saved.n == 20 and saved.value > 0
    assert gather_ms(lab.records.read_rows(tmp_path / "rows.jsonl")) == saved
