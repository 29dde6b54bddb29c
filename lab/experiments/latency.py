"""Notebook 02: where one decision's time goes, what limits each part, and what caching the question could save at most."""

import gzip
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from lab import stats
from lab.envs import EmulatorMissing, frames_for, make, one_hot
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.records import beside_rows, clean, join_rows
from lab.workloads import Workload, chosen, get_workload

PROFILES = {
    "smoke": {
        "preset": "tiny",
        "workloads": ["pong", "pong_two_frames"],
        "warmup": 3,
        "blocks": 8,
        "budget_s": 60,
    },
    "standard": {
        "preset": "smolvlm-256m",
        "workloads": ["pong"],
        "warmup": 1,
        "blocks": 5,
        "budget_s": 120,
    },
    "full": {
        "preset": "smolvlm-256m",
        "workloads": ["breakout", "pong", "boxing", "doom_basic", "doom_deadly_corridor", "pong_two_frames"],
        "warmup": 3,
        "blocks": 30,
        "budget_s": 600,
    },
}
BASE = "causal"  # the arm the others are compared with, as the published tables do
ARMS = (BASE, "block", "split", "other weights", "in loop")


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    preset: str | None = None,
    weights: str = "default",
    workload: Path | str | None = None,
) -> pd.DataFrame:
    """Measure every workload of the profile, one comparison (title) each, and return all raw rows.

    `workload` is a file of a reader's own, whose workloads are measured instead. Arms of each: the whole sequence with
    causal and with block option attention, the same split at the image's end; the first workload also has an arm with
    other weights, one in which the game moves on between decisions, and the floor of its stages (counted operations and
    bytes over this machine's measured ceilings) said beside its rows. Raises InputError for an unknown profile, device
    or preset before anything is measured.
    """
    from lab.models import load_model

    settings = settings_of(profile)
    preset = preset or settings["preset"]
    model = load_model(preset, device, dtype, seed, weights)
    tables = []
    for number, asked in enumerate(chosen(settings["workloads"], workload)):
        frames = frames_for(asked, 8, seed)[:, None]
        steps = _steps(model, asked)
        arms = [Arm.of(step) for step in steps]
        if number == 0:
            tables.append(_floor(steps[0], frames[0], asked.name, out))
            other = load_model(preset, device, dtype, seed + 1, weights="random")
            arms.append(Arm.of(_step(other, asked, "other weights")))
            arms.append(arms[0].in_loop(_player(asked, seed), "in loop"))
        tables.append(
            compare(
                arms,
                frames,
                blocks=settings["blocks"],
                warmup=settings["warmup"],
                budget_s=settings["budget_s"],
                seed=seed,
                out=out,
                title=asked.name,
                tags={"workload": asked.name, "question": asked.digest, "preset": preset},
                keep_partial=False,
            )
        )
    return join_rows(tables)


def settings_of(profile: str) -> dict:
    """The sample counts and presets of a profile; InputError for an unknown one."""
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    return PROFILES[profile]


def _step(model, workload: Workload, name: str, attention: str = "causal"):
    from lab.steps import EagerStep

    return EagerStep(model, workload.question, workload.frames, attention, name=name)


def _steps(model, workload: Workload) -> list:
    from lab.steps import SplitStep

    return [
        _step(model, workload, BASE),
        _step(model, workload, "block", "block"),
        SplitStep(model, workload.question, workload.frames, "causal", name="split"),
    ]


def _floor(step, inputs, title: str, out) -> pd.DataFrame:
    """No rows, but a line about the coming ones: the floor of the step's stages on this machine."""
    from lab import roofline

    costs = roofline.stage_costs(step, inputs)
    said = step.describe()
    ceilings = roofline.ceilings(said["device"], said["dtype"], costs["total"].shapes)
    floor = {"kind": "floor", "title": title, "ceilings": ceilings, "stages": roofline.floor(costs, ceilings)}
    return beside_rows([floor], out)


def _player(workload: Workload, seed: int):
    """A function that plays one random decision of the workload's game; without the emulator it does nothing."""
    try:
        env = make(workload.source, seed)
    except EmulatorMissing:
        return lambda: None
    policy = one_hot(env, seed)
    env.reset()

    def play_on():
        if env.step(policy(None))[2]:
            env.reset()

    return play_on


# ------------------------------------------------------------------------------------------------ rows -> results


def stage_table(rows: pd.DataFrame, title: str, arms=ARMS) -> pd.DataFrame:
    """Median ms per stage and arm of one workload, with intervals: columns arm, stage, median, low, high, share."""
    part = rows[rows["title"] == title]
    table = stats.summary(part, BASE)
    table = table[table["arm"].isin(arms)]
    total = table[table["stage"] == "total"].set_index("arm")["median"]
    return table.assign(share=table["median"] / table["arm"].map(total))[
        ["arm", "stage", "n", "median", "low", "high", "share"]
    ]


def floors(rows: pd.DataFrame) -> dict:
    """What limits each stage of the first workload: `title`, `ceilings` and `stages`, as `roofline.share_of_floor`."""
    from lab.roofline import share_of_floor

    line = next(line for line in rows.attrs["about"] if line["kind"] == "floor")
    part = rows[rows["title"] == line["title"]]
    stages = share_of_floor(pd.DataFrame(line["stages"]), part, BASE)
    return {"title": line["title"], "ceilings": line["ceilings"], "stages": stages}


def saving(rows: pd.DataFrame, title: str) -> dict:
    """What caching the question could save at most: the language stage of the whole minus the image prefix's.

    Keys `ms` and `share` (of the whole decision), each an Estimate from per-block differences.
    """
    timed = rows[(rows["title"] == title) & (rows["phase"] == "timed")]
    block = timed.pivot_table(index=["run", "block"], columns=["arm", "stage"], values="ms")
    saved = block[BASE, "language"] - block["split", "language_prefix"]
    return {"ms": stats.median_interval(saved), "share": stats.median_interval(saved / block[BASE, "total"])}


def savings(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """`saving` of every workload in ms and per cent, the published bound (`published("cpu_saving_bound")`) beside it."""
    said = published.set_index("workload")
    lines = []
    for title in dict.fromkeys(rows["title"]):
        found = saving(rows, title)
        line = {
            "workload": title,
            "saving_ms": f"{found['ms']:.3g}",
            "saving_percent": f"{_percent(found['share']):.2g}",
        }
        there = said.loc[title] if title in said.index else {}
        lines.append(line | {"published_ms": there.get("saving_ms"), "published_percent": there.get("share_percent")})
    return stats.Table(lines)


def differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Every arm against the causal one, by workload: ratio, the A/A ratio, whether a difference is shown, the sentence."""
    lines = []
    for title in dict.fromkeys(rows["title"]):
        part = rows[rows["title"] == title]
        again = stats.paired_ratio(part, BASE + stats.AGAIN, BASE)
        for arm in [arm for arm in ARMS[1:] if arm in set(part["arm"])]:
            ratio = stats.paired_ratio(part, arm, BASE)
            said = stats.sentence(f"{title}: {arm}", ratio, again, BASE)
            shown = stats.difference_shown(ratio, again)
            lines.append(
                {"workload": title, "arm": arm, "ratio": ratio, "again": again, "shown": shown, "sentence": said}
            )
    return pd.DataFrame(lines)


def mask_cost(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """How many times the causal mask's time the text model takes with the block mask, paired, by workload, and as published
    (`published("stages")`, both masks in bf16 on an NVIDIA L4, medians of separate runs)."""
    language = published.set_index(["workload", "section"])["language"].unstack()
    said = (language["block_bf16"] / language["causal_bf16"]).dropna()
    lines = []
    for title in dict.fromkeys(rows["title"]):
        ratio = stats.paired_ratio(rows[rows["title"] == title], "block", BASE, "language")
        here = {"here": ratio.value, "low": ratio.low, "high": ratio.high}
        lines.append({"workload": title, **here, "published": said.get(title)})
    return stats.Table(lines)


def beside_published(tables: dict[str, pd.DataFrame], published: pd.DataFrame) -> pd.DataFrame:
    """Median ms of the causal decision's stages, measured here and as published (`published("stages")`), by workload."""
    stages = ["build_inputs", "resize", "vision", "language", "heads"]
    lines = []
    for title, table in tables.items():
        here = table[table["arm"] == BASE].set_index("stage")["median"]
        lines.append({"workload": title, "where": "here", **here.reindex(stages), "whole": here["total"]})
        for _, said in published[published["workload"] == title].iterrows():
            where = f"{said['hardware']}, {said['dtype']}, {said['option_attention']} (published)"
            lines.append({"workload": title, "where": where, **said[stages], "whole": said["predict"]})
    return pd.DataFrame(lines).set_index(["workload", "where"])


def answer(rows: pd.DataFrame) -> str:
    """The notebook's answer, one sentence a workload, computed from the rows."""
    said = []
    for title in dict.fromkeys(rows["title"]):
        table = stage_table(rows, title, [BASE]).set_index("stage")
        largest = table.drop(index="total")["share"].idxmax()
        share = saving(rows, title)["share"]
        could = (
            f"caching the question could save at most {_percent(share):.2g} % of it"
            if share.low > 0
            else f"that caching the question could save anything is not shown ({_percent(share):.2g} %)"
        )
        said.append(
            f"{title}: a decision takes {table.loc['total', 'median']:.4g} ms, {table.loc[largest, 'share']:.0%} of it in "
            f"{largest}; {could}."
        )
    return " ".join(said)


def _percent(share: stats.Estimate) -> stats.Estimate:
    return replace(share, value=100 * share.value, low=100 * share.low, high=100 * share.high)


def trace(
    path: Path,
    profile: str = "standard",
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    workload: Path | str | None = None,
) -> Path:
    """Write a Chrome trace of one decision of the profile's, or the file's, first workload to `path` (a .json.gz file)."""
    import torch

    from lab.models import load_model

    settings = settings_of(profile)
    asked = chosen(settings["workloads"], workload)[0]
    step = _step(load_model(settings["preset"], device, dtype, seed), asked, BASE)
    frames = frames_for(asked, 1, seed)
    step.decide(frames)
    with torch.profiler.profile() as profiler:  # by default of every kind of device there is
        step.decide(frames)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


# ------------------------------------------------------------------------------------------------ lab bench latency


@dataclass(frozen=True)
class Bench:
    """What `lab bench latency` found: the rows and what is read from them."""

    rows: pd.DataFrame
    workload: str
    hz: float | None

    def table(self) -> str:
        table = stage_table(self.rows, self.workload, [BASE])
        wide = table.assign(share=table["share"].map("{:.1%}".format)).drop(columns=["arm"])
        return stats.Table(wide).__repr__()

    @property
    def verdict(self) -> str:
        tail = stats.percentiles(self.rows, BASE)
        table = stage_table(self.rows, self.workload, [BASE]).set_index("stage")
        largest = table.drop(index="total")["share"].idxmax()
        said = (
            f"{self.workload}: p50 {tail['p50']:.1f}, p95 {tail['p95']:.1f}, p99 {tail['p99']:.1f} ms a decision; "
            f"{table.loc[largest, 'share']:.0%} of it in {largest}"
        )
        if self.hz is None:
            return said + "."
        missed = stats.missed_deadlines(self.rows, BASE, self.hz)
        return (
            said + f"; at {self.hz:g} decisions a second {missed['missed']} of {missed['of']} missed their deadline of "
            f"{missed['period_ms']:.0f} ms."
        )

    def to_json(self) -> dict:
        deadlines = stats.missed_deadlines(self.rows, BASE, self.hz) if self.hz else None
        return clean(
            {
                "workload": self.workload,
                "stages": stage_table(self.rows, self.workload, [BASE]).drop(columns="arm"),
                **stats.percentiles(self.rows, BASE),
                "deadlines": deadlines,
                "unattributed": float(stats.attribution(self.rows).set_index("arm").loc[BASE, "unattributed"]),
                "describe": self.rows["describe"].iloc[0],
                "notes": stats.notes(self.rows),
                "verdict": self.verdict,
            }
        )


def bench(
    model: str = "smolvlm-256m",
    device: str = "cpu",
    dtype: str = "fp32",
    workload: str = "pong",
    hz: float | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    weights: str = "default",
) -> Bench:
    """Time one workload's decision and its stages beside an A/A arm: 30 blocks, or as many as 60 seconds hold.

    `model` and `weights` are what `lab.load_model` takes. Raises InputError for an unknown name before anything is timed.
    """
    from lab.models import load_model

    asked = get_workload(workload)
    step = _step(load_model(model, device, dtype, seed, weights), asked, BASE)
    rows = compare(
        [Arm.of(step)],
        frames_for(asked, 8, seed)[:, None],
        blocks=30,
        budget_s=60,
        seed=seed,
        out=out,
        title=workload,
        tags={"workload": workload, "preset": model},
    )
    return Bench(rows, workload, hz)
