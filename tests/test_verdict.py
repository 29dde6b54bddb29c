"""The verdict: computed from results, so that other results give other sentences."""

import json
import math
import re

import pytest
from bs4 import BeautifulSoup

from lab import figures, records, report, runner
from lab.errors import InputError
from lab.experiments import verdict

GRAPH = {"preset": "smolvlm-256m", "workload": "pong", "frames": 1, "batch": 1, "dtype": "bf16"}


def stages(ms, vision):
    whole = {
        "arm": "causal",
        "stage": "total",
        "n": 30,
        "median": ms,
        "low": 0.98 * ms,
        "high": 1.02 * ms,
        "share": 1.0,
    }
    parts = {"vision": vision, "language": 0.9 - vision, "heads": 0.1}
    return [whole | {"stage": name, "median": share * ms, "share": share} for name, share in parts.items()] + [whole]


def speed(arm, ms, ratio, shown, case=GRAPH, **more):
    line = {**case, "arm": arm, "median": ms, "low": 0.98 * ms, "high": 1.02 * ms, "ratio": ratio, "start_s": 0.0}
    return line | {"ratio_low": 0.97 * ratio, "ratio_high": 1.03 * ratio, "shown": shown} | more


def same(arm, case=GRAPH, flips=0.0, **more):
    return {**case, "arm": arm, "against": "eager", "n": 32, "flips": flips, "max_logit": 1e-5} | more


def saving(arm, ratio, shown, ms=40.0):
    case = {"preset": "smolvlm-256m", "workload": "pong", "batch": 1, "dtype": "fp32", "arm": arm}
    return case | {
        "ms": ms,
        "high": ms,
        "ratio": ratio,
        "ratio_low": 0.97 * ratio,
        "ratio_high": 1.03 * ratio,
        "shown": shown,
    }


def repeats(source, saves, policy="one_hot"):
    return {"source": source, "policy": policy, "saves": saves, "saves_low": 0.9 * saves, "saves_high": 1.1 * saves}


def lever(arm, ratio, shown, flips=0.0, **more):
    """A line as `lab.experiments.lever_results.lever_table` gives it."""
    ms, ends = 1700 * ratio, {"low": 0.97, "high": 1.03}
    bounds = {end: by * ms for end, by in ends.items()} | {f"ratio_{end}": by * ratio for end, by in ends.items()}
    return {"preset": "smolvlm-256m", "arm": arm, "ms": ms, "ratio": ratio, "shown": shown, **bounds} | {
        "flips": flips, "n": 128, "max_logit": 1e-5, "start_s": 0.0, **more
    }  # fmt: skip


BATCH = GRAPH | {"batch": 16}
GPU = {
    "02_latency_breakdown": {"stages": {"pong": stages(40, 0.2)}},
    "03_question_first": {
        "savings": [{"workload": "pong", "arm": "whole", "ratio": None}, saving("question first", 1.02, False)],
        "parity": [{"title": "pong, batch 1, fp32", "arm": "question first", "n": 8, "flips": 0.0, "max_logit": 1e-6}],
        "bounds": [{"workload": "pong", "bound (%)": 1.0, "low": -0.5, "high": 2.5}],
    },
    "04_cuda_graph": {
        "speed": [
            GRAPH | {"arm": "eager", "median": 40.0, "ratio": None},
            speed("static", 38.0, 0.95, False),
            speed("captured", 10.0, 0.25, True, start_s=2.5),
            BATCH | {"arm": "eager", "median": 150.0, "ratio": None},
            speed("captured", 147.0, 0.98, False, BATCH),
        ],
        "parity": [same("static"), same("captured"), same("captured", BATCH)],
    },
}
CPU = {
    "02_latency_breakdown": {
        "stages": {"pong": stages(1700, 0.78)},
        "floor": {"stages": [{"stage": "vision", "share": 0.72}]},
    },
    "03_question_first": {
        "savings": [saving("question first", 0.91, True, 1550.0)],
        "parity": [{"title": "pong, batch 1, fp32", "arm": "question first", "n": 8, "flips": 0.0, "max_logit": 1e-6}],
        "bounds": [{"workload": "pong", "bound (%)": 9.7, "low": 8.2, "high": 11.0}],
    },
    "04_cuda_graph": {
        "speed": [
            speed("static", 1734.0, 1.02, False, GRAPH | {"dtype": "fp32"}),
            speed("compiled", 10.0, 0.6, True, GRAPH | {"preset": "tiny"}, start_s=40.0),
        ],
        "parity": [same("static", GRAPH | {"dtype": "fp32"}), same("compiled", GRAPH | {"preset": "tiny"})],
    },
    "05_duplicate_frames": {
        "saved": [repeats("atari:Pong", 0.012), repeats("atari:Chess", 0.9), repeats("atari:Pong", 0.5, "no_op")],
        "flips": [
            {"source": "atari:Pong", "threshold": t, "decisions": 100, "reused": r, "flipped": f}
            for t, r, f in ((0.0, 0.01, 0.0), (0.001, 0.4, 0.05), (0.1, 1.0, 0.4))
        ],
    },
    "06_resumed_images": {
        "turns": [
            {"case": "turn 1", "images": 1, "encoded": 1, "encoded_without": 1, "ratio": 1.0, "low": 0.9, "high": 1.1},
            {"case": "turn 2", "images": 3, "encoded": 1, "encoded_without": 3, "ratio": 0.5, "low": 0.45, "high": 0.55}
            | {"shown": True, "tokens_equal": True, "dtype": "fp32"},
        ]
    },
    "08_cheaper_levers": {
        "levers": [
            lever("openvino", 0.8, True, start_s=12.0),
            lever("int8", 0.5, True, flips=0.25),
            lever("tuned", 0.85, True),
            lever("batch 16", 0.9, True),
        ]
    },
}


@pytest.fixture
def run(tmp_path):
    """run(results) -> a run's folder with these results."""

    def make(results, name="run"):
        folder = tmp_path / name
        folder.mkdir()
        for notebook, found in results.items():
            records.write_json(folder / f"{notebook}.json", {"notebook": notebook, "results": found})
        return folder

    return make


def regimes(found):
    one, many, rate = found.regimes
    return one, many, rate


def test_two_sets_of_results_give_two_verdicts(run):
    gpu, cpu = verdict.judge(run(GPU, "gpu"), hz=50), verdict.judge(run(CPU, "cpu"), hz=0.8)
    one, many, rate = regimes(gpu)
    assert [line.action for line in one.do] == ["Capture the whole decision as one CUDA graph"]
    assert "0.25 [0.24, 0.26] times the time; pong, bf16; no answer changed of 32" in one.do[0].sentence
    assert "2.5 s at every start" in one.do[0].sentence
    assert one.headline.startswith(
        "This machine, batch 1: capture the whole decision as one CUDA graph (0.25 [0.24, 0.26]"
    )
    assert "Do not build: fix every shape; put the question first" in one.headline
    assert not many.do and "Large batch: the one arm measured is not shown to gain" in many.headline
    assert "the plain decision takes 40 ms and is too slow (pong); capture the whole decision" in rate.headline
    assert "takes 10 ms and keeps up" in rate.headline

    one, many, rate = regimes(cpu)
    own = [line.action for line in one.do if not line.aside]
    assert own == ["Run the step in OpenVINO", "Take the tuned step", "Put the question first and keep its keys and values",
                   "Answer a repeated frame from the last answer"]  # fmt: skip
    assert "run the step in OpenVINO" in one.headline and "CUDA" not in one.headline
    assert "the model must be taught that layout" in one.do[2].sentence
    assert "Quantise linear layers to int8" in [line.action for line in one.dont]
    assert [line.action for line in many.do] == ["Answer several inputs together"]
    assert "nothing measured keeps up" in rate.headline and "1360 ms, 1.1 times too long" in rate.headline
    assert gpu.answer != cpu.answer and re.search(r"\d", gpu.answer)
    assert "3 of 8 notebooks left results; not measured in this run: 01, 05, 06, 07, 08." in gpu.answer


def test_what_is_not_to_be_built_says_why(run):
    one = verdict.judge(run(CPU)).regimes[0]
    why = {line.action: line for line in one.dont}
    assert why["Quantise linear layers to int8"].kind == "trade"
    assert "but 25.0% of 128 answers change" in why["Quantise linear layers to int8"].sentence
    assert why["Compile the step"].kind == "hint" and "on another model only" in why["Compile the step"].sentence
    assert why["Fix every shape"].sentence.startswith("no difference shown, 1.02 [0.99, 1.05] times")
    nearly = why["Reuse image rows where fewer than 0.1 % of the pixels changed"]
    assert nearly.kind == "trade" and "5.0% of 100 answers change" in nearly.sentence
    asides = {line.action: line for line in one.do if line.aside}
    assert any(action.startswith("In atari:Chess") for action in asides)
    (resume,) = [line for action, line in asides.items() if "prompts resume" in action]
    assert "turn 2 of a conversation, 1 of 3 images encoded; every reply the same" in resume.sentence
    facts = [text for text, _ in one.facts]
    assert (
        facts[0]
        == "pong: a decision takes 1700 ms, 78% of it in vision, which runs at 72% of what this machine allows."
    )
    assert facts[1] == "pong: a question that cost nothing would save 9.7 [8.2, 11.0] % at most."


def test_a_slower_arm_and_other_answers_are_never_recommended(run):
    results = json.loads(json.dumps(GPU))
    results["04_cuda_graph"]["speed"][2] |= {"ratio": 1.3, "ratio_low": 1.2, "ratio_high": 1.4}
    one = verdict.judge(run(results, "slower")).regimes[0]
    assert not one.do and [line.kind for line in one.dont][0] == "slower" and "it takes longer" in one.dont[0].sentence
    assert "of 3 arms measured none is shown to gain" in one.headline
    results = json.loads(json.dumps(GPU))
    results["04_cuda_graph"]["parity"][1] |= {"flips": 0.5}
    one = verdict.judge(run(results, "flips")).regimes[0]
    assert not one.do and one.dont[0].kind == "trade" and "50.0% of 32 answers change" in one.dont[0].sentence
    results = json.loads(json.dumps(GPU))
    results["04_cuda_graph"]["speed"][2] |= {"graph": "not used"}
    assert "Capture" not in verdict.judge(run(results, "unused")).regimes[0].headline


def test_a_rate_that_the_plain_decision_meets_needs_nothing(run):
    folder = run(GPU)
    with records.RowWriter(folder / "02_latency_breakdown.rows.jsonl") as writer:
        for block in range(10):
            row = {"title": "pong", "arm": "causal", "block": block, "phase": "timed", "stage": "total"}
            writer.append(row | {"ms": 120.0 if block == 3 else 40.0})
    rate = verdict.judge(folder, hz=10).regimes[2]
    assert (
        rate.headline
        == "10 decisions a second, 100 ms each: nothing need be done; the plain decision takes 40 ms (pong)."
    )
    assert rate.facts[0][0].startswith("1 of 10 plain decisions missed a deadline of 100 ms (10 [0, 4")
    for hz in (0, -1, math.nan, math.inf, "fast", True):
        with pytest.raises(InputError, match="hz is"):
            verdict.judge(folder, hz)


def test_nothing_measured_is_said_and_torn_results_are_nothing(run, tmp_path):
    folder = run({})
    (folder / "04_cuda_graph.json").write_text('{"results": ')
    (folder / "02_latency_breakdown.json").write_text('{"results": []}')
    found = verdict.judge(folder)
    assert [regime.headline.endswith("not measured in this run.") for regime in found.regimes] == [True] * 3
    assert "0 of 8 notebooks left results" in found.answer
    assert figures.gain_dots([]).axes[0].texts[0].get_text() == "nothing was measured in this run"
    with pytest.raises(InputError, match="There is no run's folder"):
        verdict.judge(tmp_path / "missing")


def test_own_frames_that_repeat_are_worth_remembering(run):
    again = {"workload": "mine", "pairs": 199, "identical": 0.5, "low": 0.43, "high": 0.57, "changed": 0.0}
    one = verdict.judge(run({"01_token_layout": {"repeats": [again]}})).regimes[0]
    assert one.do[0].action == "Answer a repeated frame from the last answer"
    assert one.do[0].sentence.startswith("0.50 [0.43, 0.57] times the time; mine, 199 pairs of frames")


def test_the_front_page_opens_with_the_verdict_and_leads_to_the_notebooks(run, make_notebook):
    folder = run(CPU)
    for name in ("04_cuda_graph", "08_cheaper_levers"):
        make_notebook(name).rename(folder / f"{name}.ipynb")
    index = BeautifulSoup(report.build(folder).read_text(), "html.parser")
    section = index.find("section", class_="verdict")
    assert section.find_previous("h1") and section.find_next("div", class_="cards")
    assert "run the step in OpenVINO" in section.get_text() and "9.7 [8.2, 11.0] %" in section.get_text()
    links = {a["href"] for a in section.find_all("a")}
    assert links == {"04_cuda_graph.html", "08_cheaper_levers.html"}, "only pages that are there"
    records.write_json(folder / "04_cuda_graph.json", {"results": {"speed": "of another version"}})
    said = BeautifulSoup(report.build(folder).read_text(), "html.parser").get_text()
    assert "The verdict could not be computed" in said


def test_the_figure_names_every_arm(run):
    found = verdict.judge(run(CPU)).regimes[0]
    figure = figures.gain_dots([*found.do, *found.dont])
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(labels) == len(found.do) + len(found.dont) and "Run the step in OpenVINO" in labels


def test_the_notebook_judges_another_runs_folder(run, tmp_path):
    folder, said = run(CPU), []
    code = runner.run("smoke", tmp_path / "out", "09", {"rows": str(folder), "hz": "2"}, say=said.append)
    assert code == 0, said
    saved = json.loads((tmp_path / "out" / "09_verdict.json").read_text())["results"]
    assert saved["answer"] == verdict.judge(folder, 2.0).answer
    assert [line["kind"] for line in saved["regimes"][0]["do"]].count("do") == len(saved["regimes"][0]["do"])
    with pytest.raises(InputError, match="there is no folder nowhere"):
        runner.run("smoke", tmp_path / "out2", "09", {"rows": "nowhere"}, say=said.append)


def test_one_layers_time_is_no_decisions_and_more_frames_are_another_loop(run):
    results = json.loads(json.dumps(CPU))
    results["08_cheaper_levers"]["levers"].append(lever("one vision layer, bf16", 0.01, True))
    two = GRAPH | {"frames": 2}
    speeds = [speed("static", 1700, 1.0, False), speed("static, reusing frames", 900, 0.5, True, two)]
    results["04_cuda_graph"] = {"speed": speeds, "parity": [same("static, reusing frames", two)]}
    one, _, rate = verdict.judge(run(results, "layer")).regimes
    assert "takes 1360 ms" in rate.headline, "the fastest whole decision"
    (kept,) = [line for line in one.do if line.action == "Keep the earlier frame's image rows"]
    assert kept.aside and "earlier frame" not in one.headline


def test_what_was_asked_of_another_model_says_so(run):
    results = json.loads(json.dumps(CPU))
    results["08_cheaper_levers"]["levers"].append(lever("bf16", 2.2, True) | {"preset": "pocket"})
    line = {"low": 0.55, "high": 0.57, "ratio_low": 0.55, "ratio_high": 0.57, "shown": True}
    ablation = [line | {"candidate": "compiled", "ratio": 0.6}, line | {"candidate": "prompts kept", "ratio": 0.56}]
    actions = [{"candidate": "prompts kept", "executed": 600, "moves": 600, "max_logit": 0.0}]
    models = {"snake": ablation, "multilingual": ablation}
    results["07_snake_loop"] = {"ablation": models, "actions": actions}
    one = verdict.judge(run(results, "others")).regimes[0]
    (slower,) = [found for found in one.dont if found.action == "Use a shorter dtype"]
    assert "on another model" in slower.sentence
    text = [found for found in one.do if found.action.startswith("In a text loop")]
    assert [found.arm for found in text] == ["prompts kept"] * 2, "the fastest of each model alone"
    assert all("no answer of snake changed of 600" in found.sentence for found in text)
