"""Notebook 01: where the tokens of a decision are, and which of them never change. Counts only; nothing is timed."""

import functools
from collections.abc import Iterable
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from lab.envs import make, one_hot, play
from lab.stats import share_interval
from lab.tokens import Row, build_row, cleaned, image_tokens, load_tokenizer
from lab.workloads import Question, Workload, load_workloads


def rows_of(workloads: Iterable[Workload], image_size: int = 512, layout: str = "terminator") -> dict[str, Row]:
    """Each workload's token row by its name, in one of `lab.tokens`' layouts at `image_size` pixels."""
    tokenizer, count = load_tokenizer(), image_tokens(image_size)
    return {w.name: build_row(tokenizer, w.question, w.frames, count, layout=layout) for w in workloads}


def line(name: str, row: Row) -> dict:
    """Token counts of one row: workload, total, each segment's in the row's order, and fixed_share.

    The last is the share, in whole per cent, of what never changes without standing ahead of everything: question and
    options, with the cue and the readouts of layouts that have them, but not the prefix.
    """
    counts = {"workload": name, "total": len(row), **{segment.name: len(segment) for segment in row.segments}}
    return counts | {"fixed_share": round(100 * _fixed(counts) / len(row))}


def _fixed(line: dict) -> int:
    return line["total"] - line["prefix"] - line["image"] - line.get("state", 0)


def table(workloads: str | Path | None = None, image_size: int = 512) -> list[dict]:
    """`line` of each workload of a workload file (the shipped one by default)."""
    return [line(name, row) for name, row in rows_of(load_workloads(workloads).values(), image_size).items()]


def tokens(row: Row) -> list[dict]:
    """Every token of a row: position, id, text, segment, fixed, and the option read out there (None elsewhere)."""
    tokenizer = load_tokenizer()
    options = {int(position): option for option, position in enumerate(row.readouts)}
    return [
        {
            "position": place,
            "id": int(row.ids[place]),
            "text": tokenizer.decode([int(row.ids[place])], skip_special_tokens=False),
            "segment": segment.name,
            "fixed": segment.fixed,
            "option": options.get(place),
        }
        for segment in row.segments
        for place in range(segment.start, segment.stop)
    ]


def cut(question: Question, row: Row) -> list[str]:
    """What of a question was too long for the budgets of `lab.tokens.build_row`: "the question", names of options."""
    tokenizer = load_tokenizer()
    there = tokenizer.decode(row.ids.tolist(), skip_special_tokens=False)
    texts = {"the question": question.instructions, **dict(zip(question.names, question.rendered, strict=True))}
    return [name for name, text in texts.items() if cleaned(tokenizer, text) not in there]


@functools.cache
def operations(preset: str = "smolvlm-256m") -> dict:
    """What one token costs in the text model, and one image in vision tower and connector, in floating-point operations.

    Keys: "token", and the side of the image in pixels: 512, 256, 128, as far as the preset reads it. Counted at the
    preset's shape without calculating anything. As in the published figures, heads and the part of the text model's
    attention that grows with the square of the length are left out.
    """
    import torch

    from lab.models import load_model
    from lab.roofline import count

    model = load_model(preset, weights="random")
    width = model.encoder.text_model.config.hidden_size
    counted = {"token": count(lambda: model.language(torch.zeros(1, 1, width)))}
    for size in (512, 256, 128):
        if size <= model.config.image_size:
            counted[size] = count(lambda size=size: model.images(torch.zeros(1, 3, size, size)))
    return counted


def cost(line: dict, frames: int = 1, image_size: int = 512, preset: str = "smolvlm-256m") -> dict:
    """A decision's `operations` (see there), and the share of them that its fixed tokens take, in per cent (`share`)."""
    each = operations(preset)
    total = each["token"] * line["total"] + each[image_size] * frames
    return {"operations": total, "share": 100 * each["token"] * _fixed(line) / total}


def flop_shares(
    table: list[dict], preset: str = "smolvlm-256m", workloads: str | Path | None = None
) -> dict[str, float]:
    """The share of a decision's operations that its question and options take, in per cent, by workload of `table`.

    Frames per decision are the shipped workloads', or those of the file `workloads`; pictures are as large as the preset
    reads them.
    """
    frames = {workload.name: workload.frames for workload in load_workloads(workloads).values()}
    size = max(key for key in operations(preset) if key != "token")
    return {line["workload"]: cost(line, frames[line["workload"]], size, preset)["share"] for line in table}


def beside_published(table: list[dict], shares: dict[str, float], published: pd.DataFrame) -> pd.DataFrame:
    """Counts and shares measured here beside the published ones (`published("tokens")`), one line per workload."""
    said = published.set_index("workload")
    return pd.DataFrame(
        {
            "workload": line["workload"],
            "tokens": line["total"],
            "published tokens": said["total"].get(line["workload"]),
            "fixed (%)": line["fixed_share"],
            "published fixed (%)": said["fixed_share_percent"].get(line["workload"]),
            "operations (%)": shares[line["workload"]],
            "published operations (%)": said["flop_share_percent"].get(line["workload"]),
        }
        for line in table
    )


def answer(compared: pd.DataFrame) -> str:
    """The notebook's answer, computed from the table of `beside_published`."""
    low, high = (compared["fixed (%)"].agg(end) for end in ("min", "max"))
    least, most = (compared["operations (%)"].agg(end) for end in ("min", "max"))
    known = compared[compared["published tokens"].notna()]
    tokens = f"{low} to {high}" if high > low else str(low)
    share = f"{least:.1f} to {most:.1f}" if most > least else f"{least:.1f}"
    said = (
        f"{tokens} % of a row's tokens never change, but they take only {share} % of the operations; all of them stand "
        "after the picture."
    )
    if known.empty:
        return said
    equal = (known["tokens"] == known["published tokens"]).sum()
    return f"{said} {equal} of {len(known)} workloads have the published count."


def repeats(workloads: str | Path, decisions: int = 200, seed: int = 0) -> pd.DataFrame:
    """How often a frame of a file's workloads equals the one before, byte for byte: workload, source's kind, pairs,
    `identical` with its exact interval, and the median share of pixels that changed. A frame that opens an episode is in
    no pair. Of several cameras all must be equal."""
    lines = []
    for workload in load_workloads(workloads).values():
        with closing(make(workload.source, seed)) as env:
            seen = list(islice(play(env, one_hot(env, seed)), decisions + 1))
        changed = [
            float((after != before).any(axis=-1).mean()) for (before, _), (after, opens) in pairwise(seen) if not opens
        ]
        found = share_interval(sum(share == 0 for share in changed), len(changed))
        lines.append(
            {"workload": workload.name, "source": workload.source.partition(":")[0], "pairs": len(changed)}
            | {"identical": found.value, "low": found.low, "high": found.high, "changed": float(np.median(changed))}
        )
    return pd.DataFrame(lines)
