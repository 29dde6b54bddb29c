"""Figures of trained models beside players that know nothing (notebook 03)."""

import pandas as pd
from matplotlib.figure import Figure

from lab.figures.base import BLUE, GREEN, GREY, ORANGE, new_figure

COLOURS = {"expert": GREEN, "pocket": BLUE, "pocket-question-first": ORANGE}  # all that know nothing are grey


def score_dots(scores: pd.DataFrame) -> Figure:
    """Mean score of every player with its 95 % interval, one panel per game, best player on top.

    `scores` is what `lab.experiments.imitation.score_table` returns.
    """
    games = list(scores.groupby("workload", sort=False))
    figure, grid = new_figure(8, 0.8 + 0.24 * len(scores), nrows=len(games), squeeze=False,
                              height_ratios=[len(part) for _, part in games])  # fmt: skip
    for axes, (workload, part) in zip(grid[:, 0], games, strict=True):
        part = part.assign(value=[score.value for score in part.score]).sort_values("value")
        for place, line in enumerate(part.itertuples()):
            score, colour = line.score, COLOURS.get(line.player, GREY)
            axes.plot([score.low, score.high], [place, place], color=colour, linewidth=2)
            axes.plot(score.value, place, "o", color=colour, ms=6)
            axes.annotate(f"{score.value:.1f}", (score.high if score.high == score.high else score.value, place), (6, 0),
                          textcoords="offset points", va="center", fontsize=8, color=GREY)  # fmt: skip
        axes.set_yticks(range(len(part)), part.player, fontsize=8)
        axes.set_ylim(-0.6, len(part) - 0.4)
        axes.margins(x=0.08)
        axes.set_title(f"{workload}, {part.episodes.iloc[0]} seeds", fontsize=9)
        axes.grid(axis="x")
    axes.set_xlabel("score of an episode (mean over the same seeds, 95 % interval)")
    return figure


def agreement_dots(table: pd.DataFrame) -> Figure:
    """Share of unseen frames answered as the expert does: filled with the options as given, open in other orders.

    `table` is what `lab.experiments.imitation.agreement_table` returns.
    """
    figure, axes = new_figure(8, 0.9 + 0.42 * len(table))
    for place, line in enumerate(table.itertuples()):
        for share, dy, fill in ((line.given, 0.13, None), (line.shuffled, -0.13, "none")):
            colour = COLOURS.get(line.player, GREY)
            axes.plot([share.low, share.high], [place - dy] * 2, color=colour, linewidth=2)
            axes.plot(share.value, place - dy, "o", color=colour, mfc=fill or colour, ms=6)
        axes.annotate(f"{line.given.value:.1%}, shuffled {line.shuffled.value:.1%}", (1.01, place), va="center", fontsize=8,
                      color=GREY, annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(table)), [f"{line.workload}, {line.layout}" for line in table.itertuples()], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(axis="x")
    axes.set_xlabel("share of frames answered as the expert does (filled: options as given; open: in other orders)")
    return figure
