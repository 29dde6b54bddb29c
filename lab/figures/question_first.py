"""Figures of notebook 03."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.figures.base import BLUE, FAINT, GREY, PALETTE, label_points, new_figure, short


def saving_bars(saved: pd.DataFrame) -> Figure:
    """Each arm's paired ratio to the whole sequence of its mode, with interval; the band is the A/A arm's, 1 the whole.

    `saved` is what `lab.experiments.question_first.savings` returns. Filled points: a difference is shown.
    """
    groups = list(saved[saved["ratio"].notna()].groupby(["workload", "batch", "dtype"], sort=False))
    lines = sum(len(part) for _, part in groups)
    heights = [len(part) for _, part in groups]
    figure, grid = new_figure(
        7.5, 0.6 * len(groups) + 0.32 * lines, nrows=len(groups), sharex=True, squeeze=False, height_ratios=heights
    )
    for axes, ((workload, batch, dtype), part) in zip(grid[:, 0], groups, strict=True):
        places = range(len(part))
        axes.axvspan(part["again_low"].iloc[0], part["again_high"].iloc[0], color=FAINT, linewidth=0)
        axes.axvline(1, color=GREY, linewidth=1)
        for place, line in zip(places, part.itertuples(), strict=True):
            error = np.nan_to_num([[line.ratio - line.ratio_low], [line.ratio_high - line.ratio]])
            fill = BLUE if line.shown else "none"
            axes.errorbar(line.ratio, place, xerr=error, fmt="o", color=BLUE, mfc=fill, capsize=3)
            axes.annotate(
                f"{line.ratio:.3f}, {short(line.ms)} ms", (1, place), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, color=GREY, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(places, part["arm"], fontsize=8)
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_title(f"{workload}, batch {batch}, {dtype}", fontsize=9, color=GREY)
    axes.set_xlabel("time of a decision over the whole sequence's (paired, 95 % interval; band: A/A; filled: shown)")
    return figure


def movement_lines(table: pd.DataFrame) -> Figure:
    """How far keys (solid) and values (dashed) move when only the image changes, by layer; one colour per model.

    `table` is what `lab.experiments.bidirectional.movement` returns. The axis is logarithmic and linear near 0, so that
    exactly 0 can be told from little.
    """
    figure, axes = new_figure(7.5, 3.2)
    parts = table[["keys", "values"]].to_numpy()
    least = 10.0 ** np.floor(np.log10(parts[parts > 0].min())) if parts.any() else 1e-4
    axes.set_yscale("symlog", linthresh=least, linscale=0.6)
    for colour, (name, lines) in zip(PALETTE[1:], table.groupby("model", sort=False), strict=False):
        axes.plot(lines["layer"], lines["keys"], "o-", color=colour, ms=5)
        axes.plot(lines["layer"], lines["values"], "s--", color=colour, ms=4, mfc="none")
        last = lines.iloc[-1]
        zero = "" if lines[["keys", "values"]].to_numpy().any() else ": exactly 0"
        label_points(axes, [last["layer"]], [last[["keys", "values"]].mean()], [f"{name}{zero}"], dx=8)
    deepest = int(table["layer"].max())
    axes.set_xticks(range(deepest + 1), ["0\n(embeddings)", *map(str, range(1, deepest + 1))])
    axes.set_xlim(-0.2, deepest * 1.45)
    axes.set_ylim(-0.12 * least, max(parts.max(), least) * 3)
    axes.set(xlabel="layer that reads them", ylabel="||new - old|| / ||old||")
    axes.set_title("Question and options, only the image changed (solid: keys, dashed: values)")
    return figure
