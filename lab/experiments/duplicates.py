"""Notebook 05: how often the next frame repeats the one before it, under the published protocol.

A random policy plays; every frame that a decision brings is compared with the frame before it, byte for byte. Rows are
one per compared pair, so that both rules for episode borders can be read from the same rows: the published figures
count Doom's pair of a new episode's first frame with the last one seen; everywhere else such pairs are left out.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.envs import POLICIES, Env, Policy, make, play, recorded_frames
from lab.errors import InputError
from lab.published import published
from lab.records import RowWriter, as_frame
from lab.stats import share_interval

PROFILES = {
    "smoke": {"sources": ["atari:Breakout", "doom:basic"], "atari": 300, "doom": 200, "seeds": 1},
    "standard": {"sources": None, "atari": 2000, "doom": 1000, "seeds": 1},  # None: all that figures are published for
    "full": {"sources": None, "atari": 2000, "doom": 1000, "seeds": 5},
}
PUBLISHED_POLICY = {"atari": "one_hot", "doom": "per_button"}


def run(profile: str = "standard", *, out: Path | str | None = None, seed: int = 0) -> pd.DataFrame:
    """Play every source of the profile with the published policy and return all rows, one per compared pair.

    Rows hold `source`, `policy`, `seed`, `decision` (from 1), `opens` (the pair spans a reset), `identical`, `changed`
    (share of pixels of which any channel differs) and `frame` (a fingerprint of the new frame). They are appended to
    `out` as they are taken. InputError for an unknown profile, source or seed, before anything is played.
    """
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = PROFILES[profile]
    sources = settings["sources"] or list(published("duplicates").source)
    for source in sources:
        with closing(make(source, seed)):
            pass  # a missing emulator or file is told before the first minute is spent
    lines: list[dict[str, Any]] = []
    with RowWriter(out) if out is not None else nullcontext() as writer:
        for source in sources:
            kind = source.split(":")[0]
            for each in range(seed, seed + settings["seeds"]):
                arm = [
                    writer.append(line) if writer else line
                    for line in _lines(source, settings[kind], each, PUBLISHED_POLICY[kind])
                ]
                same = sum(line.get("identical", False) for line in arm)
                print(f"{source}, seed {each}: {same} of {settings[kind]} frames repeat", file=sys.stderr, flush=True)
                lines += arm
    return as_frame(lines)


def one(
    source: str, steps: int = 2000, seed: int = 0, policy: str = "one_hot", published_resets: bool = False
) -> dict[str, float]:
    """Play one source and return {"identical", "median_changed"}: both are shares, rounded as published, to 5 decimals.

    `identical` is the share of compared frames equal to the one before; `median_changed` the median share of changed
    pixels over all compared pairs, identical ones included. `published_resets` counts Doom's pairs across a reset.
    InputError for an unknown source, policy or seed, fewer than two steps, and per_button outside Doom.
    """
    rows = as_frame(list(_lines(source, steps, seed, policy)))
    found = summary(rows, published_resets).iloc[0]
    return {"identical": round(float(found.identical), 5), "median_changed": round(float(found.median_changed), 5)}


def _start(source: str, steps: int, seed: int, policy: str) -> tuple[Env, Policy]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise InputError(f"{steps!r} steps were asked for; give at least 2, to have frames to compare.")
    if policy not in POLICIES:
        raise InputError(f"Unknown policy {policy!r}; choose one of {', '.join(POLICIES)}.")
    env = make(source, seed)
    try:
        return env, POLICIES[policy](env, seed)
    except InputError:
        env.close()
        raise


def _lines(source: str, steps: int, seed: int, policy: str) -> Iterator[dict[str, Any]]:
    """The rows of one arm as they are played, after a line that tells how the environment is set."""
    env, act = _start(source, steps, seed, policy)
    with closing(env):
        yield {"about": {"kind": "frames", "policy": policy, "seed": seed, **env.describe()}}
        # Atari shows an episode's last frame and then, with no decision in between, the next one's first: that pair is
        # no decision's doing. Doom shows no last frame: the decision that ends an episode brings the next one's first.
        counted = (pair for pair in _pairs(play(env, act)) if not (pair["opens"] and env.terminal_frame))
        for decision, pair in enumerate(islice(counted, steps), start=1):
            yield {"source": source, "policy": policy, "seed": seed, "decision": decision, **pair}


def _pairs(frames: Iterator[tuple[np.ndarray, bool]]) -> Iterator[dict[str, Any]]:
    """Compare each of the (frame, opens) with the one before: dicts of opens, identical, changed, frame."""
    previous, _ = next(frames)
    for frame, opens in frames:
        changed = changed_pixels(previous, frame)
        yield {
            "opens": opens,
            "identical": not changed.any(),
            "changed": float(changed.mean()),
            "frame": hashlib.blake2b(frame.tobytes(), digest_size=8).hexdigest(),
        }
        previous = frame


def changed_pixels(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where any channel differs between two frames [H, W, 3]: bool [H, W]."""
    return (before != after).any(axis=-1)


# ------------------------------------------------------------------------------------------------ rows -> results


def summary(rows: pd.DataFrame, published_resets: bool = False) -> pd.DataFrame:
    """One line per source, policy and seed: how many pairs were compared and what share of them is identical.

    `identical`, `low`, `high`: the share with its exact binomial 95 % interval, which takes pairs for independent.
    `median_changed`: over all pairs; `median_changed_otherwise`: over those that are not identical. `resets`: pairs that
    span a reset, left out unless `published_resets`.
    """
    if missing := {"source", "policy", "seed", "opens", "identical", "changed"} - set(rows.columns):
        raise InputError(
            f"These rows lack {', '.join(sorted(missing))}; give rows that 05_duplicate_frames has written."
        )
    lines = []
    for (source, policy, seed), part in rows.groupby(["source", "policy", "seed"], sort=False):
        kept = part if published_resets else part[~part.opens.astype(bool)]
        same = kept.identical.astype(bool)
        share = share_interval(int(same.sum()), len(kept))
        lines.append(
            {
                "source": source,
                "policy": policy,
                "seed": int(seed),
                "decisions": len(part),
                "resets": int(part.opens.sum()),
                "compared": len(kept),
                "identical": share.value,
                "low": share.low,
                "high": share.high,
                "median_changed": float(kept.changed.median()),
                "median_changed_otherwise": float(kept.changed[~same].median()),
            }
        )
    return pd.DataFrame(lines)


def comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured beside published, one line per source and seed, with the published rule for resets.

    `same` says whether a line with the published seed and count of decisions has the published figures, digit for digit
    (None where it has another seed or count, and where nothing is published).
    """
    measured = summary(rows, published_resets=True)
    known = published("duplicates").rename(
        columns={"identical": "published_identical", "median_changed": "published_median_changed"}
    )
    table = measured.merge(known, on=["source", "policy", "decisions", "seed"], how="left")
    equal = (table.identical.round(5) == table.published_identical) & (
        table.median_changed.round(5) == table.published_median_changed
    )
    table["same"] = equal.astype(object).where(table.published_identical.notna(), None)
    table["identical_without_resets"] = summary(rows).identical
    return table


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """What `comparison` returns as a table to read: per source (and seed, where there are several), in per cent."""

    def percent(shares: pd.Series, digits: int = 2) -> list[str]:
        return ["" if pd.isna(share) else f"{100 * share:.{digits}f}" for share in shares]

    same, changed = "equal to the one before (%)", "changed pixels (%)"
    columns = {
        (same, "here"): percent(table.identical),
        (same, "interval"): [f"{a}-{b}" for a, b in zip(percent(table.low, 1), percent(table.high, 1), strict=True)],
        (same, "published"): percent(table.published_identical),
        (same, "no resets"): percent(table.identical_without_resets),
        (changed, "here"): percent(table.median_changed, 3),
        (changed, "published"): percent(table.published_median_changed, 3),
        ("", "same"): [{None: "", True: "yes", False: "no"}[agrees] for agrees in table.same],
    }
    names = ["source", "seed"] if table.seed.nunique() > 1 else ["source"]
    return pd.DataFrame(columns).set_index([table[name] for name in names])


def answer(table: pd.DataFrame) -> str:
    """The notebook's answer, computed from what `comparison` returns."""
    said = []
    for kind in ("atari", "doom"):
        part = table[table.source.str.startswith(kind)]
        if len(part):
            said.append(
                f"Under random play {_span(part.identical)} of {kind.capitalize()}'s frames repeat the one before, and a "
                f"typical frame changes {_span(part.median_changed)} of its pixels."
            )
    checked = table[table.same.notna()]
    if len(checked):
        said.append(f"{int(checked.same.sum())} of {len(checked)} published rates are met to the last digit.")
    else:
        said.append("Nothing is published for these seeds and counts of decisions.")
    return " ".join(said)


def _span(shares: pd.Series) -> str:
    low, high = f"{shares.min():.1%}", f"{shares.max():.1%}"
    return low if low == high else f"{low} to {high}"


def results(table: pd.DataFrame) -> dict[str, Any]:
    """What the notebook saves of what `comparison` returns: the answer, and the rates with their intervals."""
    rates = [
        {
            "source": line.source,
            "seed": line.seed,
            "identical": share_interval(round(line.identical * line.compared), line.compared),
            "median_changed": line.median_changed,
            "identical_without_resets": line.identical_without_resets,
            "same_as_published": line.same,
        }
        for line in table.itertuples()
    ]
    return {"answer": answer(table), "rates": rates}


def example_pairs(sources: tuple[str, ...] = ("atari:Pong", "doom:deadly_corridor")) -> list[dict[str, Any]]:
    """Two pairs of each source's shipped recording, the one with the fewest changed pixels and the one with the median.

    Each is a dict of `title`, `before`, `after` (uint8 [H, W, 3]) and `changed` (bool [H, W]).
    """
    found = []
    for source in sources:
        frames = recorded_frames(source)
        shares = [changed_pixels(*pair).mean() for pair in zip(frames, frames[1:], strict=False)]
        order = np.argsort(shares, kind="stable")
        for first in (order[0], order[len(order) // 2]):
            before, after = frames[first], frames[first + 1]
            changed = changed_pixels(before, after)
            title = f"{source.partition(':')[2]}, frames {first} and {first + 1}"
            found.append({"title": title, "before": before, "after": after, "changed": changed})
    return found
