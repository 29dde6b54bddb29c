"""Levers beside the plain decision: what is measured, what is read from rows, what is said."""

import numpy as np
import pandas as pd
import pytest

from lab import figures
from lab.errors import InputError
from lab.experiments import lever_results, levers, pixel_paths
from lab.models import load_model
from lab.records import read_rows
from lab.steps import openvino


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("levers") / "rows.jsonl"
    levers.run("smoke", out=path)
    return read_rows(path)


def test_every_lever_is_timed_and_its_answers_compared(rows):
    table = lever_results.lever_table(rows)
    own = table[table["preset"] == "tiny"].set_index("arm")
    expected = {"static", "half-size pictures", "tuned", "openvino", "int8", "batch 4", levers.KEPT}
    assert expected | {"eager", "eager again"} <= set(own.index)
    for arm in expected:
        line = own.loc[arm]
        assert line["ratio_low"] <= line["ratio"] <= line["ratio_high"] and line["n"] and np.isfinite(line["max_logit"])
    exact = own.loc[["static", "tuned", "openvino", "batch 4", levers.KEPT]]
    assert (exact["max_logit"] < lever_results.SAME).all() and not exact["flips"].any()
    assert own.loc["half-size pictures", "max_logit"] > 0.1 < own.loc["int8", "max_logit"]
    assert own.loc["batch 4", "batch"] == 4 and own.loc["openvino", "start_s"] > own.loc["static", "start_s"]
    assert own.loc[levers.KEPT, "frames"] == 2
    peaked = table[table["preset"] == levers.PEAKED].set_index("arm")
    assert peaked.loc["bf16", "dtype"] == "bf16" and peaked.loc["bf16", "n"] == 16


def test_what_limits_the_plain_decision_is_said(rows):
    found = lever_results.floors(rows)
    assert set(found) == {"eager", "tuned"} and (found["eager"]["floor_ms"] > 0).any()
    operations = lever_results.operations(rows)
    assert list(operations) == ["eager", "static", "tuned"] and (operations.loc["matrix products"] > 0).all()
    bounds = lever_results.bounds(rows).set_index("what")
    assert 0 < bounds.loc["embedded question kept", "ms"] < bounds.loc["inputs built once", "ms"]
    assert figures.lever_dots(lever_results.lever_table(rows)).axes and figures.operation_bars(operations).axes


def test_the_bench_prints_one_object(rows):
    bench = lever_results.Bench(rows)
    found = bench.to_json()
    assert {"arm", "ms", "ratio", "shown", "flips", "max_logit", "start_s"} <= set(found["rows"][0])
    assert "tuned" in found["verdict"] and "openvino" in found["verdict"]
    assert "batch 4" in bench.table()


def test_published_levers_stand_beside_measured(rows):
    beside = lever_results.beside_published(lever_results.lever_table(rows))
    own = beside[beside["preset"] == "tiny"]
    assert set(own["arm"]) == {"batch 4", "half-size pictures", levers.KEPT} and own["times plain"].all()
    batch = own[own["arm"] == "batch 4"].set_index("published on")["published"]
    assert batch["a decision in bf16, NVIDIA L4"] == pytest.approx(13.594 / 36.816)
    kept = own[own["arm"] == levers.KEPT]["published"].tolist()
    assert kept == pytest.approx([38.4 / 53.1, 11.2 / 8.7])
    half = own[own["arm"] == "half-size pictures"].iloc[0]
    assert half["published"] == pytest.approx(49.1 / 53.5) and half["published score"].startswith("0.255 to 0.030")
    frames = lever_results.kept_frames(rows).set_index("preset")
    assert frames.loc["tiny", "published kept"] == 0.47 and frames.loc["tiny", "apart"] < 1e-5
    # two frames to start with, of which one stays kept at every decision, the A/A arm's and the compared answers' aside
    assert 0.4 < frames.loc["tiny", "kept"] < 0.6


def test_other_ways_to_resize_are_as_far_from_the_processor_as_published():
    levels = pixel_paths.grey_levels().dropna().set_index(["filter", "size"])
    assert levels["mean"].tolist() == pytest.approx(levels["mean, published"].tolist(), rel=0.06)
    answers = pixel_paths.answers(load_model("pocket"), decisions=4).set_index("filter")
    assert answers.loc["composed", "mean_difference"] < answers.loc["bicubic", "mean_difference"]
    assert answers["actions_changed, published"].tolist() == [3, 15]


def made_up(medians: dict[str, float], batch: dict[str, int], flips: dict[str, float]) -> pd.DataFrame:
    rng, lines = np.random.default_rng(0), []
    tags = {"run": "r", "title": "t", "preset": "p", "workload": "w", "frames": 1, "phase": "timed", "stage": "total"}
    for block in range(12):
        for arm, ms in medians.items():
            described = {"batch": batch.get(arm, 1), "dtype": "fp32"}
            lines.append(
                {**tags, "arm": arm, "block": block, "ms": ms * rng.uniform(0.99, 1.01), "describe": described}
            )
    rows = pd.DataFrame(lines).assign(pace="back_to_back", again=lambda r: r["arm"].str.endswith("again"))
    share = {arm: {"value": value} for arm, value in flips.items()}
    rows.attrs["about"] = [
        {"kind": "parity", "preset": "p", "arm": arm, "max_logit": 0.0, "n": 50, "flips": value}
        for arm, value in share.items()
    ]
    return rows


def test_a_batch_is_counted_by_decision_and_arms_fall_into_their_group():
    medians = {"eager": 100, "eager again": 100, "batch 4": 320, "int8": 70, "slow": 150, "same": 100}
    flips = {"batch 4": 0.0, "int8": 0.1, "slow": 0.0, "same": 0.0}
    rows = made_up(medians, {"batch 4": 4}, flips)
    table = lever_results.lever_table(rows).set_index("arm")
    assert table.loc["batch 4", "ms"] == pytest.approx(80, rel=0.02)
    assert table.loc["batch 4", "ratio"] == pytest.approx(0.8, rel=0.02)
    said = lever_results.answer(lever_results.lever_table(rows))
    groups = {
        words: part for words, _, part in (group.partition(": ") for group in said.partition(". ")[2].split("; "))
    }
    assert "batch 4" in groups["Faster, with the same answers"] and "int8" in groups["faster, but the answers change"]
    assert "slow" in groups["slower"] and "same" in groups["no difference shown"]
    assert "10.0% of 50 answers of p change" in " ".join(lever_results.sentences(lever_results.lever_table(rows)))


def test_a_lever_that_cannot_run_is_said_and_left_out(monkeypatch, capsys):
    def missing():
        raise InputError("no such extra")

    monkeypatch.setattr(openvino, "runtime", missing)
    wanted = levers.PROFILES["smoke"] | {"without": ("int8 vision",)}
    names = [lever.name for lever in levers.levers(load_model("tiny"), levers.get_workload("pong"), wanted)]
    assert not {"openvino", "int8 vision"} & set(names) and {"eager", "tuned", "batch 4"} <= set(names)
    assert "not run: openvino: no such extra" in capsys.readouterr().out


def test_smaller_pictures_share_the_weights():
    model = load_model("tiny")
    half = model.at_size(64)
    assert half.image_tokens == model.image_tokens / 4 and model.config.image_size == 128
    assert half.encoder is model.encoder and half.describe()["image_size"] == 64
    for size in (0, 100, 256):
        with pytest.raises(InputError, match="multiple of 64"):
            model.at_size(size)


def test_two_frames_with_features_kept_are_a_comparison_of_their_own():
    model, asked = load_model("tiny"), levers.get_workload("pong_two_frames")
    settings = {"pairs": 1, "decisions": 1, "budget_s": 20}
    rows, _ = levers._two_frames(model, asked, settings, 0, None, "tiny")
    assert set(rows["title"]).isdisjoint({levers._tags(asked, model, "tiny")["title"]})


def test_an_unknown_profile_is_refused():
    with pytest.raises(InputError, match="smoke, standard, full"):
        levers.run("quick")
