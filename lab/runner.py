"""Runs notebooks headless with papermill: watched while they run, judged after.

To papermill a cell that leaves with `sys.exit(0)` is a success, and a killed kernel dies obscurely. Here each is a failure
with its reason. What is refused before the start is in `lab.notebooks`.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from lab.errors import InputError
from lab.locks import writing
from lab.notebooks import Notebook, measures, notebooks_folder, prepare, read_parameters, select

# Minutes on two CPU cores in profile `standard`, measured; a smoke run takes about a tenth of a minute each.
MINUTES = {"01": 0.3, "02": 1.9, "03": 2.5, "04": 2.3, "05": 2.3, "06": 3.2, "07": 4.6, "08": 3.3, "09": 0.1, "10": 0.3}
MINUTES_ELSE = 1.5
MEMORY_GB = {"smoke": 2, "standard": 6, "full": 8}  # the kernel, and what it starts to try things aside
DISK_MB = 100  # a run's pages, rows and traces stay well below
HEARTBEAT_S = 20


@dataclass(frozen=True)
class Outcome:
    """How one notebook ended: `ok`, `failed` or `interrupted`, with the reason in words and the seconds it took."""

    status: str
    reason: str
    seconds: float


@contextmanager
def open_folder(out: Path | None, names: list[str], shown: Collection[str] = ()) -> Iterator[Path]:
    """Create the run's folder (default: a new reports/<date-time>), prove that it can be written, and give its absolute
    path; while the block runs no other process runs notebooks into it.

    What an earlier run left there of the same notebooks is moved into earlier-<date-time>/, so that nothing old can
    pass for a result of this run; only the rows files that are to be `shown` stay. InputError for a folder that is
    read-only, full, or no folder, and for one that another process writes.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    check = import_module("lab.records").check_folder
    folder = check(out.resolve() if out else _new_folder(check("reports").resolve() / now))
    with writing(folder):
        free = shutil.disk_usage(folder).free / 1e6
        if free < DISK_MB:
            raise InputError(
                f"{folder} has {free:.0f} MB free and a run may need {DISK_MB}: choose another folder with --out"
            )
        old = [p for name in names for p in folder.glob(f"{name}.*") if str(p) not in shown]
        if old:
            attic = _new_folder(folder / f"earlier-{now}")
            for path in old:
                path.rename(attic / path.name)
        yield folder


def _new_folder(path: Path) -> Path:
    """Make a folder that was not there: `path`, or path-2, path-3 ... where another run has begun in the same second."""
    for number in count(1):
        with suppress(FileExistsError):
            folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
            folder.mkdir()
            return folder


def minutes(notebook: Notebook) -> float:
    """Expected minutes on two CPU cores."""
    if notebook.passed.get("rows"):
        return 0.2
    standard = MINUTES.get(notebook.name.split("_")[0], MINUTES_ELSE)
    return {"smoke": 0.3, "standard": standard, "full": 5 * standard}[notebook.passed["profile"]]


def announce(notebooks: list[Notebook], folder: Path, say: Callable[[str], None]) -> None:
    """Say what will run, for how long, with how much memory, and where it writes."""
    import psutil

    profile = notebooks[0].passed["profile"]
    total, need = sum(map(minutes, notebooks)), MEMORY_GB[profile]
    where = "on a GPU" if profile == "full" else "on two CPU cores"
    say(f"{len(notebooks)} notebook(s), profile {profile}: about {total:.1f} minutes {where}, {need} GB of memory")
    say(f"writes to {folder}")
    free = psutil.virtual_memory().available / 1e9
    if free < need:
        say(f"warning: only {free:.1f} GB of memory are free; the run may be slow or be stopped")
    for notebook in notebooks:
        shown = {n: v for n, v in notebook.passed.items() if n != "profile"}
        if shown:
            say(f"  {notebook.name}: " + ", ".join(f"{n} = {v!r}" for n, v in shown.items()))


@contextmanager
def headless(folder: Path) -> Iterator[None]:
    """The environment the kernels inherit: where to write, no widgets, figures inline, this Python's own kernel."""
    wanted = {
        "LAB_RUN_FOLDER": str(folder),
        "LAB_HEADLESS": "1",
        "KINETO_LOG_LEVEL": "99",  # a profiled decision would otherwise print notices onto the page
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Progress:
    """Says every HEARTBEAT_S seconds where a notebook is, with the last line it wrote to stderr, so that a long cell
    does not look hung. A context manager; also what papermill takes for a file to copy stderr to."""

    def __init__(self, name: str, cells: int, say: Callable[[str], None]):
        self.name, self.cells, self.say = name, cells, say
        self.cell, self.line, self.start = 0, "", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def cell_starts(self, cell: Any, cell_index: int, **_: Any) -> None:
        self.cell += _runs(cell)

    def write(self, text: str) -> None:
        self.line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), self.line)

    def flush(self) -> None:
        pass

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            spent = f"{time.monotonic() - self.start:.0f} s so far"
            self.say(f"  {self.name}: code cell {self.cell} of {self.cells}, {spent}  {self.line[:100]}".rstrip())

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()


def execute(notebook: Notebook, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run one notebook into `folder`, judge it, and note the outcome in the executed copy's metadata (`metadata.lab`).

    Never raises for what the notebook does: a failing cell, an early exit and a killed kernel are outcomes. The part
    that was executed is on disk in each case. The kernel works in the notebook's own folder, as it does in JupyterLab.
    """
    import nbformat
    import papermill

    source = nbformat.read(notebook.path, as_version=4)
    target = folder / notebook.path.name
    progress = Progress(
        notebook.name, 1 + sum(map(_runs, source.cells)), say
    )  # papermill adds the cell of what is passed
    start, started = time.monotonic(), time.time()
    failure, interrupted = "", False
    try:
        with progress:
            papermill.execute_notebook(
                notebook.path, target, notebook.passed, kernel_name="python3", cwd=notebook.path.parent,
                progress_bar=False, autosave_cell_every=5, on_cell_start=progress.cell_starts, stderr_file=progress,
                extra_arguments=["--log-level=ERROR"],
            )  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
        failure = "interrupted from the keyboard"
    except papermill.PapermillExecutionError as error:
        failure = f"{error.ename}: {error.evalue}"
    except Exception as error:  # a dead kernel, a kernel that does not start, a disk that fills up
        failure = f"{type(error).__name__}: {error}"
        if type(error).__name__ == "DeadKernelError":
            failure = "the kernel died (killed, for instance for want of memory)"
    seconds = time.monotonic() - start
    executed = source
    with suppress(OSError, nbformat.reader.NotJSONError):  # never started, or torn by a disk that filled up
        executed = nbformat.read(target, as_version=4)
    reason, stopped = judge(executed, notebook, folder, started, failure, progress.cell)
    status = "interrupted" if interrupted else "failed" if reason else "ok"
    executed.metadata["lab"] = {
        "status": status,
        "reason": reason,
        "stopped": stopped,
        "seconds": round(seconds, 1),
        "parameters": notebook.defaults | notebook.passed,
        "started": datetime.fromtimestamp(started).isoformat(timespec="seconds"),
    }
    nbformat.write(executed, target)
    return Outcome(status, reason, seconds)


def _runs(cell: Any) -> bool:
    return cell.cell_type == "code" and bool(cell.source.strip())


def judge(
    executed: Any, notebook: Notebook, folder: Path, started: float, failure: str, reached: int
) -> tuple[str, int | None]:
    """Why and in which code cell (counted from 1) the notebook stopped; ("", None) if it did what it should.

    That is: its last cell ran, and it left results that are fresh and echo the parameters it was passed. `reached` is
    the last code cell that was started: the notebook's own marks say "completed" of every cell once a kernel died.
    """
    code = [cell for cell in executed.cells if _runs(cell)]
    exited = any(output.get("ename") == "SystemExit" for cell in code for output in cell.outputs)
    if exited and not failure:
        failure = "it left early with sys.exit; the cells after it never ran"
    if not failure and (reached < len(code) or code[-1].execution_count is None):
        failure = "the cells after it never ran"
    if failure:
        if not 0 < reached <= len(code):
            return f"stopped{'' if reached else ' before its first cell'}: {failure}", None
        lines = [line.strip() for line in code[reached - 1].source.splitlines()]
        line = next((line for line in lines if line and not line.startswith("#")), "")
        return f"stopped in code cell {reached} of {len(code)} ({line[:80]}): {failure}", reached
    results = folder / f"{notebook.name}.json"
    if not results.exists() or results.stat().st_mtime < started - 2:
        return f"it ran to its end but saved no {results.name}: it must end with run.save(...)", None
    try:
        echoed = json.loads(results.read_text(encoding="utf-8")).get("parameters", {})
    except (ValueError, AttributeError) as error:
        return f"{results.name} is not readable: {error}", None
    for name, value in notebook.passed.items():
        if name in echoed and echoed[name] != json.loads(json.dumps(value)):
            return f"it was passed {name} = {value!r} but worked with {echoed[name]!r}", None
    return "", None


def run(
    profile: str = "standard",
    out: Path | None = None,
    only: str | None = None,
    parameters: dict[str, Any] | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    rows: Path | None = None,
    workload: Path | None = None,
) -> int:
    """Run the chosen notebooks of `folder` (default: the checkout's) and write their pages and index.html into `out`.

    With `rows`, a folder, the notebooks show its rows instead of measuring (see `lab.elsewhere`): those it has rows of, and
    those that measure nothing. With `workload`, a file of the reader's own, those run that have a parameter of that name,
    and the verdict. Returns the exit code: 0 when every notebook ran to its end, 1 when one did not (the others
    still run), 130 after Ctrl-C. Raises InputError, before anything runs, for whatever cannot work, such as a folder that
    another process writes.
    """
    for package in ("papermill", "nbconvert", "ipykernel"):
        if find_spec(package) is None:
            raise InputError(f"{package} is not installed: install everything with make report or pip install -e .")
    say("reading the notebooks ...")
    paths = select(Path(folder).resolve() if folder else notebooks_folder(), only)
    given: dict[str, Path] = {}
    if rows is not None:
        given = import_module("lab.elsewhere").find(rows, [path.stem for path in paths])
        paths = [path for path in paths if path.stem in given or not measures(path)]
    parameters = dict(parameters or {})
    if workload is not None:
        parameters["workload"] = str(workload)
        without = [p for p in paths if "workload" not in read_parameters(p) and measures(p)]
        paths = [p for p in paths if p not in without]
        if without:
            say(f"not run, since they ask nothing of your frames: {', '.join(path.stem for path in without)}")
    notebooks = prepare(paths, profile, parameters, given)
    shown = [*map(str, given.values()), *(n.passed.get("rows", "") for n in notebooks)]
    with open_folder(out, [n.name for n in notebooks], shown) as target:
        return _run_into(target, notebooks, given, rows, say)


def _run_into(
    target: Path, notebooks: list[Notebook], given: dict[str, Path], rows: Path | None, say: Callable[[str], None]
) -> int:
    elsewhere = import_module("lab.elsewhere")
    records, report = import_module("lab.records"), import_module("lab.report")
    if given:
        taken = elsewhere.take_over(given, rows, target)
        for notebook in notebooks:
            notebook.passed.update({"rows": taken[notebook.name]} if notebook.name in taken else {})
    else:
        records.write_environment(target, "before")
    announce(notebooks, target, say)

    code = 0
    try:
        for number, notebook in enumerate(notebooks, 1):
            at = f"[{number}/{len(notebooks)}] {notebook.name}"
            say(f"{at}: about {minutes(notebook):.1f} min ...")
            with headless(target):
                outcome = execute(notebook, target, say)
            say(f"{at}: {outcome.status} in {outcome.seconds:.0f} s")
            if outcome.reason:
                say(f"  {outcome.reason}")
                code = 1
            if outcome.status == "interrupted":
                code = 130
                break
            report.build(target)  # after each, so that a run that is cut short has its front page too
        if not given:
            records.write_environment(target, "after")
        say(f"report: {report.build(target)}")
    except (OSError, InputError) as error:  # the disk filled up, or the folder went away
        say(f"stopped: {error}; what was written until then is in {target}")
        code = 1
    return code
