"""Figures of notebook 07: candidates beside eager, the loop's stages, scores by policy, memory over calls."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.figures.base import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    inside,
    new_figure,
    short,
)

STAGE_COLOURS = {"planner": SKY, "prepare": ORANGE, "forward": BLUE, "readout": GREEN, "draw": PURPLE}


def candidate_dots(tables: dict[str, pd.DataFrame], again: dict[str, tuple[float, float]]) -> Figure:
    """Each candidate's time over eager's with its 95 % interval, a panel per model; the band is the A/A interval.

    `tables` as `snake_results.ablation` returns them, by model; `again` the A/A arm's bounds. Filled where a difference is
    shown.
    """
    figure, panels = new_figure(2.6 + 2.7 * len(tables), 3.1, ncols=len(tables), sharey=True, squeeze=False)
    for axes, (model, table) in zip(panels[0], tables.items(), strict=True):
        part = table.iloc[1:]
        axes.axvspan(*again[model], color=FAINT, linewidth=0)
        axes.axvline(1, color=GREY, linewidth=1)
        for place, line in enumerate(part.itertuples()):
            colour = BLUE if line.ratio < 1 else VERMILION
            axes.plot([line.ratio_low, line.ratio_high], [place, place], color=colour, linewidth=1.5)
            axes.plot(line.ratio, place, "o", color=colour, ms=6, mfc=colour if line.shown else "none")
            axes.annotate(
                f"{line.ratio:.2f}",
                (line.ratio, place),
                (0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=GREY,
            )
        axes.set_yticks(range(len(part)), part["candidate"])
        axes.set_ylim(len(part) - 0.5, -0.7)
        axes.set_title(f"{model}, eager {short(table['ms'].iloc[0])} ms")
        axes.set_xlabel("times eager's time")
        axes.tick_params(axis="y", length=0)
    return figure


def loop_stages(tables: dict[str, pd.DataFrame]) -> Figure:
    """One move of the loop, cut into its stages: eager and all three options, a pair of bars per model.

    `tables` as `snake_results.stages` returns them; each model's bars are drawn in shares of its eager move.
    """
    lines = [(model, line) for model, table in tables.items() for line in table.to_dict("records")]
    figure, axes = new_figure(8, 0.9 + 0.55 * len(lines))
    for place, (model, line) in enumerate(lines):
        whole, left = tables[model]["total"].iloc[0], 0.0
        for name, colour in STAGE_COLOURS.items():
            width = line[name] / whole
            axes.barh(place, width, left=left, height=0.66, color=colour)
            inside(axes, left, place, width, 1.35, [f"{name} {short(line[name])}", short(line[name])], colour)
            left += width
        total = f"{short(line['total'])} ms, {short(line['moves a second'])} moves/s"
        axes.text(max(left, line["total"] / whole) + 0.015, place, total, va="center", fontsize=9, color=GREY)
    names = ["eager" if line["arm"] == "eager" else "all three options" for _, line in lines]
    axes.set_yticks(range(len(lines)), [f"{model}, {name}" for (model, _), name in zip(lines, names, strict=True)])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, 1.35)
    axes.set_xticks([])
    axes.set_xlabel("median ms of each stage; bars in shares of the eager move")
    axes.set_title("Where a move's time goes")
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def policy_dots(games: list[dict], table: pd.DataFrame) -> Figure:
    """Every game's score by policy, the mean as a line with its number.

    `games` are the lines of kind `game`, `table` is what `snake_results.scores` returns.
    """
    figure, axes = new_figure(7, 0.8 + 0.55 * len(table))
    rng = np.random.default_rng(0)
    for place, line in enumerate(table.itertuples()):
        own = np.array([game["score"] for game in games if game["policy"] == line.policy])
        colour = PALETTE[place % len(PALETTE)]
        axes.plot(own, place + rng.uniform(-0.16, 0.16, len(own)), "o", ms=4, color=colour, alpha=0.6)
        axes.plot([line.mean, line.mean], [place - 0.32, place + 0.32], color=colour, linewidth=2.5)
        gain = "" if np.isnan(line.above_random) else f", {line.above_random:+.2f} over random"
        stepped = f", {line.interventions} interventions" if line.interventions else ""
        axes.annotate(
            f"mean {line.mean:.2f}{gain}{stepped}", (1.0, place), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", fontsize=9, color=GREY,
        )  # fmt: skip
    axes.set_yticks(range(len(table)), table["policy"])
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlabel("score (pieces of food)")
    axes.set_title("Scores on the same seeds")
    axes.tick_params(axis="y", length=0)
    return figure


def memory_lines(line: dict) -> Figure:
    """Resident memory and the allocator's bytes over calls whose shapes change, in MB above the first sample.

    `line` is the rows' line of kind `memory`.
    """
    figure, panels = new_figure(8.5, 2.8, ncols=2)
    for axes, column, what in ((panels[0], 1, "resident memory"), (panels[1], 2, "the allocator's bytes")):
        ends = [found["samples"][-1][column] - found["samples"][0][column] for found in line["candidates"].values()
                if found["samples"][-1][column] is not None]  # fmt: skip
        for (name, found), colour in zip(line["candidates"].items(), (BLUE, ORANGE), strict=False):
            samples = np.array([[np.nan if v is None else v for v in sample] for sample in found["samples"]], float)
            above = (samples[:, column] - samples[0, column]) / 1e6
            if np.isnan(above).all():
                continue
            axes.plot(samples[:, 0], above, color=colour, linewidth=1.5)
            dy = 6 if 1e6 * above[-1] >= max(ends) else -6  # two that end close together are told apart
            axes.annotate(
                "eager" if name == "eager" else "all three options", (samples[-1, 0], above[-1]), (4, dy),
                textcoords="offset points", va="center", fontsize=8, color=colour,
            )  # fmt: skip
        axes.set_xlabel("calls")
        axes.set_ylabel("MB above the start")
        axes.set_title(what.capitalize())
    return figure
