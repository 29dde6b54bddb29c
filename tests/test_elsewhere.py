"""`lab run --rows FOLDER`: reports of rows that were measured elsewhere, complete wherever they are opened."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup

from lab import elsewhere, records, runner
from lab.errors import InputError

WORK = """
from lab import records
import matplotlib.pyplot as plt
run = records.Run(NAME, dict(profile=profile, seed=seed, rows=rows))
taken = records.read_rows(rows) if rows else None
plt.plot([1, 2]); plt.savefig(run.folder / f"{NAME}.png")
words = f"{len(taken)} rows of {taken['arm'][0]}." if rows else "measured 0 rows here."
path = run.save({"answer": words, "figure": f"{NAME}.png"}, weights="none")
"""


@pytest.fixture
def notebooks(make_notebook):
    for name in ("01_counts", "02_latency_breakdown", "04_cuda_graph"):
        path = make_notebook(
            name, WORK.replace("NAME", repr(name)), save=False, parameters="profile='standard'\nseed=0\nrows=''"
        )
    counts = nbformat.read(path.parent / "01_counts.ipynb", as_version=4)
    counts.metadata["measures"] = False
    nbformat.write(counts, path.parent / "01_counts.ipynb")
    return path.parent


@pytest.fixture
def measured(tmp_path):
    """What `lab gpu` leaves: rows named after benches, with their environment in them."""
    folder = tmp_path / "h200"
    for name in ("latency.bf16", "latency.fp32"):
        with records.RowWriter(folder / f"{name}.rows.jsonl") as writer:
            cpu = {"model": "Abacus 3000", "usable": 2}
            writer.about("environment", moment="before", cpu=cpu, gpus=[{"name": "H200"}], versions={"torch": "9.9"})
            writer.append({"arm": name, "ms": 1.0})
            writer.about("environment", moment="after", cpu=cpu, gpus=[{"name": "H200"}], versions={"torch": "9.9"})
    return folder


def links(folder: Path) -> list[str]:
    """Everything that the pages of a folder lead to."""
    found = []
    for page in folder.glob("*.html"):
        for tag in BeautifulSoup(page.read_text(), "html.parser").find_all(True):
            found += [tag[name] for name in ("href", "src") if tag.get(name)]
    return [unquote(link.partition("#")[0]) for link in found if not link.startswith(("data:", "#"))]


def test_rows_from_elsewhere_make_a_report_that_is_complete_anywhere(notebooks, measured, tmp_path):
    said = []
    out = tmp_path / "out"
    assert runner.run("smoke", out, None, {}, notebooks, said.append, rows=measured) == 0, said
    assert sorted(p.stem for p in out.glob("*.ipynb")) == ["01_counts", "02_latency_breakdown"]
    saved = json.loads((out / "02_latency_breakdown.json").read_text())
    assert saved["results"]["answer"] == "1 rows of latency.fp32."
    assert saved["machine"]["gpus"] == [{"name": "H200"}] and saved["versions"] == {"torch": "9.9"}
    record = json.loads((out / "environment.json").read_text())
    assert record["before"]["cpu"]["model"] == record["after"]["cpu"]["model"] == "Abacus 3000"
    index = (out / "index.html").read_text()
    assert "rows measured elsewhere (h200)" in index and "Abacus 3000" in index
    assert "did not reach its end" not in index

    packed = shutil.make_archive(str(tmp_path / "report"), "zip", out)
    pages = {p.name: p.read_bytes() for p in out.glob("*.html")}
    shutil.rmtree(out)
    shutil.rmtree(measured)
    there = tmp_path / "elsewhere" / "report"
    zipfile.ZipFile(packed).extractall(there)
    assert {p.name: p.read_bytes() for p in there.glob("*.html")} == pages
    found = links(there)
    assert "02_latency_breakdown.rows.jsonl" in found and "02_latency_breakdown.html" in found
    assert not [link for link in found if re.match(r"/|\w+:|\.\.", link)], "no link leads out of the folder"
    assert all((there / link).is_file() for link in found)
    # what was sent can be shown again, by the one who got it
    again = tmp_path / "again"
    assert runner.run("smoke", again, "02", {}, notebooks, said.append, rows=there) == 0, said
    assert json.loads((again / "02_latency_breakdown.json").read_text())["results"] == saved["results"]
    assert json.loads((again / "environment.json").read_text())["before"]["cpu"]["model"] == "Abacus 3000"


def test_a_folder_that_cannot_be_shown_is_refused_before_any_work(notebooks, measured, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "04_cuda_graph.rows.jsonl").write_text("")
    for folder, only, sentence in (
        (tmp_path / "missing", None, "There is no folder"),
        (tmp_path / "empty", None, "there is: no .rows.jsonl file"),
        (measured, "04", "holds no rows of 04_cuda_graph; there is: latency.bf16.rows.jsonl"),
        (tmp_path / "torn", None, "holds no rows"),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            runner.run("smoke", tmp_path / "out", only, {}, notebooks, print, rows=folder)
    assert not (tmp_path / "out").exists()


def test_a_notebooks_own_rows_go_before_a_benchs(tmp_path):
    for name in ("03_question_first", "question-first", "graphs"):
        with records.RowWriter(tmp_path / f"{name}.rows.jsonl") as writer:
            writer.append({"arm": name})
    found = elsewhere.find(tmp_path, ["01_token_layout", "03_question_first", "04_cuda_graph"])
    assert {name: path.name for name, path in found.items()} == {
        "03_question_first": "03_question_first.rows.jsonl", "04_cuda_graph": "graphs.rows.jsonl",
    }  # fmt: skip
