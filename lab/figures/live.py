"""Figures of notebook 10."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from lab.figures.base import BLUE, FAINT, GREY, ORANGE, SKY, new_figure, short
from lab.moments import Moment

MOST_BARS = 6


def live_strip(moments: Sequence[Moment], ms: Sequence[float], emulator_ms: Sequence[float], title: str) -> Figure:
    """What the live panel shows, standing still: moments in order with their answers (action taken in orange), and below
    the time of every decision in ms with its percentiles, the emulator's beside it."""
    figure, _ = new_figure(2 * max(len(moments), 3), 4.6)
    figure.clear()
    grid = figure.add_gridspec(3, len(moments), height_ratios=(1.7, 0.9, 1.1))
    for column, moment in enumerate(moments):
        picture = figure.add_subplot(grid[0, column])
        picture.imshow(moment.frame, interpolation="nearest")
        picture.set(xticks=[], yticks=[])
        picture.spines[:].set_visible(False)
        picture.set_title(f"decision {moment.number}", fontsize=8, color=GREY, fontweight="normal")
        _bars(figure.add_subplot(grid[1, column]), moment)
    times = figure.add_subplot(grid[2, :])
    times.plot(ms, color=BLUE, linewidth=0.9)
    times.plot(emulator_ms, color=SKY, linewidth=0.9)
    top, last = 1.6 * np.percentile(ms, 99), len(ms) - 1
    for quantile, lift in ((50, -5), (95, 3), (99, 12)):
        value = np.percentile(ms, quantile)
        times.axhline(value, color=GREY, linewidth=0.7, linestyle=":")
        text = f"p{quantile} {short(value)} ms"
        times.annotate(text, (last, value), (6, lift), textcoords="offset points", fontsize=8, color=GREY, va="center")
    at = (last, float(np.median(emulator_ms)))
    times.annotate("emulator", at, (6, -2), textcoords="offset points", fontsize=8, color=SKY, va="center")
    times.set(xlim=(0, last), ylim=(0, top), xlabel="decision", ylabel="ms")
    times.set_title(title, fontsize=9)
    return figure


def _bars(axes, moment: Moment) -> None:
    ranked = moment.ranked[:MOST_BARS]
    for place, (name, share) in enumerate(ranked):
        axes.barh(place, 1, color=FAINT, height=0.7, linewidth=0)
        axes.barh(place, share, color=ORANGE if name == moment.action else BLUE, height=0.7)
        axes.text(1.04, place, f"{share:.0%}", va="center", fontsize=7, color=GREY)
    axes.set_yticks(range(len(ranked)), [name.lower().replace("_", " ") for name, _ in ranked], fontsize=7)
    axes.set(xticks=[], xlim=(0, 1.3), ylim=(MOST_BARS - 0.4, -0.6))
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)
