"""What one decision does, as torch's profiler sees it: stages and operations in time; on CUDA launches and busy time."""

import itertools
import time

import pandas as pd
import torch

from lab.clocks import marked


def activity(step, inputs) -> dict:
    """What one decision does on a CUDA device, from torch's profiler.

    `graph_launches` and `kernel_launches` counted on the host side, `busy` (the share of the decision's time in which a
    kernel ran, overlaps counted once), `attention` (names of the attention kernels met), `peak_bytes`, and `graph`:
    "used", "not used" where the step says captured but no graph was launched, "" where it makes no such claim.
    """
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


def timeline(step, inputs) -> pd.DataFrame:
    """One decision of the host's time: columns kind, name, start_ms, end_ms.

    `kind` is "stage", "operation" (one that no other called) or "launch" (of a kernel or a graph, on CUDA).
    """
    for _ in range(3):
        step.decide(inputs)
    count = itertools.count()

    def mark():
        with torch.profiler.record_function("mark"):
            return next(count)

    with torch.profiler.profile() as profiler, marked(mark) as pieces:
        step.decide(inputs)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    marks = sorted(event.time_range.start for event in events if event.name == "mark")
    found = [("stage", name, marks[first], marks[last]) for name, first, last in pieces]
    for event in events:
        launch = event.name.startswith(("cudaLaunch", "cudaGraphLaunch", "cuLaunch"))
        if launch or (event.name.startswith("aten::") and event.cpu_parent is None):
            kind = "launch" if launch else "operation"
            found.append((kind, event.name, event.time_range.start, event.time_range.end))
    zero = min(start for *_, start, _ in found)
    lines = [(kind, name, (start - zero) / 1e3, (end - zero) / 1e3) for kind, name, start, end in found]
    return pd.DataFrame(lines, columns=["kind", "name", "start_ms", "end_ms"])


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
