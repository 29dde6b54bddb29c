"""Notebook 05: how often a frame repeats an earlier one, over every game there is, several players and seeds.

The work is cells (game, player, seed), each scanned on its own (`lab.experiments.frame_scan`), on as many processors or
machines as there are (`lab.cells`); rates and intervals are in `lab.experiments.frame_repeats`. The published figures have
rules of their own: one_hot for Atari and per_button for Doom, seed 0, and in Doom the pair of a new episode's first frame
with the last one seen counts. Those rules are options here, and give the published figures to the last digit.
"""

import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.cells import Cell, on_disk, run_cells, unique
from lab.envs import make, recorded_frames
from lab.errors import InputError
from lab.experiments import players
from lab.experiments.frame_repeats import CACHES, counted, readable, scanned, summary
from lab.experiments.frame_scan import scan
from lab.published import published
from lab.records import RowWriter, as_frame, clean

PUBLISHED_POLICY = {"atari": "one_hot", "doom": "per_button"}

# seeds: of every game, and of those that figures are published for; others: policies beside one_hot
# `steps` of cells without published figures (`model_steps` where a model plays), `bare`: whether a bare emulator plays these
PROFILES = {
    "smoke": {
        "all": False, "steps": 500, "model_steps": 500, "bare": True, "published_steps": 500, "seeds": 1,
        "published_seeds": 1,
    },
    "standard": {
        "all": True, "steps": 600, "model_steps": 500, "bare": False, "published_steps": None, "seeds": 1,
        "published_seeds": 5,
    },
    "full": {
        "all": True, "steps": 2000, "model_steps": 2000, "bare": True, "published_steps": None, "seeds": 5,
        "published_seeds": 5,
    },
}  # fmt: skip
EVERY_OUT = Path("reports") / "duplicates.rows.jsonl"
SMOKE = ("atari:Breakout", "doom:basic")


# --- what to scan -------------------------------------------------------------------------------------------------------


def every_source() -> list[str]:
    """Every ROM that ale-py ships and every scenario that ViZDoom ships, playable or not. EmulatorMissing without them."""
    from lab.envs import atari, doom

    games = [*atari.games(), *atari.several_players()]
    scenarios = [*doom.scenarios(), *doom.SEVERAL_PLAYERS]
    return [f"atari:{name}" for name in sorted(games)] + [f"doom:{name}" for name in sorted(scenarios)]


def cells_of(sources: list[str], policies: list[str], seeds: list[int], steps: int) -> list[Cell]:
    """The cells of all combinations, each once; a player that cannot play a game has none there. InputError for what cannot
    be."""
    check_steps(steps)
    for policy in policies:
        if policy not in players.PLAYERS:
            raise InputError(f"Unknown policy {policy!r}; choose one of {', '.join(players.PLAYERS)}.")
    able = {(source, policy) for policy in policies for source in sources if _can(policy, source)}
    return unique(
        [
            {"source": source, "policy": policy, "seed": seed, "steps": steps}
            for policy in policies
            for seed in seeds
            for source in sources
            if (source, policy) in able
        ]
    )


def _can(policy: str, source: str) -> bool:
    try:
        players.check(policy, source)
    except InputError:
        return False
    return True


def check_steps(steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise InputError(f"{steps!r} steps were asked for; give at least 2, to have frames to compare.")


def plan(profile: str, seed: int = 0) -> list[Cell]:
    """The cells of a profile, those with published figures first; each player's seed of a game is played once."""
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    chosen = PROFILES[profile]
    known = published("duplicates")
    if not chosen["all"]:
        known = known[known.source.isin(SMOKE)]
    cells: list[Cell] = []
    for line in known.itertuples():
        steps = chosen["published_steps"] or line.decisions
        cells += cells_of([line.source], [line.policy], list(range(seed, seed + chosen["published_seeds"])), steps)
    named = list(known.source)
    for policy in ("one_hot", "no_op", "repeat", players.MODEL_POLICY):
        sources = every_source() if chosen["all"] and (policy == "one_hot" or profile == "full") else named
        by_model = policy == players.MODEL_POLICY
        if not by_model or _taught():
            steps = chosen["model_steps" if by_model else "steps"]
            others = cells_of(sources, [policy], list(range(seed, seed + chosen["seeds"])), steps)
            cells += others if chosen["bare"] else [cell | {"bare_steps": 0} for cell in others]
    plays: dict[tuple, Cell] = {}
    for cell in cells:
        plays.setdefault((cell["source"], cell["policy"], cell["seed"]), cell)
    return list(plays.values())


def _taught() -> bool:
    """Whether the model that plays has been trained and is here."""
    return bool(players.taught_games(players.MODEL_POLICY))


# --- scanning -----------------------------------------------------------------------------------------------------------


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    workers: int | None = None,
    scheduler: str | None = None,
) -> pd.DataFrame:
    """Scan every cell of the profile and return a row per cell (see `frame_scan.scan`), appended to `out` as it ends.

    What cannot be played is said in `.attrs["about"]`, a line each of the kind "skipped" or "failed", with the reason.
    InputError for an unknown profile or seed and for missing emulators, before anything is played.
    """
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    for source in SMOKE:
        with closing(make(source, seed)):
            pass  # a missing emulator is told before the first minute is spent
    return scan_all(plan(profile, seed), out=out, workers=workers, scheduler=scheduler)


def scan_all(cells: list[Cell], **how: Any) -> pd.DataFrame:
    """Scan cells as `lab.cells.run_cells` does, which takes the rest of the arguments."""
    return run_cells(scan, cells, title="scanning games", **how)


def scan_one(
    source: str, steps: int = 2000, seed: int = 0, policy: str = "one_hot", out: Path | str | None = None
) -> pd.DataFrame:
    """Scan one game in this process: its row, as a table, appended to `out`, or the one that `out` holds of it already.
    InputError for what cannot be."""
    check_steps(steps)
    cell = {"source": source, "policy": policy, "seed": seed, "steps": steps}
    with RowWriter(out) if out is not None else nullcontext() as writer:
        if found := on_disk(out, [cell]):
            print(f"{out} holds it already", file=sys.stderr, flush=True)
            return as_frame(list(found.values()))
        row = {**cell, **scan(cell)}
        return as_frame([writer.append(row) if writer else clean(row)])


def one(
    source: str, steps: int = 2000, seed: int = 0, policy: str = "one_hot", published_resets: bool = False
) -> dict[str, Any]:
    """Scan one game here and return what `found_of` does, for instance {"identical": 0.0125, ...}.

    InputError for an unknown source, policy or seed, fewer than two steps, and a player that cannot play the game.
    """
    return found_of(summary(scan_one(source, steps, seed, policy), published_resets).iloc[0])


def found_of(line: pd.Series) -> dict[str, Any]:
    """A line of `frame_repeats.summary` as it is printed: shares rounded as published, to 5 decimals.

    {"identical", "identical_any_lag", "median_changed", "median_changed_if_not_identical" (None where all are), "cache_hits"
    (by size), "steps", "steps_per_s", "emulator_steps_per_s" (None where it was not measured)}.
    """

    def rounded(name: str, digits: int = 5) -> float | None:
        return None if np.isnan(line[name]) else round(float(line[name]), digits)

    return {
        "identical": rounded("identical"),
        "identical_any_lag": rounded("any_lag"),
        "median_changed": rounded("median_changed"),
        "median_changed_if_not_identical": rounded("median_changed_otherwise"),
        "cache_hits": {str(k): rounded(f"cache_{k}") for k in CACHES},
        "steps": int(line.decisions),
        "steps_per_s": rounded("steps_per_s", 1),
        "emulator_steps_per_s": rounded("emulator_steps_per_s", 1),
    }


# --- from the command line ----------------------------------------------------------------------------------------------


class Survey(NamedTuple):
    """What `lab duplicates` prints: a table as dicts, or a document."""

    table: list[dict[str, Any]]
    document: dict[str, Any]


def survey(
    source: str | None,
    steps: int,
    seeds: Sequence[int],
    policies: Sequence[str],
    out: Path | str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    published_resets: bool = False,
) -> Survey:
    """Scan one game, or all of them (`source` None), and say what was found; rows go to `out` as they finish.

    One cell is scanned in this process; several, and all that go to a scheduler, as cells. Of all games the rows are kept
    even where no `out` is named, so that a run that was stopped can go on. InputError, before any work, for what cannot be.
    """
    check_steps(steps)
    if any(seed < 0 for seed in seeds):
        raise InputError(f"The seed is {min(seeds)}; give a whole number from 0 to {2**31 - 1}.")
    if source is not None:
        for policy in policies:
            players.check(policy, source)
        with closing(make(source, seeds[0])):
            pass
    sources = [source] if source is not None else every_source()
    out = EVERY_OUT if out is None and source is None else out
    cells = cells_of(sources, list(policies), list(seeds), steps)
    if not cells:
        raise InputError(f"No game can be played by {', '.join(policies)}.")
    if len(cells) == 1 and scheduler is None:
        cell = cells[0]
        say = f"{cell['source']}, {cell['policy']}, seed {cell['seed']}, {steps} decisions"
        print(f"{say} ...", file=sys.stderr, flush=True)
        rows = scan_one(cell["source"], steps, cell["seed"], cell["policy"], out)
        print(f"{say}: {rows.scan_s[0]:.1f} s", file=sys.stderr, flush=True)
    else:
        if out is not None:
            print(f"rows go to {out}; after a stop the same call takes up from there", file=sys.stderr, flush=True)
        rows = scan_all(cells, out=out, workers=workers, scheduler=scheduler)
        if rows.empty:
            raise InputError("No cell could be scanned; the reasons stand above.")
    table = summary(rows, published_resets)
    games = [{"source": line.source, "policy": line.policy, **found_of(line)} for _, line in table.iterrows()]
    if len(games) == 1 and source is not None:
        return Survey(_upright(table), {k: v for k, v in games[0].items() if k not in ("source", "policy")})
    left = [{k: v for k, v in line.items() if k != "kind"} for line in rows.attrs["about"] if line["kind"] == "skipped"]
    failed = [
        {k: v for k, v in line.items() if k != "kind"} for line in rows.attrs["about"] if line["kind"] == "failed"
    ]
    narrow = readable(table).drop(columns=["of the changed", "cache of 2", "cache of 8"])  # a terminal is no page
    return Survey(narrow.to_dict("records"), {"games": games, "skipped": left, "failed": failed})


def _upright(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One game's line as a table of names and values."""
    return [{"": name, "value": str(value)} for name, value in readable(table).iloc[0].items()]


# --- beside the published figures ---------------------------------------------------------------------------------------


def comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """Measured beside published, one line per published figure that these rows have the cell of, by the published rules.

    source, policy, decisions, seed, `identical`, `published_identical`, `median_changed`, `published_median_changed`,
    `same` (both agree to the last digit, five decimals) and `identical_without_resets`, by our own rule.
    """
    known = published("duplicates")
    lines = []
    for row in scanned(rows).itertuples():
        said = known[
            (known.source == row.source)
            & (known.policy == row.policy)
            & (known.seed == row.seed)
            & (known.decisions == row.steps)
        ]
        for line in said.itertuples():
            ours, theirs = (np.array(row.changed)[counted(row, rule)] / row.pixels for rule in (False, True))
            identical, median = round(float((theirs == 0).mean()), 5), round(float(np.median(theirs)), 5)
            lines.append(
                {
                    **{"source": row.source, "policy": row.policy, "decisions": int(row.steps), "seed": int(row.seed)},
                    **{"identical": identical, "published_identical": line.identical},
                    **{"median_changed": median, "published_median_changed": line.median_changed},
                    "same": identical == line.identical and median == line.median_changed,
                    "identical_without_resets": float((ours == 0).mean()),
                }
            )
    return pd.DataFrame(lines, columns=_COMPARED)


_COMPARED = [
    "source", "policy", "decisions", "seed", "identical", "published_identical", "median_changed",
    "published_median_changed", "same", "identical_without_resets",
]  # fmt: skip


def changed_pixels(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where any channel differs between two frames [H, W, 3]: bool [H, W]."""
    return (before != after).any(axis=-1)


def example_pairs(sources: tuple[str, ...] = ("atari:Pong", "doom:deadly_corridor")) -> list[dict[str, Any]]:
    """Three pairs of neighbours from the shipped recordings: identical, nearly so, and mostly changed.

    The first two are the first source's pairs with the fewest changed pixels, none and then any; the third is the last
    source's with the most. Each is a dict of `title`, `before`, `after` (uint8 [H, W, 3]) and `changed`
    (bool [H, W]).
    """
    pairs = [_neighbours(source) for source in sources]
    nearly = next(pair for pair in pairs[0] if pair["changed"].any())
    return [pairs[0][0], nearly, pairs[-1][-1]]


def _neighbours(source: str) -> list[dict[str, Any]]:
    """All pairs of neighbours of a source's shipped recording, those with the fewest changed pixels first."""
    pairs, frames = [], recorded_frames(source)
    for first, (before, after) in enumerate(zip(frames, frames[1:], strict=False)):
        title = f"{source.partition(':')[2]}, frames {first} and {first + 1}"
        pairs.append({"title": title, "before": before, "after": after, "changed": changed_pixels(before, after)})
    return sorted(pairs, key=lambda pair: pair["changed"].mean())
