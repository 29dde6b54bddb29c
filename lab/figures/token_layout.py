"""Figures of notebook 01."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from lab.figures.base import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, inside, new_figure

SEGMENT_COLOURS = {
    "prefix": GREY, "image": ORANGE, "state": PURPLE, "question": BLUE, "options": GREEN, "cue": SKY, "readouts": VERMILION,
}  # fmt: skip


def token_bars(table: Sequence[dict]) -> Figure:
    """One bar per row of tokens, as long as it, its segments in order; the share that never changes at its end.

    `table` holds what `lab.experiments.token_layout.line` returns, as its `table` does.
    """
    figure, axes = new_figure(7.5, 0.5 + 0.45 * len(table))
    longest = max(line["total"] for line in table)
    for place, line in enumerate(table):
        left = 0
        for name in (key for key in line if key in SEGMENT_COLOURS):
            axes.barh(place, line[name], left=left, color=SEGMENT_COLOURS[name], height=0.62)
            inside(
                axes, left, place, line[name], longest, (f"{name} {line[name]}", str(line[name])), SEGMENT_COLOURS[name]
            )
            left += line[name]
        axes.text(left + 3, place, f"{line['fixed_share']} % fixed", va="center", fontsize=9, color=GREY)
    axes.set_yticks(range(len(table)), [line["workload"] for line in table])
    axes.invert_yaxis()
    axes.set_xlabel("position in the row (tokens)")
    axes.set_xlim(0, longest * 1.15)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
