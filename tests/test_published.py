"""Published figures: each as it was published, and beside a measurement or with the reason why not."""

import ast
import json

import pytest

from lab.errors import InputError
from lab.published import published
from lab.workloads import DATA, load_workloads

NAMES = sorted(path.stem for path in (DATA / "published").glob("*.csv"))

# A handful of figures of every table, typed from the publications: (table, which row, what it says).
FIGURES = [
    ("batching", {"section": "causal_bf16", "batch": 16}, {"ms_per_step": 151.51, "ms_per_frame": 9.469}),
    ("batching", {"section": "causal_fp32", "batch": 4}, {"ms_per_step": 144.168, "frames_per_second": 27.7}),
    ("cpu_saving_bound", {"workload": "pong"}, {"saving_ms": 124.7, "share_percent": 9.4}),
    ("cpu_saving_bound", {"workload": "doom_basic"}, {"saving_ms": 88.3, "share_percent": 7.0}),
    ("cpu_saving_bound", {"workload": "pong_two_frames"}, {"saving_ms": 165.7, "share_percent": 6.5}),
    ("duplicates", {"source": "atari:Breakout"}, {"decisions": 2000, "identical": 0.0715, "median_changed": 0.00095}),
    ("duplicates", {"source": "atari:SpaceInvaders"}, {"identical": 0.089, "median_changed": 0.00119}),
    ("duplicates", {"source": "doom:defend_the_center"}, {"decisions": 1000, "identical": 0.016}),
    ("feature_cache", {"dtype": "fp32"}, {"frames": 2, "hit_rate": 0.47, "difference": 1.7e-6}),
    ("feature_cache", {"dtype": "bf16"}, {"frames": 2, "hit_rate": 0.47, "difference": 0.03}),
    ("graphs", {"section": "graphs", "dtype": "bf16", "option_attention": "causal", "frames": 1},
     {"eager_ms": 51.089, "graph_ms": 11.102, "graph_max_abs": 0.012852072715759277}),
    ("graphs", {"section": "graphs_static_step", "dtype": "bf16", "option_attention": "block", "frames": 2},
     {"eager_ms": 58.627, "unrolled_eager_ms": 53.432, "graph_ms": 19.488, "graph_max_abs": 0}),
    ("grey_levels", {"filter": "composed", "size": 512}, {"max": 22, "mean": 0.049}),
    ("grey_levels", {"filter": "lanczos", "size": 256}, {"max": 21, "mean": 0.295}),
    ("grey_levels", {"filter": "bilinear", "size": 256}, {"max": 55, "mean": 0.766}),
    ("image_store", {"hardware": "NVIDIA L4", "workload": "agent"}, {"nothing_kept_ms": 50.4, "images_kept_ms": 36.9}),
    ("image_store", {"hardware": "NVIDIA L4", "workload": "game"}, {"nothing_kept_ms": 57.8, "images_kept_ms": 34.9}),
    ("image_store", {"hardware": "CPU, 8 cores", "workload": "agent"}, {"nothing_kept_ms": 566, "images_kept_ms": 185}),
    ("image_store", {"hardware": "CPU, 8 cores", "workload": "game"}, {"nothing_kept_ms": 445, "images_kept_ms": 111}),
    ("pixel_paths", {"filter": "composed"}, {"mean_difference": 0.006, "max_difference": 0.027, "actions_changed": 3}),
    ("pixel_paths", {"filter": "bicubic"}, {"actions_changed": 15, "frames": 50}),
    ("play", {"image_size": 512, "pixels": "device", "frames": 2, "features_cached": "no"},
     {"decisions_per_second": 38.4}),
    ("play", {"image_size": 512, "pixels": "device", "features_cached": "yes"}, {"decisions_per_second": 53.1}),
    ("play", {"image_size": 512, "pixels": "processor", "features_cached": "yes"}, {"decisions_per_second": 8.7}),
    ("play", {"image_size": 256, "frames": 1}, {"decisions_per_second": 53.5}),
    ("play_score", {"image_size": 512}, {"median_normalised_score": 0.255}),
    ("play_score", {"image_size": 256}, {"median_normalised_score": 0.030}),
    ("snake_ablation", {"candidate": "eager"}, {"multilingual_p50_ms": 9.121, "english_p95_ms": 26.732}),
    ("snake_ablation", {"candidate": "compiled + padded to 96"}, {"multilingual_p50_ms": 10.915}),
    ("snake_ablation", {"candidate": "compiled + padded to 16 + prompts kept"}, {"multilingual_p50_ms": 8.563}),
    ("snake_loop", {"seed": 101}, {"eager_moves_per_s": 68.60, "optimised_moves_per_s": 78.04, "score": 20}),
    ("snake_loop", {"seed": 104}, {"optimised_moves_per_s": 63.15, "ratio": 0.922, "score": 16, "agreement": 600}),
    ("snake_pooled", {"arm": "eager"}, {"moves": 2400, "moves_per_s": 70.824, "interventions": 2}),
    ("snake_pooled", {"arm": "optimised"}, {"moves": 2400, "moves_per_s": 75.403, "deaths": 0}),
    ("snake_prompts", {"prompt": "compact"}, {"tokens_from": 150, "tokens_to": 155, "median_ms": 9.29}),
    ("snake_prompts", {"prompt": "verbose"},
     {"tokens_from": 242, "tokens_to": 246, "states": 64, "left_out": 8, "median_ms": 11.80}),
    ("snake_scores", {"policy": "laya (English)"},
     {"survived": 20, "moves": 6000, "mean": 6.9, "median": 7, "interventions": 0, "p50_ms": 23.15, "p95_ms": 28.21}),
    ("snake_scores", {"policy": "multilingual"},
     {"survived": 20, "moves": 6000, "mean": 9.9, "median": 10, "interventions": 2, "p50_ms": 9.38, "p95_ms": 14.38}),
    ("snake_scores", {"policy": "random-safe"}, {"mean": 8.85, "median": 9}),
    ("snake_validation", {"checkpoint": "english", "dtype": "fp16"}, {"error": 0.00544, "tolerance": 0.02}),
    ("snake_validation", {"checkpoint": "multilingual", "dtype": "fp32"}, {"error": 1.2e-6, "tolerance": 1e-4}),
    ("stages", {"workload": "pong", "section": "causal_bf16"},
     {"vision": 6.533, "language": 24.532, "predict": 36.711, "split_parity_max_abs": 2.03125}),
    ("stages", {"workload": "boxing", "section": "causal_fp32"}, {"build_inputs": 1.254, "sum_of_parts": 55.825}),
    ("stages", {"workload": "pong", "section": "block_bf16"}, {"language": 26.225, "embedding_lookup": 0.047}),
    ("stages", {"workload": "doom_basic", "section": "cpu4_fp32"},
     {"vision": 966.71, "predict": 1262.654, "question_first_sum": 1159.587, "max_saving_share_of_predict": 0.132}),
    ("static_step", {"run": 1, "dtype": "bf16", "workload": "pong", "batch": 1},
     {"action_probs_ms": 55.597, "static_ms": 11.173, "speedup": 4.98, "predict_ms": 53.441}),
    ("static_step", {"run": 2, "dtype": "fp32", "workload": "doom_basic", "batch": 16},
     {"action_probs_ms": 582.707, "static_ms": 579.892, "speedup": 1.0}),
    ("tokens", {"workload": "boxing"}, {"total": 303, "question": 48, "options": 185, "flop_share_percent": 18}),
    ("tokens", {"workload": "doom_deadly_corridor"}, {"total": 181, "question": 45, "fixed_share_percent": 61}),
    ("tokens", {"workload": "pong_two_frames"}, {"total": 243, "image_tokens": 128, "flop_share_percent": 4.7}),
]  # fmt: skip
ROWS = {
    **{"batching": 6, "cpu_saving_bound": 3, "duplicates": 8, "feature_cache": 2, "graphs": 12, "grey_levels": 8},
    **{"image_store": 4, "pixel_paths": 2, "play": 9, "play_score": 2, "snake_ablation": 7, "snake_loop": 4},
    **{"snake_pooled": 2, "snake_prompts": 2, "snake_scores": 4, "snake_validation": 6, "stages": 18},
    **{"static_step": 32, "tokens": 6},
}


@pytest.mark.parametrize(("name", "where", "says"), FIGURES)
def test_figures_are_those_that_were_published(name, where, says):
    table = published(name)
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, f"{len(table)} rows of {name} have {where}"
    assert {column: table[column].iloc[0] for column in says} == says


def test_every_table_is_whole_and_checked():
    assert {name: len(published(name)) for name in NAMES} == ROWS
    assert {name for name, _, _ in FIGURES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_names_its_source(name):
    table = published(name)
    assert not table.columns.duplicated().any()
    assert table.attrs["source"].startswith("source: ")
    assert "http" not in table.attrs["source"]
    if "workload" in table and name not in ("static_step", "image_store"):
        assert set(table.workload) <= set(load_workloads())


def test_the_score_of_smaller_pictures_is_over_eight_games_and_of_no_one_game():
    source = published("play_score").attrs["source"]
    assert "over eight games" in source and "Breakout" not in source


# ------------------------------------------------------------------------------------------- what was said of the figures


def test_figures_agree_with_what_was_said_of_them():
    stages = published("stages").set_index(["section", "workload"])
    for workload, ms, percent in published("cpu_saving_bound").itertuples(index=False):
        line = stages.loc["cpu4_fp32", workload]
        saved = line.language - line.language_image_prefix
        assert (round(saved, 1), round(100 * saved / line.predict, 1)) == (ms, percent)
    sums = stages[["question_first_sum", "sum_of_parts"]]
    assert sums.loc[("causal_bf16", "pong")].round(1).tolist() == [37.5, 32.9]
    assert sums.loc[("cpu4_fp32", "pong_two_frames")].round(0).tolist() == [2189, 2350]
    mask = stages.loc[("block_bf16", "pong"), "language"] / stages.loc[("causal_bf16", "pong"), "language"]
    assert round(100 * (mask - 1)) == 7
    cpu = stages.loc["cpu4_fp32"]
    assert (100 * cpu.vision / cpu.predict).round().tolist() == [73, 77, 75]
    alone = published("static_step").query("dtype == 'bf16' and batch == 1 and frames == 1").speedup
    assert [alone.min(), alone.max()] == pytest.approx([3.4, 5.0], abs=0.051)


def test_what_was_said_of_snake():
    rate = published("snake_pooled").set_index("arm").moves_per_s
    assert round(rate.optimised / rate.eager, 4) == 1.0647
    prompts = published("snake_prompts").set_index("prompt").median_ms
    assert round(prompts.verbose / prompts.compact, 2) == 1.27
    decisions = published("snake_validation")
    assert (decisions.decisions.sum(), decisions.equal.sum()) == (378, 378)
    loop = published("snake_loop")
    assert (loop.score.mean(), loop.agreement.sum()) == (20.75, 2400)


# ------------------------------------------------------------------------------------------------- beside a measurement


def shown() -> set[str]:
    """The names in calls of `published("name")` in lab and in the notebooks' code; a table shown alone does not count."""
    root = DATA.parent
    sources = [path.read_text() for path in (root / "lab").rglob("*.py")]
    for path in (root / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    alone = [arg for call in calls if ast.unparse(call.func) == "views.table" for arg in call.args]
    named = [call for call in calls if ast.unparse(call.func) == "published" and call not in alone]
    return {call.args[0].value for call in named if isinstance(call.args[0], ast.Constant)}


def test_every_table_stands_beside_a_measurement_or_says_why_not():
    reasons = {name: published(name).attrs["no_measurement"] for name in NAMES}
    unused = set(NAMES) - shown()
    assert unused == {name for name, reason in reasons.items() if reason}
    assert shown() <= set(NAMES)
    assert all(len(reasons[name].split()) > 5 for name in unused)


def test_unknown_table_lists_the_known():
    with pytest.raises(InputError, match="grey_levels"):
        published("nothing")
