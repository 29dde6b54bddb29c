"""What the experiments measure at the tiny size, and what they say of rows made up for the purpose."""

import pandas as pd
import pytest

from lab import stats
from lab.errors import InputError
from lab.experiments import capture, graphs, latency, question_first, token_layout
from lab.published import published
from lab.records import read_rows


@pytest.fixture(scope="module")
def latency_rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("rows") / "latency.rows.jsonl"
    latency.run("smoke", out=out)
    return read_rows(out)


def test_a_decisions_stages_cover_it(latency_rows):
    """Everything before the model (tokens, resize) is a stage too; what has none is under 5 %."""
    table = latency.stage_table(latency_rows, "pong", ["causal"])
    assert table["stage"].tolist() == ["build_inputs", "resize", "vision", "language", "heads", "readback", "total"]
    assert (stats.attribution(latency_rows)["unattributed"].abs() < 0.05).all()


def test_both_paces_are_measured(latency_rows):
    found = stats.paces(latency_rows)
    assert {"back_to_back", "in_loop"} <= set(found.columns) and len(found) == 1


def test_arms_differ_in_what_they_describe(latency_rows):
    for _, part in latency_rows[~latency_rows["again"].astype(bool)].groupby("title"):
        said = part.drop_duplicates("arm")[["pace", "describe"]].astype(str).apply(tuple, axis=1)
        assert said.nunique() == part["arm"].nunique()


def test_the_floor_stands_beside_the_rows(latency_rows):
    found = latency.floors(latency_rows)
    assert found["title"] == "pong" and found["ceilings"]["gflops"] > 0
    assert (found["stages"].set_index("stage").loc[["vision", "language", "heads"], "floor_ms"] > 0).all()


def made_up(language: float, prefix: float, blocks: int = 12) -> pd.DataFrame:
    """Rows of one workload whose stages take given times, give or take a per cent."""
    lines = []
    for block in range(blocks):
        drift = 1 + 0.01 * ((block * 7) % 5 - 2) / 2
        for arm, stages in {
            "causal": {"vision": 80, "language": language},
            "causal again": {"vision": 80, "language": language},
            "split": {"vision": 80, "language_prefix": prefix, "language_question": language - prefix},
        }.items():
            for stage, ms in {**stages, "total": sum(stages.values())}.items():
                same = {"run": "r", "title": "pong", "phase": "timed", "pace": "back_to_back", "describe": {}}
                again = arm.endswith("again")
                lines.append({**same, "arm": arm, "block": block, "stage": stage, "ms": ms * drift, "again": again})
    return pd.DataFrame(lines)


def test_the_latency_answer_follows_the_rows():
    saving = latency.saving(made_up(language=20, prefix=10), "pong")
    assert saving["share"].value == pytest.approx(0.1, abs=0.002) and saving["ms"].value == pytest.approx(10, abs=0.2)
    assert "at most 10 [" in latency.answer(made_up(20, 10)) and "80% of it in vision" in latency.answer(
        made_up(20, 10)
    )
    assert "is not shown" in latency.answer(made_up(20, 20.5))
    table = latency.savings(made_up(20, 10), published("cpu_saving_bound"))
    assert table.loc[0, "published_percent"] == 9.4


def test_the_cost_of_the_mask_stands_beside_the_published_seven_per_cent():
    rows = made_up(20, 10)
    block = rows[rows["arm"] == latency.BASE].assign(arm="block")
    block.loc[block["stage"] == "language", "ms"] *= 1.5
    cost = latency.mask_cost(pd.concat([rows, block]), published("stages")).iloc[0]
    assert cost[["here", "published"]].tolist() == pytest.approx([1.5, 1.069], abs=1e-3)


def test_unknown_profiles_are_refused():
    for experiment in (latency, graphs, question_first):
        with pytest.raises(InputError, match="Unknown profile 'quick'"):
            experiment.run("quick")


def test_flop_shares_are_the_published_ones():
    said = published("tokens").set_index("workload")["flop_share_percent"].dropna()
    counted = token_layout.flop_shares(token_layout.table())
    for workload, share in said.items():
        assert counted[workload] == pytest.approx(share, abs=0.5)


@pytest.fixture(scope="module")
def graph_bench():
    return graphs.Bench(graphs.run("smoke"), {name: found.capturable for name, found in capture.audits().items()})


def test_the_graphs_document_has_rows_parity_and_what_could_be_captured(graph_bench):
    found = graph_bench.to_json()
    assert {"arm", "frames", "batch", "dtype", "ms", "low", "high"} <= set(found["rows"][0])
    assert found["parity"]["max_logit"] < 2e-5 and found["parity"]["flips"] == 0
    assert found["capturable"] == {"stock": False, "eager": False, "static": True}
    assert {line["arm"] for line in found["rows"]} >= {"eager", "static", "static, reusing frames"}


def test_the_graphs_tables_set_the_published_factor_beside_measured(graph_bench):
    speed = graphs.speed_table(graph_bench.rows).assign(preset="smolvlm-256m", dtype="bf16", arm="captured")
    beside = graphs.beside_published(speed, published("static_step"), published("graphs"))
    one = beside[(beside["workload"] == "pong") & (beside["frames"] == 1)].iloc[0]
    assert (one["published captured, from"], one["to"]) == (3.51, 4.98)
    assert (one["not captured, from"], one["not captured, to"]) == pytest.approx((51.089 / 49.277, 56.656 / 51.308))
    assert "times the time of eager" in graphs.speed_sentence(speed.assign(shown=True))
    assert "no difference shown" in graphs.speed_sentence(speed.assign(shown=False))
    assert "graph not used" in graphs.speed_sentence(speed.assign(shown=True, graph="not used"))
    assert 0 < float(graphs.check_sentence(graph_bench.rows).split(" costs ")[1].split()[0]) < 5


def test_parity_on_peaked_answers():
    found = capture.peaked_parity(frames=16, decisions=8)
    found = found.set_index(["checkpoint", "workload", "dtype", "arm"]).sort_index()
    for checkpoint, workload in (("golden", "pong"), ("pocket", "doom_basic"), ("pocket", "breakout")):
        part = found.loc[checkpoint, workload]
        for dtype in ("fp32", "bf16"):
            static = part.loc[dtype, "static"]
            assert static["max_logit"] <= 2e-5 and static["flips"] == 0
            assert static["first_other_action"] == "[None, None]"
        assert part.loc[("bf16 against fp32", "eager, bf16"), "max_logit"] > 1e-3
    assert (found.loc["golden"]["smallest_margin"] > 1e-3).all()


@pytest.fixture(scope="module")
def first_bench():
    return question_first.Bench(question_first.run("smoke"))


def test_the_question_first_document(first_bench):
    found = first_bench.to_json()
    assert {"arm", "ms", "low", "high"} <= set(found["rows"][0])
    assert {"arm", "ratio", "low", "high"} <= set(found["savings"][0])
    assert found["parity"]["max_logit"] < 1e-4
    arms = {line["arm"] for line in found["rows"]}
    assert arms == {
        "whole", "split", "question first", "published simulation",
        "whole, reuse", "split, reuse", "question first, reuse", "published simulation, reuse",
    }  # fmt: skip


def test_the_question_first_verdict_follows_the_intervals(first_bench):
    saved, same = question_first.savings(first_bench.rows), question_first.parity(first_bench.rows)
    shown = saved.assign(ratio=0.9, ratio_low=0.88, ratio_high=0.92, shown=True, rest_shown=False)
    assert "saves at least 8.0 %" in question_first.answer(shown, same)
    noisy = shown.assign(shown=False, rest_shown=True, saved=9.0, saved_low=8.5, saved_high=9.5)
    assert "no difference shown; outside vision it saves 9.0 [8.5, 9.5] %" in question_first.answer(noisy, same)
    slower = shown.assign(ratio=1.1, ratio_low=1.05, ratio_high=1.2)
    assert "is not shown in any case" in question_first.answer(slower, same)
    assert "is not shown" in question_first.answer(shown.assign(shown=False), same)
    beside = question_first.beside_published(shown, published("stages"))
    cpu = beside[
        (beside["workload"] == "pong")
        & beside["published on"].str.startswith("x86")
        & (beside["arm"] == "question first")
    ]
    assert cpu.iloc[0]["published (%)"] == pytest.approx(-10.5, abs=0.1)
