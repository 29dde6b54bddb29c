"""Everything that wants a GPU, as one run that installs nothing: `make gpu`, or `lab gpu --out FOLDER`.

Needs torch with CUDA, transformers, and what they bring; no Jupyter, emulator, gymnasium or network. Rows are on disk as
they are taken; a bench that fails is said, and the others go on.
"""

import re
import time
import traceback
from pathlib import Path

from lab.errors import InputError
from lab.locks import writing
from lab.records import check_folder, write_environment
from lab.workloads import DATA


def run(out: Path | None = None, seed: int = 0) -> int:
    """Run every bench on CUDA and write its rows to `out` (default: data/measured/<the GPU's name>); the exit code.

    Raises InputError where torch sees no CUDA GPU, the folder cannot be written, or another process writes it.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "torch sees no CUDA GPU here, so there is nothing to run; the CPU's figures come from `lab run`."
        )
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    folder = check_folder(out or DATA / "measured" / name)
    with writing(folder):
        return _run(folder, seed)


def _run(folder: Path, seed: int) -> int:
    import torch

    write_environment(folder, "before", seed)
    failed = []
    for title, bench in _benches(folder, seed).items():
        print(f"\n== {title}", flush=True)
        start = time.perf_counter()
        try:
            result = bench()
            print(result.table(), result.verdict, sep="\n", flush=True)
        except Exception:
            failed.append(title)
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"   {time.perf_counter() - start:.0f} s", flush=True)
    write_environment(folder, "after", seed)
    print(f"\nrows: {folder}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _benches(folder: Path, seed: int) -> dict:
    from lab.experiments import graphs, lever_results, question_first, resume, snake_results

    # Random weights: the offline package is not there, and time does not depend on them.
    common = {"device": "cuda", "seed": seed, "weights": "random"}
    found = {}
    for dtype in ("bf16", "fp32"):
        path = folder / f"latency.{dtype}.rows.jsonl"
        found[f"latency, {dtype}"] = lambda dtype=dtype, path=path: _latency(dtype, path, common)
    found["graphs"] = lambda: graphs.bench(out=folder / "graphs.rows.jsonl", **common)
    path = folder / "question-first.rows.jsonl"
    found["question-first"] = lambda: question_first.bench(out=path, **common)
    found["resume"] = lambda: resume.bench(out=folder / "resume.rows.jsonl", **common)
    found["levers"] = lambda: lever_results.bench(out=folder / "levers.rows.jsonl", **common)
    for preset in ("snake", "multilingual", "english"):
        found[f"snake, {preset}"] = lambda preset=preset: snake_results.bench(
            preset, "cuda", out=folder / f"snake.{preset}.rows.jsonl", seed=seed
        )
    return found


def _latency(dtype: str, path: Path, common: dict):
    """Every arm and workload of notebook 02, so that it can show the rows; said of the first workload alone."""
    from lab.experiments import latency

    rows = latency.run("full", dtype=dtype, out=path, **common)
    workload = rows["title"].iloc[0]
    return latency.Bench(rows[rows["title"] == workload], workload, None)
