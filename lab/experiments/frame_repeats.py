"""From rows of scanned games to rates: how often frames come back, how soon, what a cache would have had of them.

Counted are the frames that a decision brought within an episode. The frame that opens an episode comes from a reset and
is left out of every share, but it is remembered: later frames may repeat it. Intervals (95 %) resample seeds, then blocks
of 100 decisions, because neighbouring frames are not independent; where nothing or everything repeats, resampling would
show no spread at all, and the exact binomial bound is given instead.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from lab.errors import InputError
from lab.experiments.frame_scan import BLOCK
from lab.stats import MIN_N, Estimate, median_interval, share_interval, spell

CACHES = (1, 2, 8, 64)  # frames that a cache of features keeps
LAGS = tuple(2**i for i in range(11))
RESAMPLES = 999
NEEDED = {"source", "policy", "seed", "steps", "pixels", "changed", "lag", "opens", "shows_last"}


def scanned(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of scanned games among `rows`, each cell's first, in a fixed order; InputError where there are none."""
    if missing := NEEDED - set(rows.columns):
        raise InputError(
            f"These rows lack {', '.join(sorted(missing))}; give rows that 05_duplicate_frames or `lab duplicates` wrote."
        )
    kept = rows[rows["changed"].map(lambda value: isinstance(value, list))]
    kept = kept.drop_duplicates(["source", "policy", "seed", "steps"])
    return kept.sort_values(["policy", "source", "seed"], kind="stable")  # files hold them as they finished


def _plays(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each seed of a player and game the longest play alone: a shorter one is its beginning."""
    by = ["policy", "source", "seed"]
    return scanned(rows).sort_values([*by, "steps"], kind="stable").drop_duplicates(by, keep="last")


def counted(row, published_resets: bool = False) -> np.ndarray:
    """Which frames of a scanned game (a row) count: places int64 [n], the first frame never among them.

    `published_resets` counts openings too where the emulator shows no last frame (Doom): so the published figures do.
    """
    keep = np.ones(len(row.changed), bool)
    keep[0] = False
    if not (published_resets and not row.shows_last):
        keep[list(row.opens)] = False
    return np.flatnonzero(keep)


def reuse_distance(lag: Sequence[int], most: int = max(CACHES)) -> np.ndarray:
    """How many different frames were seen since each frame was seen last, itself included, int64 [n].

    A cache of k frames, the least recently used one making room, finds a frame where that is at most k. 0: seen never
    before, or more than `most` different frames ago.
    """
    names: list[int] = []
    recent: list[int] = []
    found = np.zeros(len(lag), np.int64)
    for place, ago in enumerate(lag):
        name = names[place - ago] if ago else place
        names.append(name)
        if ago and name in recent:
            found[place] = recent.index(name) + 1
            recent.remove(name)
        recent.insert(0, name)
        del recent[most:]
    return found


# --- intervals --------------------------------------------------------------------------------------------------------


class Blocks:
    """Values of several seeds in blocks of 100, and how often each block is taken in each of 999 resamplings."""

    def __init__(self, per_seed: list[np.ndarray], seed: int = 0):
        self.parts = [
            part for values in per_seed for part in np.array_split(values, max(1, round(len(values) / BLOCK)))
        ]
        self.counts = np.array([len(part) for part in self.parts])
        sizes = [max(1, round(len(values) / BLOCK)) for values in per_seed]
        rng = np.random.default_rng(seed)
        seeds = rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=RESAMPLES)
        drawn = [rng.multinomial(seeds[:, i] * n, np.full(n, 1 / n)) for i, n in enumerate(sizes)]
        self.taken = np.concatenate(drawn, axis=1).astype(float)

    @property
    def enough(self) -> bool:
        return len(self.parts) >= MIN_N

    def share(self, hit: Callable[[np.ndarray], np.ndarray]) -> Estimate:
        """The share of values of which `hit` (an array of truths from an array of values) is true."""
        hits = np.array([np.count_nonzero(hit(part)) for part in self.parts])
        n, total = int(self.counts.sum()), int(hits.sum())
        if total in (0, n):
            return share_interval(total, n)
        if not self.enough:
            return Estimate(total / n, math.nan, math.nan, n)
        low, high = np.quantile((self.taken @ hits) / (self.taken @ self.counts), [0.025, 0.975])
        return Estimate(total / n, float(low), float(high), n)

    def median(self, keep: Callable[[np.ndarray], np.ndarray] | None = None) -> Estimate:
        """The median of the values, or of those that `keep` is true of; NaN where there are none."""
        values = np.concatenate(self.parts)
        block = np.repeat(np.arange(len(self.parts)), self.counts)
        if keep is not None:
            block, values = block[keep(values)], values[keep(values)]
        if not len(values):
            return Estimate(math.nan, math.nan, math.nan, 0)
        if not self.enough:
            return Estimate(float(np.median(values)), math.nan, math.nan, len(values))
        levels, level = np.unique(values, return_inverse=True)
        held = np.zeros((len(self.parts), len(levels)))
        np.add.at(held, (block, level), 1)
        weight = (self.taken @ held).cumsum(axis=1)
        weight = weight[weight[:, -1] > 0]  # resamplings that met none of them have no median
        middle = (weight < weight[:, -1:] / 2).sum(axis=1)
        low, high = np.quantile(levels[middle], [0.025, 0.975], method="nearest")
        return Estimate(float(np.median(values)), float(low), float(high), len(values))


# --- tables -----------------------------------------------------------------------------------------------------------


def summary(rows: pd.DataFrame, published_resets: bool = False) -> pd.DataFrame:
    """One line per source and policy, over its seeds; estimates are columns `name`, `name_low`, `name_high`.

    `seeds`, `decisions`, `resets`, `compared`; the shares `identical` (to the frame before) and `any_lag` (to any earlier
    one); `median_changed`, the median share of changed pixels, and `median_changed_otherwise`, of the pairs that are not
    identical; `cache_1` ... `cache_64`, hit rates; `steps_per_s` of the scan, `emulator_steps_per_s` of the bare emulator
    and `pace`, the one over the other (the median of the blocks that both played).
    """
    lines = []
    for (source, policy), part in _plays(rows).groupby(["source", "policy"], sort=False):
        kept = [(row, counted(row, published_resets)) for row in part.itertuples()]
        changed = Blocks([np.array(row.changed)[places] / row.pixels for row, places in kept])
        lag = Blocks([np.array(row.lag)[places] for row, places in kept])
        distance = Blocks([reuse_distance(row.lag)[places] for row, places in kept])
        line = {
            "source": source,
            "policy": policy,
            "seeds": len(part),
            "decisions": int(part.steps.sum()),
            "resets": sum(len(row.opens) - 1 for row, _ in kept),
            "compared": sum(len(places) for _, places in kept),
        }
        estimates = {
            "identical": changed.share(lambda values: values == 0),
            "any_lag": lag.share(lambda values: values > 0),
            "median_changed": changed.median(),
            "median_changed_otherwise": changed.median(lambda values: values > 0),
        }
        estimates |= {f"cache_{k}": distance.share(lambda v, k=k: (v > 0) & (v <= k)) for k in CACHES}
        for name, found in estimates.items():
            line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        lines.append(line | rates(part))
    return pd.DataFrame(lines)


def rates(part: pd.DataFrame) -> dict[str, float]:
    """Decisions a second of the scan and of the bare emulator, and the one over the other, over several rows."""
    blocks = np.array([block for row in part["blocks"] if isinstance(row, list) for block in row]).reshape(-1, 3)
    pace = median_interval(blocks[:, 2] / blocks[:, 1]) if len(blocks) else Estimate(math.nan, math.nan, math.nan, 0)
    return {
        "steps_per_s": float(part["steps"].sum() / part["scan_s"].sum()),
        "emulator_steps_per_s": float(blocks[:, 0].sum() / blocks[:, 2].sum()) if len(blocks) else math.nan,
        "pace": pace.value,
        "pace_low": pace.low,
        "pace_high": pace.high,
    }


def recurrence(rows: pd.DataFrame, lags: Sequence[int] = LAGS) -> pd.DataFrame:
    """The share of frames that were seen at most so many frames ago: source, policy, lag, share, over all seeds."""
    lines = []
    for (source, policy), part in _plays(rows).groupby(["source", "policy"], sort=False):
        ago = np.concatenate([np.array(row.lag)[counted(row)] for row in part.itertuples()])
        for most in lags:
            share = np.count_nonzero((ago > 0) & (ago <= most)) / len(ago)
            lines.append({"source": source, "policy": policy, "lag": most, "share": share})
    return pd.DataFrame(lines)


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Every counted pair's share of changed pixels, for distributions: source, policy, changed."""
    parts = []
    for row in _plays(rows).itertuples():
        share = np.array(row.changed)[counted(row)] / row.pixels
        parts.append(pd.DataFrame({"source": row.source, "policy": row.policy, "changed": share}))
    return pd.concat(parts, ignore_index=True)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """What `summary` returns as a table to read, in per cent; games that repeat most come first."""

    def percent(name: str) -> list[str]:
        return [percent_text(*line) for line in table[[name, f"{name}_low", f"{name}_high"]].to_numpy()]

    shown = pd.DataFrame(
        {
            "source": table.source,
            "policy": table.policy,
            "seeds": table.seeds,
            "equal to the one before": percent("identical"),
            "to any earlier": percent("any_lag"),
            "changed pixels, median": percent("median_changed"),
            "of the changed": percent("median_changed_otherwise"),
            **{f"cache of {k}": [f"{100 * share:.3g} %" for share in table[f"cache_{k}"]] for k in CACHES[1:]},
            "steps/s": [f"{rate:.0f}" for rate in table.steps_per_s],
            "of the emulator's": ["" if np.isnan(rate) else f"{rate:.2f}" for rate in table.pace],
        }
    )
    return shown.loc[table.sort_values(["identical", "any_lag"], ascending=False).index].reset_index(drop=True)


def intervals(table: pd.DataFrame, percent: Sequence[str] = (), plain: Sequence[str] = ()) -> pd.DataFrame:
    """`table` with the columns `name`, `name_low`, `name_high` as one text each, shares in `percent` in per cent."""
    shown = table.copy()
    for name in (*percent, *plain):
        found = table[[c for c in (name, f"{name}_low", f"{name}_high") if c in table]].to_numpy(float)
        shown[name] = [percent_text(*line) if name in percent else spell(*line) for line in found]
    return shown.drop(
        columns=[f"{name}_{end}" for name in (*percent, *plain) for end in ("low", "high")], errors="ignore"
    )


def percent_text(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A share as text in per cent, with its interval where it has one."""
    if np.isnan(value):
        return ""
    return f"{100 * value:.3g}" + ("" if np.isnan(low) else f" [{100 * low:.3g}, {100 * high:.3g}]") + " %"
