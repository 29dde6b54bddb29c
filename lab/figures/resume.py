"""Figures of notebook 06."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.figures.base import BLUE, FAINT, GREEN, GREY, ORANGE, SKY, label_points, new_figure, short


def prompt_strips(prompts: pd.DataFrame) -> Figure:
    """Each prompt as a strip of its tokens: what was restored (pale, images framed), which images were encoded, what
    text was run.

    `prompts` is what `lab.experiments.resume.lines(rows, "prompt")` returns.
    """
    prompts = prompts.drop_duplicates(["images", "tokens", "cached_tokens"])
    figure, axes = new_figure(7.5, 0.9 + 0.62 * len(prompts))
    longest = prompts["tokens"].max()
    for place, line in enumerate(prompts.itertuples()):
        axes.barh(place, line.cached_tokens, color=FAINT, height=0.6)
        axes.barh(place, line.tokens - line.cached_tokens, left=line.cached_tokens, color=GREEN, height=0.6)
        for number, (start, stop) in enumerate(line.spans):
            encoded = number in line.encoded
            colour = ORANGE if encoded else SKY
            axes.add_patch(
                Rectangle(
                    (start, place - 0.3), stop - start, 0.6, facecolor=colour if encoded else "none", edgecolor=colour,
                    linewidth=1.5, zorder=3,
                )
            )  # fmt: skip
            text = "#111111" if encoded else GREY
            axes.text(
                (start + stop) / 2, place, f"{number + 1}", ha="center", va="center", color=text, zorder=4, fontsize=9
            )
        said = f"{len(line.encoded)} of {line.images} encoded"
        axes.text(line.tokens + longest * 0.012, place, said, va="center", fontsize=9, color=GREY)
    axes.set_yticks(range(len(prompts)), [title.rpartition(", ")[0] for title in prompts["title"]])
    axes.set_ylim(len(prompts) - 0.5, -0.95)
    for name, colour, left in (
        ("restored", GREY, 0), ("image restored, not encoded", SKY, 0.13), ("image encoded", ORANGE, 0.47),
        ("text run", GREEN, 0.66),
    ):  # fmt: skip
        axes.text(left, 1.0, f"■ {name}", color=colour, transform=axes.transAxes, fontsize=9, va="top")
    axes.set_xlim(0, longest * 1.2)
    axes.set_xlabel("position in the prompt (tokens)")
    axes.set_title("What a resumed prompt restores, skips and encodes")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def first_token_bars(table: pd.DataFrame) -> Figure:
    """Time to first token per turn with the skip and without; the paired ratio with its interval beside each pair.

    `table` is what `lab.experiments.resume.turns` returns.
    """
    several = table["dtype"].nunique() > 1
    figure, axes = new_figure(7.5, 0.9 + 0.75 * len(table))
    longest = table[["ttft_ms", "ttft_ms_without"]].to_numpy().max()
    for place, line in enumerate(table.itertuples()):
        for shift, ms, encoded, colour in (
            (-0.19, line.ttft_ms, line.encoded, BLUE), (0.19, line.ttft_ms_without, line.encoded_without, ORANGE),
        ):  # fmt: skip
            axes.barh(place + shift, ms, height=0.34, color=colour)
            text = f"{short(ms)} ms, {encoded} encoded"
            axes.text(ms + longest * 0.012, place + shift, text, va="center", fontsize=9, color=GREY)
        bounds = f" [{line.low:.2f}, {line.high:.2f}]" if line.low == line.low else ""
        said = f"ratio {line.ratio:.2f}{bounds}" + ("" if line.shown else "\nno difference shown")
        axes.text(longest * 1.72, place, said, va="center", ha="right", fontsize=9, color=GREY)
    names = [f"{line.case}" + (f", {line.dtype}" if several else "") for line in table.itertuples()]
    axes.set_yticks(range(len(table)), names)
    axes.set_ylim(len(table) - 0.5, -0.85)
    for name, colour, left in (("only what the state does not hold", BLUE, 0), ("every image", ORANGE, 0.36)):
        axes.text(left, 1.0, f"■ {name}", color=colour, transform=axes.transAxes, fontsize=9, va="top")
    axes.set_xlim(0, longest * 1.73)
    axes.set_xlabel("time to first token (ms, median)")
    axes.set_title("Time to first token, by which images are encoded")
    return figure


def saving_growth(table: pd.DataFrame) -> Figure:
    """The paired ratio of the times to first token by the images in the prompt, of which one is new.

    `table` is what `lab.experiments.resume.growth` returns; the dotted line is one image's share of them all, which is
    what the ratio would be if nothing but the tower took time.
    """
    figure, axes = new_figure(6.5, 3.2)
    most = int(table["images"].max())
    counts = range(1, most + 1)
    axes.plot(counts, [1 / count for count in counts], ":", color=GREY, linewidth=1)
    axes.annotate(
        "1 / images", (most, 1 / most), (0, -12), textcoords="offset points", ha="right", fontsize=9, color=GREY
    )
    axes.axhline(1, color=GREY, linewidth=1)
    for colour, (dtype, part) in zip((BLUE, ORANGE), table.groupby("dtype", sort=False), strict=False):
        error = [(part["ratio"] - part["low"]).fillna(0), (part["high"] - part["ratio"]).fillna(0)]
        axes.errorbar(part["images"], part["ratio"], yerr=error, fmt="o", color=colour, capsize=3, ms=5)
        last = part.tail(1)
        name = f"{dtype}: " if table["dtype"].nunique() > 1 else ""
        label_points(axes, last["images"], last["ratio"], [f"{name}{last['ratio'].iloc[0]:.2f}"], dx=8)
    axes.set_xlim(0.5, most * 1.13)
    axes.set_ylim(0, max(1.15, table["high"].max(skipna=True) * 1.05))
    axes.set_xticks(list(counts))
    axes.set(xlabel="images in the prompt, one of them new", ylabel="time with the skip / without")
    axes.set_title("What the skip saves, by images per prompt")
    return figure
