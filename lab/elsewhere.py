"""`lab run --rows FOLDER`: the report of rows that were measured elsewhere, on a GPU box or by a colleague.

FOLDER is what `lab run` wrote there, or what `lab gpu` and `lab bench --out` left: rows files named after a notebook
(02_latency_breakdown.rows.jsonl) or a bench (latency.bf16.rows.jsonl).
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from lab.errors import InputError
from lab.records import clean, environment, read_rows, write_json

END = ".rows.jsonl"
BENCHES = {
    "02": "latency", "03": "question-first", "04": "graphs", "05": "duplicates", "06": "resume", "07": "snake",
    "08": "levers",
}  # fmt: skip


def find(folder: Path | str, notebooks: Sequence[str]) -> dict[str, Path]:
    """The rows file of each of `notebooks` that FOLDER has one for, by the notebook's name.

    Of a bench measured in several dtypes (latency.bf16, latency.fp32) the fp32 rows are taken. Raises InputError where
    FOLDER is no folder, holds rows of none of them, or a file without rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}; give one with .rows.jsonl files, such as `lab run` writes.")
    found = {name: path for name in notebooks if (path := _rows_of(folder, name))}
    if not found:
        there = ", ".join(sorted(path.name for path in folder.glob(f"*{END}"))[:8]) or "no .rows.jsonl file"
        raise InputError(f"{folder} holds no rows of {', '.join(notebooks)}; there is: {there}.")
    for path in found.values():
        read_rows(path)  # refuses a file without rows
    return found


def _rows_of(folder: Path, name: str) -> Path | None:
    own = folder / f"{name}{END}"
    if own.is_file():
        return own
    bench = BENCHES.get(name.split("_")[0])
    others = sorted(folder.glob(f"{bench}{END}")) + sorted(folder.glob(f"{bench}.*{END}"), reverse=True)
    return next((path for path in others if path.is_file()), None) if bench else None


def take_over(found: dict[str, Path], source: Path | str, target: Path) -> dict[str, str]:
    """Copy the rows into the report's folder, so that it is complete wherever it is opened; return their new paths.

    The folder's environment record becomes the measuring machine's, as FOLDER or else the rows themselves tell it.
    """
    paths = {}
    for name, path in found.items():
        copy = target / f"{name}{END}"
        if path.resolve() != copy.resolve():
            shutil.copyfile(path, copy)
        paths[name] = str(copy)
    write_json(target / "environment.json", _record(Path(source), list(found.values())))
    return paths


def _record(source: Path, files: list[Path]) -> dict:
    try:
        record = json.loads((source / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
        for line in (
            line for path in files for line in read_rows(path).attrs["about"] if line["kind"] == "environment"
        ):
            record.setdefault("before", line)
            if line.get("moment") == "after":
                record["after"] = line
    here = environment(import_torch=False)
    shown = {"time": here["time"], "cpu": here["cpu"]["model"], "versions": here["versions"]}
    return clean({"before": {}, "after": {}, **record, "rows_from": source.resolve().name, "shown_by": shown})
