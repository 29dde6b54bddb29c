"""What notebook 05 concludes from the rates of `frame_repeats` and the answers and times of `reuse`."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.experiments.frame_repeats import percent_text
from lab.stats import Estimate, median_interval

PLAIN = "one_hot"  # the policy that every game is played with


def savings(rates: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """What answering repeats from the last answer saves per game and player, in per cent of the decisions' time and in ms.

    `rates` is `frame_repeats.summary`, `timed` is `times`: a game without a timed model of its own takes the median of
    those. source, policy, saves, saves_low, saves_high, ms (saved per decision).
    """
    spared, decision = float(timed["spared"].median()), float(timed["decision"].median())
    own = timed.set_index("source")
    lines = []
    for line in rates.itertuples():
        part, ms = (
            (own.loc[line.source, "spared"], own.loc[line.source, "decision"])
            if line.source in own.index
            else (spared, decision)
        )
        found = Estimate(line.identical * part, line.identical_low * part, line.identical_high * part, line.compared)
        lines.append(
            {
                **{"source": line.source, "policy": line.policy, "saves": found.value},
                **{"saves_low": found.low, "saves_high": found.high, "ms": found.value * ms},
            }
        )
    return pd.DataFrame(lines)


def skipped(rows: pd.DataFrame) -> pd.DataFrame:
    """What could not be scanned, a line per game: source, and why."""
    told = [line for line in rows.attrs.get("about", []) if line["kind"] in ("skipped", "failed") and "source" in line]
    table = pd.DataFrame(
        [{"source": line["source"], "why": line["reason"].partition(";")[0]} for line in told],
        columns=["source", "why"],
    )
    return table.drop_duplicates(ignore_index=True)


def beside(compared: pd.DataFrame) -> pd.DataFrame:
    """What `duplicates.comparison` returns as a table to read, in per cent to the published digits."""

    def percent(name: str) -> list[str]:
        return [f"{100 * share:.3f}" for share in compared[name]]

    return pd.DataFrame(
        {
            "source": compared.source,
            "decisions": [int(n) for n in compared.decisions],
            "equal (%)": percent("identical"),
            "published": percent("published_identical"),
            "no resets": percent("identical_without_resets"),
            "changed (%)": percent("median_changed"),
            "published ": percent("published_median_changed"),
            "same": ["yes" if same else "no" for same in compared.same],
        }
    )


def players_table(rates: pd.DataFrame, sources: Sequence[str]) -> pd.DataFrame:
    """The share of frames equal to the one before, a line per source and a column per player, in per cent as text."""
    part = rates[rates.source.isin(sources)].copy()
    part["text"] = [percent_text(*line) for line in part[["identical", "identical_low", "identical_high"]].to_numpy()]
    table = part.pivot(index="source", columns="policy", values="text").fillna("")
    order = [policy for policy in dict.fromkeys(rates.policy) if policy in table]
    return table.loc[[source for source in sources if source in table.index], order]


def speed(rates: pd.DataFrame) -> dict[str, Estimate | float]:
    """How fast the scan is beside the bare emulator: medians over games of `scan` and `emulator` (decisions a second) and
    of their ratio `pace`, which is taken block by block; `games_at_85`, the share of games at 0.85 or more."""
    known = rates[rates.pace.notna()]
    found: dict[str, Estimate | float] = {
        name: median_interval(known[column])
        for name, column in (("scan", "steps_per_s"), ("emulator", "emulator_steps_per_s"), ("pace", "pace"))
    }
    return found | {"games_at_85": float((known.pace >= 0.85).mean())}


def answer(rates: pd.DataFrame, compared: pd.DataFrame, saved: pd.DataFrame, flips: pd.DataFrame) -> str:
    """The notebook's answer in words, computed."""
    said = []
    for kind in ("atari", "doom"):
        part = rates[rates.source.str.startswith(f"{kind}:") & (rates.policy == PLAIN)]
        if len(part):
            often, games = part.identical > 0.1, "games" if kind == "atari" else "scenarios"
            said.append(
                f"Under random play {_span(part.identical)} of frames repeat the one before, over {len(part)} "
                f"{kind.capitalize()} {games} (the middle one: {part.identical.median():.1%}; more than a tenth in "
                f"{int(often.sum()) or 'none'} of them), and {_span(part.any_lag)} some earlier one (the middle: "
                f"{part.any_lag.median():.1%})."
            )
    plain = saved[saved.policy == PLAIN]
    if len(plain):
        most = plain.loc[plain.saves.idxmax()]
        said.append(
            f"Answering repeats from the last answer, which is exact, would save {plain.saves.median():.1%} of the "
            f"decisions' time in the middle game and {percent_text(most.saves, most.saves_low, most.saves_high)} in "
            f"{most.source}."
        )
    said.append(_flip_sentence(flips))
    if len(compared):
        said.append(f"{int(compared.same.sum())} of {len(compared)} published rates are met to the last digit.")
    else:
        said.append("Nothing is published for these seeds and counts of decisions.")
    return " ".join(said)


def _flip_sentence(flips: pd.DataFrame, little: float = 0.001) -> str:
    """What reuse of features does at the largest threshold that reuses what changed by at most a thousandth."""
    told = []
    for source, part in flips.groupby("source", sort=False):
        line = part[part.threshold <= little].iloc[-1]
        share = percent_text(line.flipped, line.flipped_low, line.flipped_high)
        told.append(f"{source} {share} ({line.reused:.0%} reused)")
    return (
        f"Reusing features where fewer than {little:.1%} of the pixels changed gives another answer of "
        f"{flips.model.iloc[0]} in a share of decisions of: {', '.join(told)}."
    )


def _span(shares: pd.Series) -> str:
    low, high = f"{shares.min():.1%}", f"{shares.max():.1%}"
    return low if low == high else f"{low} to {high}"


def results(rates: pd.DataFrame, compared: pd.DataFrame, **more: Any) -> dict[str, Any]:
    """What the notebook saves: the rates with their intervals, the published ones beside them, and what it is given."""
    estimates = [name for name in rates if f"{name}_low" in rates]
    lines = [
        {"source": line["source"], "policy": line["policy"], "seeds": line["seeds"], "compared": line["compared"]}
        | {n: Estimate(line[n], line[f"{n}_low"], line[f"{n}_high"], line["compared"]) for n in estimates}
        | {n: line[n] for n in ("steps_per_s", "emulator_steps_per_s")}
        for line in rates.to_dict("records")
    ]
    return {"rates": lines, "published": compared, "speed": speed(rates), **more}
