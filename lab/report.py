"""Executed notebooks -> pages that open anywhere, with no network, in light and dark; and the run's front page.

A page holds everything it shows: pictures are embedded, progress bars and widgets become the text they ended with, code
is folded away. Whatever would be loaded from an outside address is taken out or written as text.
"""

import base64
import json
import mimetypes
import re
from collections.abc import Iterator
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import Any

from lab.errors import InputError

TEMPLATES = Path(__file__).parent / "templates"
MOST_BYTES = 5_000_000
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
_ADDRESSES = {"src", "href", "xlink:href", "data", "poster", "action", "formaction", "background", "ping", "cite"}
_OUTSIDE = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
_CSS_OUTSIDE = re.compile(r"@import[^;]*;?|url\(\s*['\"]?\s*(?:https?:)?//[^)]*\)", re.IGNORECASE)
_SCRIPT_OUTSIDE = re.compile(r"['\"`](?:https?:)?//(?!www\.w3\.org/)", re.IGNORECASE)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhl]")  # moves of the cursor; colours stay, for ansi2html


def build(folder: Path) -> Path:
    """(Re)write a page for each executed notebook in `folder`, and index.html; return the path of the latter.

    InputError where the folder holds no executed notebook.
    """
    folder = Path(folder)
    executed = sorted(folder.glob("*.ipynb"))
    if not executed:
        raise InputError(f"{folder} holds no executed notebook: give the folder that `lab run` wrote")
    cards = [write_page(path) for path in executed]
    index = folder / "index.html"
    index.write_text(_render("index.html.j2", css=_css(), **front(folder, cards)), encoding="utf-8")
    return index


def write_page(path: Path) -> dict[str, Any]:
    """Write the page of one executed notebook beside it and return what the front page says about it."""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(path, as_version=4)
    except nbformat.reader.NotJSONError as error:
        notebook = nbformat.v4.new_notebook()
        notebook.metadata["lab"] = {"status": "failed", "reason": f"{path.name} is torn: {str(error)[:80]}"}
    card = describe(path, notebook)
    environment = _flat(_read(path.parent / "environment.json").get("before", {}))
    top = _render("top.html.j2", environment=environment, machine=_machine(environment), **card)
    exporter = HTMLExporter(
        extra_template_basedirs=[str(TEMPLATES)], template_name="notebook", embed_images=True,
        exclude_anchor_links=True, exclude_input_prompt=True, exclude_output_prompt=True,
    )  # fmt: skip
    exporter.config.NbConvertBase.display_data_priority = [
        "text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/latex", "text/plain",
    ]  # fmt: skip
    page = {"title": card["title"], "css": _css(), "top": top}
    resources = {"page": page, "metadata": {"path": str(path.parent), "name": path.stem}}
    html, _ = exporter.from_notebook_node(_tidy(notebook), resources)
    html = inline(html)
    if len(html.encode()) > MOST_BYTES:
        card["warnings"].append(f"this page is {len(html.encode()) / 1e6:.1f} MB: it may be slow to open or to send")
    (path.parent / card["page"]).write_text(html, encoding="utf-8")
    return card


def describe(path: Path, notebook: Any) -> dict[str, Any]:
    """What page and card say of one executed notebook: title, question, answer, status, parameters, figure, files."""
    run, saved = notebook.metadata.get("lab", {}), _read(path.with_suffix(".json"))
    results = saved.get("results", {})
    title, question = _opening(notebook)
    beside = sorted(p for p in path.parent.glob(f"{path.stem}.*") if p.suffix != ".html" and not p.name.startswith("."))
    facts = [_duration(run["seconds"])] if "seconds" in run else []
    facts += [f"profile {run['parameters']['profile']}"] if run.get("parameters", {}).get("profile") else []
    facts += [f"weights: {saved['weights']}"] if saved.get("weights") else []
    return {
        "name": path.stem,
        "page": f"{path.stem}.html",
        "title": title or path.stem,
        "question": question,
        "answer": results.get("answer", ""),
        "status": run.get("status", "not judged"),
        "reason": run.get("reason", ""),
        "stopped": run.get("stopped"),
        "warnings": _warnings(results, path.with_suffix(".rows.jsonl")),
        "facts": facts,
        "seconds": run.get("seconds", 0.0),
        "started": run.get("started", ""),
        "parameters": run.get("parameters") or saved.get("parameters", {}),
        "figure": _figure(path.parent, results.get("figure"), notebook),
        "files": [(p.name, _size(p.stat().st_size)) for p in beside],
    }


def front(folder: Path, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """What index.html shows: how the run went, a card for each notebook, the environment before and after."""
    record = _read(folder / "environment.json")
    moments = {moment: _flat(record[moment]) for moment in ("before", "after") if moment in record}
    names = list(dict.fromkeys(name for moment in moments.values() for name in moment))
    count = len(cards)
    bad = sum(card["status"] != "ok" for card in cards)
    cut = "" if "after" in moments else "The run did not reach its end: there is no environment record after it."
    started = min((card["started"] for card in cards if card["started"]), default="")
    profiles = sorted({str(card["parameters"].get("profile", "")) for card in cards} - {""})
    facts = [started.replace("T", " "), f"profile {' and '.join(profiles)}" if profiles else ""]
    facts += [_duration(sum(card["seconds"] for card in cards)), _machine(moments.get("before", {}))]
    verdict, lost = _verdict(folder)
    facts += [f"rows measured elsewhere ({record['rows_from']})"] if record.get("rows_from") else []
    return {
        "date": started[:10] or datetime.now().strftime("%Y-%m-%d"),
        "cards": cards,
        "status": "failed" if bad else "ok",
        "headline": f"{bad} of {count} notebooks stopped early" if bad else f"{count} of {count} ok",
        "facts": [fact for fact in facts if fact],
        "warnings": [warning for warning in (cut, lost) if warning],
        "verdict": verdict,
        "moments": list(moments),
        "environment": {name: _same([moment.get(name, "") for moment in moments.values()]) for name in names},
    }


def _verdict(folder: Path) -> tuple[str, str]:
    """The verdict of the folder's results as HTML, and why there is none; both empty where nothing was compared yet."""
    from markupsafe import Markup

    from lab.experiments import verdict

    hz = _read(folder / "09_verdict.json").get("parameters", {}).get("hz", 10.0)
    try:
        found = verdict.judge(folder, hz)
        if not any(regime.do or regime.dont or regime.facts for regime in found.regimes):
            return "", ""
        pages = {name for name in verdict.NOTEBOOKS.values() if (folder / f"{name}.ipynb").is_file()}
        return Markup(verdict.html(found, pages)), ""
    except Exception as error:  # results of another version must not cost a run its front page
        return "", f"The verdict could not be computed from these results ({type(error).__name__}: {error})."


# --- what the notebook left, made still -------------------------------------------------------------------------------


def _tidy(notebook: Any) -> Any:
    """Merge streams, settle progress bars, replace widgets by their text, mark the cell the run stopped in."""
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    widgets = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    notebook.cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    if notebook.cells and notebook.cells[0].cell_type == "markdown":  # the title is in the page's head already
        notebook.cells[0].source = re.sub(r"\A\s*# .*\n?", "", notebook.cells[0].source)
    ran = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    stopped = notebook.metadata.get("lab", {}).get("stopped")
    if stopped and stopped <= len(ran):
        ran[stopped - 1].metadata["lab_stopped"] = True
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # a link to another notebook leads to its page
            cell.source = re.sub(r"\]\((?:\./)?([\w-]+)\.ipynb", r"](\1.html", cell.source)
        if cell.cell_type != "code":
            continue
        outputs = [new for old in cell.outputs for new in (_still(old, widgets) if old.get("data") else [old])]
        for output in outputs:
            if output.output_type == "stream":
                output.text = _ESCAPES.sub("", output.text)
        cell.outputs = outputs
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
        cell.metadata["lab_summary"] = _gist(cell)
    notebook.cells = [c for c in notebook.cells if c.source.strip()]
    return notebook


def _gist(cell: Any) -> str:
    """What stands beside a folded cell: its first line that does something."""
    tags = cell.metadata.get("tags", [])
    if "parameters" in tags or "injected-parameters" in tags:
        return (
            "parameters, as they stand in the notebook" if "parameters" in tags else "parameters, as passed to this run"
        )
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    plain = ("#", "import ", "from ", "try:", "except ", "raise ", "%")
    return next((line for line in lines if not line.startswith(plain)), lines[0] if lines else "")[:90]


def _still(output: Any, widgets: dict[str, Any]) -> Iterator[Any]:
    """An output as it is; for a widget whose last state was kept, that state as text and the outputs it captured."""
    from nbformat.v4 import new_output

    if output.data.get("text/html") or WIDGET not in output.data:
        yield output
        return
    words: list[str] = []
    captured: list[Any] = []

    def walk(model: str) -> None:
        widget = widgets.get(model.removeprefix("IPY_MODEL_"), {})
        state = widget.get("state", {})
        captured.extend(state.get("outputs", []))
        text = [str(state[key]) for key in ("description", "value") if state.get(key) not in (None, "")]
        if "Progress" not in widget.get("model_name", ""):  # a bar's number stands in the text beside it
            words.append(": ".join(text))
        for child in state.get("children", []):
            walk(child)

    walk(output.data[WIDGET].get("model_id", ""))
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", " ".join(words))).split())
    if text or captured:
        if text:
            yield new_output("stream", name="stderr", text=text + "\n")
        yield from captured
    else:
        yield output


# --- no outside address ---------------------------------------------------------------------------------------------


def inline(html: str) -> str:
    """`html` without anything that a browser would fetch from, or lead to, an outside address.

    Links and pictures become their text with the address behind it, without its scheme; scripts, style sheets and
    frames from elsewhere are dropped, and so are scripts that name an outside address. Wide tables get a box to scroll.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.find_all(["link", "base", "meta"]):
        if _OUTSIDE.match(tag.get("href", "")) or "http-equiv" in tag.attrs:
            tag.decompose()
    for tag in soup.find_all("script"):
        if tag.get("src") or _SCRIPT_OUTSIDE.search(tag.string or ""):
            tag.decompose()
    for tag in soup.find_all("style"):
        tag.string = _CSS_OUTSIDE.sub("none", tag.string or "")
    for tag in soup.find_all(True):
        if tag.name == "table" and "scroll" not in (tag.parent.get("class") or []):
            tag.wrap(soup.new_tag("div", attrs={"class": "scroll"}))
        for name, value in list(tag.attrs.items()):
            if not isinstance(value, str):
                continue
            if name == "style":
                tag[name] = _CSS_OUTSIDE.sub("none", value)
            elif name == "srcdoc":
                tag[name] = inline(value)
            elif name == "srcset" and "//" in value:
                del tag[name]
            elif name in _ADDRESSES and _OUTSIDE.match(value):
                del tag[name]
                _say_address(soup, tag, re.sub(r"^\s*([a-z][a-z0-9+.-]*:)?//", "", value.strip(), flags=re.I))
    return str(soup)


def _say_address(soup: Any, tag: Any, address: str) -> None:
    said = tag.get_text().strip().removeprefix("https://").removeprefix("http://").rstrip("/")
    if tag.name == "a":
        tag.name = "span"
        if said != address.rstrip("/"):
            tag.append(f" ({address})")
        else:
            tag.string = address
        tag["class"] = "source"
    elif tag.name in ("img", "iframe", "video", "audio", "embed", "object", "source"):
        note = soup.new_tag("span", attrs={"class": "source"})
        note.string = f"[{tag.get('alt') or 'left out'}: {address}]"
        tag.replace_with(note)


# --- small parts ----------------------------------------------------------------------------------------------------


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader

    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template(template).render(values)


def _css() -> str:
    from markupsafe import Markup
    from pygments.formatters import HtmlFormatter

    def code(style: str) -> str:
        lines = HtmlFormatter(style=style).get_style_defs(".highlight").splitlines()
        return "\n".join(line for line in lines if "background" not in line)

    own = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    dark = f"@media (prefers-color-scheme: dark) {{\n{code('github-dark')}\n}}"
    return Markup("\n".join((own, code("friendly"), dark)))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _opening(notebook: Any) -> tuple[str, str]:
    """The first heading and the first paragraph after it: the notebook's title and its question."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = re.search(r"^# +(.+)$", text, re.MULTILINE)
    rest = text[title.end() :] if title else text
    paragraphs = [p.strip() for p in rest.split("\n\n") if p.strip() and not p.strip().startswith(("#", "<", "|", "!"))]
    plain = re.sub(r"[*`]", "", " ".join(paragraphs[0].split())) if paragraphs else ""
    return (re.sub(r"[*`]", "", title[1]).strip() if title else ""), plain


def _figure(folder: Path, named: str | None, notebook: Any) -> str:
    """The headline figure as a data address: the file that the results name, else the last picture of the notebook."""
    if named and (folder / named).is_file():
        kind = mimetypes.guess_type(named)[0] or "image/png"
        return f"data:{kind};base64,{base64.b64encode((folder / named).read_bytes()).decode()}"
    outputs = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.get("data")]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    return f"data:image/png;base64,{''.join(pictures[-1].split())}" if pictures else ""


def _warnings(results: dict[str, Any], rows: Path) -> list[str]:
    """What to be wary of: the results' own warnings, and the notes that were taken down among the rows."""
    found = results.get("warnings", [])
    found = [found] if isinstance(found, str) else list(found)
    if rows.is_file():
        for line in rows.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith('{"about"'):
                try:
                    about = json.loads(line)["about"]
                except ValueError:
                    continue
                if about.get("kind") in ("note", "warning") and about.get("text"):
                    found.append(about["text"])
    return list(dict.fromkeys(found))


def _flat(record: dict[str, Any], before: str = "") -> dict[str, str]:
    """A nested record as one table: {"cpu": {"model": "x"}} -> {"cpu model": "x"}."""
    table = {}
    for name, value in record.items():
        if name == "versions":
            table[name] = ", ".join(f"{package} {version}" for package, version in value.items() if version)
        elif isinstance(value, dict):
            table |= _flat(value, f"{before}{name} ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, item in enumerate(value):
                table |= _flat(item, f"{before}{name} {number} ")
        elif value not in (None, "", []):
            if isinstance(value, list):
                value = ", ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in value)
            table[f"{before}{name}"] = _size(value) if before == "memory " else str(value)
    return table


def _same(values: list[str]) -> list[str]:
    return values[:1] if len(set(values)) == 1 else values


def _machine(environment: dict[str, str]) -> str:
    gpu = environment.get("gpus 0 name", "")
    cpu = re.sub(r"\((R|TM)\)|CPU|@.*", "", environment.get("cpu model", "")).strip()
    cores = f"{cpu}, {environment['cpu usable']} threads" if "cpu usable" in environment else cpu
    return ", ".join(part for part in (gpu, " ".join(cores.split())) if part)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
