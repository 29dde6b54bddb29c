"""Matplotlib figures, readable on a light and on a dark page; `lab.views` has what is shown as HTML.

A figure function takes rows or results and returns a Figure; it draws on a transparent ground in mid-grey, with the
colour-blind-safe palette of Okabe and Ito ("Color Universal Design", 2008), and writes labels beside what they name.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lab.stats import spell

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


def _inside(axes: Axes, left: float, y: float, width: float, longest: float, texts: Sequence[str], ground: str) -> None:
    """Write the first of `texts` that fits into a bar `width` wide, where `longest` is the longest bar of the figure."""
    fitting = [text for text in texts if width > 0.0145 * len(text) * longest]
    if fitting:
        colour = "#111111" if ground in (ORANGE, SKY, PURPLE) else "white"
        axes.text(left + width / 2, y, fitting[0], ha="center", va="center", color=colour, fontsize=8)


def _short(number: float) -> str:
    """A time for a label: three digits, never in powers of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


# ---------------------------------------------------------------------------------------------------- token layout

SEGMENT_COLOURS = {
    "prefix": GREY, "image": ORANGE, "state": PURPLE, "question": BLUE, "options": GREEN, "cue": SKY, "readouts": VERMILION,
}  # fmt: skip
SEGMENTS = ("prefix", "image", "question", "options")


def token_bars(table: Sequence[dict]) -> Figure:
    """One bar per workload, as long as its tokens, coloured by segment; the share that never changes at its end.

    `table` is what `lab.experiments.token_layout.table` returns.
    """
    figure, axes = new_figure(7.5, 0.5 + 0.45 * len(table))
    longest = max(line["total"] for line in table)
    for place, line in enumerate(table):
        left = 0
        for name in SEGMENTS:
            axes.barh(place, line[name], left=left, color=SEGMENT_COLOURS[name], height=0.62)
            _inside(
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


# ---------------------------------------------------------------------------------------------------- latency

STAGE_COLOURS = {
    "build_inputs": PURPLE,
    "resize": SKY,
    "vision": ORANGE,
    "language": BLUE,
    "language_prefix": BLUE,
    "language_question": VERMILION,
    "restore": PURPLE,
    "heads": GREEN,
    "readback": GREY,
}


def stage_bars(tables: dict[str, pd.DataFrame]) -> Figure:
    """One bar per workload and arm, cut into its stages (median ms), with the whole decision's interval at its end.

    `tables` holds, by workload, what `lab.experiments.latency.stage_table` returns.
    """
    lines = [
        (name, arm, part.set_index("stage")) for name, t in tables.items() for arm, part in t.groupby("arm", sort=False)
    ]
    figure, axes = new_figure(7.5, 0.8 + 0.42 * len(lines))
    longest = max(part.loc["total", "median"] for _, _, part in lines)
    highest = max(part.loc["total", ["median", "high"]].max() for _, _, part in lines)
    reach = min(max(longest, highest / 1.1), 1.4 * longest)  # one wild interval must not squeeze the bars
    for place, (_, _, part) in enumerate(lines):
        left = 0.0
        for stage, line in part.drop(index="total").iterrows():
            axes.barh(place, line["median"], left=left, color=STAGE_COLOURS.get(stage, GREY), height=0.62)
            words = stage.replace("_", " ")
            texts = (f"{words} {_short(line['median'])}", words, _short(line["median"]))
            _inside(axes, left, place, line["median"], reach, texts, STAGE_COLOURS.get(stage, GREY))
            left += line["median"]
        total = part.loc["total"]
        error = [[total["median"] - total["low"]], [total["high"] - total["median"]]]
        axes.errorbar(total["median"], place + 0.4, xerr=error, color=GREY, capsize=2, elinewidth=1.2)
        axes.text(left + 0.01 * reach, place, _short(total["median"]), va="center", fontsize=9, color=GREY)
    seen = list(dict.fromkeys(stage for _, _, part in lines for stage in part.index if stage != "total"))
    swatches = [plt.Rectangle((0, 0), 1, 1, color=STAGE_COLOURS.get(stage, GREY)) for stage in seen]
    figure.legend(
        swatches,
        [stage.replace("_", " ") for stage in seen],
        loc="outside upper left",
        ncols=5,
        frameon=False,
        labelcolor=GREY,
        fontsize=8,
    )
    axes.set_yticks(range(len(lines)), [f"{name}, {arm}" for name, arm, _ in lines])
    axes.invert_yaxis()
    axes.set_xlabel("time of one decision (ms, median; below each bar the whole's 95 % interval)")
    axes.set_xlim(0, 1.15 * reach)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def arm_bars(speed: pd.DataFrame) -> Figure:
    """Median time of every arm (ms) with its interval, grouped by case; the ratio to eager beside it.

    `speed` is what `lab.experiments.graphs.speed_table` returns.
    """
    case = ["preset", "workload", "frames", "batch", "dtype"]
    groups = list(speed.groupby(case, sort=False))
    figure, grid = new_figure(7.5, 0.5 * len(groups) + 0.3 * len(speed), nrows=len(groups), squeeze=False)
    for axes, (names, part) in zip(grid[:, 0], groups, strict=True):
        places = range(len(part))
        error = [part["median"] - part["low"], part["high"] - part["median"]]
        colours = [GREY if arm.endswith("again") else BLUE if arm == "eager" else ORANGE for arm in part["arm"]]
        axes.barh(places, part["median"], color=colours, height=0.6)
        axes.errorbar(part["median"], places, xerr=np.nan_to_num(error), fmt="none", ecolor=GREY, capsize=3)
        for place, line in zip(places, part.itertuples(), strict=True):
            ratio = "" if np.isnan(line.ratio) else f", {spell(line.ratio, line.ratio_low, line.ratio_high)}"
            end = np.nanmax([line.median, line.high])
            axes.text(end, place, f"  {_short(line.median)}{ratio}", va="center", fontsize=8, color=GREY)
        axes.set_yticks(places, part["arm"], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.45 * np.nanmax(part[["median", "high"]].to_numpy()))
        preset, workload, frames, batch, dtype = names
        axes.set_title(f"{preset}: {workload}, {frames} frame(s), batch {batch}, {dtype}", fontsize=9, color=GREY)
        axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of one decision (ms, median, 95 % interval); beside it the paired ratio to eager")
    return figure


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
                f"{line.ratio:.3f}, {_short(line.ms)} ms", (1, place), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", fontsize=8, color=GREY, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(places, part["arm"], fontsize=8)
        axes.set_ylim(len(part) - 0.4, -0.6)
        axes.set_title(f"{workload}, batch {batch}, {dtype}", fontsize=9, color=GREY)
    axes.set_xlabel("time of a decision over the whole sequence's (paired, 95 % interval; band: A/A; filled: shown)")
    return figure


def timeline(events: pd.DataFrame) -> Figure:
    """One decision per arm on a time axis: stages as bars, operations and launches as ticks below.

    `events` is what `lab.experiments.graphs.timelines` returns.
    """
    arms = list(dict.fromkeys(events["arm"]))
    figure, grid = new_figure(8, 1.3 * len(arms), nrows=len(arms), sharex=True, squeeze=False)
    for axes, arm in zip(grid[:, 0], arms, strict=True):
        own = events[events["arm"] == arm]
        for line in own[own["kind"] == "stage"].itertuples():
            colour = STAGE_COLOURS.get(line.name, SKY)
            axes.barh(1, line.end_ms - line.start_ms, left=line.start_ms, color=colour, height=0.7)
            name, width = line.name.replace("_", " "), line.end_ms - line.start_ms
            _inside(axes, line.start_ms, 1, width, events["end_ms"].max(), (name,), colour)
        for place, kind, colour in ((0.3, "operation", GREY), (0, "launch", VERMILION)):
            starts = own[own["kind"] == kind]["start_ms"]
            axes.vlines(starts, place - 0.12, place + 0.12, color=colour, linewidth=0.6)
        counts = own["kind"].value_counts()
        total = own["end_ms"].max()
        text = f"{arm}: {_short(total)} ms, {counts.get('operation', 0)} operations, {counts.get('launch', 0)} launches"
        axes.set_title(text, fontsize=9, color=GREY)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    axes.set_xlabel("time since the decision began (ms, one profiled decision at the tiny size)")
    return figure


# ---------------------------------------------------------------------------------------------------- duplicates

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


def floor_bars(stages: pd.DataFrame, title: str) -> Figure:
    """Measured time of each stage (ms, logarithmic) with its floor marked, and the share the floor explains.

    `stages` is what `lab.roofline.share_of_floor` returns; stages under 0.1 % of the whole are left out.
    """
    whole = stages.set_index("stage").loc["total", "measured_ms"]
    shown = stages[(stages["stage"] != "total") & (stages["measured_ms"] > 0.001 * whole)].reset_index(drop=True)
    figure, axes = new_figure(7.5, 0.9 + 0.45 * len(shown))
    colours = [STAGE_COLOURS.get(stage, GREY) for stage in shown["stage"]]
    axes.barh(range(len(shown)), shown["measured_ms"], color=colours, height=0.6)
    for place, line in shown.iterrows():
        axes.plot([line["floor_ms"]] * 2, [place - 0.38, place + 0.38], color=VERMILION, linewidth=3)
        bound = f", {line['bound']}" if line["bound"] else ""
        text = f" {_short(line['measured_ms'])} ms: {line['share']:.0%} floor{bound}"
        axes.text(max(line["measured_ms"], line["floor_ms"]) * 1.05, place, text, va="center", fontsize=9, color=GREY)
    axes.set_xscale("log")
    axes.set_xlim(shown["measured_ms"].min() / 5, shown["measured_ms"].max() * 20)
    axes.set_yticks(range(len(shown)), [stage.replace("_", " ") for stage in shown["stage"]])
    axes.invert_yaxis()
    axes.set_xlabel(f"{title}: time of the stage (ms, median, logarithmic); red: its floor on this machine")
    return figure


# ---------------------------------------------------------------------------------------------------- question first


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
