"""Runs notebooks headless with papermill: checked before the start, watched while they run, judged after.

papermill on its own answers 0 to a mistyped parameter, to a notebook without a `parameters` cell (its defaults then
overwrite what was passed) and to a cell that leaves with `sys.exit(0)`. Here each of these is refused or is a failure.
"""

import ast
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.errors import InputError

PROFILES = ("smoke", "standard", "full")

# Minutes on two CPU cores in profile `standard`, measured; a smoke run takes about a tenth of a minute each.
MINUTES = {"01": 0.3, "02": 5.5, "03": 9.0, "04": 4.5, "05": 3.6, "06": 4.2, "07": 5.0, "08": 2.0, "09": 0.2, "10": 0.5}
MINUTES_ELSE = 1.5
MEMORY_GB = {"smoke": 2, "standard": 6, "full": 8}  # the kernel, and what it starts to try things aside
DISK_MB = 100  # a run's pages, rows and traces stay well below
HEARTBEAT_S = 20


@dataclass(frozen=True)
class Notebook:
    """One notebook as it will run: its file, its declared parameters with their defaults, what is passed to it."""

    path: Path
    defaults: dict[str, Any]
    passed: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Outcome:
    """How one notebook ended: `ok`, `failed` or `interrupted`, with the reason in words and the seconds it took."""

    status: str
    reason: str
    seconds: float


def notebooks_folder() -> Path:
    """The checkout's notebooks/, else the one in the current folder."""
    for folder in (Path(__file__).parent.parent / "notebooks", Path("notebooks")):
        if folder.is_dir():
            return folder.resolve()
    raise InputError("no notebooks/ folder is here: run from a checkout, or name a folder with --notebooks")


def select(folder: Path, only: str | None = None) -> list[Path]:
    """Notebooks of `folder` in reading order; `only` is a comma list of numbers or names ("01,duplicate_frames")."""
    found = sorted(folder.glob("*.ipynb"))
    if not found:
        raise InputError(f"{folder} holds no notebook")
    if only is None:
        return found
    chosen = []
    for word in filter(None, (w.strip().removesuffix(".ipynb") for w in only.split(","))):
        hits = [p for p in found if p.stem == word or p.stem.split("_")[0] == word or p.stem.partition("_")[2] == word]
        if not hits:
            raise InputError(f"no notebook is called {word!r}; there are: {', '.join(p.stem for p in found)}")
        chosen += hits
    if not chosen:
        raise InputError("--only names no notebook")
    return [p for p in found if p in chosen]


def read_parameters(path: Path) -> dict[str, Any]:
    """The names and default values in the notebook's `parameters` cell.

    The cell must be the only one with that tag and the first code cell, and hold nothing but literals: otherwise a
    passed value would come too late or not at all. InputError names the notebook and what is wrong.
    """
    import nbformat

    try:
        cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    except Exception as error:
        raise InputError(f"{path} is not a readable notebook: {error}") from error
    tagged = [i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise InputError(f"{path.name} has {len(tagged)} cells tagged `parameters`; it needs exactly one")
    if tagged[0] != 0:
        raise InputError(f"{path.name}: the cell tagged `parameters` must be the first code cell")
    defaults = {}
    try:
        for statement in ast.parse(cells[0].source).body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                target = statement.target
            else:
                raise ValueError(ast.unparse(statement))
            defaults[target.id] = ast.literal_eval(statement.value)
    except (SyntaxError, ValueError, AttributeError) as error:
        raise InputError(f"{path.name}: the `parameters` cell may hold only NAME = LITERAL lines ({error})") from error
    return defaults


def fit_value(name: str, value: Any, default: Any) -> Any:
    """`value`, read as the type of `default` when it is text from a command line; InputError where it does not fit.

    A whole number fits a float; a default of None takes any literal; nothing else is converted.
    """
    if isinstance(value, str) and not isinstance(default, str):
        with suppress(SyntaxError, ValueError):  # what is no literal stays text, which then does not fit
            value = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    if type(default) is float and type(value) is int:
        value = float(value)
    if default is not None and type(value) is not type(default):
        raise InputError(f"parameter {name} takes {_article(default)} like {default!r}, not {value!r}")
    return value


def _article(default: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}
    return words.get(type(default), f"a {type(default).__name__}")


def prepare(
    paths: list[Path], profile: str, parameters: dict[str, Any], given: Mapping[str, Path] = MappingProxyType({})
) -> list[Notebook]:
    """Check all notebooks and parameters before anything runs; a parameter goes to every notebook that declares it.

    `given` are rows files by notebook, which need no emulator.
    """
    declared = {path: read_parameters(path) for path in paths}
    if parameters.get("workload"):
        import_module("lab.envs.own").check_workloads(parameters["workload"])
    for name in parameters:
        takers = [path for path in paths if name in declared[path]]
        if not takers:
            known = sorted({n for names in declared.values() for n in names})
            raise InputError(f"no chosen notebook has a parameter {name!r}; they have: {', '.join(known)}")
        if name == "rows" and parameters[name] and len(takers) > 1:
            raise InputError("rows shows the rows of one notebook: choose it with --only")
    notebooks = []
    for path, defaults in declared.items():
        if "profile" not in defaults:
            raise InputError(f"{path.name} has no parameter `profile`")
        passed = {n: fit_value(n, v, defaults[n]) for n, v in parameters.items() if n in defaults}
        if passed.get("rows"):  # a path of the caller's, while the kernel works in the notebook's folder
            rows = Path(passed["rows"]).resolve()
            if _measures(path):
                if not rows.is_file():
                    raise InputError(f"there is no rows file {passed['rows']}")
                import_module("lab.records").read_rows(rows)  # refuses a file without rows
            elif not rows.exists():
                raise InputError(f"there is no folder {passed['rows']}")
            passed["rows"] = str(rows)
        if passed.get("workload"):
            passed["workload"] = str(Path(passed["workload"]).resolve())
        shared = {n: v for n, v in passed.items() if n in ("profile", "seed", "device", "dtype")}
        _check_values(**{"profile": profile} | shared)
        if not passed.get("rows") and path.stem not in given:
            _check_needs(path)
        notebooks.append(Notebook(path, defaults, {"profile": profile} | passed))
    return notebooks


def _measures(path: Path) -> bool:
    """Whether a notebook takes rows of its own: one that does not says `"measures": false` in its metadata."""
    import nbformat

    return nbformat.read(path, as_version=4).metadata.get("measures", True)


def _check_needs(path: Path) -> None:
    """Refuse a notebook whose metadata name, under `needs`, a module that is not installed here."""
    import nbformat

    def missing(module: str) -> bool:
        try:
            return find_spec(module) is None
        except ValueError:  # imported and taken away again
            return True

    if lost := [module for module in nbformat.read(path, as_version=4).metadata.get("needs", []) if missing(module)]:
        raise InputError(
            f"{path.name} needs {' and '.join(lost)}: install what is missing with make report or pip install -e ., "
            "choose other notebooks with --only, or show given rows with -p rows FILE"
        )


def _check_values(profile: str, seed: int = 0, device: str = "cpu", dtype: str = "fp32") -> None:
    """Refuse what every notebook would refuse, before the first of them runs."""
    if profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}: choose one of {', '.join(PROFILES)}")
    if not 0 <= seed < 2**31:
        raise InputError(f"seed is {seed}: give a whole number from 0 to {2**31 - 1}")
    if device != "cpu":
        from lab.models.checkpoints import check_device

        check_device(device)
    if dtype not in ("fp32", "bf16"):
        raise InputError(f"dtype is {dtype!r}: choose fp32 or bf16")


def open_folder(out: Path | None, names: list[str], shown: Collection[str] = ()) -> Path:
    """Create the run's folder (default reports/<date-time>), prove that it can be written, return its absolute path.

    What an earlier run left there of the same notebooks is moved into earlier-<date-time>/, so that nothing old can
    pass for a result of this run; only the rows files that are to be `shown` stay. InputError for a folder that is
    read-only, full, or no folder.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = (out or Path("reports") / now).resolve()
    import_module("lab.records").check_folder(folder)
    free = shutil.disk_usage(folder).free / 1e6
    if free < DISK_MB:
        raise InputError(
            f"{folder} has {free:.0f} MB free and a run may need {DISK_MB}: choose another folder with --out"
        )
    old = [p for name in names for p in folder.glob(f"{name}.*") if str(p) not in shown]
    if old:
        attic = folder / f"earlier-{now}"
        attic.mkdir(exist_ok=True)
        for path in old:
            path.rename(attic / path.name)
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
    still run), 130 after Ctrl-C. Raises InputError, before anything runs, for whatever cannot work.
    """
    for package in ("papermill", "nbconvert", "ipykernel"):
        if find_spec(package) is None:
            raise InputError(f"{package} is not installed: install everything with make report or pip install -e .")
    say("reading the notebooks ...")
    paths = select(Path(folder).resolve() if folder else notebooks_folder(), only)
    elsewhere, given = import_module("lab.elsewhere"), {}
    if rows is not None:
        given = elsewhere.find(rows, [path.stem for path in paths])
        paths = [path for path in paths if path.stem in given or not _measures(path)]
    parameters = dict(parameters or {})
    if workload is not None:
        parameters["workload"] = str(workload)
        without = [p for p in paths if "workload" not in read_parameters(p) and _measures(p)]
        paths = [p for p in paths if p not in without]
        if without:
            say(f"not run, since they ask nothing of your frames: {', '.join(path.stem for path in without)}")
    notebooks = prepare(paths, profile, parameters, given)
    shown = [*map(str, given.values()), *(n.passed.get("rows", "") for n in notebooks)]
    target = open_folder(out, [n.name for n in notebooks], shown)
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
