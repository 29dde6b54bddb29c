"""The figure of notebook 09."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from lab.figures.base import GREEN, GREY, ORANGE, SKY, VERMILION, new_figure

KINDS = {
    "do": (GREEN, "gains"), "trade": (ORANGE, "faster, other answers"), "hint": (SKY, "gains on another model"),
    "slower": (VERMILION, "slower"), "open": (GREY, "no difference shown"),
}  # fmt: skip


def gain_dots(findings: Sequence) -> Figure:
    """How many times the base's time each finding takes (`lab.experiments.verdict_findings.Finding`), with its interval,
    the largest gain on top; what it means is written beside it. Without findings the figure says so."""
    shown = sorted(findings, key=lambda one: one.ratio, reverse=True)
    figure, axes = new_figure(9, 0.9 + 0.34 * max(len(shown), 1))
    axes.axvline(1, color=GREY, linewidth=0.8)
    for place, one in enumerate(shown):
        colour, word = KINDS[one.kind]
        if not math.isnan(one.low):
            axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([one.ratio], [place], "o", color=colour, markersize=5)
        axes.annotate(
            word, (1, place), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            fontsize=8, color=colour, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [_label(one) for one in shown])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("time, as a multiple of the base's (1: the same)")
    axes.margins(x=0.05, y=0.5 / max(len(shown), 1))
    axes.set_xlim(left=0)
    if not shown:
        axes.text(0.5, 0.5, "nothing was measured in this run", transform=axes.transAxes, ha="center", va="center")
    return figure


def _label(one, most: int = 62) -> str:
    text = f"{one.action} ({one.arm})" if one.arm.lower() not in one.action.lower() else one.action
    return text if len(text) <= most else f"{text[: most - 1]}…"
