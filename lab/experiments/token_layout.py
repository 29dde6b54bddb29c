"""Notebook 01: where the tokens of a decision are, and which of them never change. Counts only; nothing is timed."""

from collections.abc import Iterable
from pathlib import Path

from lab.tokens import Row, build_row, image_tokens, load_tokenizer
from lab.workloads import Workload, load_workloads

PROFILES = {
    "smoke": {"image_size": 512},
    "standard": {"image_size": 512},
    "full": {"image_size": 512},
}


def rows_of(workloads: Iterable[Workload], image_size: int = 512) -> dict[str, Row]:
    """Each workload's token row by its name, in the `terminator` layout at `image_size` pixels."""
    tokenizer = load_tokenizer()
    return {w.name: build_row(tokenizer, w.question, w.frames, image_tokens(image_size)) for w in workloads}


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
