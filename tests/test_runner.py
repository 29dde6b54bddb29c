import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from lab import notebooks, runner
from lab.errors import InputError


@pytest.fixture
def run(tmp_path):
    """run(**arguments) -> exit code, after running tmp_path/notebooks into tmp_path/out; run.said holds the lines."""

    def call(**arguments):
        arguments = {"profile": "smoke", "out": tmp_path / "out", "folder": tmp_path / "notebooks"} | arguments
        return runner.run(**arguments, say=call.said.append)

    call.said = []
    return call


def outcome(tmp_path, name):
    return nbformat.read(tmp_path / "out" / f"{name}.ipynb", as_version=4).metadata["lab"]


# --- before anything runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tag": None}, "has 0 cells tagged `parameters`"),
        ({"tag": 1}, "must be the first code cell"),
        ({"parameters": "import os\nprofile = 'smoke'"}, "only NAME = LITERAL lines (import os)"),
        ({"parameters": "profile = str(3)"}, "only NAME = LITERAL lines"),
        ({"parameters": "steps = 3"}, "no parameter `profile`"),
    ],
)
def test_a_notebook_that_cannot_take_parameters_is_refused(make_notebook, run, tmp_path, changes, sentence):
    make_notebook("01_odd", "pass", **changes)
    with pytest.raises(InputError, match=re.escape(sentence)):
        run()
    assert not (tmp_path / "out").exists()


def test_two_parameters_cells_are_refused(make_notebook, run):
    path = make_notebook("01_two", "pass")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, path)
    with pytest.raises(InputError, match="has 2 cells tagged"):
        run()


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"stepz": "9"}, "no chosen notebook has a parameter 'stepz'; they have: device, dtype, fast, profile"),
        ({"steps": "nine"}, "parameter steps takes a whole number like 3, not 'nine'"),
        ({"steps": "2.5"}, "parameter steps takes a whole number like 3, not 2.5"),
        ({"steps": "True"}, "parameter steps takes a whole number like 3, not True"),
        ({"rate": "fast"}, "parameter rate takes a number like 0.5"),
        ({"fast": "1"}, "parameter fast takes true or false like False, not 1"),
        ({"sizes": "3"}, "parameter sizes takes a list like"),
        ({"rows": "nowhere.jsonl"}, "there is no rows file nowhere.jsonl"),
        ({"rows": os.devnull}, "there is no rows file"),
        ({"rows": __file__}, "holds no rows; give a .rows.jsonl file"),
        ({"profile": "quick"}, "unknown profile 'quick'"),
        ({"device": "abacus"}, "Unknown device 'abacus'"),
        ({"seed": "-1"}, "seed is -1: give a whole number from 0"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused(make_notebook, run, tmp_path, parameters, sentence):
    names = "profile = 'smoke'\nseed = 0\nrows = ''\ndevice = 'cpu'\ndtype = 'fp32'\n"
    make_notebook("01_plain", parameters=names + "steps = 3\nrate = 0.5\nfast = False\nsizes = [1, 2]")
    with pytest.raises(InputError, match=re.escape(sentence)):
        run(parameters=parameters)
    assert not (tmp_path / "out").exists()


def test_values_are_read_as_the_type_of_the_default():
    assert notebooks.fit_value("x", "9", 3) == 9
    assert repr(notebooks.fit_value("x", "2", 0.5)) == "2.0"
    assert notebooks.fit_value("x", "true", False) is True
    assert notebooks.fit_value("x", "9", "text") == "9"
    assert notebooks.fit_value("x", "[1]", None) == [1]
    assert notebooks.fit_value("x", "none yet", None) == "none yet"


def test_unknown_profile_notebook_and_folder_are_refused(make_notebook, run, tmp_path):
    make_notebook("01_plain")
    with pytest.raises(InputError, match="unknown profile 'quick': choose one of smoke, standard, full"):
        run(profile="quick")
    with pytest.raises(InputError, match="no notebook is called '07'; there are: 01_plain"):
        run(only="01,07")
    with pytest.raises(InputError, match="holds no notebook"):
        run(folder=tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(make_notebook, run, tmp_path, monkeypatch):
    make_notebook("01_plain")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="[Cc]annot write"):
        run(out=tmp_path / "file" / "out")
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000))
    with pytest.raises(InputError, match="has 3 MB free"):
        run()


def test_without_papermill_it_says_what_to_install(make_notebook, run, monkeypatch):
    make_notebook("01_plain")
    monkeypatch.setattr(runner, "find_spec", lambda name: None if name == "papermill" else name)
    with pytest.raises(InputError, match="papermill is not installed: install everything with make report"):
        run()


def test_a_notebook_that_needs_what_is_not_installed_is_refused_before_it_runs(make_notebook, run, tmp_path):
    path = make_notebook("05_games")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["needs"] = ["json", "no_such_emulator"]
    nbformat.write(notebook, path)
    with pytest.raises(InputError, match="05_games.ipynb needs no_such_emulator: install what is missing"):
        run()
    assert not (tmp_path / "out").exists()
    rows = tmp_path / "given.jsonl"
    rows.write_text('{"arm": "eager", "ms": 1.0}\n')  # shown rows need no emulator
    assert run(parameters={"rows": str(rows)}) == 0


def test_selection_takes_numbers_and_names(make_notebook, tmp_path):
    for name in ("01_layout", "02_latency", "05_duplicates"):
        make_notebook(name)
    chosen = notebooks.select(tmp_path / "notebooks", "05, latency,02_latency")
    assert [path.stem for path in chosen] == ["02_latency", "05_duplicates"]


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_takes_and_the_notebook_works_with_what_was_passed(make_notebook, run, tmp_path):
    make_notebook("01_plain")
    assert run(parameters={"steps": "9371", "sizes": "[7]"}) == 0
    out = tmp_path / "out"
    echoed = json.loads((out / "01_plain.json").read_text())["parameters"]
    assert (echoed["steps"], echoed["sizes"], echoed["profile"], echoed["seed"]) == (9371, [7], "smoke", 0)
    said = "\n".join(run.said)
    before, after = said.split("[1/1] 01_plain", 1)
    assert "minutes" in before and "GB of memory" in before and f"writes to {out}" in before
    assert "steps = 9371" in before
    assert after.endswith(f"report: {out / 'index.html'}")
    assert set(json.loads((out / "environment.json").read_text())) >= {"before", "after"}
    assert {"index.html", "01_plain.html", "01_plain.ipynb", "01_plain.json"} <= {p.name for p in out.iterdir()}


def test_kernels_know_the_folder_and_that_nobody_watches(make_notebook, run, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    make_notebook(
        "01_env",
        "import os, sys\n"
        "print(os.environ['LAB_RUN_FOLDER'], os.environ['LAB_HEADLESS'], os.getcwd(), sys.executable, sep='\\n')",
        "import matplotlib.pyplot as plt\nfigure = plt.figure()\nfigure.add_subplot().plot([1, 2]);",
    )
    assert run() == 0
    cells = nbformat.read(tmp_path / "out" / "01_env.ipynb", as_version=4).cells
    lines = cells[3].outputs[0].text.splitlines()
    assert lines == [str(tmp_path / "out"), "1", str(tmp_path / "notebooks"), sys.executable]
    assert "image/png" in cells[4].outputs[-1].data, "figures are drawn whatever MPLBACKEND was outside"
    assert os.environ["MPLBACKEND"] == "agg"


def test_a_failing_notebook_leaves_its_part_and_the_others_still_run(make_notebook, run, tmp_path):
    rows = "import os, pathlib\nfile = pathlib.Path(os.environ['LAB_RUN_FOLDER'], '01_bad.rows.jsonl')"
    make_notebook("01_bad", rows + "\nfile.write_text('{\"ms\": 1}\\n')", "print('so far')", "1 / 0")
    make_notebook("02_good")
    assert run() == 1
    assert outcome(tmp_path, "01_bad")["status"] == "failed"
    assert "code cell 5 of 6 (1 / 0): ZeroDivisionError" in outcome(tmp_path, "01_bad")["reason"]
    assert outcome(tmp_path, "02_good")["status"] == "ok"
    out = tmp_path / "out"
    assert (out / "01_bad.rows.jsonl").read_text() == '{"ms": 1}\n'
    assert "so far" in (out / "01_bad.html").read_text()
    index = (out / "index.html").read_text()
    assert "1 of 2 notebooks stopped early" in index and "code cell 5 of 6" in index
    assert "01_bad.rows.jsonl" in index and "3 steps at seed 0." in index


def test_leaving_early_with_exit_code_0_is_a_failure(make_notebook, run, tmp_path):
    make_notebook("01_exit", "import sys", "sys.exit(0)")
    assert run() == 1
    assert "code cell 4 of 5 (sys.exit(0)): it left early" in outcome(tmp_path, "01_exit")["reason"]


def test_a_notebook_that_saves_nothing_is_a_failure(make_notebook, run, tmp_path):
    make_notebook("01_mute", "print(1)", save=False)
    assert run() == 1
    assert "saved no 01_mute.json" in outcome(tmp_path, "01_mute")["reason"]


def test_results_of_an_earlier_run_do_not_pass_for_new_ones(make_notebook, run, tmp_path):
    make_notebook("01_twice")
    assert run(parameters={"steps": "5"}) == 0
    make_notebook("01_twice", "print(1)", save=False)
    assert run() == 1
    assert not (tmp_path / "out" / "01_twice.json").exists()
    (kept,) = (tmp_path / "out").glob("earlier-*/01_twice.json")
    assert json.loads(kept.read_text())["parameters"]["steps"] == 5


def test_rows_of_the_very_folder_can_be_shown(make_notebook, run, tmp_path):
    make_notebook("01_rows", "text = open(rows).read() if rows else ''")
    rows = tmp_path / "out" / "01_rows.rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"ms": 1}\n')
    assert run(parameters={"rows": str(rows)}) == 0
    assert rows.read_text() == '{"ms": 1}\n'
    assert run() == 0 and not rows.exists(), "rows that nobody asked to see are moved away"


def test_a_notebook_that_overwrites_what_it_was_passed_is_a_failure(make_notebook, run, tmp_path):
    make_notebook("01_stubborn", "steps = 3")
    assert run(parameters={"steps": "9"}) == 1
    assert outcome(tmp_path, "01_stubborn")["reason"] == "it was passed steps = 9 but worked with 3"


def test_a_killed_kernel_ends_the_notebook_within_seconds(make_notebook, run, tmp_path):
    make_notebook(
        "01_killed",
        "import os, pathlib, signal, time\n"
        "pathlib.Path(os.environ['LAB_RUN_FOLDER'], '01_killed.rows.jsonl').write_text('{}')",
        "print('alive', flush=True)\ntime.sleep(1)\nos.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)",
    )
    make_notebook("02_good")
    start = time.monotonic()
    assert run() == 1
    assert time.monotonic() - start < 30
    reason = outcome(tmp_path, "01_killed")["reason"]
    assert "code cell 4 of 5 (print('alive', flush=True)): the kernel died" in reason
    page = (tmp_path / "out" / "01_killed.html").read_text()
    assert "alive" in page and 'id="stopped"' in page and "the kernel died" in page
    assert (tmp_path / "out" / "01_killed.rows.jsonl").exists()
    assert outcome(tmp_path, "02_good")["status"] == "ok"


def test_ctrl_c_keeps_what_was_done_and_writes_the_front_page(make_notebook, tmp_path):
    begun = tmp_path / "begun"
    make_notebook(
        "01_slow", f"print('so far', flush=True)\nopen({str(begun)!r}, 'w').close()\nimport time\ntime.sleep(120)"
    )
    make_notebook("02_never")
    command = [sys.executable, "-m", "lab.cli", "run", "--profile", "smoke"]
    command += ["--notebooks", str(tmp_path / "notebooks"), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not begun.exists():
            time.sleep(0.2)
        process.send_signal(2)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert outcome(tmp_path, "01_slow")["status"] == "interrupted"
    assert "so far" in (tmp_path / "out" / "01_slow.html").read_text()
    assert "interrupted from the keyboard" in (tmp_path / "out" / "index.html").read_text()
    assert not (tmp_path / "out" / "02_never.ipynb").exists()


def test_a_disk_that_fills_up_ends_the_run_with_a_sentence(make_notebook, run, tmp_path, monkeypatch):
    def full(notebook, path, *_, **__):
        Path(path).write_text('{"cells": [')
        raise OSError(28, "No space left on device")

    make_notebook("01_plain")
    monkeypatch.setattr("papermill.engines.write_ipynb", full)
    monkeypatch.setattr("nbformat.write", full)
    assert run() == 1
    assert "stopped: [Errno 28] No space left on device; what was written until then is in" in run.said[-1]


def test_a_long_cell_is_reported_while_it_runs(make_notebook, run, monkeypatch):
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.5)
    make_notebook("01_slow", "import sys, time\nprint('4 of 10 blocks', file=sys.stderr, flush=True)\ntime.sleep(2)")
    assert run() == 0
    wanted = r"  01_slow: code cell 3 of 4, \d s so far  4 of 10 blocks"
    assert any(re.fullmatch(wanted, line) for line in run.said), run.said
