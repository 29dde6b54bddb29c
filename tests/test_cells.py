import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from cell_work import slow, square, troubled, with_child

from lab import cells
from lab.cells import run_cells
from lab.errors import InputError

TESTS = Path(__file__).parent


def bare(rows) -> list[dict]:
    """Rows without times and without who took them."""
    return rows.drop(columns=["seconds", "worker"]).to_dict("records")


def test_rows_do_not_depend_on_the_number_of_workers(tmp_path):
    todo = [{"n": n} for n in range(6)]
    one, two = (run_cells(square, todo, workers=workers) for workers in (1, 2))
    assert bare(one) == bare(two) == [{"n": n, "square": n * n, "threads": "1"} for n in range(6)]
    assert one.worker.nunique() == 1 and str(os.getpid()) not in one.worker[0]


def test_failures_deaths_and_bad_input_are_told_apart(tmp_path, capsys):
    todo = [{"n": n, "folder": str(tmp_path)} for n in range(6)]
    out = tmp_path / "rows.jsonl"
    rows = run_cells(troubled, todo, out=out, workers=2)
    assert [row["n"] for row in bare(rows)] == [0, 1, 3]
    told = {line["n"]: (line["kind"], line["reason"]) for line in rows.attrs["about"]}
    assert told == {
        2: ("failed", "RuntimeError: no luck with 2"),
        4: ("failed", "its worker died twice (killed, for instance for want of memory)"),
        5: ("skipped", "Nobody can play this; take another."),
    }
    tries = {n: len((tmp_path / str(n)).read_text()) for n in range(6)}
    assert tries[4] == 2 and all(2 <= tries[n] <= 3 for n in (1, 2, 3))  # once more where they ran beside a death
    assert "skipped: 5" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 6


def test_a_second_run_does_only_what_is_missing(tmp_path, capsys):
    out, todo = tmp_path / "rows.jsonl", [{"n": n} for n in range(4)]
    first = run_cells(square, todo[:2], out=out, workers=1)
    with open(out, "a") as file:
        file.write('{"n": 3, "squ')  # torn by a kill
    again = run_cells(square, todo, out=out, workers=1)
    assert again.head(2).to_dict("records") == first.to_dict("records")  # the very rows, times too
    assert again.square.tolist() == [0, 1, 4, 9]
    assert "2 of 4 are there already" in capsys.readouterr().err
    kept = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    assert [row["n"] for row in kept] == [0, 1, 2, 3]


def test_what_a_killed_worker_had_started_is_ended(tmp_path):
    rows = run_cells(with_child, [{"folder": str(tmp_path)}], workers=1)
    child = rows.child[0]
    gone = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone, "the orphan lives on"
        time.sleep(0.1)


def test_ctrl_c_keeps_the_rows_and_says_how_to_go_on(tmp_path):
    code = (
        "from cell_work import slow; from lab.cells import run_cells\n"
        "if __name__ == '__main__':\n"
        f"    run_cells(slow, [dict(n=n, folder={str(tmp_path)!r}) for n in range(40)], workers=1,"
        f" out={str(tmp_path / 'rows.jsonl')!r})"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    run = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)}
    )
    wait_for(lambda: (tmp_path / "rows.jsonl").exists() and (tmp_path / "rows.jsonl").read_text())
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=30)[1]
    done = len((tmp_path / "rows.jsonl").read_text().splitlines())
    assert run.returncode != 0 and f"Stopped: {done} of 40 done" in said and "takes up from there" in said
    assert done == len([path for path in tmp_path.iterdir() if path.name[0].isdigit()])  # what had begun was finished


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"workers": 0}, "1 or more"),
        ({"workers": True}, "1 or more"),
        ({"scheduler": "nonsense"}, "No scheduler answers at 'nonsense'"),
        ({"out": "/proc/rows.jsonl"}, "Cannot write"),
    ],
)
def test_bad_input_is_named_before_any_work(settings, says):
    with pytest.raises(InputError, match=says):
        run_cells(square, [{"n": 1}], **settings)


@pytest.mark.parametrize("listens", [False, True], ids=["nobody", "a web server"])
def test_an_unreachable_scheduler_is_told_within_ten_seconds(monkeypatch, listens):
    assert cells.CONNECT_S <= 8
    monkeypatch.setattr(cells, "CONNECT_S", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:  # and answers in another language
            taken.listen()
            answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
            threading.Thread(target=lambda: taken.accept()[0].sendall(answer), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(InputError, match="No scheduler answers"):
            run_cells(square, [{"n": 1}], scheduler=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert time.monotonic() - began < 4


# --- Dask: a real scheduler and two worker processes on this machine --------------------------------------------------


def wait_for(happens, seconds: float = 40):
    end = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


@pytest.fixture
def cluster(tmp_path):
    """A scheduler's address, and its two workers as processes, without nannies, so that a killed one stays dead."""
    told, environment = tmp_path / "scheduler.json", os.environ | {"PYTHONPATH": str(TESTS)}
    quiet = {"env": environment, "cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    dask = [sys.executable, "-m", "dask"]
    scheduler = subprocess.Popen(
        [*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(told)],
        **quiet,
    )
    started = [scheduler]
    try:
        wait_for(lambda: told.exists() and told.read_text().strip().endswith("}"))
        address = json.loads(told.read_text())["address"]
        workers = [
            subprocess.Popen([*dask, "worker", address, "--no-nanny", "--no-dashboard", "--nthreads", "1"], **quiet)
            for _ in range(2)
        ]
        started = [*workers, scheduler]  # workers first: one without a scheduler would look for it
        yield address, workers
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_dask_goes_on_when_a_worker_is_killed_midway(cluster, tmp_path):
    address, workers = cluster
    out, todo = tmp_path / "rows.jsonl", [{"n": n, "folder": str(tmp_path)} for n in range(12)]
    code = (
        "import sys, json; from cell_work import slow; from lab.cells import run_cells\n"
        f"run_cells(slow, json.loads(sys.argv[1]), out={str(out)!r}, scheduler={address!r})"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(todo)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(TESTS)},
    )  # fmt: skip
    killed = workers[0].pid
    begun = lambda: {int(path.suffix[1:]) for path in tmp_path.glob("[0-9]*.*")}  # noqa: E731
    wait_for(lambda: len(begun()) == 2 and out.exists() and len(out.read_text().splitlines()) >= 2)
    assert killed in begun()
    os.kill(killed, signal.SIGKILL)
    assert run.wait(timeout=60) == 0, run.stderr.read()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["n"] for row in rows) == list(range(12))  # every cell once
    assert all(row["square"] == row["n"] ** 2 for row in rows)
    by = {int(row["worker"].split(":")[1]) for row in rows}
    assert by == {worker.pid for worker in workers}
    # the same call finds everything there and asks nobody; pools of this machine give the same rows
    again = run_cells(slow, todo, out=out, scheduler=address)
    assert again.n.tolist() == list(range(12)) and len(out.read_text().splitlines()) == 12
    few = run_cells(troubled, [{"n": n, "folder": str(tmp_path)} for n in (0, 1, 2, 5)], scheduler=address)
    assert few.n.tolist() == [0, 1]
    assert {(line["kind"], line["n"]) for line in few.attrs["about"]} == {("skipped", 5), ("failed", 2)}
