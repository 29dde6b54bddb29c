"""Notebook 04: a whole decision captured once and replayed: is it faster, and is it the same answer?"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.experiments.capture import audits
from lab.measure import Arm, compare
from lab.records import about, beside_rows, clean, join_rows, read_rows
from lab.workloads import DATA, Workload, chosen

# `warmup` blocks come after the call that starts a step, which in `standard` has to do; `repeats`: how often one input is
# decided to see whether the bits agree; `brief`: with several frames neither that nor the static step without reuse.
PROFILES = {
    "smoke": {
        "preset": "tiny",
        "workloads": ["pong"],
        "frames": [1, 2],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": None,
        "warmup": 2,
        "blocks": 6,
        "budget_s": 20,
        "parity": 8,
        "repeats": 10,
        "brief": False,
    },
    "standard": {
        "preset": "smolvlm-256m",
        "workloads": ["pong"],
        "frames": [1, 2],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": None,
        "warmup": 0,
        "blocks": 5,
        "budget_s": 95,
        "parity": 1,
        "repeats": 2,
        "brief": True,
    },
    "full": {
        "preset": "smolvlm-256m",
        "workloads": ["pong", "doom_basic"],
        "frames": [1, 2],
        "batches": [1, 4, 16],
        "dtypes": ["bf16", "fp32"],
        "compiled": {"preset": "smolvlm-256m", "dtype": "bf16", "modes": ["default", "reduce-overhead"]},
        "warmup": 2,
        "blocks": 30,
        "budget_s": 8,
        "parity": 32,
        "repeats": 10,
        "brief": False,
    },
}
BASE = "eager"


@dataclass(frozen=True)
class Case:
    """One comparison: a workload with a number of frames, a batch, a dtype, and what else its title must say."""

    workload: Workload
    batch: int
    dtype: str
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.workload.name}, {self.workload.frames} frame(s), batch {self.batch}, {self.dtype}{self.note}"

    @property
    def tags(self) -> dict:
        return {
            "workload": self.workload.name,
            "frames": self.workload.frames,
            "batch": self.batch,
            "dtype": self.dtype,
            "question": self.workload.digest,
        }

    def inputs(self, count: int, seed: int) -> np.ndarray:
        """uint8 [count, batch, frames, height, width, 3], consecutive decisions of seeded random play."""
        frames = frames_for(self.workload, count * self.batch, seed)
        return frames.reshape(self.batch, count, *frames.shape[1:]).swapaxes(0, 1)


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
    """Measure every case of the profile, one comparison (title) each, and return all raw rows; of a reader's own file
    `workload` each workload with its own number of frames.

    Arms: `eager`; `static`, its fixed-shape twin without capture; `static, reusing frames` for several frames; the same
    `captured` on CUDA. On CUDA a further comparison sets fp32 eager against bf16 captured, as the published headline
    does. The last one adds `compiled` arms for one frame and batch 1, at the size that the profile compiles. Beside the
    rows stand, as lines about them: parity of every arm with eager, and of causal eager with its mask written out;
    whether repeats agree bit for bit; on CUDA launches, device-busy share, attention kernels and memory. Raises
    InputError for an unknown profile, device or preset before anything is measured.
    """
    from lab.models import load_model

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = PROFILES[profile]
    preset, dtypes = preset or settings["preset"], [dtype] if dtype else settings["dtypes"]
    models = {kind: load_model(preset, device, kind, seed, weights) for kind in dtypes}
    asked, tables = chosen(settings["workloads"], workload), []
    for case in _cases(asked, settings | ({"frames": [None]} if workload else {}), dtypes):
        steps = list(_steps(models[case.dtype], case, settings["brief"]))
        tables += _measure(case, steps, settings, seed, out, preset)
    if device != "cpu" and {"fp32", "bf16"} <= set(models):
        for one in asked:
            tables += _headline(models, one, settings, seed, out, preset)
    if settings["compiled"]:
        wanted = settings["compiled"]
        size = preset if preset == "tiny" else wanted["preset"]
        case = Case(asked[0], 1, wanted["dtype"], f", compiled at {size}")
        model = load_model(size, device, wanted["dtype"], seed, weights)
        steps = [*_steps(model, case), *_compiled(model, case, wanted["modes"])]
        tables += _measure(case, steps, settings, seed, out, size)
    return join_rows(tables)


def _cases(asked: list[Workload], settings: dict, dtypes: list[str]) -> Iterator[Case]:
    for workload in asked:
        for frames in settings["frames"]:
            for batch in settings["batches"]:
                for dtype in dtypes:
                    yield Case(replace(workload, frames=frames or workload.frames), batch, dtype)


def _steps(model, case: Case, brief: bool = False) -> Iterator:
    from lab.steps import EagerStep, StaticStep

    question, frames = case.workload.question, case.workload.frames
    yield EagerStep(model, question, frames)
    for capture in [False, True] if model.device.type == "cuda" else [False]:
        for reuse in [False] if frames == 1 else [True] if brief else [False, True]:
            yield StaticStep(model, question, frames, case.batch, capture=capture, reuse=reuse)


def _compiled(model, case: Case, modes: list[str]) -> Iterator:
    from lab.steps import CompiledStep

    for mode in modes:
        try:
            yield CompiledStep(model, case.workload.question, case.workload.frames, case.batch, mode=mode)
        except InputError as missing:
            print(f"not run: compiled, {mode}: {missing}", flush=True)


def _measure(case: Case, steps: list, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    from lab.activity import activity
    from lab.parity import MaskedEagerStep, Remembering, compare_answers, repeats
    from lab.steps import EagerStep

    before = max(settings["warmup"], 1)
    inputs = case.inputs(max(before + settings["blocks"], settings["parity"]), seed)
    inputs = np.roll(inputs, -before, axis=0)  # block 0 then follows the frame before it, as reuse expects
    steps = [step for step in steps if _starts(step, inputs[-1])]
    rows = compare(
        [Arm.of(step, counts=step.reuse_counts if getattr(step, "reuse", False) else None) for step in steps],
        inputs,
        blocks=settings["blocks"],
        warmup=settings["warmup"],
        budget_s=settings["budget_s"],
        seed=seed,
        out=out,
        title=case.title,
        tags=case.tags | {"preset": preset},
        keep_partial=False,
    )
    eager, sample = steps[0], inputs[: settings["parity"]]
    pairs = [(Remembering(eager), step) for step in steps[1:]]
    if case.batch == 1 and eager.frames == 1:
        causal = (eager.model, eager.question, 1, "causal")
        pairs.append((EagerStep(*causal, name="eager, causal"), MaskedEagerStep(*causal)))
    lines = [{"kind": "parity", **asdict(compare_answers(one, other, sample))} for one, other in pairs]
    if eager.frames == 1 or not settings["brief"]:
        again = [(step.name, repeats(step, inputs[0], settings["repeats"])) for step in steps]
        lines += [{"kind": "repeats", "arm": name, "same": same} for name, same in again]
    if eager.model.device.type == "cuda":
        lines += [{"kind": "activity", "arm": step.name, **activity(step, inputs[0])} for step in steps]
    tags = {"title": case.title, "preset": preset, **case.tags}
    return [rows, beside_rows([line | tags for line in lines], out)]


def _starts(step, inputs) -> bool:
    """Let the step capture or compile now: that counts as its start, not against the budget. Say so where it cannot."""
    try:
        step.decide(inputs)
    except InputError as reason:
        print(f"not run: {step.name}: {reason}", flush=True)
        return False
    return True


def _headline(models: dict, workload: Workload, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    """The published headline's own pair: batch 1, fp32 eager against bf16 captured."""
    from lab.steps import EagerStep, StaticStep

    steps = [
        EagerStep(models["fp32"], workload.question, workload.frames, name="eager, fp32"),
        StaticStep(models["bf16"], workload.question, workload.frames, name="captured, bf16"),
    ]
    case = Case(workload, 1, "fp32 against bf16")
    rows = compare(
        [Arm.of(step) for step in steps],
        case.inputs(8, seed),
        blocks=settings["blocks"],
        budget_s=settings["budget_s"],
        seed=seed,
        out=out,
        title=case.title,
        tags=case.tags | {"preset": preset},
        keep_partial=False,
    )
    return [rows]


# ------------------------------------------------------------------------------------------------ rows -> results


def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per case and arm: workload, frames, batch, dtype, arm, median ms with interval, ratio to eager with
    interval, shown (the one rule), what the arm cost to start, and on CUDA whether its graph was used."""
    costs = {(line["title"], line["arm"]): line["cost"] for line in about(rows, "start_cost")}
    used = {(line["title"], line["arm"]): line for line in about(rows, "activity")}
    lines = []
    for title, part in rows.groupby("title", sort=False):
        tags = part[["preset", "workload", "frames", "batch", "dtype"]].iloc[0].to_dict()
        table = stats.summary(part)
        for _, line in table[table["stage"] == "total"].iterrows():
            cost, act = costs.get((title, line["arm"]), {}), used.get((title, line["arm"]), {})
            start = sum(cost.get(key, 0.0) for key in ("build_s", "capture_s", "compile_s"))
            kept = line[["arm", "median", "low", "high", "ratio", "ratio_low", "ratio_high", "shown"]].to_dict()
            lines.append(
                {**tags, **kept, "start_s": start, "graph_mb": cost.get("graph_bytes", 0) / 1e6}
                | {key: act.get(key) for key in ("graph", "graph_launches", "kernel_launches", "busy")}
            )
    table = pd.DataFrame(lines)
    return table.drop(
        columns=[c for c in ("graph", "graph_launches", "kernel_launches", "busy") if table[c].isna().all()]
    )


def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per pair of arms: the largest differences, flips with interval, smallest margin, and whether the second
    arm's repeats agree bit for bit (None where it was not asked)."""
    same = {(line["title"], line["arm"]): line["same"] for line in about(rows, "repeats")}
    return pd.DataFrame(
        {
            **{key: line[key] for key in ("preset", "workload", "frames", "batch", "dtype")},
            "arm": line["second"],
            "against": line["first"],
            **{key: line[key] for key in ("n", "max_logit", "max_probability", "max_p_act", "smallest_margin")},
            "flips": line["flips"]["value"],
            "flips_high": line["flips"]["high"],
            "repeats_equal": same.get((line["title"], line["second"])),
        }
        for line in about(rows, "parity")
    )


def check_sentence(rows: pd.DataFrame) -> str:
    """What the static step's check for changed weights costs, from its start cost."""
    seconds = [line["cost"]["check_s"] for line in about(rows, "start_cost") if line["arm"] == "static"]
    return f"Looking whether a weight changed since construction costs {1e3 * max(seconds):.3f} ms of every decision."


def measured_elsewhere() -> dict[str, pd.DataFrame]:
    """The speed tables of rows kept in data/measured, by the folder's name (the GPU's)."""
    found = sorted((DATA / "measured").glob("*/graphs.rows.jsonl"))
    return {path.parent.name: speed_table(read_rows(path)) for path in found}


def beside_published(speed: pd.DataFrame, captured: pd.DataFrame, unrolled: pd.DataFrame) -> pd.DataFrame:
    """How many times faster than eager the static and captured arms are here (interval: the paired ratio's), and as
    published, by workload, frames, batch and dtype: captured (`published("static_step")`, two containers), and as fixed
    shapes without capture (`published("graphs")`, batch 1, over its sections and masks)."""
    key = ["workload", "frames", "batch", "dtype"]
    here = speed[speed["arm"].isin(["static", "captured"]) & (speed["preset"] == "smolvlm-256m")]
    here = pd.DataFrame(
        {
            **{name: here[name] for name in key},
            "arm": here["arm"],
            "eager / arm": 1 / here["ratio"],
            "low": 1 / here["ratio_high"],
            "high": 1 / here["ratio_low"],
        }
    )
    fixed = unrolled.assign(batch=1, speedup=unrolled["eager_ms"] / unrolled["unrolled_eager_ms"])
    beside = {"published captured, from": captured, "not captured, from": fixed}
    for low, table in beside.items():
        words = low, "to" if table is captured else "not captured, to"
        said = table.groupby(key)["speedup"].agg(["min", "max"]).set_axis(words, axis=1).reset_index()
        here = here.merge(said, on=key, how="left")
    return here


def speed_sentence(speed: pd.DataFrame) -> str:
    """What may be said of the static and captured arms at batch 1, by the one rule."""
    said = []
    for _, line in speed[speed["arm"].isin(["static", "captured"]) & (speed["batch"] == 1)].iterrows():
        where = f"{line['preset']}, {line['workload']}, {line['frames']} frame(s), {line['dtype']}"
        if line.get("graph") == "not used":
            said.append(f"{where}: {line['arm']}: graph not used, so its time says nothing about capturing.")
            continue
        ratio = stats.spell(line["ratio"], line["ratio_low"], line["ratio_high"])
        said.append(
            f"{where}: {line['arm']} took {ratio} times the time of eager."
            if line["shown"]
            else f"{where}: {line['arm']} against eager: no difference shown ({ratio})."
        )
    return " ".join(said)


def answer(rows: pd.DataFrame, capturable: dict[str, bool]) -> str:
    """The notebook's answer, computed from rows and from which steps could be captured."""
    parity = parity_table(rows)
    could = [name for name, can in capturable.items() if can]
    not_so = [name for name in capturable if name not in could]
    flips = round((parity["flips"] * parity["n"]).sum())
    return (
        f"Could be captured as one graph: {', '.join(could) or 'none'}; could not: {', '.join(not_so) or 'none'}. "
        f"{speed_sentence(speed_table(rows))} Answers differ by at most {parity['max_probability'].max():.1e} in a "
        f"probability; {flips} of {parity['n'].sum()} chosen options flipped."
    )


@dataclass(frozen=True)
class Bench:
    """What `lab bench graphs` found: the rows, and what of it could be captured."""

    rows: pd.DataFrame
    capturable: dict[str, bool]

    def table(self) -> str:
        kept = [
            "preset",
            "workload",
            "frames",
            "batch",
            "dtype",
            "arm",
            "median",
            "low",
            "high",
            "ratio",
            "shown",
            "start_s",
        ]
        speed = speed_table(self.rows)
        more = [name for name in ("graph", "graph_launches", "kernel_launches", "busy", "graph_mb") if name in speed]
        return f"{stats.Table(speed[kept + more])!r}\n\n{stats.Table(parity_table(self.rows))!r}"

    @property
    def verdict(self) -> str:
        return answer(self.rows, self.capturable)

    def to_json(self) -> dict:
        speed, parity = speed_table(self.rows), parity_table(self.rows)
        kept = ["preset", "workload", "arm", "frames", "batch", "dtype", "low", "high"]
        return clean(
            {
                "rows": [{**line[kept], "ms": line["median"]} for _, line in speed.iterrows()],
                "parity": {
                    "max_logit": parity["max_logit"].max(),
                    "max_probability": parity["max_probability"].max(),
                    "flips": round((parity["flips"] * parity["n"]).sum()),
                    "decisions": parity["n"].sum(),
                },
                "capturable": self.capturable,
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
    rows = run(profile, out=out, seed=seed, device=device, dtype=dtype, preset=preset, weights=weights)
    return Bench(rows, {name: found.capturable for name, found in audits().items()})
