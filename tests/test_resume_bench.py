"""`lab bench resume`, its rows, tables and figures."""

import json

import pandas as pd
import pytest

from lab import cli, figures
from lab.errors import InputError
from lab.experiments import resume
from lab.records import read_rows


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[dict, pd.DataFrame]:
    """What the command prints at the tiny preset, and the rows it leaves."""
    import contextlib
    import io

    path = tmp_path_factory.mktemp("resume") / "resume.rows.jsonl"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.exit", lambda code=0: None)
        patch.setitem(resume.PROFILES["standard"], "families", "few")
        cli.main(["bench", "resume", "--preset", "tiny", "--device", "cpu", "--json", "--out", str(path)])
    (line,) = said.getvalue().splitlines()
    return json.loads(line), read_rows(path, resume.OLD)


def test_the_last_line_is_one_object_with_every_turn(measured):
    document, _ = measured
    wanted = {
        "images",
        "encoded",
        "cached_tokens",
        "ttft_ms",
        "ttft_ms_without",
        "ratio",
        "low",
        "high",
        "tokens_equal",
    }
    assert [turn["case"] for turn in document["turns"]] == ["turn 1", "turn 2", "turn 3"]
    assert all(wanted <= set(turn) for turn in document["turns"])
    assert [(t["images"], t["encoded"], t["encoded_without"]) for t in document["turns"]] == [
        (2, 2, 2),
        (3, 1, 3),
        (4, 1, 4),
    ]
    assert all(t["tokens_equal"] for t in document["turns"] + document["growth"])
    assert document["turns"][0]["cached_tokens"] == 0 < document["turns"][1]["cached_tokens"]
    for turn in document["turns"]:
        assert turn["ttft_ms"] > 0 and turn["low"] <= turn["ratio"] <= turn["high"]
    assert [line["images"] for line in document["growth"]] == [3, 4, 8]
    assert all(line["encoded"] == 1 and line["encoded_without"] == line["images"] for line in document["growth"])


def test_kept_images_stand_beside_a_published_store(measured):
    beside = resume.beside_published(resume.times(measured[1]))
    assert beside["case"].tolist()[:2] == ["turn 2", "turn 3"] and beside["kept"].tolist()[:2] == ["2 of 3", "3 of 4"]
    there = [36.9 / 50.4, 34.9 / 57.8, 185 / 566, 111 / 445]
    assert beside["ratio"].tolist()[2:] == pytest.approx(there) and "NVIDIA L4" in beside["case"][2]


def test_the_families_answer_as_cold_passes_do(measured):
    families = pd.DataFrame(measured[0]["families"]).set_index(["family", "turn"])
    assert (families["equal"] == families["replies"]).all() and len(families) == 12
    assert families["encoded"].unstack().to_dict("index") == {
        **{name: {1: 2, 2: 1, 3: 1} for name in ("smolvlm", "qwen2_5_vl", "gemma4")},
        "qwen3_5": {1: 2, 2: 1, 3: 2},  # the third turn's image stands in a run with the second's
    }
    assert families.loc["qwen3_5", "tower_calls"].tolist() == [1, 1, 1]
    assert families.loc["gemma4", "cold_calls"].tolist() == [2, 3, 4]


def test_rows_say_what_was_done(measured):
    _, rows = measured
    timed = rows[(rows["phase"] == "timed") & (rows["stage"] == "total")]
    assert set(timed["arm"]) == {"skip", "skip again", "encode all"}
    assert timed.groupby(["title", "arm"])["block"].nunique().eq(5).all()
    stages = rows.groupby("arm")["stage"].unique()
    assert {"build_inputs", "restore", "resize", "vision", "language", "readback"} <= set(stages["skip"])
    prompts = resume.lines(rows, "prompt").set_index("title")
    second = prompts.loc["turn 2, fp32"]
    assert second["encoded"] == [2] and len(second["spans"]) == 3 and second["spans"][1][1] <= second["cached_tokens"]
    assert resume.lines(rows, "same").set_index("title")["against"].loc["turn 2, fp32"] == "cold pass"


def test_the_same_rows_give_the_same_verdict(measured):
    document, rows = measured
    found = resume.Bench(rows)
    assert found.verdict == document["verdict"]
    assert "turn 2 (1 of 3 images encoded) 0." in found.verdict and "8 images (1 of 8" in found.verdict
    assert "3 of 3 prompts answer as a cold pass does" in found.verdict and "24 of 24" in found.verdict
    assert "turn 2" in found.table() and "gemma4" in found.table()


def test_a_difference_is_said_only_where_it_is_shown(measured):
    _, rows = measured
    table, families = resume.times(rows), resume.lines(rows, "family")
    for shown in (True, False):
        said = resume.answer(table.assign(shown=shown), families)
        assert said.count("no difference shown") == (0 if shown else 4)
    unequal = resume.answer(table.assign(tokens_equal=False), families)
    assert "0 of 3 prompts answer as a cold pass does" in unequal


def test_figures_draw_every_prompt_and_turn(measured):
    _, rows = measured
    table, prompts = resume.times(rows), resume.lines(rows, "prompt")
    axes = figures.prompt_strips(prompts).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["turn 1", "turn 2", "turn 3", "8 images"]
    said = [text.get_text() for text in axes.texts]
    assert "1 of 3 encoded" in said and "1 of 8 encoded" in said
    assert len(figures.first_token_bars(resume.turns(table)).axes[0].patches) == 6
    two = pd.concat([table, table.assign(dtype="bf16")])
    assert len(figures.saving_growth(resume.growth(two)).axes[0].containers) == 2
    assert len(figures.first_token_bars(resume.turns(two)).axes[0].get_yticklabels()) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"profile": "quick"}, "Unknown profile 'quick'"),
        ({"profile": "smoke", "device": "abacus"}, "Unknown device 'abacus'"),
        ({"profile": "smoke", "dtype": "fp8"}, "dtype is 'fp8'"),
        ({"profile": "smoke", "weights": "best"}, "weights is 'best'"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(options, says, tmp_path):
    with pytest.raises(InputError, match=says):
        resume.run(**options, out=tmp_path / "rows.jsonl")
    assert not list(tmp_path.iterdir())


def test_other_rows_are_refused(measured, tmp_path):
    with pytest.raises(InputError, match="nothing of kind 'prompt'"):
        rows = measured[1].copy()
        rows.attrs["about"] = []
        resume.times(rows)
