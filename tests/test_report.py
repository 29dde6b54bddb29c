import base64
import io
import json
import re
import shutil
import subprocess

import nbformat
import numpy as np
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from lab import report, runner
from lab.errors import InputError
from lab.views import View

ADDRESSES = ("src", "href", "srcset", "data", "poster", "action", "formaction", "background", "srcdoc", "xlink:href")
FETCHED = re.compile(
    r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?\s*(?:https?:)?//""", re.I
)


def outside_addresses(html: str) -> list[str]:
    """What a browser would fetch from, or follow to, another address."""
    found = [match[0] for match in FETCHED.finditer(html)]
    found += re.findall(r"https?://[^\"'\s<>]*\.(?:m?js|css)\b", html)
    found += re.findall(r"(?:import|require|fetch)\W{1,4}//[^\"']*", html)
    for tag in BeautifulSoup(html, "html.parser").find_all(True):
        found += [f"<{tag.name} {name}>" for name in ADDRESSES if re.match(r"\s*(https?:)?//", str(tag.get(name, "")))]
        if tag.name == "script" and tag.get("src"):
            found.append(f"<script src={tag['src']}>")
    return found


def executed(
    tmp_path, *outputs, source="work()", markdown="# A title\n\nA question?", results=None, name="01_page", lab=None
):
    """An executed notebook with these outputs in one cell, its page made; returns the page's HTML."""
    cell = new_code_cell(source, execution_count=1, outputs=list(outputs))
    notebook = new_notebook(cells=[new_markdown_cell(markdown), cell])
    notebook.metadata["lab"] = {"status": "ok", "reason": "", "seconds": 2.0, "started": "2030-01-02T03:04:05"} | (
        lab or {}
    )
    nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    if results is not None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"parameters": {"profile": "smoke"}, "results": results}))
    report.build(tmp_path)
    return (tmp_path / f"{name}.html").read_text()


def png(colour=(0, 120, 200), size=(40, 30)):
    data = io.BytesIO()
    Image.new("RGBA", size, (*colour, 255)).save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


# --- nothing from elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("html", "kept"),
    [
        ('<a href="https://example.org/paper">the paper</a>', "the paper (example.org/paper)"),
        ('<a href="https://example.org/paper">https://example.org/paper</a>', "example.org/paper"),
        ('<img src="//example.org/x.png" alt="a frame">', "[a frame: example.org/x.png]"),
        ('<img srcset="https://example.org/x.png 2x" src="data:image/png;base64,AA==">', ""),
        ('<script src="https://example.org/x.js"></script><p>after</p>', "after"),
        ('<script>import("https://example.org/x.mjs")</script><p>after</p>', "after"),
        ('<script>require(["//example.org/plot"])</script><p>after</p>', "after"),
        ('<link rel="stylesheet" href="https://example.org/x.css"><p>after</p>', "after"),
        ('<style>@import "https://example.org/x.css"; p { color: red }</style><p>after</p>', "after"),
        ("<p style=\"background: url('https://example.org/x.png')\">after</p>", "after"),
        ('<iframe src="https://example.org/demo"></iframe><p>after</p>', "[left out: example.org/demo]"),
        ("<iframe srcdoc=\"<script src='https://example.org/x.js'></script><b>in</b>\"></iframe><p>after</p>", "after"),
    ],
)
def test_outside_addresses_in_an_output_are_taken_out_or_said(tmp_path, html, kept):
    assert outside_addresses(html), "the case must be one"
    page = executed(tmp_path, new_output("display_data", {"text/html": html, "text/plain": "plain"}))
    assert outside_addresses(page) == []
    assert kept in BeautifulSoup(page, "html.parser").get_text()


def test_what_a_page_holds_itself_stays(tmp_path):
    html = '<svg xmlns="http://www.w3.org/2000/svg"><rect fill="red"/></svg><script>let kept = 1;</script><a href="#x">x</a>'
    page = executed(tmp_path, new_output("display_data", {"text/html": html}))
    assert 'xmlns="http://www.w3.org/2000/svg"' in page and "let kept = 1;" in page and 'href="#x"' in page
    assert outside_addresses(page) == []


def test_links_and_pictures_in_prose_become_text(tmp_path):
    page = executed(
        tmp_path, markdown="# T\n\nSee [this](https://example.org/a) and ![that](https://example.org/b.png)."
    )
    assert outside_addresses(page) == []
    assert "this (example.org/a)" in BeautifulSoup(page, "html.parser").get_text()


def test_a_link_to_another_notebook_leads_to_its_page(tmp_path):
    page = executed(tmp_path, markdown="# T\n\nMore in [the next one](02_next.ipynb#part).")
    assert 'href="02_next.html#part"' in page and 'href="01_page.ipynb"' in page


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_answer_parameters_environment_and_files_stand_on_top(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"before": {"cpu": {"model": "Abacus 3000", "usable": 2}}}))
    (tmp_path / "01_page.rows.jsonl").write_text(
        '{"about": {"kind": "note", "text": "This machine is busy."}}\n{"ms": 1}\n'
    )
    (tmp_path / "01_page.trace.json.gz").write_bytes(b"x" * 2000)
    lab = {"parameters": {"profile": "smoke", "steps": 9371}}
    page = executed(tmp_path, results={"answer": "A <decision> takes 12 ms."}, lab=lab)
    header = str(BeautifulSoup(page, "html.parser").header)
    for part in ("A title", "A &lt;decision&gt; takes 12 ms.", "9371", "Abacus 3000", "This machine is busy."):
        assert part in header, part
    assert 'href="01_page.rows.jsonl"' in header and 'href="01_page.trace.json.gz"' in header and "2.0 kB" in header
    index = (tmp_path / "index.html").read_text()
    for part in ("A title", "A &lt;decision&gt; takes 12 ms.", "Abacus 3000", "This machine is busy.", "1 of 1 ok"):
        assert part in index, part
    assert "profile smoke" in index and "2030-01-02 03:04:05" in index


def test_code_is_folded_and_outputs_are_open(tmp_path):
    page = executed(tmp_path, new_output("stream", text="12 ms\n"), source="# why\nslow = 'x'")
    soup = BeautifulSoup(page, "html.parser")
    (folded,) = soup.select("details.code")
    assert "open" not in folded.attrs and "slow" in folded.get_text()
    assert "12 ms" in soup.get_text() and "12 ms" not in folded.get_text()


def test_a_headline_figure_is_the_named_file_or_the_last_picture(tmp_path):
    executed(tmp_path, new_output("display_data", {"image/png": png()}), results={"answer": "x"})
    (shown,) = BeautifulSoup((tmp_path / "index.html").read_text(), "html.parser").select(".card img")
    assert shown["src"] == f"data:image/png;base64,{png()}"
    (tmp_path / "headline.png").write_bytes(base64.b64decode(png((9, 9, 9))))
    executed(tmp_path, new_output("display_data", {"image/png": png()}), results={"figure": "headline.png"})
    (shown,) = BeautifulSoup((tmp_path / "index.html").read_text(), "html.parser").select(".card img")
    assert shown["src"] == f"data:image/png;base64,{png((9, 9, 9))}"


def test_wide_tables_scroll_and_carriage_returns_are_settled(tmp_path):
    table = "<table class='dataframe'><tr><td>7.15</td></tr></table>"
    steps = ("\r  0%|   | 0/3", "\r 33%|#  | 1/3", "\r100%|###| 3/3\n")
    bar = [new_output("stream", name="stderr", text=text) for text in steps]
    page = executed(tmp_path, new_output("display_data", {"text/html": table}), *bar)
    assert BeautifulSoup(page, "html.parser").select(".scroll > table.dataframe")
    assert "3/3" in page and not re.search(r"(?<!\d)0%\|", page)


def test_a_view_carries_its_numbers_into_the_page(tmp_path):
    bundle = View("<p>question <b>46.25</b> %</p>", "46.25 % question")._repr_mimebundle_()
    page = executed(tmp_path, new_output("display_data", bundle))
    assert "question <b>46.25</b> %" in page


def test_a_page_that_grows_too_large_is_said(tmp_path):
    noise = base64.b64encode(np.random.default_rng(0).bytes(4_500_000)).decode()
    executed(tmp_path, new_output("display_data", {"image/png": noise}))
    assert "this page is 6" in (tmp_path / "index.html").read_text()


def test_a_torn_notebook_has_a_card_that_says_so(tmp_path):
    (tmp_path / "02_torn.ipynb").write_text('{"cells": [{"cell_type": "code", "source": "pri')
    executed(tmp_path, results={"answer": "Twelve."})
    index = (tmp_path / "index.html").read_text()
    assert "02_torn.ipynb is torn" in index and "Twelve." in index and "1 of 2 notebooks stopped early" in index


def test_a_folder_without_executed_notebooks_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no executed notebook"):
        report.build(tmp_path)


# --- executed for real ------------------------------------------------------------------------------------------------

BARS = """
import sys
{block}
import time, warnings
warnings.simplefilter("ignore")
from tqdm.auto import tqdm as auto
from tqdm import tqdm as plain
for _ in auto(range(7), desc="first"): time.sleep(0.12)
for _ in plain(range(9), desc="second"): time.sleep(0.12)
"""


@pytest.mark.parametrize(
    "block", ["", "sys.modules['ipywidgets'] = None"], ids=["with_ipywidgets", "without_ipywidgets"]
)
def test_progress_bars_end_with_their_final_count(make_notebook, tmp_path, block):
    make_notebook("01_bars", BARS.replace("{block}", block))
    assert runner.run("smoke", tmp_path / "out", folder=tmp_path / "notebooks", say=lambda line: None) == 0
    page = (tmp_path / "out" / "01_bars.html").read_text()
    text = BeautifulSoup(page, "html.parser").get_text()
    assert re.search(r"first: 100%.*7/7", text) and re.search(r"second: 100%.*9/9", text)
    assert not re.search(r"(?<!\d)0%(\||\s)", text)
    assert outside_addresses(page) == []


def test_widgets_become_their_last_state_in_text(make_notebook, tmp_path):
    widgets = (
        "import ipywidgets as w\nfrom IPython.display import display\n"
        "out = w.Output()\nwith out:\n    print('captured 41')\n"
        "display(w.VBox([w.IntSlider(description='steps', value=57), w.HTML('<b>bold 12</b>'), out]))"
    )
    make_notebook("01_widgets", widgets)
    assert runner.run("smoke", tmp_path / "out", folder=tmp_path / "notebooks", say=lambda line: None) == 0
    text = BeautifulSoup((tmp_path / "out" / "01_widgets.html").read_text(), "html.parser").get_text()
    assert "steps: 57" in text and "bold 12" in text and "captured 41" in text


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "pages are looked at in a browser: install chromium (Debian: apt-get install chromium)"
    return found


def picture(page, scheme, folder) -> np.ndarray:
    """The page as headless Chromium draws it, grey levels [H, W]."""
    target = folder / f"{page.stem}-{scheme}.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1100,1400"]
    flags += [f"--user-data-dir={folder / ('profile-' + scheme)}", f"--screenshot={target}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    subprocess.run([browser(), *flags, page.as_uri()], capture_output=True, timeout=120, check=True)
    return np.asarray(Image.open(target).convert("L"), float)


def test_pages_show_in_a_browser_light_and_dark(make_notebook, tmp_path):
    figure = (
        "from lab import figures\nshown, axes = figures.new_figure()\n"
        "axes.plot([0, 1, 2], [5, 1, 4])\naxes.set_title('A figure')\nshown"
    )
    make_notebook("01_shown", figure, "import pandas as pd\npd.DataFrame({'ms': [1.5, 2.5]})")
    make_notebook("02_bad", "1 / 0")
    assert runner.run("smoke", tmp_path / "out", folder=tmp_path / "notebooks", say=lambda line: None) == 1
    for page in ("index.html", "01_shown.html", "02_bad.html"):
        path = tmp_path / "out" / page
        assert outside_addresses(path.read_text()) == []
        light, dark = (picture(path, scheme, tmp_path) for scheme in ("light", "dark"))
        assert np.median(light) > 230 and np.median(dark) < 50, page
        for drawn in (light, dark):  # text and figures stand out from the ground on both
            contrast = np.abs(drawn - np.median(drawn))
            assert (contrast > 70).mean() > 0.004, page
