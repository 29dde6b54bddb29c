"""Figures of a decision's time: stages, arms, floors, timelines (notebooks 02 and 04)."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lab.figures.base import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, inside, new_figure, short
from lab.stats import spell

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
            texts = (f"{words} {short(line['median'])}", words, short(line["median"]))
            inside(axes, left, place, line["median"], reach, texts, STAGE_COLOURS.get(stage, GREY))
            left += line["median"]
        total = part.loc["total"]
        error = [[total["median"] - total["low"]], [total["high"] - total["median"]]]
        axes.errorbar(total["median"], place + 0.4, xerr=error, color=GREY, capsize=2, elinewidth=1.2)
        axes.text(left + 0.01 * reach, place, short(total["median"]), va="center", fontsize=9, color=GREY)
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
            axes.text(end, place, f"  {short(line.median)}{ratio}", va="center", fontsize=8, color=GREY)
        axes.set_yticks(places, part["arm"], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.45 * np.nanmax(part[["median", "high"]].to_numpy()))
        preset, workload, frames, batch, dtype = names
        axes.set_title(f"{preset}: {workload}, {frames} frame(s), batch {batch}, {dtype}", fontsize=9, color=GREY)
        axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of one decision (ms, median, 95 % interval); beside it the paired ratio to eager")
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
            inside(axes, line.start_ms, 1, width, events["end_ms"].max(), (name,), colour)
        for place, kind, colour in ((0.3, "operation", GREY), (0, "launch", VERMILION)):
            starts = own[own["kind"] == kind]["start_ms"]
            axes.vlines(starts, place - 0.12, place + 0.12, color=colour, linewidth=0.6)
        counts = own["kind"].value_counts()
        total = own["end_ms"].max()
        text = f"{arm}: {short(total)} ms, {counts.get('operation', 0)} operations, {counts.get('launch', 0)} launches"
        axes.set_title(text, fontsize=9, color=GREY)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    axes.set_xlabel("time since the decision began (ms, one profiled decision at the tiny size)")
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
        text = f" {short(line['measured_ms'])} ms: {line['share']:.0%} floor{bound}"
        axes.text(max(line["measured_ms"], line["floor_ms"]) * 1.05, place, text, va="center", fontsize=9, color=GREY)
    axes.set_xscale("log")
    axes.set_xlim(shown["measured_ms"].min() / 5, shown["measured_ms"].max() * 20)
    axes.set_yticks(range(len(shown)), [stage.replace("_", " ") for stage in shown["stage"]])
    axes.invert_yaxis()
    axes.set_xlabel(f"{title}: time of the stage (ms, median, logarithmic); red: its floor on this machine")
    return figure
