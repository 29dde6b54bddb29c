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


# Kinds of operation by how their names begin; the first that fits counts.
_KINDS = {
    "matrix products": (
        "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::linear", "mkldnn::_linear", "aten::mkldnn_linear",
        "quantized::linear", "aten::mkldnn_convolution", "aten::convolution",
    ),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention"),
    "activations": ("aten::gelu", "aten::silu", "aten::sigmoid", "aten::tanh", "aten::addcmul"),
    "norms": ("aten::native_layer_norm", "aten::_fused_rms_norm", "aten::pow", "aten::rsqrt", "aten::mean"),
    "copies and sums": ("aten::copy_", "aten::add", "aten::cat", "aten::mul", "aten::neg", "aten::index_copy"),
}  # fmt: skip


def operations(step, inputs) -> dict[str, float]:
    """Milliseconds of the host's time in one decision by kind of operation (`matrix products`, `attention`, `activations`,
    `norms`, `copies and sums`, `rest`), as the profiler sees them: time in an operation itself, not in those it calls.
    Let the step decide once before: what it does at its first call would count."""
    with torch.profiler.profile() as profiler:
        step.decide(inputs)
    found = dict.fromkeys([*_KINDS, "rest"], 0.0)
    for event in profiler.key_averages():
        kind = next((kind for kind, names in _KINDS.items() if event.key.startswith(names)), "rest")
        found[kind] += event.self_cpu_time_total / 1e3
    return found
