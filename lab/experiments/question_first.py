"""Notebook 03: if the question came first and were cached, what would a frame cost?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.records import beside_rows, clean, join_rows, read_rows
from lab.workloads import DATA, Workload, chosen, get_workload

LAYOUTS = ("whole", "split", "question first", "published simulation")
BASE = "whole"
# `reuse`: the layouts that, with several frames, also run with the earlier frame's image rows kept; `warmup` blocks come
# after the call that starts a step, which in `standard` has to do.
PROFILES = {
    "smoke": {
        "preset": "tiny",
        "workloads": ["pong", "pong_two_frames"],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": None,
        "reuse": LAYOUTS,
        "warmup": 2,
        "blocks": 6,
        "budget_s": 20,
        "parity": 8,
    },
    "standard": {
        "preset": "smolvlm-256m",
        "workloads": ["pong"],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": None,
        "reuse": ("whole", "question first"),
        "warmup": 0,
        "blocks": 5,
        "budget_s": 150,
        "parity": 1,
    },
    "full": {
        "preset": "smolvlm-256m",
        "workloads": ["pong", "doom_basic", "pong_two_frames"],
        "batches": [1, 16],
        "dtypes": ["bf16", "fp32"],
        "compiled": "default",
        "reuse": LAYOUTS,
        "warmup": 2,
        "blocks": 30,
        "budget_s": 10,
        "parity": 8,
    },
}


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str | None = None,
    preset: str | None = None,
    weights: str = "default",
    workload: Path | str | None = None,
) -> pd.DataFrame:
    """Measure every workload of the profile, or of the file `workload`, one comparison (title) each, and return all rows.

    Arms: the whole sequence, split behind the picture, question first with its keys and values kept, and the
    published simulation of it, all with causal option attention on the same fixed-shape machinery, so that like is
    compared with like; on CUDA each also captured, and where the profile says so compiled. With two frames they also
    run with the earlier frame's image rows kept (in the profile `standard` only whole and question first). Beside the
    rows stand, as lines about them, the largest difference of logits from the twin without a cache. Raises InputError
    for an unknown profile, device or preset.
    """
    from lab.models import load_model

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = PROFILES[profile]
    preset, dtypes = preset or settings["preset"], [dtype] if dtype else settings["dtypes"]
    tables = []
    for kind in dtypes:
        model = load_model(preset, device, kind, seed, weights)
        for asked in chosen(settings["workloads"], workload):
            for batch in settings["batches"]:
                tables += _measure(model, asked, batch, settings, preset, seed, out)
    return join_rows(tables)


def _measure(model, workload: Workload, batch: int, settings: dict, preset: str, seed: int, out) -> list[pd.DataFrame]:
    tags = {"preset": preset, "workload": workload.name, "batch": batch, "dtype": model.dtype_name}
    tags |= {"question": workload.digest}
    title = f"{workload.name}, batch {batch}, {model.dtype_name}"
    before = max(settings["warmup"], 1)
    count = max(before + settings["blocks"], settings["parity"])
    frames = frames_for(workload, count * batch, seed)
    inputs = frames.reshape(batch, count, *frames.shape[1:]).swapaxes(0, 1)
    inputs = np.roll(inputs, -before, axis=0)  # block 0 then follows the frame before it, as reuse expects
    compiled = settings["compiled"] if batch == 1 and workload.name == "pong" else None
    steps = _steps(model, workload, batch, compiled, settings["reuse"])
    for step in steps:
        step.decide(inputs[-1])  # building, capturing and compiling count as the arm's start, not against the budget
    rows = compare(
        [Arm.of(step) for step in steps],
        inputs,
        blocks=settings["blocks"],
        warmup=settings["warmup"],
        budget_s=settings["budget_s"],
        seed=seed,
        out=out,
        title=title,
        tags=tags,
        keep_partial=False,
    )
    lines = [
        {"kind": "parity", "title": title, **tags, **asdict(found)}
        for found in _parity(steps, inputs[: settings["parity"]])
    ]
    return [rows, beside_rows(lines, out)]


def _steps(model, workload: Workload, batch: int, compiled: str | None, reused: Sequence[str]) -> list:
    from lab.steps import (
        CompiledQuestionFirstStep,
        CompiledSplitStep,
        CompiledStep,
        QuestionFirstStep,
        StaticSplitStep,
        StaticStep,
    )

    common = {"model": model, "question": workload.question, "frames": workload.frames, "batch": batch}
    common["option_attention"] = "causal"
    layouts = {"question first": "question_first", "published simulation": "published_simulation"}
    steps = []
    for capture in [False, True] if model.device.type == "cuda" else [False]:
        for reuse in [False, True] if workload.frames > 1 else [False]:
            end = (", captured" if capture else "") + (", reuse" if reuse else "")
            kept = {**common, "capture": capture, "reuse": reuse}
            for name in [name for name in LAYOUTS if name in reused or not reuse]:
                if name in layouts:
                    steps.append(QuestionFirstStep(**kept, layout=layouts[name], name=f"{name}{end}"))
                else:
                    kind = StaticStep if name == BASE else StaticSplitStep
                    steps.append(kind(**kept, name=f"{name}{end}"))
    if compiled:
        try:
            steps.append(CompiledStep(**common, mode=compiled, name="whole, compiled"))
            steps.append(CompiledSplitStep(**common, mode=compiled, name="split, compiled"))
            for name, layout in layouts.items():
                kept = {**common, "layout": layout, "mode": compiled}
                steps.append(CompiledQuestionFirstStep(**kept, name=f"{name}, compiled"))
        except InputError as missing:
            print(f"not run: compiled: {missing}", flush=True)
    return steps


def _parity(steps: list, inputs) -> list:
    """Each arm's logits against its layout's twin without a cache."""
    from lab.parity import Remembering, compare_answers
    from lab.steps import QuestionFirstStep

    whole, found = Remembering(steps[0]), []
    for step in steps[1:]:
        twin = whole
        if isinstance(step, QuestionFirstStep):
            twin = QuestionFirstStep(
                step.model, step.question, step.frames, step.batch, step.setting.layout, cache=None, capture=False,
                option_attention="causal", name=f"{step.setting.layout}, uncached",
            )  # fmt: skip
        found.append(compare_answers(twin, step, inputs))
    return found


# ------------------------------------------------------------------------------------------------ rows -> results


def savings(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per workload, batch, dtype and arm: median ms with interval, and against the whole sequence of the same
    mode, paired by block:

    `ratio` of the whole decisions with its interval, and `shown` by the one rule; `rest`, the same ratio of what is not
    the way of pixels to image rows (which all arms share, and whose noise hides the rest), with `rest_shown`; and
    `saved`, what the rest saves in per cent of the whole decision. Captured and compiled arms mark no stages: no `rest`.
    """
    lines = []
    for _, part in rows.groupby("title", sort=False):
        tags = part[["preset", "workload", "batch", "dtype"]].iloc[0].to_dict()
        timed = part[part["phase"] == "timed"]
        block = timed.pivot_table(index=["run", "block"], columns=["arm", "stage"], values="ms", aggfunc="sum")
        totals = block.xs("total", axis=1, level="stage")
        rests = {arm: _rest(block[arm]) for arm in totals}
        again = stats.median_interval(totals[BASE + stats.AGAIN] / totals[BASE])
        again_rest = stats.median_interval(rests[BASE + stats.AGAIN] / rests[BASE])
        for arm in [arm for arm in dict.fromkeys(part["arm"]) if not arm.endswith(stats.AGAIN)]:
            layout, *mode = arm.split(", ")
            base = ", ".join([BASE, *mode])
            line = {**tags, "arm": arm, **_spread("ms", totals[arm], ("ms", "low", "high"))}
            if layout != BASE:
                ratio = stats.median_interval(totals[arm] / totals[base])
                line |= _spread("ratio", totals[arm] / totals[base])
                line |= {"again_low": again.low, "again_high": again.high}
                line |= {"shown": stats.difference_shown(ratio, again)}
            if layout != BASE and rests[arm] is not None and rests[base] is not None:
                rest = stats.median_interval(rests[arm] / rests[base])
                line |= _spread("rest", rests[arm] / rests[base])
                line |= {"rest_shown": stats.difference_shown(rest, again_rest)}
                line |= _spread("saved", 100 * (rests[base] - rests[arm]) / totals[base])
            lines.append(line)
    return pd.DataFrame(lines)


def _rest(stages: pd.DataFrame) -> pd.Series | None:
    """Per block, the time of a decision outside the stages that lead to image rows; None where no stages are marked."""
    marked = stages.dropna(axis=1, how="all").columns
    if "vision" not in marked:
        return None
    return stages["total"] - stages[[name for name in ("copy_in", "resize", "vision") if name in marked]].sum(axis=1)


def _spread(name: str, values: pd.Series, keys: tuple[str, str, str] | None = None) -> dict:
    found = stats.median_interval(values)
    return dict(zip(keys or (name, f"{name}_low", f"{name}_high"), (found.value, found.low, found.high), strict=True))


def stages(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms of every stage, one line per workload and arm: what the question costs where it is read every time."""
    timed = rows[(rows["phase"] == "timed") & ~rows["again"].astype(bool)]
    table = timed.pivot_table(index=["title", "arm"], columns="stage", values="ms", aggfunc="median", sort=False)
    return table[[name for name in table.columns if name != "total"] + ["total"]].reset_index()


def parity(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per arm: the largest difference of logits from its twin without a cache, and flips."""
    return pd.DataFrame(
        {key: line[key] for key in ("title", "second", "first", "n", "max_logit", "max_probability")}
        | {"flips": line["flips"]["value"]}
        for line in rows.attrs["about"]
        if line["kind"] == "parity"
    ).rename(columns={"second": "arm", "first": "against"})


def order_sensitivity(orders: int = 20, seed: int = 0) -> pd.DataFrame:
    """How the order of the options changes answers, for causal, block and question first: one line each, as
    `lab.parity.option_orders` counts them, on the checkpoint with peaked answers in tests/golden and eight Pong frames.

    That checkpoint was fitted to the published layout, so question first is out of its training here.
    """
    from lab.models import load_model
    from lab.parity import option_orders
    from lab.steps import EagerStep, QuestionFirstStep

    folder = DATA.parent / "tests" / "golden"
    if not folder.is_dir():
        raise InputError(f"The checkpoint {folder} is not there; run in a checkout of the repository.")
    model, workload = load_model(str(folder)), get_workload("pong")
    inputs = frames_for(workload, 8, seed)[None]
    together = {"batch": inputs.shape[1]}
    makers = {
        "causal": lambda question: EagerStep(model, question, option_attention="causal", name="causal"),
        "block": lambda question: EagerStep(model, question, option_attention="block", name="block"),
        "question first": lambda question: QuestionFirstStep(model, question, name="question first", **together),
    }
    found = [option_orders(make, workload.question, inputs, orders, seed) for make in makers.values()]
    return pd.DataFrame(
        {**asdict(one), "flips": one.flips.value, "flips_low": one.flips.low, "flips_high": one.flips.high}
        for one in found
    )


def beside_published(saved: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """The change that question first brings here (per cent of the whole decision, interval) beside the published
    simulation's on the same kind of device (`published("stages")`, sums of stages timed apart)."""
    lines = []
    for _, line in saved[
        saved["arm"].isin(["question first", "question first, captured", "published simulation"])
    ].iterrows():
        for _, said in published[published["workload"] == line["workload"]].iterrows():
            change = 100 * (said["question_first_sum"] / said["sum_of_parts"] - 1)
            lines.append(
                {
                    "workload": line["workload"],
                    "arm": line["arm"],
                    "batch": line["batch"],
                    "dtype": line["dtype"],
                    "here (%)": 100 * (line["ratio"] - 1),
                    "low": 100 * (line["ratio_low"] - 1),
                    "high": 100 * (line["ratio_high"] - 1),
                    "outside vision (%)": -line.get("saved", float("nan")),
                    "from": -line.get("saved_high", float("nan")),
                    "to": -line.get("saved_low", float("nan")),
                    "published (%)": change,
                    "published on": f"{said['hardware']}, {said['dtype']}, {said['option_attention']}",
                }
            )
    return pd.DataFrame(lines)


def bounds(rows: pd.DataFrame, flop_shares: dict[str, float]) -> pd.DataFrame:
    """What a free question could save at most, by regime: measured (the split's question stage over the whole
    decision, per block) at each batch, beside the share of operations that it tends to where the device is full."""
    lines = []
    for _, part in rows.groupby("title", sort=False):
        tags = part[["workload", "batch", "dtype"]].iloc[0].to_dict()
        timed = part[part["phase"] == "timed"]
        block = timed.pivot_table(index=["run", "block"], columns=["arm", "stage"], values="ms")
        saved = block[BASE, "language"] - block["split", "language_prefix"]
        share = stats.median_interval(100 * saved / block[BASE, "total"])
        lines.append(
            {**tags, "bound (%)": share.value, "low": share.low, "high": share.high}
            | {"share of operations (%)": flop_shares.get(tags["workload"])}
        )
    return pd.DataFrame(lines)


def answer(saved: pd.DataFrame, same: pd.DataFrame) -> str:
    """The verdict, computed from intervals: what question first saves, and whether that is shown."""
    said, worth = [], []
    for _, line in saved[saved["arm"].str.startswith("question first")].iterrows():
        where = f"{line['workload']}, batch {line['batch']}, {line['dtype']}, {line['arm']}"
        ratio = stats.spell(line["ratio"], line["ratio_low"], line["ratio_high"], ".3f")
        text = f"{where}: ratio to the whole {ratio}" + ("" if line["shown"] else ", no difference shown")
        if line["shown"] and line["ratio_high"] < 1:
            worth.append(100 * (1 - line["ratio_high"]))
        if line.get("rest_shown") is True:
            text += f"; outside vision it saves {stats.spell(line['saved'], line['saved_low'], line['saved_high'], '.1f')} %"
            worth.append(line["saved_low"])
        said.append(text + ".")
    least = max(worth, default=0.0)
    verdict = (
        f"Caching the question saves at least {least:.1f} % of a decision in the best case measured."
        if least > 0
        else "That caching the question saves time is not shown in any case measured."
    )
    return f"{verdict} {' '.join(said)} Cached answers equal uncached ones to {same['max_logit'].max():.1e} on logits."


@dataclass(frozen=True)
class Bench:
    """What `lab bench question-first` found."""

    rows: pd.DataFrame

    def table(self) -> str:
        return f"{stats.Table(savings(self.rows))!r}\n\n{stats.Table(parity(self.rows))!r}"

    @property
    def verdict(self) -> str:
        return answer(savings(self.rows), parity(self.rows))

    def to_json(self) -> dict:
        saved = savings(self.rows)
        case = ["workload", "batch", "dtype", "arm"]
        ratios = saved[saved["ratio"].notna()]
        ratios = ratios.drop(columns=["low", "high"]).rename(columns={"ratio_low": "low", "ratio_high": "high"})
        return clean(
            {
                "rows": saved[[*case, "ms", "low", "high"]],
                "savings": ratios[[*case, "ratio", "low", "high", "shown", "saved", "saved_low", "saved_high"]],
                "parity": {"max_logit": parity(self.rows)["max_logit"].max()},
                "notes": stats.notes(self.rows),
                "verdict": self.verdict,
            }
        )


def bench(
    preset: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    weights: str = "default",
) -> Bench:
    """All cases of the profile `full` on CUDA, of `standard` elsewhere; see `run`."""
    profile = "standard" if device == "cpu" else "full"
    return Bench(run(profile, out=out, seed=seed, device=device, dtype=dtype, preset=preset, weights=weights))


def measured_elsewhere() -> dict[str, pd.DataFrame]:
    """The savings of rows kept in data/measured, by the folder's name (the GPU's)."""
    found = sorted((DATA / "measured").glob("*/question-first.rows.jsonl"))
    return {path.parent.name: savings(read_rows(path)) for path in found}
