"""What a run leaves behind: raw rows as they are taken, the environment before and after, and named results.

A rows file is JSON lines. Most lines are rows; a line whose only key is `about` says something about the rows around it
(the plan of a comparison, its environment, what an arm cost to start, a note), so that one file read years later, or on
another machine, still tells how it came about.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd

from lab.errors import InputError
from lab.locks import writing

_PACKAGES = (
    "refrain-lab", "torch", "transformers", "numpy", "scipy", "pandas", "pillow", "gymnasium", "ale-py", "vizdoom",
    "papermill", "jupyterlab", "matplotlib", "ipywidgets", "safetensors", "gguf", "xxhash", "distributed",
)  # fmt: skip
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "asimd", "sve")
_VARIABLES = ("OMP_", "MKL_", "TORCH_", "TORCHINDUCTOR_", "CUDA_VISIBLE", "CUBLAS_")
_GPU_FIELDS = (
    "name", "uuid", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm", "clocks.mem",
    "clocks_throttle_reasons.active", "temperature.gpu", "power.draw", "power.limit", "utilization.gpu",
    "mig.mode.current",
)  # fmt: skip


def clean(value):
    """Turn `value` into something JSON holds: NaN and infinities become null, an `Estimate` a dict of its fields,
    numpy scalars and arrays numbers and lists, a table a list of records, a path or any other object its text."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [clean(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return clean({name: item for name, item in fields.items() if not (isinstance(item, str) and item == "")})
    if isinstance(value, pd.DataFrame):
        return clean(value.to_dict("records"))
    if isinstance(value, (np.ndarray, pd.Series)):
        return clean(value.tolist())
    if isinstance(value, np.generic):
        return clean(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# --- rows ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path | str) -> Path:
    """Make `folder` if need be and prove, with a small write, that results can be kept there.

    Raises InputError where it cannot be made or written (read-only, full, below a file).
    """
    folder = Path(folder)
    probe = folder / f".write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b" " * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"Cannot write to {path} ({error.strerror}); free some space or choose another output folder.")


class RowWriter:
    """Appends rows to a JSON-lines file, one at a time, each on disk before `append` returns.

    Every line is handed to the operating system at once, so that rows survive a killed process. A last line left torn
    by an earlier kill is closed first. Raises InputError where the file cannot be written, and where another process
    writes it.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        check_folder(self.path.parent)
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(writing(self.path))
        try:
            # unbuffered: a buffered file that could not be written raises a second time when it is collected
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (lives as long as the writer)
            if self.path.is_file() and self.path.stat().st_size:
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")
        except OSError as error:
            self._alone.close()
            raise _unwritable(self.path, error) from error

    def append(self, row: dict) -> dict:
        """Write one row and return it as it was written (see `clean`)."""
        row = clean(row)
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return row

    def about(self, kind: str, **fields) -> dict:
        """Write a line about the rows: the plan, the environment, a note."""
        return self.append({"about": {"kind": kind, **fields}})

    def close(self) -> None:
        self._file.close()
        self._alone.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def as_frame(lines: list[dict]) -> pd.DataFrame:
    """Rows as a table; what the lines say about them is in `.attrs["about"]` (a list of dicts, in order)."""
    rows = pd.DataFrame([line for line in lines if "about" not in line])
    rows.attrs["about"] = [line["about"] for line in lines if "about" in line]
    return rows


def read_rows(path: Path | str, arm: str | None = None) -> pd.DataFrame:
    """Read a rows file into a table, one line per row; `.attrs["about"]` holds what the file says about them.

    A line torn by a killed process is left out, and said on stderr. Raises InputError where the file is missing or
    holds no rows; with `arm`, also where it holds none of that arm, so that another experiment's rows are refused. Then
    rows of no arm, which a notebook keeps in the same file, are left out.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"Cannot read rows from {path} ({error.strerror}); give a .rows.jsonl file.") from error
    lines, torn = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            (lines if isinstance(value, dict) else torn).append(value if isinstance(value, dict) else number)
        except json.JSONDecodeError:
            torn.append(number)
    if not any("about" not in line for line in lines):
        raise InputError(f"{path} holds no rows; give a .rows.jsonl file that a measurement has written to.")
    if arm is not None:
        lines = [line for line in lines if "about" in line or "arm" in line]
        if not any(line.get("arm") == arm for line in lines):
            raise InputError(f"{path} holds no rows of the arm {arm!r}; give rows that this notebook has written.")
    rows = as_frame(lines)
    if torn:
        note = f"{path.name}: left out {len(torn)} torn line(s), number {', '.join(map(str, torn[:5]))}."
        print(note, file=sys.stderr)
        rows.attrs["about"].append({"kind": "note", "text": note})
    return rows


def beside_rows(lines: list[dict], out: Path | str | None) -> pd.DataFrame:
    """A table without rows whose `.attrs["about"]` says `lines` (a dict each, with a `kind`); with `out` on disk too.

    `join_rows` puts it beside the rows it speaks of.
    """
    lines = [clean({"about": line}) for line in lines]
    if out:
        with RowWriter(out) as writer:
            for line in lines:
                writer.append(line)
    return as_frame(lines)


def join_rows(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Several tables of rows as one, with all that is said about them (`pandas.concat` would drop it)."""
    about = [line for table in tables for line in table.attrs.get("about", [])]
    bare = [table.copy(deep=False) for table in tables]
    for table in bare:
        table.attrs = {}
    rows = pd.concat(bare, ignore_index=True)
    rows.attrs["about"] = about
    return rows


def about(rows: pd.DataFrame, kind: str) -> list[dict]:
    """The lines of one kind that stand beside rows, as `beside_rows` and `lab.compare` leave them."""
    return [line for line in rows.attrs.get("about", []) if line["kind"] == kind]


def write_json(path: Path, value: dict) -> Path:
    """Write `value` (see `clean`) as JSON, whole or not at all: readers never see half a file."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(clean(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error
    return path


# --- the environment ------------------------------------------------------------------------------------------------


def environment(seed: int | None = None, import_torch: bool = True) -> dict:
    """The state of the machine and of the libraries, as far as it can move a time.

    Keys: `time`, `seed`, `versions`, `platform`, `cpu` (model, cores, threads, MHz, vector flags, whether bf16 is
    native), `load` (1, 5, 15 minutes), `memory` (bytes), `torch` (threads, TF32, attention kernels, determinism; null
    where torch is not installed, or not imported and `import_torch` is false), `gpus` (one dict each, as nvidia-smi
    gives it: clocks, throttle reasons, temperature, power), `git` (in a checkout: the commit, and whether files differ
    from it).
    """
    if import_torch and "torch" not in sys.modules:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "versions": _versions(),
        "platform": {"system": platform.platform(), "machine": platform.machine()},
        "cpu": _cpu(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "memory": _memory(),
        "torch": _torch_state(),
        "gpus": _gpus(),
        "git": _git(),
    }


def cores() -> int:
    """How many processors this process may use (the affinity mask, where the system has one)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_environment(folder: Path | str, moment: str, seed: int | None = None) -> Path:
    """Record the environment in `folder`/environment.json: `moment` "before" starts the file, "after" adds to it."""
    if moment not in ("before", "after"):
        raise InputError(f'The moment of an environment record is "before" or "after", not {moment!r}.')
    path = check_folder(folder) / "environment.json"
    kept = json.loads(path.read_text()) if moment == "after" and path.exists() else {}
    return write_json(path, {**kept, moment: environment(seed)})


def _versions() -> dict:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _cpu() -> dict:
    import psutil

    model, flags = platform.processor(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass  # not Linux: the model's short name must do
    clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "model": model,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": cores(),
        "mhz": clock and {"current": round(clock.current), "max": round(clock.max)},
        "flags": sorted(flags.intersection(_CPU_FLAGS)),
        "native_bf16": bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}),
    }


def _memory() -> dict:
    import psutil

    memory = psutil.virtual_memory()
    return {"total": memory.total, "available": memory.available, "this_process": psutil.Process().memory_info().rss}


def _torch_state() -> dict | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "tf32_matmul": cuda.matmul.allow_tf32,
        "tf32_cudnn": cudnn.allow_tf32,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "attention_kernels": {
            "flash": cuda.flash_sdp_enabled(),
            "mem_efficient": cuda.mem_efficient_sdp_enabled(),
            "math": cuda.math_sdp_enabled(),
            "cudnn": cuda.cudnn_sdp_enabled(),
        },
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> list[dict]:
    # nvidia-smi comes with the driver, so clocks and throttling are recorded without one more dependency
    for fields in (_GPU_FIELDS, _GPU_FIELDS[:5]):  # a driver that does not know one of the fields answers none
        table = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        if table:
            return [dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in table.splitlines()]
    return []


def _git() -> dict | None:
    here = Path(__file__).resolve().parent
    commit = _output_of("git", "rev-parse", "HEAD", cwd=here)
    return commit and {"commit": commit, "changed": bool(_output_of("git", "status", "--porcelain", "-uno", cwd=here))}


# --- a notebook's run ---------------------------------------------------------------------------------------------


class Run:
    """Where one notebook keeps its rows and results.

    The folder is the environment variable LAB_RUN_FOLDER (set by `lab run`), otherwise reports/interactive beside the
    notebooks folder. An interactive notebook that measures again starts a new rows file; the one before it stays as
    <notebook>.rows.old.jsonl. Until it is saved, a run that measures is the only process that writes its rows. Raises
    InputError where nothing can be written there, and where another process writes the rows.
    """

    def __init__(self, notebook: str, parameters: dict):
        if not notebook or Path(notebook).name != notebook:
            raise InputError(f"A run needs its notebook's bare name, such as 02_latency_breakdown, not {notebook!r}.")
        self.notebook, self.parameters = notebook, dict(parameters)
        self.folder = check_folder(os.environ.get("LAB_RUN_FOLDER") or _interactive_folder())
        self.rows_path = self.folder / f"{notebook}.rows.jsonl"
        self._started, self._alone = time.perf_counter(), contextlib.ExitStack()
        if not self.parameters.get("rows"):
            self._alone.enter_context(writing(self.rows_path))
            if self.rows_path.exists():
                os.replace(self.rows_path, self.folder / f"{notebook}.rows.old.jsonl")

    def log(self, message: str) -> None:
        """Say `message` on stderr and keep it, with the time, in <notebook>.log."""
        print(message, file=sys.stderr, flush=True)
        with open(self.folder / f"{self.notebook}.log", "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n")

    def save(self, results: dict, weights: str | None = None) -> Path:
        """Write <notebook>.json, whole or not at all, and return its path.

        It holds `notebook`, `parameters`, `results` (numbers and texts by name; an `Estimate` becomes value, low, high
        and n; NaN becomes null), `weights` (which weights the figures were taken on), `machine` and `versions` (of given
        rows those that they were measured with, where they tell), `seconds` since the run began, and `finished` (UTC, ISO
        8601).
        """
        here = self._measured_on() or {"cpu": _cpu(), "gpus": _gpus(), "torch": _torch_state(), "versions": _versions()}
        machine = {name: here.get(name) for name in ("cpu", "gpus", "torch")}
        path = write_json(
            self.folder / f"{self.notebook}.json",
            {
                "notebook": self.notebook,
                "parameters": self.parameters,
                "results": results,
                "weights": weights,
                "machine": machine,
                "versions": here.get("versions"),
                "seconds": round(time.perf_counter() - self._started, 3),
                "finished": datetime.now(UTC).isoformat(),
            },
        )
        self._alone.close()
        return path

    def _measured_on(self) -> dict | None:
        """The environment that given rows tell of themselves; None where this run measures or they tell none."""
        rows = self.parameters.get("rows")
        if not rows or not Path(rows).is_file():
            return None
        return next((line for line in read_rows(rows).attrs["about"] if line["kind"] == "environment"), None)


def _interactive_folder() -> Path:
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "notebooks").is_dir()), here)
    return root / "reports" / "interactive"
