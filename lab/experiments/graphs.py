"""Notebook 04: a whole decision captured once and replayed: is it faster, and is it the same answer?"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.parity import MaskedEagerStep, compare_answers, repeats
from lab.records import RowWriter, as_frame, clean, join_rows
from lab.workloads import Workload, get_workload

PROFILES = {
    "smoke": {
        "preset": "tiny",
        "workloads": ["pong"],
        "frames": [1, 2],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": [],
        "blocks": 6,
        "budget_s": 20,
        "parity": 8,
    },
    "standard": {
        "preset": "smolvlm-256m",
        "workloads": ["pong"],
        "frames": [1, 2],
        "batches": [1],
        "dtypes": ["fp32"],
        "compiled": [],
        "blocks": 8,
        "budget_s": 75,
        "parity": 3,
    },
    "full": {
        "preset": "smolvlm-256m",
        "workloads": ["pong", "doom_basic"],
        "frames": [1, 2],
        "batches": [1, 4, 16],
        "dtypes": ["bf16", "fp32"],
        "compiled": ["default", "reduce-overhead"],
        "blocks": 30,
        "budget_s": 25,
        "parity": 32,
    },
}
BASE = "eager"


@dataclass(frozen=True)
class Case:
    """One comparison: a workload with a number of frames, a batch and a dtype."""

    workload: Workload
    batch: int
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.workload.name}, {self.workload.frames} frame(s), batch {self.batch}, {self.dtype}"

    @property
    def tags(self) -> dict:
        return {
            "workload": self.workload.name,
            "frames": self.workload.frames,
            "batch": self.batch,
            "dtype": self.dtype,
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
) -> pd.DataFrame:
    """Measure every case of the profile, one comparison (title) each, and return all raw rows.

    Arms: `eager`; `static`, its fixed-shape twin without capture; `static, reusing frames` for several frames; the same
    `captured` on CUDA; `compiled` for one frame and batch 1. On CUDA a last comparison sets fp32 eager against bf16
    captured, as the published headline does. Beside the rows stand, as lines about them: parity of every arm with
    eager, whether ten repeats agree bit for bit, and on CUDA launches, device-busy share, attention kernels and memory.
    Raises InputError for an unknown profile, device or preset before anything is measured.
    """
    from lab.models import load_model

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = PROFILES[profile]
    preset, dtypes = preset or settings["preset"], [dtype] if dtype else settings["dtypes"]
    models = {kind: load_model(preset, device, kind, seed, weights) for kind in dtypes}
    tables = []
    for case in _cases(settings, dtypes):
        modes = settings["compiled"] if case.batch == 1 and case.workload.name == settings["workloads"][0] else []
        steps = list(_steps(models[case.dtype], case, modes if case.workload.frames == 1 else []))
        tables += _measure(case, steps, settings, seed, out, preset)
    if device != "cpu" and {"fp32", "bf16"} <= set(models):
        for name in settings["workloads"]:
            tables += _headline(models, get_workload(name), settings, seed, out, preset)
    return join_rows(tables)


def _cases(settings: dict, dtypes: list[str]) -> Iterator[Case]:
    for name in settings["workloads"]:
        for frames in settings["frames"]:
            for batch in settings["batches"]:
                for dtype in dtypes:
                    yield Case(replace(get_workload(name), frames=frames), batch, dtype)


def _steps(model, case: Case, modes: list[str]) -> Iterator:
    from lab.steps import CompiledStep, EagerStep, StaticStep

    question, frames = case.workload.question, case.workload.frames
    yield EagerStep(model, question, frames)
    for capture in [False, True] if model.device.type == "cuda" else [False]:
        for reuse in [False, True] if frames > 1 else [False]:
            yield StaticStep(model, question, frames, case.batch, capture=capture, reuse=reuse)
    for mode in modes:
        try:
            yield CompiledStep(model, question, frames, case.batch, mode=mode)
        except InputError as missing:
            print(f"not run: compiled, {mode}: {missing}", flush=True)


def _measure(case: Case, steps: list, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    inputs = case.inputs(max(8, settings["parity"]), seed)
    rows = compare(
        [Arm.of(step) for step in steps],
        inputs,
        blocks=settings["blocks"],
        budget_s=settings["budget_s"],
        seed=seed,
        out=out,
        title=case.title,
        tags=case.tags | {"preset": preset},
    )
    eager = steps[0]
    others = steps[1:]
    if case.batch == 1 and eager.option_attention == "causal":
        others.append(MaskedEagerStep(eager.model, eager.question, eager.frames, "causal"))
    lines = [
        {"kind": "parity", **asdict(compare_answers(eager, step, inputs[: settings["parity"]]))} for step in others
    ]
    lines += [{"kind": "repeats", "arm": step.name, "same": repeats(step, inputs[0])} for step in steps]
    if eager.model.device.type == "cuda":
        lines += [{"kind": "activity", "arm": step.name, **activity(step, inputs[0])} for step in steps]
    lines = [clean({"about": {**line, "title": case.title, **case.tags}}) for line in lines]
    if out:
        with RowWriter(out) as writer:
            for line in lines:
                writer.append(line)
    return [rows, as_frame(lines)]


def _headline(models: dict, workload: Workload, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    """The published headline's own pair: one frame, batch 1, fp32 eager against bf16 captured."""
    from lab.steps import EagerStep, StaticStep

    steps = [
        EagerStep(models["fp32"], workload.question, name="eager, fp32"),
        StaticStep(models["bf16"], workload.question, name="captured, bf16"),
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
    )
    return [rows]


def activity(step, inputs) -> dict:
    """What one decision does on a CUDA device, from torch's profiler.

    `graph_launches` and `kernel_launches` counted on the host side, `busy` (the share of the decision's time in which a
    kernel ran, overlaps counted once), `attention` (names of the attention kernels met), `peak_bytes`, and `graph`:
    "used", "not used" where the step says captured but no graph was launched, "" where it makes no such claim.
    """
    import time

    import torch

    step.decide(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile() as profiler:
        start = time.perf_counter()
        step.decide(inputs)
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - start) * 1e6
    events = profiler.events()
    launches = [event.name for event in events]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    graphs = sum(name.startswith("cudaGraphLaunch") for name in launches)
    claims = step.describe().get("captured", False)
    return {
        "graph_launches": graphs,
        "kernel_launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in launches),
        "busy": _covered([(event.time_range.start, event.time_range.end) for event in kernels]) / wall_us,
        "attention": sorted(
            {e.name[:80] for e in kernels if any(k in e.name.lower() for k in ("flash", "fmha", "attn"))}
        ),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "graph": ("used" if graphs else "not used") if claims else "",
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# ------------------------------------------------------------------------------------------------ rows -> results


def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per case and arm: workload, frames, batch, dtype, arm, median ms with interval, ratio to eager with
    interval, shown (the one rule), what the arm cost to start, and on CUDA whether its graph was used."""
    costs = {(line["title"], line["arm"]): line["cost"] for line in _about(rows, "start_cost")}
    used = {(line["title"], line["arm"]): line for line in _about(rows, "activity")}
    lines = []
    for title, part in rows.groupby("title", sort=False):
        tags = part[["workload", "frames", "batch", "dtype"]].iloc[0].to_dict()
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
    """One line per case and arm: the largest differences from eager, flips with interval, smallest margin, and whether
    ten repeats agree bit for bit."""
    same = {(line["title"], line["arm"]): line["same"] for line in _about(rows, "repeats")}
    return pd.DataFrame(
        {
            **{key: line[key] for key in ("workload", "frames", "batch", "dtype")},
            "arm": line["second"],
            **{key: line[key] for key in ("n", "max_logit", "max_probability", "max_p_act", "smallest_margin")},
            "flips": line["flips"]["value"],
            "flips_high": line["flips"]["high"],
            "repeats_equal": same.get((line["title"], line["second"])),
        }
        for line in _about(rows, "parity")
    )


def _about(rows: pd.DataFrame, kind: str) -> list[dict]:
    return [line for line in rows.attrs.get("about", []) if line["kind"] == kind]
