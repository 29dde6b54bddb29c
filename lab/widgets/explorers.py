"""Explorers: controls over the same figures and tables that a notebook shows still.

`Explorer` is all they share; an explorer of your own is a function from values to things to see, and a dict of controls:

    def show(game, lag):                       # called after each change; raise InputError for what cannot be shown
        return figures.my_figure(game, lag), "A sentence.", views.table(frame)

    Explorer("games", show, {"game": ipywidgets.Dropdown(options=games), "lag": ipywidgets.IntSlider(1, 1, 8)})
"""

import asyncio
import functools
import io
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from lab import figures, views
from lab.errors import InputError
from lab.experiments import latency as stages
from lab.experiments import token_layout
from lab.stats import Estimate
from lab.tokens import LAYOUTS, build_row, image_tokens, load_tokenizer
from lab.widgets import interactive
from lab.workloads import MAX_FRAMES, QUESTION_TYPES, Question, load_workloads

WAIT_S = 0.25  # how long nothing must change before it is drawn: someone may still be typing
DPI = 220  # twice what a notebook shows a figure at, so that it is sharp on a fine screen
_STYLE = f"""<style>
.lab-explorer {{ gap: 4px; }}
.lab-explorer .lab-controls {{ flex-flow: row wrap; gap: 4px 16px; align-items: flex-start; }}
.lab-explorer .lab-error {{ color: {figures.VERMILION}; font-weight: 600; }}
.lab-explorer .lab-stale {{ opacity: .35; }}
.lab-explorer .widget-html-content {{ line-height: 1.5; overflow-x: auto; }}
.lab-explorer img {{ max-width: 100%; height: auto; }}
.lab-explorer .lab-controls .widget-textarea {{ flex: 1 1 380px; height: 132px; }}
.lab-explorer .lab-controls .widget-hslider {{ width: 190px; }}
.lab-explorer .lab-controls .widget-dropdown {{ width: auto; }}
.lab-explorer .widget-dropdown > select {{ appearance: auto; background-image: none; }}
.lab-explorer td, .lab-explorer th {{ font-size: 12px; padding: 4px 6px; }}
.lab-explorer td {{ white-space: nowrap; }}
.lab-explorer textarea {{ font-family: var(--jp-code-font-family, monospace); font-size: 12px; }}
</style>"""


def picture(figure: Figure) -> ipywidgets.Image:
    """A figure as an image widget: PNG with a transparent ground, shown as wide as the notebook would show it."""
    widget = ipywidgets.Image(format="png")
    _draw(widget, figure)
    return widget


def _draw(widget: ipywidgets.Image, figure: Figure) -> None:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, transparent=True, bbox_inches="tight")
    content = data.getvalue()
    width = int.from_bytes(content[16:20], "big")  # of the PNG's header
    widget.value, widget.width = content, str(round(width * figure.dpi / DPI))


class Explorer(ipywidgets.VBox):
    """Controls above what `show(**values)` returns for their values: figures, views, tables and texts, one below the other.

    `controls` are ipywidgets by the argument they stand for; one of them gets the class lab-NAME, the whole
    lab-explorer and lab-explorer-NAME. What is shown follows the controls once they rest for `WAIT_S`. An InputError
    becomes a line between controls and picture, and what was last shown stays behind it, faint. Where nobody can move a
    control (see `lab.widgets.interactive`) a notebook shows one sentence instead. `error` is the line between, as plain
    text; empty where the values can be shown.
    """

    wait_s = WAIT_S

    def __init__(self, name: str, show: Callable[..., Iterable], controls: Mapping[str, ipywidgets.Widget]):
        self.name, self.show, self.controls = name, show, dict(controls)
        self.error, self._timer, self._held = "", None, False
        for key, control in self.controls.items():
            control.add_class(f"lab-{key}")
            if hasattr(control.style, "description_width"):
                control.style.description_width = "initial"
            control.observe(self._changed, "value")
        self._error = ipywidgets.HTML()
        self._shown = ipywidgets.VBox()
        texts = [control for control in self.controls.values() if isinstance(control, ipywidgets.Textarea)]
        small = [control for control in self.controls.values() if control not in texts]
        boxes = [ipywidgets.Box(group) for group in (small, texts) if group]
        for box in boxes:
            box.add_class("lab-controls")
        super().__init__([ipywidgets.HTML(_STYLE), *boxes, self._error, self._shown])
        self.add_class("lab-explorer")
        self.add_class(f"lab-explorer-{name}")
        self.refresh()

    @property
    def shown(self) -> tuple:
        """The widgets that show the result, in order."""
        return self._shown.children

    def set(self, **values: Any) -> None:
        """Set several controls and show the result once."""
        self._held = True
        try:
            for key, value in values.items():
                self.controls[key].value = value
        finally:
            self._held = False
        self._changed()

    def _changed(self, _: Any = None) -> None:
        if self._held:
            return
        if self._timer:
            self._timer.cancel()
        try:
            self._timer = asyncio.get_running_loop().call_later(self.wait_s, self._follow)
        except RuntimeError:  # plain Python: there is nothing to wait in
            self._follow()

    def _follow(self) -> None:
        try:
            self.refresh()
        except Exception as error:  # nobody would see it otherwise: the cell ran long ago
            self._complain(f"{type(error).__name__}: {error}")

    def _complain(self, sentence: str) -> None:
        self.error = sentence
        self._error.value = f'<div class="lab-error" role="alert">{escape(sentence)}</div>'
        self._shown.add_class("lab-stale")

    def refresh(self) -> None:
        """Show what belongs to the controls' values now; what `show` raises passes through, but for an InputError."""
        try:
            parts = list(self.show(**{key: control.value for key, control in self.controls.items()}))
        except InputError as error:
            return self._complain(str(error))
        self.error = self._error.value = ""
        self._shown.remove_class("lab-stale")
        old = self._shown.children
        new = [_part(part, old[i] if i < len(old) else None) for i, part in enumerate(parts)]
        if len(new) != len(old) or any(one is not other for one, other in zip(new, old, strict=True)):
            self._shown.children = new

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        text = "Open this notebook in JupyterLab (make lab) to move the controls that stand here."
        if not interactive():
            return {"text/plain": text, "text/html": f"<p><em>{text}</em></p>"}
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": text}


def _part(part: Any, old: ipywidgets.Widget | None) -> ipywidgets.Widget:
    """A widget for a part of what is shown; `old` itself with the new content where it is of the kind."""
    if isinstance(part, ipywidgets.Widget):
        return part
    if isinstance(part, Figure):
        if not isinstance(old, ipywidgets.Image):
            return picture(part)
        _draw(old, part)
        return old
    if isinstance(part, views.View):
        html = part.html
    elif isinstance(part, str):
        html = "".join(f"<div>{escape(line)}</div>" for line in part.splitlines())
    else:
        html = (views.table(part) if isinstance(part, pd.DataFrame) else part).to_html()
    if isinstance(old, ipywidgets.HTML):
        old.value = html
        return old
    widget = ipywidgets.HTML(html)
    widget.add_class("jp-RenderedHTMLCommon")  # tables look as they do elsewhere in JupyterLab
    return widget


# ------------------------------------------------------------------------------------------------ notebook 01


def tokens(workloads: Mapping | None = None, preset: str = "smolvlm-256m") -> Explorer:
    """Edit a question and its options, choose layout, picture size and frames: the row's segments and what it costs.

    `workloads` (the shipped ones by default) fill the fields; the chosen one is drawn as shipped above the edited one.
    `preset` is the model whose operations are counted, which takes seconds the first time.
    """
    workloads = dict(workloads or load_workloads())
    sizes = [size for size in token_layout.operations(preset) if size != "token"]

    def lay_out(name: str, question: Question, frames: int, size: int, layout: str):
        row = build_row(load_tokenizer(), question, frames, image_tokens(size), layout=layout)
        line = token_layout.line(name, row)
        return row, line, token_layout.cost(line, frames, size, preset)

    def show(workload, type, frames, size, layout, instructions, options):
        shipped = workloads[workload]
        question = Question(type, instructions, read_options(options))
        row, line, cost = lay_out("yours", question, frames, size, layout)
        before = lay_out(f"{workload}, as shipped", shipped.question, shipped.frames, sizes[0], "terminator")
        cut = token_layout.cut(question, row)
        note = f"Too long for the model, so tokens are left out of: {', '.join(cut)}. " if cut else ""
        kept = f"A key/value cache could keep the first {row.kept} of its {len(row)} tokens: what comes before the picture."
        return (
            figures.token_bars([before[1], line]),
            note + kept,
            _costs([before, (row, line, cost)]),
            views.token_strip(token_layout.tokens(row), f"yours, {layout.replace('_', ' ')}"),
        )

    names = list(workloads)
    first = workloads["pong"] if "pong" in workloads else workloads[names[0]]
    controls = {
        "workload": ipywidgets.Dropdown(options=names, value=first.name, description="start from"),
        "type": ipywidgets.Dropdown(options=QUESTION_TYPES, description="question type"),
        "layout": ipywidgets.Dropdown(options=list(LAYOUTS), description="layout"),
        "size": ipywidgets.Dropdown(options=[(f"{size} px", size) for size in sizes], description="picture"),
        "frames": ipywidgets.IntSlider(1, 1, MAX_FRAMES, description="frames"),
        "instructions": ipywidgets.Textarea(description="question"),
        "options": ipywidgets.Textarea(description="options", placeholder="NAME: description"),
    }

    def fields(workload) -> dict:
        listed = "\n".join(f"{name}: {about}" if about else name for name, about in workload.question.options)
        return {
            "type": workload.question.type,
            "frames": workload.frames,
            "instructions": workload.question.instructions,
            "options": listed,
        }

    for key, value in fields(first).items():
        controls[key].value = value
    explorer = Explorer("tokens", show, controls)
    controls["workload"].observe(lambda change: explorer.set(**fields(workloads[change["new"]])), "value")
    return explorer


def read_options(text: str) -> dict[str, str] | list[str]:
    """Options from a text, one a line, `NAME: description` or `NAME`; blank lines do not count."""
    pairs = [line.partition(":") for line in text.splitlines() if line.strip()]
    names = [name.strip() for name, _, _ in pairs]
    if len(set(names)) < len(names):
        return names  # a table could not hold it twice; Question refuses it in its own words
    return {name: about.strip() for name, (_, _, about) in zip(names, pairs, strict=True)}


def _costs(lines: list[tuple]) -> pd.DataFrame:
    """What the shipped and the edited row cost beside each other, and the change between them."""
    table = pd.DataFrame(
        {
            "row": line["workload"],
            "tokens": len(row),
            "fixed (%)": line["fixed_share"],
            "GFLOP a decision": cost["operations"] / 1e9,
            "of these for the fixed tokens (%)": cost["share"],
        }
        for row, line, cost in lines
    )
    numbers = table.drop(columns="row")
    change = {name: f"{b - a:+d}" if isinstance(a, int) else f"{b - a:+.2g}" for name, (a, b) in numbers.items()}
    change["GFLOP a decision"] = f"{numbers['GFLOP a decision'][1] / numbers['GFLOP a decision'][0] - 1:+.1%}"
    return pd.concat([table.astype(object), pd.DataFrame([{"row": "change", **change}])], ignore_index=True)


# ------------------------------------------------------------------------------------------------ notebook 02


def latency(rows: pd.DataFrame) -> Explorer:
    """Choose workload, dtype and arm of the rows of `lab.experiments.latency`: its stages as bars and as a table.

    An arm is drawn under the one that all are compared with, and what the one rule says of the two is written below.
    """
    dtypes = rows["describe"].map(lambda said: said.get("dtype", ""))
    every = "all of them"

    @functools.cache
    def read(dtype: str, title: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        part = rows[(dtypes == dtype) & (rows["title"] == title)]
        return stages.stage_table(part, title), stages.differences(part)

    def show(workload, dtype, arm):
        titles = dict.fromkeys(rows["title"][dtypes == dtype])
        found = {title: read(dtype, title) for title in titles if workload in (every, title)}
        tables = {title: table for title, (table, _) in found.items()}
        compared = pd.concat([differences for _, differences in found.values()]) if found else pd.DataFrame()
        if arm != every:
            there = {title: table for title, table in tables.items() if arm in set(table["arm"])}
            tables = {title: table[table["arm"].isin([stages.BASE, arm])] for title, table in there.items()}
        if not tables:
            raise InputError(
                f"{workload} has no {'rows' if arm == every else f'arm {arm!r}'} in {dtype}; choose another."
            )
        said = [line.sentence for line in compared.itertuples() if arm in (every, line.arm)]
        about = "Median ms of each stage, in brackets its share of the decision; the whole with its 95 % interval."
        return figures.stage_bars(tables), "\n".join(said), about, _stages(tables)

    arms = [arm for arm in stages.ARMS if arm in set(rows["arm"])]
    choices = {
        "workload": [*dict.fromkeys(rows["title"]), every],
        "dtype": list(dict.fromkeys(dtypes)),
        "arm": [every, *arms],
    }
    controls = {name: ipywidgets.Dropdown(options=values, description=name) for name, values in choices.items()}
    return Explorer("latency", show, controls)


def _stages(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A line per workload and arm: its stages' median ms with their shares, the whole with its interval."""
    lines = []
    for title, table in tables.items():
        for arm, part in table.groupby("arm", sort=False):
            part = part.set_index("stage")
            total = part.loc["total"]
            said = {stage: f"{line['median']:.3g} ({line['share']:.0%})" for stage, line in part.iterrows()}
            said["total"] = f"{Estimate(total['median'], total['low'], total['high'], total['n'])}"
            lines.append({"workload": title, "arm": arm, **said})
    table = pd.DataFrame(lines)
    first = ["workload", "arm", "total"]
    return table[[*first, *table.columns.drop(first)]].rename(columns=lambda name: name.replace("_", " "))
