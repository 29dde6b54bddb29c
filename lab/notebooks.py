"""Which notebooks run, with which values: chosen, read and checked before anything starts.

papermill on its own answers 0 to a mistyped parameter and to a notebook without a `parameters` cell, whose defaults then
overwrite what was passed; here each is refused.
"""

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.errors import InputError
from lab.workloads import listed

PROFILES = ("smoke", "standard", "full")


@dataclass(frozen=True)
class Notebook:
    """One notebook as it will run: its file, its declared parameters with their defaults, what is passed to it."""

    path: Path
    defaults: dict[str, Any]
    passed: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem


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
    for word in (word.removesuffix(".ipynb") for word in listed(only)):
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
            if measures(path):
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


def measures(path: Path) -> bool:
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
