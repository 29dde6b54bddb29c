"""Figures of notebook 05."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lab.figures.base import BLUE, FAINT, GREY, ORANGE, PALETTE, VERMILION, new_figure

KIND_COLOURS = {"atari": ORANGE, "doom": BLUE}
NOUGHT = 1e-3  # shares below are drawn on a linear scale, so that 0 has a place


def _name(source: str) -> str:
    kind, _, name = source.partition(":")
    return name if kind == "atari" else f"Doom {name}"


def _colour(source: str) -> str:
    return KIND_COLOURS[source.partition(":")[0]]


def _percent(share: float, _place=None) -> str:
    return f"{100 * share:.3g} %"


def _share_axis(axes: Axes, which: str = "x", high: float = 1.0) -> None:
    """A scale that holds 0 and shows small shares: linear up to 0.1 %, logarithmic above."""
    getattr(axes, f"set_{which}scale")("symlog", linthresh=NOUGHT, linscale=0.5)
    ticks = [share for share in (0, 0.001, 0.01, 0.1, 1) if share <= high]
    getattr(axes, f"set_{which}ticks")(ticks)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(_percent))
    axis.set_minor_locator(NullLocator())


def repeat_dots(table: pd.DataFrame, columns: int = 3) -> Figure:
    """Every game, ranked: the share of frames equal to the one before (dot, with its 95 % interval) and the share equal to
    any earlier one (ring). Atari and Doom apart in colour; the scale is logarithmic above 0.1 %.

    `table` is what `lab.experiments.frame_repeats.summary` returns, of one player.
    """
    table = table.sort_values(["identical", "any_lag"], ascending=False, ignore_index=True)
    columns = max(1, min(columns, -(-len(table) // 12)))
    length = -(-len(table) // columns)
    figure, panels = new_figure(3.5 * columns + 0.5, 1.0 + 0.17 * length, ncols=columns, squeeze=False, sharex=True)
    for panel, axes in enumerate(panels[0]):
        part = table.iloc[panel * length : (panel + 1) * length]
        for place, line in enumerate(part.itertuples()):
            colour = _colour(line.source)
            axes.plot([line.identical_low, line.identical_high], [place, place], color=colour, lw=1.5)
            axes.plot(line.identical, place, "o", ms=4, color=colour)
            axes.plot(line.any_lag, place, "o", ms=6, mfc="none", mec=GREY, mew=0.8)
        axes.set_yticks(range(len(part)), [_name(source) for source in part.source], fontsize=7)
        axes.set_ylim(length - 0.5, -0.8)
        axes.grid(axis="x")
        _share_axis(axes)
        axes.set_xlim(-0.0002, 1.3)
        axes.tick_params(axis="x", labelsize=8)
    panels[0][0].set_title("Frames that repeat", fontsize=11)
    words = [("Atari", ORANGE), ("Doom", BLUE), ("ring: any earlier frame", GREY)]
    for place, (word, colour) in enumerate(words):
        panels[0][-1].annotate(
            word, (1, 1), (-90 + 45 * place if place < 2 else 0, 6 if place < 2 else 18), xycoords="axes fraction",
            textcoords="offset points", ha="right", color=colour, fontsize=9,
        )  # fmt: skip
    figure.supxlabel("share of frames equal to the one before, 95 % interval", fontsize=9, color=GREY)
    return figure


def recurrence_lines(recurrence: pd.DataFrame, rates: pd.DataFrame, named: Sequence[str]) -> Figure:
    """Left: the share of frames seen at most so many frames ago. Right: what a cache of the last k frames would have hit.

    `recurrence` and `rates` are those of `lab.experiments.frame_repeats` (`recurrence`, `summary`), of one player; the
    `named` sources are drawn in colour and labelled (Doom dashed), the others faint.
    """
    figure, (left, right) = new_figure(10, 4, ncols=2, sharey=True)
    sizes = [int(name.removeprefix("cache_")) for name in rates if name.startswith("cache_") and name[6:].isdigit()]
    named = [source for source in named if source in set(rates.source)]
    colours = dict(zip(named, PALETTE * 2, strict=False))
    ends: dict[str, dict[str, float]] = {"left": {}, "right": {}}
    for source, part in recurrence.groupby("source", sort=False):
        left.plot(part.lag, part.share, **_line(source, colours))
        ends["left"][source] = part.share.iloc[-1]
    for line in rates.itertuples():
        shares = [getattr(line, f"cache_{size}") for size in sizes]
        right.plot(sizes, shares, **_line(line.source, colours))
        ends["right"][line.source] = shares[-1]
    for axes, key in ((left, "left"), (right, "right")):
        _spread(axes, {source: _place(ends[key][source]) for source in named}, colours)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.margins(x=0.02)
        axes.grid(axis="y")
    _share_axis(left, "y")
    left.set_ylim(-0.0002, 1.1)
    left.set_xticks([1, 4, 16, 64, 256, 1024])
    right.set_xticks(sizes)
    left.set(title="Seen before", xlabel="at most so many frames ago", ylabel="share of frames")
    right.set(title="A cache would have hit", xlabel="frames kept, least recently used makes room")
    return figure


def _line(source: str, colours: dict[str, str]) -> dict:
    """How a line looks: in its colour, dashed for Doom, where the source has one; else faint."""
    if source not in colours:
        return {"color": FAINT, "lw": 0.8}
    return {"color": colours[source], "lw": 1.8, "ls": "--" if source.startswith("doom") else "-"}


def _place(share: float, low: float = -0.0002, high: float = 1.1) -> float:
    """Where a share lies on `_share_axis` from `low` to `high`, 0 at the bottom and 1 at the top."""

    def scaled(value: float) -> float:
        linear = 0.5 / (1 - 0.1) * min(abs(value), NOUGHT) / NOUGHT
        return np.sign(value) * (linear + max(0.0, np.log10(max(abs(value), NOUGHT) / NOUGHT)))

    return (scaled(share) - scaled(low)) / (scaled(high) - scaled(low))


def _spread(axes: Axes, places: dict[str, float], colours: dict[str, str], gap: float = 0.06) -> None:
    """Names right of the axes at `places` (0 bottom, 1 top), moved apart where they would overlap."""
    order = sorted(places, key=places.get)
    heights: list[float] = []
    for source in order:
        heights.append(max(places[source], heights[-1] + gap if heights else places[source]))
    for i in reversed(range(len(heights))):  # down again where they ran over the top
        heights[i] = min(heights[i], heights[i + 1] - gap if i + 1 < len(heights) else 1.0)
    for source, height in zip(order, heights, strict=True):
        axes.annotate(
            _name(source), (1, height), (5, 0), xycoords="axes fraction", textcoords="offset points", va="center",
            color=colours[source], fontsize=8, annotation_clip=False,
        )  # fmt: skip


def change_curves(changes: pd.DataFrame) -> Figure:
    """How much of a frame changes: for each share of pixels, how many of the frames change at most that much.

    `changes` is what `lab.experiments.frame_repeats.changes` returns, of one player: a faint line per game, a thick one
    for Atari and for Doom, every game weighing the same.
    """
    figure, axes = new_figure(7.5, 3.8)
    grid = np.concatenate([[0], np.geomspace(1e-5, 1, 300)])
    for kind, colour in KIND_COLOURS.items():
        part = changes[changes.source.str.startswith(f"{kind}:")]
        curves = [
            np.searchsorted(np.sort(own.to_numpy()), grid, side="right") / len(own)
            for _, own in part.groupby("source")["changed"]
        ]
        for curve in curves:
            axes.plot(grid, curve, color=colour, lw=0.6, alpha=0.25)
        if curves:
            mean = np.mean(curves, axis=0)
            axes.plot(grid, mean, color=colour, lw=2.5)
            middle = int(np.searchsorted(mean, 0.55))
            axes.annotate(
                f"{kind.capitalize()}, {len(curves)} games", (grid[min(middle, 300)], 0.55), (-6, 4), ha="right",
                textcoords="offset points", color=colour, weight="bold",
            )  # fmt: skip
    axes.set_xscale("symlog", linthresh=1e-5, linscale=0.3)
    axes.set_xticks([0, 1e-4, 1e-3, 1e-2, 1e-1, 1])
    axes.xaxis.set_major_formatter(FuncFormatter(_percent))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(0, 1.05)
    axes.grid(axis="y")
    axes.set(
        title="How much of a frame changes",
        xlabel="share of pixels (logarithmic)",
        ylabel="frames that change at most so much",
    )
    return figure


def flip_lines(flips: pd.DataFrame) -> Figure:
    """Reusing the features of the last encoded frame where fewer than x % of pixels changed: how often that happens (left),
    and how often the answer is then another (right, with its 95 % interval), against x.

    `flips` is what `lab.experiments.reuse.flips` returns.
    """
    figure, (left, right) = new_figure(10, 3.8, ncols=2)
    sources = list(dict.fromkeys(flips.source))
    colours = dict(zip(sources, PALETTE, strict=False))
    ends: dict[str, list[float]] = {}
    for source in sources:
        part = flips[flips.source == source]
        x, colour = part.threshold.to_numpy(), colours[source]
        left.plot(x, part.reused, "o-", ms=4, color=colour)
        right.plot(x, part.flipped, "o-", ms=4, color=colour)
        right.fill_between(x, part.flipped_low, part.flipped_high, color=colour, alpha=0.2, lw=0)
        ends[source] = [part.reused.iloc[-1], part.flipped.iloc[-1]]
    top = max(0.02, float(np.nanmax(flips[["flipped", "flipped_high"]].to_numpy())) * 1.15)
    for axes, place, high in ((left, 0, 1.05), (right, 1, top)):
        axes.set_xscale("symlog", linthresh=3e-4, linscale=0.4)
        axes.set_xticks([0, 0.001, 0.01, 0.1, 0.6])
        axes.xaxis.set_major_formatter(FuncFormatter(_percent))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_ylim(-high / 60, high)
        axes.grid(axis="y")
        axes.set_xlabel("x: features are reused where fewer pixels changed")
        _spread(axes, {source: end[place] / high for source, end in ends.items()}, colours)
    left.set(title="Decisions on reused features", ylabel="share of decisions")
    right.set(title="Answers that would be others")
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
