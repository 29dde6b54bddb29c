"""Figures of notebook 08: every lever beside the plain decision, and a decision's time by kind of operation."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.figures.base import BLUE, FAINT, GREEN, GREY, ORANGE, PURPLE, SKY, inside, new_figure, short

KIND_COLOURS = dict(
    zip(
        ("matrix products", "attention", "activations", "norms", "copies and sums", "rest"),
        (BLUE, ORANGE, GREEN, PURPLE, SKY, GREY),
        strict=True,
    )
)


def lever_dots(table: pd.DataFrame) -> Figure:
    """Each lever's time over the plain decision's with its 95 % interval (logarithmic), a panel per comparison.

    `table` is what `lever_results.lever_table` returns. Filled where a difference is shown; orange where answers
    change, blue where none does, grey where they were not compared; the band is the A/A interval.
    """
    decisions = table[~table["arm"].str.startswith("one vision layer")]
    panels = [(key, part) for key, part in decisions.groupby(["preset", "frames"], sort=False)]
    shown = [part[part["ratio"].notna() & ~part["arm"].str.endswith(" again")] for _, part in panels]
    figure, grid = new_figure(
        8, 0.9 * len(panels) + 0.29 * sum(map(len, shown)), nrows=len(panels), squeeze=False, sharex=True,
        height_ratios=[len(part) for part in shown],
    )  # fmt: skip
    for axes, ((preset, frames), part), arms in zip(grid[:, 0], panels, shown, strict=True):
        again = part[part["arm"] == "eager again"].iloc[0]
        axes.axvspan(again["ratio_low"], again["ratio_high"], color=FAINT, linewidth=0)
        axes.axvline(1, color=GREY, linewidth=1)
        for place, line in enumerate(arms.sort_values("ratio").itertuples()):
            colour = GREY if np.isnan(line.flips) else ORANGE if line.flips > 0 else BLUE
            axes.plot([line.ratio_low, line.ratio_high], [place, place], color=colour, linewidth=1.5)
            axes.plot(line.ratio, place, "o", color=colour, ms=6, mfc=colour if line.shown else "none")
            answers = "" if np.isnan(line.flips) else f", {line.flips:.0%} of answers change" if line.flips else ""
            text = f"{line.ratio:.2f}, {short(line.ms)} ms{answers}"
            axes.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=GREY)
        axes.set_yticks(range(len(arms)), arms.sort_values("ratio")["arm"])
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.set_xscale("log")
        given = f"{frames} frames" if frames > 1 else "one frame"
        axes.set_title(f"{preset}, {given}: the plain decision takes {short(part['ms'].iloc[0])} ms")
        axes.tick_params(axis="y", length=0)
    ticks = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10]
    drawn = pd.concat(shown)
    low, high = drawn["ratio_low"].min(), drawn["ratio_high"].max()
    axes.set_xticks([tick for tick in ticks if 0.9 * low <= tick <= 1.1 * high], minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("times the plain decision's time (logarithmic, 95 % interval); filled: a difference is shown")
    return figure


def operation_bars(operations: pd.DataFrame) -> Figure:
    """One decision per arm, cut by kind of operation (ms). `operations` is what `lever_results.operations` returns."""
    figure, axes = new_figure(7.5, 0.8 + 0.45 * operations.shape[1])
    longest = operations.sum().max()
    for place, arm in enumerate(operations):
        left = 0.0
        for kind, ms in operations[arm].items():
            axes.barh(place, ms, left=left, height=0.66, color=KIND_COLOURS[kind])
            inside(axes, left, place, ms, longest, (f"{kind} {short(ms)}", short(ms)), KIND_COLOURS[kind])
            left += ms
        axes.text(left + 0.01 * longest, place, short(left), va="center", fontsize=9, color=GREY)
    axes.set_yticks(range(operations.shape[1]), operations.columns)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * longest)
    axes.set_xlabel("time of one profiled decision (ms) by kind of operation")
    axes.tick_params(axis="y", length=0)
    handles = [axes.barh(0, 0, color=colour) for colour in KIND_COLOURS.values()]
    figure.legend(handles, KIND_COLOURS, loc="outside upper left", ncols=6, frameon=False, labelcolor=GREY, fontsize=8)
    return figure
