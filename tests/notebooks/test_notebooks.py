"""Every notebook runs from first to last cell in profile smoke, with what it is passed, and leaves its answer."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lab import runner

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
SEED = 4


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """ran(name) -> the folder with that notebook's smoke run, at a seed that is not the default; run once each."""
    folder = tmp_path_factory.mktemp("smoke")
    done = {}

    def run(name: str) -> Path:
        if name not in done:
            said: list[str] = []
            code = runner.run("smoke", folder / name, only=name, parameters={"seed": SEED}, say=said.append)
            done[name] = (code, said)
        code, said = done[name]
        assert code == 0, "\n".join(said)
        return folder / name

    return run


@each
def test_it_runs_to_its_end_and_answers(ran, name):
    saved = json.loads((ran(name) / f"{name}.json").read_text())
    assert (saved["parameters"]["profile"], saved["parameters"]["seed"]) == ("smoke", SEED)
    assert len(saved["results"]["answer"]) > 20 and re.search(r"\d", saved["results"]["answer"])
    executed = nbformat.read(ran(name) / f"{name}.ipynb", as_version=4)
    assert executed.metadata["lab"]["status"] == "ok"
    kinds = [kind for c in executed.cells if c.cell_type == "code" for o in c.outputs for kind in o.get("data", {})]
    assert "text/html" in kinds, "a table or a view"
    assert "image/png" in kinds or "image/svg+xml" in kinds, "a figure"


@each
def test_its_page_opens_anywhere(ran, name):
    page = (ran(name) / f"{name}.html").read_text()
    assert len(page.encode()) < 5_000_000
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//""", page)
    assert not re.search(r"https?://[^\"'\s<>]*\.(?:m?js|css)\b", page)
    assert not re.search(r"(?<!\d)0%\|", page)
    index = (ran(name) / "index.html").read_text()
    assert f'href="{name}.html"' in index and 'class="answer"' in index


@each
def test_it_shows_given_rows_without_measuring(ran, name, tmp_path):
    rows = ran(name) / f"{name}.rows.jsonl"
    if not rows.exists():
        assert json.loads((ran(name) / f"{name}.json").read_text())["results"], "counts only, so there are no rows"
        return
    before = json.loads((ran(name) / f"{name}.json").read_text())["results"]
    said: list[str] = []
    parameters = {"rows": str(rows), "seed": SEED}
    assert runner.run("smoke", tmp_path / "again", only=name, parameters=parameters, say=said.append) == 0, said
    assert json.loads((tmp_path / "again" / f"{name}.json").read_text())["results"]["answer"] == before["answer"]
    assert not (tmp_path / "again" / f"{name}.rows.jsonl").exists()


@each
def test_without_the_package_its_first_cell_says_what_to_do(name):
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code[1]], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "pip install -e ." in done.stderr.strip().splitlines()[-1]
    assert "During handling" not in done.stderr
