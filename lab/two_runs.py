"""`lab compare A B`: two runs beside each other, from another machine, dtype, commit, or with other libraries.

The two share no blocks, so each arm is compared unpaired (`lab.stats.unpaired_ratio`). A difference is shown by the one
rule, with what both runs' A/A arms say about noise. Only like is compared: where the workload differs (the question's
tokens, frames, batch, model or picture size) that part is refused, and said.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab import stats
from lab.errors import InputError
from lab.records import clean, join_rows, read_rows

# What makes a workload: columns of the rows, and of what their arms say of themselves.
WORKLOAD = ("workload", "question", "source", "preset", "model", "frames", "batch", "tokens", "image_size", "pace")
# What moves from minute to minute on one machine, and is no difference between two.
MOMENTARY = ("time", "seed", "load", "memory available", "memory this_process", "cpu mhz current")
MOMENTARY_GPU = (
    "memory.used",
    "clocks.sm",
    "clocks.mem",
    "temperature",
    "power.draw",
    "utilization",
    "throttle",
    "uuid",
)
DTYPES = (", fp32", ", bf16")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: rows of each notebook or bench by its name, the environment as a flat table."""

    path: Path
    rows: dict[str, pd.DataFrame]
    environment: dict[str, str]

    @property
    def runs(self) -> int:
        return max((rows["run"].nunique() for rows in self.rows.values()), default=0)


@dataclass(frozen=True)
class Comparison:
    """`table`: a line per notebook, comparison and arm that both sides have; `refused`, `missing`: what was left out and
    why; `settings`: what the arms say of themselves that differs; `environment`: fields that differ, by name."""

    table: pd.DataFrame
    refused: list[str]
    missing: list[str]
    settings: dict[str, tuple[str, str]]
    environment: dict[str, tuple[str, str]]
    runs: tuple[int, int]

    @property
    def sentence(self) -> str:
        shown = self.table[self.table["shown"]]
        slower = int((shown["ratio"] > 1).sum())
        parts = [f"{slower} slower"] * bool(slower) + [f"{len(shown) - slower} faster"] * (slower < len(shown))
        said = (
            f"B differs from A in {len(shown)} of {len(self.table)} arms ({', '.join(parts)})"
            if len(shown)
            else f"No difference shown in any of {len(self.table)} arms"
        )
        if min(self.runs) >= 3:
            return f"{said}; {self.runs[0]} and {self.runs[1]} runs."
        return f"{said}; {stats.SINGLE_RUNS}, so what differs may be the hour as well as the machine or the code."

    def text(self) -> str:
        """The whole comparison for a terminal."""
        lines = [repr(stats.Table(self.table.drop(columns=["sentence"]))), ""]
        lines += [*self.table["sentence"], ""]
        lines += [f"not compared: {line}" for line in [*self.refused, *self.missing]]
        for what, found in (("settings", self.settings), ("environment", self.environment)):
            lines += [f"{what} that differ:" if found else f"{what}: no field differs"]
            lines += [f"  {name}: {a} | {b}" for name, (a, b) in found.items()]
        return "\n".join([*lines, self.sentence])

    def to_json(self) -> dict:
        return clean(
            {
                "arms": self.table,
                "refused": self.refused,
                "missing": self.missing,
                "settings": self.settings,
                "environment": self.environment,
                "runs": self.runs,
                "verdict": self.sentence,
            }
        )


def compare_runs(a: Path | str, b: Path | str, stage: str = "total") -> Comparison:
    """Compare two sides, each a rows file, a run's folder, or a folder of several runs' folders.

    `ratio` is how many times A's time B takes. Raises InputError where a side holds no timed rows, both are the same, or
    nothing that both hold has the same workload.
    """
    if Path(a).resolve() == Path(b).resolve():
        raise InputError(f"{a} would be compared with itself; give two runs.")
    one, two = read_side(a), read_side(b)
    _same_names(one, two)
    lines, refused, missing, settings = [], [], [], {}
    for name in sorted(set(one.rows) | set(two.rows)):
        if name not in one.rows or name not in two.rows:
            missing.append(f"{name}: only in {'A' if name in one.rows else 'B'}")
            continue
        pairs, lonely = _pairs(one.rows[name], two.rows[name])
        missing += [f"{name}, {title or 'no title'}: only in {side}" for title, side in lonely]
        for title, left, right in pairs:
            where = ", ".join(filter(None, (name, title)))
            if odd := _unlike(left, right):
                refused.append(f"{where}: another workload, {odd}")
                continue
            settings |= _settings(where, left, right)
            lines += _lines(name, title, left, right, stage)
            here, there = (dict.fromkeys(part["arm"]) for part in (left, right))
            missing += [f"{where}, {arm}: only in A" for arm in here if arm not in there]
            missing += [f"{where}, {arm}: only in B" for arm in there if arm not in here]
    if not lines:
        why = "; ".join([*refused, *missing][:3]) or "they share no notebook"
        raise InputError(f"{a} and {b} cannot be compared: {why}. Give two runs of one profile and workload.")
    return Comparison(
        pd.DataFrame(lines),
        refused,
        missing,
        settings,
        differing(one.environment, two.environment),
        (one.runs, two.runs),
    )


# ------------------------------------------------------------------------------------------------ reading a side


def read_side(path: Path | str) -> Side:
    """Read one side (see `compare_runs`). Rows of each run are told apart by the folder or file they came from."""
    path = Path(path)
    if path.is_file():
        folders = {path.parent: [path]}
    elif path.is_dir():
        runs = [path, *sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("earlier-"))]
        folders = {run: sorted(p for p in run.glob("*.rows.jsonl")) for run in runs}
        folders = {run: files for run, files in folders.items() if files}
    else:
        raise InputError(f"There is no run {path}; give a folder that `lab run` wrote, or a .rows.jsonl file.")
    found: dict[str, list[pd.DataFrame]] = {}
    environment = {}
    for folder, files in folders.items():
        for file in files:
            rows = read_rows(file)
            environment = environment or _environment(folder, rows)
            timed = _timing(rows)
            if len(timed):
                timed["run"] = [f"{folder.name}/{run}" for run in timed["run"]]
                timed.attrs = rows.attrs
                found.setdefault(file.name.removesuffix(".rows.jsonl"), []).append(timed)
    if not found:
        raise InputError(f"{path} holds no timed rows; give a folder that `lab run` wrote, or a .rows.jsonl file.")
    return Side(path, {name: join_rows(tables) for name, tables in found.items()}, environment)


def _timing(rows: pd.DataFrame) -> pd.DataFrame:
    """Those rows that are times of arms, with every column that `lab.stats` and this module look at."""
    if not {"arm", "block", "phase", "stage", "ms"} <= set(rows):
        return pd.DataFrame()
    kept = rows[rows["arm"].notna() & rows["ms"].notna() & (rows["phase"] == "timed")].copy()
    for column, default in {"run": "", "title": "", "again": False, "pace": "back_to_back"}.items():
        kept[column] = kept[column].fillna(default) if column in kept else default
    kept["describe"] = kept["describe"].map(lambda d: d if isinstance(d, dict) else {}) if "describe" in kept else None
    kept["describe"] = [said or {} for said in kept["describe"]]
    return kept


def _environment(folder: Path, rows: pd.DataFrame) -> dict[str, str]:
    try:
        record = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["before"]
    except (OSError, ValueError, KeyError, TypeError):
        record = next((line for line in rows.attrs["about"] if line["kind"] == "environment"), {})
    return _flat({name: value for name, value in record.items() if name not in ("kind", "moment", "run", "title")})


def _flat(value, name: str = "") -> dict[str, str]:
    """A nested record as one table: {"cpu": {"model": "x"}} -> {"cpu model": "x"}."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    table = {}
    for key, item in items:
        full = f"{name} {key}".strip()
        if isinstance(item, dict) or (isinstance(item, list) and item and isinstance(item[0], dict)):
            table |= _flat(item, full)
        elif item not in (None, [], ""):
            table[full] = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
    return table


def differing(a: dict[str, str], b: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Fields of two flat environments that differ, by name; what moves from minute to minute is left out."""
    names = [name for name in dict.fromkeys([*a, *b]) if name not in MOMENTARY]
    names = [n for n in names if not (n.startswith("gpus ") and any(word in n for word in MOMENTARY_GPU))]
    pairs = {name: (a.get(name, "none"), b.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ------------------------------------------------------------------------------------------------ like with like


def _same_names(one: Side, two: Side) -> None:
    """Two single files are meant for each other, whatever they are called."""
    if len(one.rows) == len(two.rows) == 1 and one.path.is_file() and two.path.is_file():
        two.rows[next(iter(one.rows))] = two.rows.pop(next(iter(two.rows)))


def _pairs(a: pd.DataFrame, b: pd.DataFrame) -> tuple[list[tuple], list[tuple[str, str]]]:
    """Comparisons by title: those of both sides, and those of one alone. A title that differs only in its dtype pairs up
    with the other's where each side has one such, so that fp32 can be compared with bf16."""
    left, right = (dict(tuple(side.groupby("title", sort=False))) for side in (a, b))
    pairs = [(title, left.pop(title), right.pop(title)) for title in list(left) if title in right]
    bare_left, bare_right = (_by(map(_bare, side), side) for side in (left, right))
    for bare, titles in bare_left.items():
        if len(titles) == 1 and len(bare_right.get(bare, ())) == 1:
            pairs.append((bare, left.pop(titles[0]), right.pop(bare_right[bare][0])))
    return pairs, [(title, "A") for title in left] + [(title, "B") for title in right]


def _bare(title: str) -> str:
    for word in DTYPES:
        title = title.replace(word, "")
    return title


def _by(keys: Iterable[str], values: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return found


def _said(part: pd.DataFrame, arm: str) -> dict:
    """What an arm says of itself, with the constant columns of its rows."""
    first = part[part["arm"] == arm].iloc[0]
    columns = {name: first[name] for name in WORKLOAD if name in part and not _missing(first[name])}
    return {**first["describe"], **columns}


def _missing(value) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _arms(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    there = set(b["arm"])
    arms = [arm for arm in dict.fromkeys(a["arm"]) if arm in there]
    return [arm for arm in arms if not (arm.endswith(stats.AGAIN) and arm.removesuffix(stats.AGAIN) in arms)]


def _unlike(a: pd.DataFrame, b: pd.DataFrame) -> str:
    """How the workload of arms with the same name differs, in words; empty where it does not."""
    for arm in _arms(a, b):
        one, two = _said(a, arm), _said(b, arm)
        for name in WORKLOAD:
            if name in one and name in two and one[name] != two[name]:
                return f"{name} is {one[name]} in A and {two[name]} in B (arm {arm})"
    return ""


def _settings(where: str, a: pd.DataFrame, b: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Fields of the arms' descriptions that differ. A field that differs alike in all arms of a comparison stands once."""
    found: dict[tuple, list[str]] = {}
    arms = _arms(a, b)
    for arm in arms:
        one, two = ({k: str(v) for k, v in _said(side, arm).items() if k not in WORKLOAD} for side in (a, b))
        for name, pair in differing(one, two).items():
            found.setdefault((name, pair), []).append(arm)
    return {
        f"{where}{'' if len(those) == len(arms) else ' (' + ', '.join(those) + ')'}, {name}": pair
        for (name, pair), those in found.items()
    }


def _lines(name: str, title: str, a: pd.DataFrame, b: pd.DataFrame, stage: str) -> list[dict]:
    again = _again(a, b, stage)
    lines = []
    for arm in _arms(a, b):
        if not all(((side["arm"] == arm) & (side["stage"] == stage)).any() for side in (a, b)):
            continue
        ratio = stats.unpaired_ratio(b, arm, a, arm, stage)
        shown = stats.difference_shown(ratio, again)
        where = ", ".join(filter(None, (name, title, arm)))
        line = {"notebook": name, "title": title, "arm": arm, "A (ms)": _median(a, arm, stage)}
        line |= {"B (ms)": _median(b, arm, stage), "ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        lines.append(line | {"shown": shown, "sentence": _sentence(where, ratio, again, shown)})
    return lines


def _median(part: pd.DataFrame, arm: str, stage: str) -> float:
    return float(part.loc[(part["arm"] == arm) & (part["stage"] == stage), "ms"].median())


def _again(a: pd.DataFrame, b: pd.DataFrame, stage: str) -> stats.Estimate | None:
    """How far equal arms lie apart within one run: the span of both sides' A/A intervals; None without an A/A arm."""
    found = []
    for part in (a, b):
        base = next((arm for arm in dict.fromkeys(part["arm"]) if arm + stats.AGAIN in set(part["arm"])), None)
        if base is not None and (part["stage"] == stage).any():
            found.append(stats.paired_ratio(part, base + stats.AGAIN, base, stage))
    if not found:
        return None
    low, high = min(one.low for one in found), max(one.high for one in found)
    if any(math.isnan(one.low) for one in found):
        low = high = math.nan
    return stats.Estimate(found[0].value, low, high, min(one.n for one in found))


def _sentence(where: str, ratio: stats.Estimate, again: stats.Estimate | None, shown: bool) -> str:
    note = f", {stats.SINGLE_RUNS}" if ratio.note else ""
    found = stats.spell(ratio.value, ratio.low, ratio.high)
    if shown:
        return f"{where}: B took {found} times the time of A{note}."
    why = "no A/A arm was measured" if again is None else f"A/A {stats.spell(again.value, again.low, again.high)}"
    return f"{where}: no difference shown ({found}; {why}{note})."
