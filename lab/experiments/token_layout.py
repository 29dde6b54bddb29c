"""Notebook 01: where the tokens of a decision are, and which of them never change. Counts only; nothing is timed."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lab.tokens import Row, build_row, image_tokens, load_tokenizer
from lab.workloads import Workload, load_workloads


def rows_of(workloads: Iterable[Workload], image_size: int = 512, layout: str = "terminator") -> dict[str, Row]:
    """Each workload's token row by its name, in one of `lab.tokens`' layouts at `image_size` pixels."""
    tokenizer, count = load_tokenizer(), image_tokens(image_size)
    return {w.name: build_row(tokenizer, w.question, w.frames, count, layout=layout) for w in workloads}


def table(workloads: str | Path | None = None, image_size: int = 512) -> list[dict]:
    """Token counts per segment, one dict per workload of a workload file (the shipped one by default).

    Keys: workload, total, prefix, image, question, options, fixed_share (question and options over the total, in whole
    per cent).
    """
    lines = []
    for name, row in rows_of(load_workloads(workloads).values(), image_size).items():
        counts = {segment.name: len(segment) for segment in row.segments}
        fixed = counts["question"] + counts["options"]
        counts = {segment: counts[segment] for segment in ("prefix", "image", "question", "options")}
        lines.append({"workload": name, "total": len(row), **counts, "fixed_share": round(100 * fixed / len(row))})
    return lines


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


def flop_shares(table: list[dict], preset: str = "smolvlm-256m") -> dict[str, float]:
    """The share of a decision's operations that its question and options take, in per cent, by workload of `table`.

    Counted at the preset's shape without calculating anything: one image through vision tower and connector, one token
    through the text model. As in the published figures, heads and the part of the text model's attention that grows
    with the square of the length are left out.
    """
    import torch

    from lab.models import load_model
    from lab.roofline import count

    model = load_model(preset, weights="random")
    size, width = model.config.image_size, model.encoder.text_model.config.hidden_size
    image = count(lambda: model.images(torch.zeros(1, 3, size, size)))
    token = count(lambda: model.language(torch.zeros(1, 1, width)))
    frames = {workload.name: workload.frames for workload in load_workloads().values()}
    return {
        line["workload"]: 100
        * token
        * (line["question"] + line["options"])
        / (token * line["total"] + image * frames[line["workload"]])
        for line in table
    }


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
    equal = (compared["tokens"] == compared["published tokens"]).sum()
    return (
        f"{low} to {high} % of a row's tokens never change, but they take only {least:.1f} to {most:.1f} % of the "
        f"operations; all of them stand after the picture. {equal} of {len(compared)} workloads have the published count."
    )
