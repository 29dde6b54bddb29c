"""One process writes a file or a folder at a time, and nothing is counted twice."""

import contextlib
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest
from cell_work import leaves, square

from lab import cli, measure, notebooks, records, runner
from lab.cells import run_cells
from lab.errors import InputError
from lab.experiments import duplicates, other_models, reuse
from lab.experiments import frame_repeats as repeats

TESTS = Path(__file__).parent


@contextlib.contextmanager
def process(code: str, *arguments, **variables):
    """A Python process running `code`, once it has said its first line; killed at the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"} | variables
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment)
    try:
        assert running.stdout.readline()
        yield running
    finally:
        running.kill()
        running.communicate()


WRITES = """
import sys
from lab.records import RowWriter
with RowWriter(sys.argv[1]) as writer:
    writer.append({"n": 0})
    print("held", flush=True)
    sys.stdin.read()
"""


def refused(command: list, capsys) -> str:
    """The last line that a command says, which ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in command])
    *before, said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and said.startswith("lab: ") and "Traceback" not in before
    return said


# --- rows files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["duplicates --game Pong --steps 5", "duplicates --game Pong --steps 5 --seeds 2", "bench snake"]
)
def test_a_second_process_is_told_whose_the_rows_file_is(tmp_path, capsys, command):
    out = tmp_path / "rows.jsonl"
    with process(WRITES, out) as other:
        link = tmp_path / "other name.jsonl"
        link.symlink_to(out)
        for name in (out, link):
            said = refused([*command.split(), "--json", "--out", name], capsys)
            assert said.endswith(
                f"is being written by process {other.pid}; wait until that ends, or choose another place."
            )
        assert out.read_text() == '{"n": 0}\n'
        other.kill()  # nobody has to tidy up after it
        other.wait()
        with records.RowWriter(out) as writer:
            writer.append({"n": 1})
            with records.RowWriter(out):
                pass  # this very process may go on, and holds the file still
            assert out.with_name(".rows.jsonl.lock").read_text().split()[0] == str(os.getpid())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other name.jsonl", "rows.jsonl"]


def test_two_scans_into_one_file_give_each_cell_once(tmp_path):
    out, todo = tmp_path / "rows.jsonl", [{"n": n, "folder": str(tmp_path)} for n in range(4)]
    code = (
        "import json, sys\nfrom cell_work import slow\nfrom lab.cells import run_cells\n"
        "print('here', flush=True)\nrun_cells(slow, json.loads(sys.argv[1]), out=sys.argv[2], scheduler=None, workers=1)"
    )
    script = tmp_path / "scan.py"
    script.write_text(f"if __name__ == '__main__':\n    {code.replace(chr(10), chr(10) + '    ')}")
    command = [sys.executable, str(script), json.dumps(todo), str(out)]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    ended = [running.communicate(timeout=120)[1] for running in both]
    codes = sorted(running.returncode for running in both)
    rows = [json.loads(line)["n"] for line in out.read_text().splitlines()]
    assert sorted(rows) == [0, 1, 2, 3]
    if codes != [0, 0]:  # else the second began when the first had ended, and found its rows
        assert any("is being written by process" in said for said in ended)


def test_a_notebooks_rows_are_one_kernels_until_they_are_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_RUN_FOLDER", str(tmp_path))
    code = "import sys\nfrom lab.records import Run\nrun = Run('02', {})\nprint('held', flush=True)\nsys.stdin.readline()\n"
    code += "run.save({})\nprint('saved', flush=True)\nsys.stdin.read()"
    with process(code) as other:
        with pytest.raises(InputError, match=f"02.rows.jsonl is being written by process {other.pid}"):
            records.Run("02", {})
        records.Run("03", {}).save({})
        records.Run("02", {"rows": "elsewhere.rows.jsonl"})
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "saved\n"
        records.Run("02", {}).save({})


# --- run folders ---------------------------------------------------------------------------------------------------------


def test_a_second_run_into_a_folder_is_refused_before_it_touches_anything(make_notebook, tmp_path, capsys):
    make_notebook("01_one")
    out, holds = tmp_path / "out", "import sys\nfrom pathlib import Path\nfrom lab import runner\n"
    holds += "with runner.open_folder(Path(sys.argv[1]), []):\n    print('held', flush=True)\n    sys.stdin.read()"
    with process(holds, out) as other:
        (out / "01_one.json").write_text("the other's")
        command = ["run", "--profile", "smoke", "--notebooks", tmp_path / "notebooks", "--out", out]
        assert f"out is being written by process {other.pid};" in refused(command, capsys)
        assert sorted(path.name for path in out.iterdir()) == [".lock", "01_one.json"]
        other.kill()
        other.wait()
        with runner.open_folder(out, ["01_one"]) as folder:
            assert not (folder / "01_one.json").exists()
    assert not (out / ".lock").exists()


def test_two_default_runs_of_one_second_have_a_folder_each(tmp_path, monkeypatch):
    class Still(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "datetime", Still)
    with runner.open_folder(None, []) as one, runner.open_folder(None, []) as other:
        assert one == tmp_path / "reports" / "2030-01-02_03-04-05" and other != one
    for text in ("first", "second"):
        (one / "01.json").write_text(text)
        with runner.open_folder(one, ["01"]):
            assert not (one / "01.json").exists()
    assert {path.read_text() for path in one.glob("earlier-*/01.json")} == {"first", "second"}


# --- the lock itself -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_what_stands_in_a_locks_place_is_left_alone(tmp_path, monkeypatch, kind):
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for place in (tmp_path / "refrain-cpu.lock", tmp_path / ".r.jsonl.lock"):
        make = {"link": lambda p: p.symlink_to(mine), "hard link": lambda p: p.hardlink_to(mine)}
        {**make, "pipe": os.mkfifo, "folder": Path.mkdir}[kind](place)
    with pytest.raises(InputError, match="Cannot lock .*; remove what is there"):
        measure.compare({"a": lambda: 1}, blocks=1, warmup=0)
    with pytest.raises(InputError, match="Cannot lock .*; remove what is there"):
        records.RowWriter(tmp_path / "r.jsonl")
    assert mine.read_text() == "precious"


def test_processes_that_wait_take_turns(tmp_path):
    code = """
import sys
from pathlib import Path
from lab.locks import held
print("here", flush=True)
counter = Path(sys.argv[2])
for _ in range(150):
    with held(Path(sys.argv[1]), "", lambda *_: None):
        count = int(counter.read_text())
        counter.write_text(str(count + 1))
"""
    lock, counter = tmp_path / "lock", tmp_path / "counter"
    counter.write_text("0")
    with contextlib.ExitStack() as stack:
        for running in [stack.enter_context(process(code, lock, counter)) for _ in range(4)]:
            assert running.wait(timeout=60) == 0
    assert counter.read_text() == "600" and not lock.exists()


# --- counted once --------------------------------------------------------------------------------------------------------


def test_a_cell_given_twice_is_one(tmp_path):
    rows = run_cells(square, [{"n": 1}, {"n": 2}, {"n": 1}], out=tmp_path / "rows.jsonl", workers=1)
    assert rows.n.tolist() == [1, 2] and len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
    assert duplicates.cells_of(["atari:Pong"], ["no_op", "one_hot", "no_op"], [0, 0], 9) == [
        {"source": "atari:Pong", "policy": policy, "seed": 0, "steps": 9} for policy in ("no_op", "one_hot")
    ]


def test_a_profile_plays_each_seed_once():
    for profile in duplicates.PROFILES:
        played = [(cell["source"], cell["policy"], cell["seed"]) for cell in duplicates.plan(profile)]
        assert len(set(played)) == len(played)


def test_names_in_a_comma_list_are_taken_once(tmp_path, capsys, make_notebook):
    folder = make_notebook("01_one").parent
    assert len(notebooks.select(folder, "01, 01,01_one")) == 1
    assert other_models.names_of("tiny-gemma3, tiny-idefics3,tiny-gemma3") == ["tiny-gemma3", "tiny-idefics3"]
    out = tmp_path / "rows.jsonl"
    command = ["duplicates", "--game", "Pong", "--steps", "20", "--json", "--policy"]
    found = []
    for names in ("one_hot, one_hot", "one_hot"):
        with contextlib.suppress(SystemExit):
            cli.main([*command, names, "--out", str(out)])
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["steps"] == 20
    assert len(out.read_text().splitlines()) == 1, "the second call found the row there"
    assert "Unknown policy ','" in refused([*command, ","], capsys)


def test_rows_that_a_file_holds_twice_are_counted_once(tmp_path):
    same = {"source": "atari:Pong", "policy": "one_hot", "pixels": 10, "opens": [0], "shows_last": True, "scan_s": 1.0}
    rows = [
        {**same, "seed": seed, "steps": steps, "changed": [-1, *[seed] * steps], "lag": [0] * (steps + 1), "blocks": []}
        for seed, steps in ((0, 20), (1, 20), (0, 8), (1, 20), (0, 20))
    ]
    once, twice = (repeats.summary(records.as_frame(part)).iloc[0] for part in (rows[:2], rows))
    assert (twice.seeds, twice.decisions, twice.compared) == (2, 40, 40)
    pd.testing.assert_series_equal(once, twice)
    assert len(repeats.changes(records.as_frame(rows))) == 40
    same = {"source": "atari:Pong", "model": "pocket", "steps": 9, "reuse": [[]]}
    watched = [{**same, "seed": seed} for seed in (0, 0, 1)]
    assert reuse.watched(records.as_frame(watched)).seed.tolist() == [0, 1]
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps({"n": n, "square": square}) + "\n" for n, square in ((1, 10), (1, 20), (2, 30))))
    assert run_cells(square, [{"n": 1}, {"n": 2}], out=out, workers=1).square.tolist() == [10, 30]


def test_work_that_leaves_has_failed(tmp_path):
    rows = run_cells(leaves, [{"n": 0}, {"n": 1}], out=tmp_path / "rows.jsonl", workers=1)
    assert rows.n.tolist() == [1]
    (told,) = rows.attrs["about"]
    assert told["kind"] == "failed" and "left with sys.exit(0)" in told["reason"]
