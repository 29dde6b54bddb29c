"""What every figure shares: the palette of Okabe and Ito ("Color Universal Design", 2008), which the colour-blind can
tell apart, the style, and ways to write labels beside what they name."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE)  # without black and yellow, which vanish on one ground
GREY = "#808080"  # text and lines: contrast about 4:1 on white and 5:1 on near-black
FAINT = "#80808055"  # grid lines and bands

_RC = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.transparent": True,
    "savefig.bbox": "tight",
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.prop_cycle": plt.cycler(color=PALETTE),
    "svg.fonttype": "none",
}


def style() -> None:
    """Set matplotlib's defaults for the whole session: transparent ground, mid-grey text, Okabe-Ito colours."""
    plt.rcParams.update(_RC)


def new_figure(width: float = 7.5, height: float = 3.5, **subplots: Any) -> tuple[Figure, Any]:
    """A styled figure of `width` x `height` inches and its axes (`plt.subplots` arguments pass through).

    The figure is not left open in pyplot, so a notebook cell that ends with it shows it once, and a long run of
    notebooks does not pile figures up.
    """
    with plt.rc_context(_RC):
        figure, axes = plt.subplots(figsize=(width, height), **subplots)
    plt.close(figure)
    return figure, axes


def label_points(axes: Axes, xs: Sequence[float], ys: Sequence[float], labels: Sequence[str], dx: float = 6) -> None:
    """Write each label `dx` points to the right of its point: direct labels instead of a legend."""
    for x, y, label in zip(xs, ys, labels, strict=True):
        axes.annotate(label, (x, y), (dx, 0), textcoords="offset points", va="center", color=GREY, fontsize=9)


def inside(axes: Axes, left: float, y: float, width: float, longest: float, texts: Sequence[str], ground: str) -> None:
    """Write the first of `texts` that fits into a bar `width` wide, where `longest` is the longest bar of the figure."""
    fitting = [text for text in texts if width > 0.0145 * len(text) * longest]
    if fitting:
        colour = "#111111" if ground in (ORANGE, SKY, PURPLE) else "white"
        axes.text(left + width / 2, y, fitting[0], ha="center", va="center", color=colour, fontsize=8)


def short(number: float) -> str:
    """A time for a label: three digits, never in powers of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
