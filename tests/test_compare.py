"""`lab compare A B`: two runs arm by arm."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import lab
from lab import cli, clocks, records
from lab.errors import InputError
from lab.two_runs import compare_runs

DESCRIBE = {"step": "EagerStep", "model": "tiny", "tokens": 116, "frames": 1, "dtype": "fp32", "device": "cpu"}
ENVIRONMENT = {
    "time": "2026-01-01T00:00:00", "load": [0.5, 0.5, 0.5], "versions": {"torch": "2.13.0", "numpy": "2.4"},
    "cpu": {"model": "EPYC", "mhz": {"current": 2596}}, "git": {"commit": "a" * 40}, "gpus": [],
}  # fmt: skip


def made_up(
    folder, seed, slower=1.0, name="02_latency_breakdown", blocks=30, title="pong", environment=None, **describe
):
    """A run's folder of made-up rows: two arms and an A/A arm, times 100 ms with 3 % noise, `slower` times over."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    records.write_json(folder / "environment.json", {"before": ENVIRONMENT | (environment or {})})
    with records.RowWriter(folder / f"{name}.rows.jsonl") as writer:
        for block in range(blocks):
            for order, (arm, ms) in enumerate({"causal": 100, "split": 110, "causal again": 100}.items()):
                row = {"run": "made up", "title": title, "arm": arm, "block": block, "order": order, "phase": "timed"}
                row |= {"pace": "back_to_back", "device": "cpu", "again": arm.endswith("again"), "workload": title}
                row |= {"stage": "total", "ms": ms * slower * np.exp(rng.normal(0, 0.03))}
                writer.append(row | {"describe": DESCRIBE | {"option": arm.removesuffix(" again")} | describe})
    return folder


def test_two_independent_runs_show_no_difference_and_one_slowed_by_a_fifth_does(tmp_path):
    a = made_up(tmp_path / "a", 1)
    same = compare_runs(a, made_up(tmp_path / "b", 2))
    assert list(same.table["arm"]) == ["causal", "split"] and not same.table["shown"].any()
    assert "no difference shown" in same.table["sentence"][0] and "single runs" in same.table["sentence"][0]
    assert same.sentence.startswith("No difference shown in any of 2 arms; single runs")
    slowed = compare_runs(a, made_up(tmp_path / "c", 3, slower=1.2))
    assert slowed.table["shown"].all()
    assert slowed.table["ratio"].between(1.15, 1.25).all() and (slowed.table["low"] > 1.1).all()
    assert (
        "B took 1.19 [1.18, 1.21] times" in slowed.table["sentence"][0] and "single runs" in slowed.table["sentence"][0]
    )
    assert "differs from A in 2 of 2 arms (2 slower)" in slowed.sentence
    assert "2 faster" in compare_runs(tmp_path / "c", a).sentence


def test_it_holds_for_many_independent_runs(tmp_path):
    """By far most pairs of equal runs show nothing: the bootstrap's 5 % are halved by the A/A arms."""
    runs = [made_up(tmp_path / str(seed), seed, blocks=12) for seed in range(12)]
    shown = [compare_runs(a, b).table["shown"].any() for a, b in zip(runs[::2], runs[1::2], strict=True)]
    assert sum(shown) <= 1


def test_runs_measured_for_real_are_told_apart(tmp_path, monkeypatch):
    now, rng = [0], np.random.default_rng(0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a lock of its own: nothing is timed here
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))  # no noise of a busy machine

    def measure(name, ms):
        def work():
            now[0] += int(1e6 * ms * np.exp(rng.normal(0, 0.02)))

        out = tmp_path / name / "work.rows.jsonl"
        lab.compare([lab.Arm("work", work, {"step": "work"})], blocks=12, warmup=1, out=out, title="work")
        return out.parent

    found = compare_runs(measure("a", 8), measure("b", 9.6))
    (line,) = found.table.to_dict("records")
    assert line["shown"] and 1.1 < line["ratio"] < 1.3
    assert found.environment == {}  # the rows' own record of one machine


def test_three_runs_a_side_are_no_single_runs(tmp_path):
    for seed in range(6):
        made_up(tmp_path / ("a" if seed < 3 else "b") / f"run-{seed}", seed, slower=1.0 if seed < 3 else 1.2)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.runs == (3, 3) and found.table["shown"].all()
    assert "single runs" not in found.sentence + "".join(found.table["sentence"])


def test_another_workload_is_refused_and_the_rest_is_compared(tmp_path):
    a, b = made_up(tmp_path / "a", 1), made_up(tmp_path / "b", 2, tokens=152)
    with pytest.raises(InputError, match=r"another workload, tokens is 116 in A and 152 in B .arm causal."):
        compare_runs(a, b)
    for folder, seed in ((a, 3), (b, 4)):
        made_up(folder, seed, title="doom", name="03_question_first")
    made_up(a, 5, name="04_cuda_graph")
    found = compare_runs(a, b)
    assert set(found.table["notebook"]) == {"03_question_first"}
    assert "tokens is 116" in found.refused[0]
    assert found.missing == ["04_cuda_graph: only in A"]
    for key, value in {"model": "smolvlm-256m", "frames": 2, "batch": 4, "image_size": 512}.items():
        with pytest.raises(InputError, match=key):
            compare_runs(made_up(tmp_path / f"{key}1", 1, **{key: 1}), made_up(tmp_path / f"{key}2", 1, **{key: value}))


def test_dtype_and_environment_may_differ_and_are_named(tmp_path):
    a = made_up(tmp_path / "a", 1, title="pong, batch 1, fp32")
    other = {"versions": {"torch": "2.12.0", "numpy": "2.4"}, "git": {"commit": "b" * 40}, "load": [9, 9, 9]}
    other |= {"gpus": [{"name": "H200", "temperature.gpu": "40"}]}
    b = made_up(tmp_path / "b", 2, title="pong, batch 1, bf16", slower=0.5, environment=other, dtype="bf16")
    for path in (a, b):  # the same workload, whatever its comparison is called
        file = path / "02_latency_breakdown.rows.jsonl"
        file.write_text(file.read_text().replace('"workload": "pong, batch 1, ', '"workload": "pong", "was": "'))
    found = compare_runs(a, b)
    assert found.settings == {"02_latency_breakdown, pong, batch 1, dtype": ("fp32", "bf16")}
    assert found.environment == {
        "versions torch": ("2.13.0", "2.12.0"), "git commit": ("a" * 40, "b" * 40), "gpus 0 name": ("none", "H200"),
    }  # fmt: skip
    assert found.table["shown"].all() and (found.table["ratio"] < 0.6).all()


def test_the_command_prints_a_table_or_json_and_refuses_in_one_sentence(tmp_path, capsys):
    a, b = made_up(tmp_path / "a", 1), made_up(tmp_path / "b", 2, slower=1.2)

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["compare", *map(str, arguments)])
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, said.err

    code, out, _ = call(a, b)
    assert code == 0 and "environment: no field differs" in out and "B differs from A in 2 of 2 arms" in out
    code, out, _ = call(a, b, "--json")
    assert json.loads(out.splitlines()[-1])["arms"][0]["shown"] is True
    (tmp_path / "empty").mkdir()
    files = [tmp_path / name / "02_latency_breakdown.rows.jsonl" for name in "ab"]
    assert call(*files)[0] == 0
    for arguments, sentence in (
        ((a, a), "compared with itself"),
        ((a, tmp_path / "missing"), "There is no run"),
        ((a, tmp_path / "empty"), "holds no timed rows"),
        ((a, a / "environment.json"), "holds no rows"),
        ((a, made_up(tmp_path / "other", 3, name="04_cuda_graph")), "only in A"),
    ):
        code, out, err = call(*arguments)
        assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1, err
