"""Self-contained HTML views and tables, readable on a light and on a dark page, in a notebook and in a mailed report."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from lab.figures import SEGMENT_COLOURS, VERMILION


@dataclass(frozen=True)
class View:
    """Something to show in a notebook: `html` where pages are shown, `text` (its conclusion) everywhere else.

    The HTML must stand alone: no script, style sheet or picture from another address, so that it shows in a report
    that is opened without a network.
    """

    html: str
    text: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text


def table(frame: pd.DataFrame, digits: int = 3) -> Any:
    """`frame` as a table without its row numbers, numbers with `digits` significant digits, for a notebook's page."""
    shown = frame.style.format(lambda v: f"{v:.{digits}g}" if isinstance(v, float) else str(v), na_rep="")
    return shown.hide(axis="index") if isinstance(frame.index, pd.RangeIndex) else shown


def token_strip(tokens: Sequence[dict], title: str) -> View:
    """Every token of one row as a coloured cell: its text, on hover its position, id and segment; readouts are framed.

    `tokens` is what `lab.experiments.token_layout.tokens` returns.
    """
    cells = []
    for token in tokens:
        name, colour = token["segment"], SEGMENT_COLOURS[token["segment"]]
        shown = "▪" if token["text"] == "<image>" else escape(token["text"].replace("\n", "⏎").strip() or "␣")
        readout = "" if token["option"] is None else f", readout of option {token['option']}"
        frame = "" if token["option"] is None else f"outline:2px solid {VERMILION};outline-offset:-1px;"
        about = f"position {token['position']}, id {token['id']}, {name}{readout}"
        cells.append(
            f'<span title="{about}" style="background:{colour}40;{frame}border-radius:2px;'
            f'padding:0 3px;margin:1px;display:inline-block">{shown}</span>'
        )
    counts = {name: sum(token["segment"] == name for token in tokens) for name in SEGMENT_COLOURS}
    counts = {name: count for name, count in counts.items() if count}
    key = " ".join(
        f'<span style="background:{SEGMENT_COLOURS[name]}40;border-radius:2px;padding:0 4px">{name} {count}</span>'
        for name, count in counts.items()
    )
    html = (
        f'<div style="font:12px/1.6 monospace;color:inherit"><b>{escape(title)}</b>, {len(tokens)} tokens: {key} '
        f'<span style="outline:2px solid {VERMILION};outline-offset:-1px;padding:0 4px">readout</span>'
        f'<div style="margin-top:4px">{"".join(cells)}</div></div>'
    )
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    return View(html, f"{title}: {len(tokens)} tokens ({listed})")
