"""Estimates with intervals from rows, and the one rule for "a difference is shown".

Every function takes rows as `lab.compare` returns them (or `lab.records.read_rows` reads them) and looks at timed rows
only: warm-up never reaches a statistic. All intervals are 95 %.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lab.errors import InputError

LEVEL = 0.95
RESAMPLES = 4999
MIN_N = 5  # with five values [min, max] holds the median with 94 %; with fewer no interval comes near 95 %
UNATTRIBUTED = 0.05  # share of a decision outside every stage from which on a warning is due
SINGLE_RUNS = "single runs"
AGAIN = " again"  # the A/A arm of "eager" is named "eager again"


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `n` values stand behind it. Too few for an interval: the bounds are NaN."""

    value: float
    low: float
    high: float
    n: int
    note: str = ""

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        bounds = f"{self.low:{spec}}, {self.high:{spec}}" if self.low == self.low else f"no interval from {self.n}"
        return f"{self.value:{spec}} [{bounds}]" + (f" ({self.note})" if self.note else "")

    def __str__(self) -> str:
        return format(self, "")


def spell(value: float, low: float, high: float, spec: str = ".2f") -> str:
    """A value with its interval in words, for figures and sentences made from tables."""
    return (
        f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"
        if low == low
        else f"{value:{spec}}, too few blocks for an interval"
    )


def median_interval(values, seed: int = 0, statistic: Callable = np.median) -> Estimate:
    """The median of `values` (any unit), or another `statistic` such as np.mean, with its bootstrap percentile interval.

    Fewer than five values get no interval: the bounds are NaN. Raises InputError for an empty sample.
    """
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        raise InputError("There are no values to take an interval of; measure at least one block first.")
    if len(values) < MIN_N:
        return Estimate(float(statistic(values)), math.nan, math.nan, len(values))
    from scipy import stats  # here, so that importing lab stays light

    interval = stats.bootstrap(
        (values,),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=max(1, 2_000_000 // len(values)),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(float(statistic(values)), float(interval.low), float(interval.high), len(values))


def share_interval(count: int, n: int) -> Estimate:
    """The share count/n with its exact binomial (Clopper-Pearson) interval."""
    if not 0 <= count <= n or n < 1:
        raise InputError(f"A share needs 0 <= count <= n and n >= 1, not {count} of {n}.")
    from scipy import stats

    interval = stats.binomtest(int(count), int(n)).proportion_ci(LEVEL, method="exact")
    return Estimate(count / n, float(interval.low), float(interval.high), int(n))


def percentiles(rows: pd.DataFrame, arm: str, stage: str = "total") -> dict[str, float]:
    """The 50th, 95th and 99th percentile of an arm's times in ms, as {"p50", "p95", "p99"}."""
    values = series(rows, arm, stage)
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


def missed_deadlines(rows: pd.DataFrame, arm: str, hz: float) -> dict:
    """How many of an arm's decisions took longer than a period at `hz` decisions a second.

    Returns {"hz", "period_ms", "missed", "of", "share"}; the share is an Estimate with an exact binomial interval.
    """
    if not (isinstance(hz, (int, float)) and math.isfinite(hz) and hz > 0):
        raise InputError(f"Decisions a second must be a number above 0, not {hz!r}.")
    values = series(rows, arm, "total")
    missed = int((values > 1000 / hz).sum())
    share = share_interval(missed, len(values))
    return {"hz": hz, "period_ms": 1000 / hz, "missed": missed, "of": len(values), "share": share}


# --- paired by block ------------------------------------------------------------------------------------------------


def paired_ratio(rows: pd.DataFrame, arm: str, base: str, stage: str = "total", seed: int = 0) -> Estimate:
    """How many times `base`'s time `arm` takes: the median of the per-block ratios, blocks resampled."""
    pair = _paired(rows, (arm, stage), (base, stage))
    return median_interval(pair["a"] / pair["b"], seed)


def paired_difference(rows: pd.DataFrame, a: tuple[str, str], b: tuple[str, str], seed: int = 0) -> Estimate:
    """`a` minus `b` in ms, each an (arm, stage): the median of the per-block differences, blocks resampled."""
    pair = _paired(rows, a, b)
    return median_interval(pair["a"] - pair["b"], seed)


def difference_shown(ratio: Estimate, again: Estimate | None) -> bool:
    """The one rule: the ratio's interval excludes 1 and lies outside the A/A arm's interval.

    Without an A/A arm, or where either interval is missing, nothing is shown.
    """
    if again is None:
        return False
    excludes_one = ratio.low > 1 or ratio.high < 1
    outside = ratio.low > again.high or ratio.high < again.low
    return excludes_one and outside


def sentence(name: str, ratio: Estimate, again: Estimate | None, base: str = "the base arm") -> str:
    """What may be said about `name` against `base`, in words."""
    if ratio.note == SINGLE_RUNS:
        return f"{name} against {base}: {ratio:.2f} times the time."
    if difference_shown(ratio, again):
        return f"{name} took {ratio:.2f} times the time of {base}."
    if again is None:
        return f"{name} against {base}: no difference shown ({ratio:.2f}; no A/A arm was measured)."
    return f"{name} against {base}: no difference shown ({ratio:.2f}; A/A {again:.2f})."


# --- two separate runs ----------------------------------------------------------------------------------------------


def unpaired_ratio(
    rows_a: pd.DataFrame, arm_a: str, rows_b: pd.DataFrame, arm_b: str, stage: str = "total", seed: int = 0
) -> Estimate:
    """How many times the time of `arm_b` in `rows_b` the `arm_a` in `rows_a` takes, where the two share no blocks.

    With three runs a side or more (column `run`), the run is the unit: the ratio of the geometric means of the runs'
    medians, with Welch's t interval on the logarithms; `n` is the smaller number of runs. With fewer, the ratio of the
    medians with a bootstrap interval over each side's rows, which knows nothing of the differences between runs:
    `note` then says "single runs".
    """
    from scipy import stats

    sides = [_select(rows_a, arm_a, stage), _select(rows_b, arm_b, stage)]
    logs = [np.log(side.groupby("run")["ms"].median().to_numpy()) for side in sides]
    runs = min(map(len, logs))
    if runs >= 3:
        interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(LEVEL)
        return Estimate(*(float(np.exp(x)) for x in (logs[0].mean() - logs[1].mean(), *interval)), runs)
    a, b = (side["ms"].to_numpy() for side in sides)
    n = min(len(a), len(b))
    value = float(np.median(a) / np.median(b))
    if n < MIN_N:
        return Estimate(value, math.nan, math.nan, n, SINGLE_RUNS)
    interval = stats.bootstrap(
        (a, b),
        lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        batch=max(1, 2_000_000 // max(len(a), len(b))),
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), n, SINGLE_RUNS)


# --- tables -------------------------------------------------------------------------------------------------------


class Table(pd.DataFrame):
    """A DataFrame that prints whole, with three significant digits."""

    @property
    def _constructor(self):
        return Table

    def __repr__(self) -> str:
        return self.to_string(index=False, float_format="{:.3g}".format, na_rep="")


def summary(rows: pd.DataFrame, base: str | None = None) -> pd.DataFrame:
    """One line per arm and stage: the median in ms with its interval, and the paired ratio to `base` with its own.

    `base` is by default the arm that has an A/A arm, else the first. Columns: title (where there are several), arm,
    pace, stage, n, median, low, high, ratio, ratio_low, ratio_high, shown (the one rule, per stage).
    """
    timed = _timed(rows)
    planned = [arm for line in rows.attrs.get("about", []) if line["kind"] == "plan" for arm in line["arms"]]
    lines = []
    for title, part in timed.groupby("title", sort=False):
        arms = [arm for arm in dict.fromkeys([*planned, *part["arm"]]) if arm in set(part["arm"])]
        here = base or next((a for a in arms if a + AGAIN in arms), arms[0])
        if here not in arms:
            raise InputError(f"There is no arm {here!r} in these rows; there are: {', '.join(arms)}.")
        for arm in arms:
            own = part[part["arm"] == arm]
            for stage in _stages_in_order(own):
                lines.append({"title": title, **_line(part, own, arm, stage, here)})
    table = Table(lines)
    return table.drop(columns="title") if table["title"].nunique() == 1 else table


def _line(part: pd.DataFrame, own: pd.DataFrame, arm: str, stage: str, base: str) -> dict:
    time = median_interval(own.loc[own["stage"] == stage, "ms"])
    stages = part[part["stage"] == stage].groupby("arm").size()
    ratio, again = Estimate(math.nan, math.nan, math.nan, 0), None
    if arm != base and base in stages:
        ratio = paired_ratio(part, arm, base, stage)
    if base + AGAIN in stages and base in stages:
        again = paired_ratio(part, base + AGAIN, base, stage)
    return {
        "arm": arm,
        "pace": own["pace"].iloc[0],
        "stage": stage,
        "n": time.n,
        "median": time.value,
        "low": time.low,
        "high": time.high,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "shown": difference_shown(ratio, again),
    }


def attribution(rows: pd.DataFrame) -> pd.DataFrame:
    """How much of each arm's decision its stages account for, one line per arm (and title).

    Columns: title, arm, stages (how many), stage_sum and total (median ms), unattributed_ms, unattributed (share of the
    total, the median over blocks), warning: a sentence where more than 5 % of the time, either way, has no stage; empty
    otherwise. Arms without stages have NaN.
    """
    lines = []
    for (title, arm), own in _timed(rows).groupby(["title", "arm"], sort=False):
        calls = own.pivot_table(index=["run", "block"], columns="stage", values="ms", aggfunc="sum")
        parts = calls.drop(columns="total")
        line = {"title": title, "arm": arm, "stages": parts.shape[1], "total": calls["total"].median(), "warning": ""}
        rest = calls["total"] - parts.sum(axis=1) if parts.shape[1] else calls["total"] * math.nan
        share = float((rest / calls["total"]).median())
        if abs(share) > UNATTRIBUTED:
            line["warning"] = f"{arm}: {share:.0%} of the decision's time is in no stage; mark what is missing."
        line |= {"stage_sum": line["total"] - rest.median(), "unattributed_ms": rest.median(), "unattributed": share}
        lines.append(line)
    columns = ["title", "arm", "stages", "stage_sum", "total", "unattributed_ms", "unattributed", "warning"]
    return pd.DataFrame(lines)[columns]


def paces(rows: pd.DataFrame) -> pd.DataFrame:
    """The same configuration back to back and in the loop, one line per configuration measured both ways.

    Columns: arm (its back-to-back name), back_to_back and in_loop (median ms), ratio, ratio_low, ratio_high (in the
    loop over back to back, paired). Configurations are matched by what the arms say about themselves.
    """
    timed = _timed(rows)
    timed = timed[~timed["again"].astype(bool)]
    configuration = timed["describe"].map(lambda d: json.dumps(d, sort_keys=True))
    lines = []
    for _, own in timed.groupby([timed["title"], configuration], sort=False):
        names = {pace: part["arm"].iloc[0] for pace, part in own.groupby("pace")}
        if {"back_to_back", "in_loop"} <= set(names):
            ratio = paired_ratio(own, names["in_loop"], names["back_to_back"])
            medians = {pace: series(own, name, "total").median() for pace, name in names.items()}
            lines.append(
                {"arm": names["back_to_back"], "back_to_back": medians["back_to_back"], "in_loop": medians["in_loop"]}
                | {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high}
            )
    return pd.DataFrame(lines, columns=["arm", "back_to_back", "in_loop", "ratio", "ratio_low", "ratio_high"])


def start_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """What each arm spent before its first decision, one line per arm: the keys of its `start_cost()` as columns."""
    about = [line for line in rows.attrs.get("about", []) if line["kind"] == "start_cost"]
    return pd.DataFrame([{"title": line["title"], "arm": line["arm"], **line["cost"]} for line in about])


def notes(rows: pd.DataFrame) -> list[str]:
    """What must be said beside these rows: cut budgets, interruptions, a loaded machine, torn lines."""
    return [line["text"] for line in rows.attrs.get("about", []) if line["kind"] == "note"]


# --- selecting --------------------------------------------------------------------------------------------------------


def _timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The timed rows of whole blocks, without attrs (pandas copies them at every step)."""
    missing = {"arm", "block", "phase", "stage", "ms"} - set(rows.columns)
    if missing:
        raise InputError(f"These are not timing rows: column(s) {', '.join(sorted(missing))} missing.")
    timed = rows[rows["phase"] == "timed"].copy()
    timed.attrs = {}
    for column, default in {"run": "", "title": "", "pace": "back_to_back", "again": False}.items():
        if column not in timed:
            timed[column] = default
        timed[column] = timed[column].fillna(default)
    if timed.empty:
        raise InputError("These rows hold no timed block, only warm-up; measure at least one block.")
    # a block cut short by a stop would weigh on some arms only
    key = ["run", "title"]
    arms = timed.groupby(key)["arm"].transform("nunique")
    return timed[timed.groupby([*key, "block"])["arm"].transform("nunique") == arms]


def _select(rows: pd.DataFrame, arm: str, stage: str) -> pd.DataFrame:
    timed = _timed(rows)
    own = timed[timed["arm"] == arm]
    if own.empty:
        raise InputError(f"There is no arm {arm!r} in these rows; there are: {', '.join(dict.fromkeys(timed['arm']))}.")
    part = own[own["stage"] == stage]
    if part.empty:
        raise InputError(f"Arm {arm!r} has no stage {stage!r}; it has: {', '.join(dict.fromkeys(own['stage']))}.")
    return part


def series(rows: pd.DataFrame, arm: str, stage: str = "total") -> pd.Series:
    """An arm's timed values in ms, by run, title and block (whole blocks only)."""
    series = _select(rows, arm, stage).set_index(["run", "title", "block"])["ms"]
    if series.index.has_duplicates:
        raise InputError("These rows hold several comparisons of the same title and run; take one of them.")
    return series


def _paired(rows: pd.DataFrame, a: tuple[str, str], b: tuple[str, str]) -> pd.DataFrame:
    pair = pd.concat({"a": series(rows, *a), "b": series(rows, *b)}, axis=1, join="inner")
    if pair.empty:
        raise InputError(f"{a[0]!r} and {b[0]!r} share no block, so they cannot be paired; use unpaired_ratio.")
    return pair


def _stages_in_order(own: pd.DataFrame) -> list[str]:
    stages = list(dict.fromkeys(own["stage"]))
    return [s for s in stages if s != "total"] + ["total"] * ("total" in stages)
