"""Figures of notebook 05."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.figures.base import BLUE, GREY, ORANGE, VERMILION, label_points, new_figure

KIND_COLOURS = {"atari": ORANGE, "doom": BLUE}


def duplicate_dots(table: pd.DataFrame) -> Figure:
    """Left: the share of identical frames per source with its 95 % interval, the published rate as a ring around it.
    Right: the median share of changed pixels, on a logarithmic axis.

    `table` is what `lab.experiments.duplicates.comparison` returns; several seeds of a source share a line.
    """
    sources = list(dict.fromkeys(table.source))
    figure, (left, right) = new_figure(8, 1.1 + 0.34 * len(sources), ncols=2, sharey=True)
    for line in table.itertuples():
        place, colour = sources.index(line.source), KIND_COLOURS[line.source.split(":")[0]]
        error = [[line.identical - line.low], [line.high - line.identical]]
        left.errorbar(line.identical, place, xerr=error, fmt="o", ms=5, color=colour, capsize=3)
        right.plot(line.median_changed, place, "o", ms=5, color=colour)
        for axes, rate in ((left, line.published_identical), (right, line.published_median_changed)):
            axes.plot(rate, place, "o", ms=11, mfc="none", mec=GREY)
    first = table.drop_duplicates("source")
    places = range(len(sources))
    label_points(left, first.high, places, [f"{share:.2%}" for share in first.identical])
    label_points(right, first.median_changed, places, [f"{share:.2%}" for share in first.median_changed], dx=9)
    left.set_yticks(places, [source.replace("atari:", "Atari ").replace("doom:", "Doom ") for source in sources])
    left.invert_yaxis()
    left.set(title="Frames equal to the one before", xlabel="share of compared pairs (95 % interval)")
    left.set_xlim(-0.002, table.high.max() * 1.25)
    left.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.set(title="Pixels that change", xlabel="median share of a frame (logarithmic)", xscale="log")
    right.set_xlim(table.median_changed[table.median_changed > 0].min() / 2, 6)
    right.set_xticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
    if table.published_identical.notna().any():
        left.annotate(
            "ring: published", (1, 0), (0, 6), xycoords="axes fraction", textcoords="offset points", ha="right"
        )
    return figure


def frame_pairs(pairs: Sequence[dict]) -> Figure:
    """Pairs of consecutive frames as pictures: before, after, and where a pixel changed.

    `pairs` is what `lab.experiments.duplicates.example_pairs` returns.
    """
    figure, grid = new_figure(7, 1.75 * len(pairs), nrows=len(pairs), ncols=3, squeeze=False)
    for row, pair in zip(grid, pairs, strict=True):
        mask = np.zeros((*pair["changed"].shape, 4))
        mask[pair["changed"]] = to_rgba(VERMILION)
        for axes, picture in zip(row, (pair["before"], pair["after"], mask), strict=True):
            axes.imshow(picture, aspect="equal", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set(visible=True, color=GREY)
        row[0].set_title(pair["title"], fontsize=9)
        share = pair["changed"].mean()
        row[2].set_title(f"{share:.2%} of pixels changed" if share else "no pixel changed", fontsize=9)
    return figure
