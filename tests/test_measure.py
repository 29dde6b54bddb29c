import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import lab
from lab import clocks, stats
from lab.errors import InputError
from lab.measure import Arm, HostClock, balanced_orders, compare, missed_deadlines, percentiles, stage, time_call
from lab.records import read_rows


@pytest.fixture(autouse=True)
def a_machine_of_its_own(tmp_path, monkeypatch):
    """A measurement running elsewhere on this machine is not waited for, and its load not warned of."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def python(code: str, folder, **variables) -> subprocess.Popen:
    """A Python process running `code`, its locks in `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder), "LAB_HEADLESS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True)


class AsyncDevice:
    """A device with a queue: work and marks given to it are done later, in order, while the host goes on."""

    def __init__(self):
        self.queue = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            self.queue.get()()
            self.queue.task_done()

    def sleep(self, seconds):
        self.queue.put(lambda: time.sleep(seconds))

    def mark(self):
        when = []
        self.queue.put(lambda: when.append(time.perf_counter()))
        return when

    def sync(self):
        self.queue.join()

    def elapsed_ms(self, begin, end):
        return (end[0] - begin[0]) * 1e3


class Ticks:
    """A clock whose every mark is one millisecond after the one before."""

    def __init__(self):
        self.now = 0

    def mark(self):
        self.now += 1
        return self.now

    def sync(self):
        pass

    def elapsed_ms(self, begin, end):
        return end - begin


def arms(calls: list, names=("a", "b", "c")) -> dict:
    return {name: lambda name=name: calls.append(name) for name in names}


# --- one call -------------------------------------------------------------------------------------------------------


def test_work_queued_on_a_device_is_waited_for_and_counted_in_its_stage():
    device = AsyncDevice()

    def decide():
        with stage("vision"):
            device.sleep(0.05)
        with stage("language"):
            device.sleep(0.02)

    # the best of three, as another process may hold up the threads of one
    times = min((time_call(decide, clock=device) for _ in range(3)), key=lambda times: times["total"])
    assert 50 <= times["vision"] < 60
    assert 20 <= times["language"] < 30
    assert times["vision"] + times["language"] == pytest.approx(times["total"], rel=0.05)
    device.sync()
    assert time_call(decide, clock=HostClock())["total"] < 20  # a clock that does not wait misses all of it
    device.sync()


def test_work_queued_before_the_call_is_not_counted():
    device = AsyncDevice()
    device.sleep(0.05)
    assert time_call(lambda: None, clock=device)["total"] < 10


def test_a_stage_costs_next_to_nothing_when_nobody_measures():
    def marked():
        with stage("vision"):
            pass

    assert min(timeit.repeat(marked, number=10_000, repeat=5)) / 10_000 < 2e-6


def test_repeated_stages_add_up_and_a_nested_one_interrupts_the_outer():
    def decide():
        with stage("language"):  # 1
            with stage("restore"):  # 2
                pass  # 3
            with stage("language"):  # 4
                pass  # 5
        # 6
        with stage("language"):  # 7
            pass  # 8

    times = time_call(decide, clock=Ticks())
    assert times["restore"] == 1
    assert times["language"] == (2 - 1) + (4 - 3) + (5 - 4) + (6 - 5) + (8 - 7)


def test_a_failing_call_leaves_nothing_measuring():
    def fails():
        with stage("vision"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        time_call(fails)
    assert clocks._recorder is None
    assert "vision" not in time_call(lambda: None)


def test_measuring_inside_a_measured_call_is_refused():
    with pytest.raises(InputError, match="inside"):
        time_call(lambda: time_call(lambda: None))


class FakeCuda:
    """torch.cuda as far as the clock uses it."""

    capturing = False

    class Event:
        count = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "current stream"
            FakeCuda.Event.count += 1
            self.at = FakeCuda.Event.count

        def elapsed_time(self, end):
            return float(end.at - self.at)

    def current_stream(self, device):
        return "current stream"

    def is_current_stream_capturing(self):
        return self.capturing

    def synchronize(self, device):
        pass


def test_cuda_stages_are_events_and_a_captured_stage_is_left_out():
    clock = clocks.CudaClock.__new__(clocks.CudaClock)
    clock._cuda, clock._device = FakeCuda(), "cuda"

    def decide():
        with stage("vision"):
            pass
        clock._cuda.capturing = True
        with stage("language"):
            pass
        clock._cuda.capturing = False

    times = time_call(decide, clock=clock)
    assert times["vision"] == 1.0
    assert "language" not in times


def test_cuda_is_waited_for_where_the_process_uses_it(monkeypatch):
    used = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", used)
    assert clocks.default_device() == "cuda"
    used.cuda.is_initialized = lambda: False
    assert clocks.default_device() == "cpu"


def test_unknown_devices_are_refused():
    with pytest.raises(InputError, match="abacus"):
        compare({"a": lambda: None}, device="abacus")


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_warm_up_is_kept_apart_and_reaches_no_statistic():
    calls = []

    def slow_at_first():
        calls.append(1)
        time.sleep(0.05 if len(calls) <= 4 else 0)

    rows = compare({"a": slow_at_first}, blocks=6, warmup=2)
    assert (rows[rows.phase == "warmup"]["ms"] >= 50).all()
    assert len(rows[rows.phase == "warmup"]) == 4  # the arm and its A/A arm, twice
    assert len(rows[rows.phase == "timed"]) == 12
    line = stats.summary(rows).set_index("arm").loc["a"]
    assert line["n"] == 6
    assert line["high"] < 10
    assert percentiles(rows, "a")["p99"] < 10


def test_every_block_holds_every_arm_once_in_an_order_of_its_own():
    calls = []
    rows = compare(arms(calls), blocks=12, warmup=1, seed=3)
    blocks = [tuple(calls[i : i + 4]) for i in range(0, len(calls), 4)]
    assert len(blocks) == 13
    assert all(sorted(block) == ["a", "a", "b", "c"] for block in blocks)  # a twice: the A/A arm
    assert len(set(blocks)) > 3
    timed = rows[rows.phase == "timed"].sort_values(["block", "order"])
    assert [name.removesuffix(" again") for name in timed.arm] == calls[4:]

    once_more, other = [], []
    compare(arms(once_more), blocks=12, warmup=1, seed=3)
    compare(arms(other), blocks=12, warmup=1, seed=4)
    assert once_more == calls
    assert other != calls


def test_all_arms_of_a_block_get_the_same_input_and_inputs_take_turns():
    seen = []
    compare({"a": lambda x: seen.append(x), "b": lambda x: seen.append(x)}, [10, 11, 12], blocks=4, warmup=1)
    assert seen == [12] * 3 + [10] * 3 + [11] * 3 + [12] * 3 + [10] * 3


def test_the_again_arm_repeats_the_arm_asked_for():
    calls = []
    rows = compare(arms(calls), blocks=2, warmup=0, again="b")
    assert set(rows[rows.again].arm) == {"b again"}
    assert calls.count("b") == 4
    assert calls.count("a") == 2
    assert not compare(arms([]), blocks=1, warmup=0, again=False).again.any()
    with pytest.raises(InputError, match="nobody"):
        compare(arms([]), again="nobody")


def test_arms_of_the_same_configuration_are_refused_before_anything_runs():
    calls = []
    f = lambda: calls.append(1)  # noqa: E731
    with pytest.raises(InputError, match="same effective configuration"):
        compare({"mine": f, "theirs": f})
    with pytest.raises(InputError, match="same effective configuration"):
        compare([Arm("a", f, {"graph": True}), Arm("b", lambda: None, {"graph": True})])
    with pytest.raises(InputError, match="by name"):
        compare([Arm("a", f, {"graph": True}), Arm("a", f, {"graph": False})])
    assert calls == []


def test_arms_that_turn_out_the_same_after_warm_up_are_refused():
    state = {"graph": True}
    captured = Arm("captured", lambda: state.update(graph=False), lambda: dict(state))
    with pytest.raises(InputError, match="same effective configuration"):
        compare([captured, Arm("eager", lambda: None, {"graph": False})], blocks=5)


def test_steps_are_timed_through_decide_and_carry_their_description():
    step = SimpleNamespace(
        name="eager",
        device="cpu",
        decide=lambda x: time.sleep(0.001),
        describe=lambda: {"attention": "block"},
        start_cost=lambda: {"build_s": 1.5},
    )
    rows = compare(
        [Arm.of(step, counts=lambda: {"hits": 2})], [0], blocks=2, warmup=1, title="pong", tags={"game": "Pong"}
    )
    assert set(rows["describe"].map(str)) == {"{'attention': 'block'}"}
    assert set(rows.game) == {"Pong"}
    assert set(rows.loc[rows.stage == "total", "counts"].map(str)) == {"{'hits': 2}"}
    assert stats.start_costs(rows).to_dict("records") == [{"title": "pong", "arm": "eager", "build_s": 1.5}]
    assert set(compare({"x": step}, [0], blocks=1, warmup=0).arm) == {"x", "x again"}


def test_back_to_back_and_in_loop_stand_beside_each_other():
    def decide():
        time.sleep(0.002)

    world = []
    arm = Arm("eager", decide, {"step": "eager"})
    in_loop = arm.in_loop(lambda: (world.append(1), time.sleep(0.02)))
    rows = compare([arm, in_loop], blocks=6, warmup=1)
    assert len(world) == 7
    assert rows[rows.arm == "eager in loop"].ms.median() < 10  # the environment's 20 ms are not the decision's
    assert set(rows.pace) == {"back_to_back", "in_loop"}
    table = stats.paces(rows)
    assert list(table.arm) == ["eager"]
    assert table.loc[0, "back_to_back"] == pytest.approx(2, abs=1)
    assert table.loc[0, "in_loop"] == pytest.approx(2, abs=1)
    with pytest.raises(InputError, match="pace"):
        compare([Arm("a", decide, pace="in_loop")])


def test_bad_arguments_are_refused_with_a_sentence():
    f = lambda: None  # noqa: E731
    for wrong in (
        {"blocks": 0},
        {"blocks": 2.5},
        {"warmup": -1},
        {"budget_s": 0},
        {"inputs": []},
    ):
        with pytest.raises(InputError):
            compare({"a": f}, **wrong)
    for wrong_arms in ({}, [], [f], {"a": 3}):
        with pytest.raises(InputError):
            compare(wrong_arms)


# --- stopping, and what stays -----------------------------------------------------------------------------------------


def test_a_budget_cuts_whole_blocks_and_says_so(tmp_path, capsys):
    f = lambda: time.sleep(0.02)  # noqa: E731
    rows = compare({"a": f}, blocks=50, warmup=1, budget_s=0.3, title="pong", out=tmp_path / "r.jsonl")
    blocks = rows[rows.phase == "timed"].groupby("arm").size()
    assert blocks["a"] == blocks["a again"]
    assert 1 <= blocks["a"] < 20
    said = f"pong: stopped after {blocks['a']} of 50 blocks"
    assert said in capsys.readouterr().err
    assert said in stats.notes(rows)[0]
    assert stats.notes(read_rows(tmp_path / "r.jsonl")) == stats.notes(rows)


def test_ctrl_c_keeps_the_whole_blocks_and_says_where_they_are(tmp_path, capsys):
    calls = []

    def f():
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt

    path = tmp_path / "r.jsonl"
    rows = compare({"a": f, "b": lambda: None}, blocks=50, warmup=1, out=path)
    counts = rows[rows.phase == "timed"].groupby("arm").size()
    assert counts.nunique() == 1
    assert counts["a"] == 4  # two calls of a block, one block of warm-up, the sixth block cut
    assert f"interrupted after 4 of 50 blocks. Rows are in {path}." in capsys.readouterr().err
    assert len(stats._timed(read_rows(path))) == 12  # a block cut short on disk does not count either


def test_ctrl_c_in_one_of_several_comparisons_ends_the_program(tmp_path, capsys):
    calls = []

    def f():
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": f, "b": lambda: None}, blocks=50, warmup=1, out=tmp_path / "r.jsonl", keep_partial=False)
    assert "Rows are in" in capsys.readouterr().err
    assert len(stats._timed(read_rows(tmp_path / "r.jsonl"))) == 12


def test_ctrl_c_before_the_first_block_stops_everything():
    def f():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": f}, blocks=3, warmup=1)


def test_rows_survive_a_killed_process(tmp_path):
    path = tmp_path / "r.jsonl"
    code = f"import time, lab; lab.compare({{'a': lambda: time.sleep(0.01)}}, blocks=10**6, out={str(path)!r})"
    process = python(code, tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.read_text().count('"timed"') < 10):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    rows = read_rows(path)
    assert (rows.phase == "timed").sum() >= 10
    assert (rows.phase == "warmup").sum() == 6
    assert stats.summary(rows).n.iloc[0] >= 4


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    calls = []
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "r.jsonl", "/proc/r.jsonl", "/dev/full"):
        with pytest.raises(InputError, match="Cannot write"):
            compare({"a": lambda: calls.append(1)}, out=out)
    assert calls == []


def test_one_measurement_at_a_time_per_device(tmp_path):
    code = """
import time, lab
spans = []
def f():
    begin = time.time(); time.sleep(0.05); spans.append((begin, time.time()))
lab.compare({"a": f}, blocks=6, warmup=0, again=False, title="TITLE")
print(spans[0][0], spans[-1][1])
"""
    processes = [python(code.replace("TITLE", title), tmp_path) for title in ("first", "second")]
    ended = [process.communicate(timeout=120) for process in processes]
    spans = sorted(tuple(map(float, out.split())) for out, _ in ended)
    assert spans[0][1] <= spans[1][0]
    waited = [err for _, err in ended if "Waiting for process" in err]
    assert len(waited) == 1
    assert any(str(process.pid) in waited[0] for process in processes)
    assert "first" in waited[0]
    assert "second" in waited[0]


def test_a_comparison_inside_a_comparison_does_not_wait_for_itself():
    with pytest.raises(InputError):
        compare({"a": lambda: compare({"b": lambda: None})}, warmup=0)
    assert len(compare({"a": lambda: None}, blocks=1, warmup=0)) == 2  # the lock is free again


def test_a_loaded_machine_is_said(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 1.0, 1.0))
    rows = compare({"a": lambda: None}, blocks=1, warmup=0)
    assert "load 99.0" in capsys.readouterr().err
    assert "load 99.0" in stats.notes(rows)[0]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 1.0, 1.0))
    assert stats.notes(compare({"a": lambda: None}, blocks=1, warmup=0)) == []


def test_the_environment_stands_before_and_after_the_rows(tmp_path):
    compare({"a": lambda: None}, blocks=1, warmup=0, out=tmp_path / "r.jsonl")
    about = read_rows(tmp_path / "r.jsonl").attrs["about"]
    assert [line.get("moment") for line in about if line["kind"] == "environment"] == ["before", "after"]
    assert about[0]["kind"] == "plan"
    assert about[0]["arms"] == ["a", "a again"]


def test_headless_progress_is_plain_lines_that_end_with_the_count(monkeypatch, capsys):
    monkeypatch.setenv("LAB_HEADLESS", "1")
    compare({"a": lambda: None}, blocks=8, warmup=1, title="pong")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pong: 2 of 8 blocks"
    assert lines[-1].startswith("pong: 8 of 8 blocks in ")
    assert not any("\r" in line or "%" in line for line in lines)


def test_unmarked_time_is_said(capsys):
    def decide():
        with stage("vision"):
            time.sleep(0.002)
        time.sleep(0.002)

    compare({"a": decide}, blocks=2, warmup=0)
    assert "of the decision's time is in no stage" in capsys.readouterr().err


def test_missed_deadlines():
    rows = compare({"a": lambda: time.sleep(0.005)}, blocks=5, warmup=1)
    assert missed_deadlines(rows, "a", hz=1000)["missed"] == 5
    at_10 = missed_deadlines(rows, "a", hz=10)
    assert at_10["missed"] == 0
    assert at_10["period_ms"] == 100
    assert at_10["share"].high == pytest.approx(0.5218, abs=1e-3)  # 1 - 0.025 ** (1/5)
    with pytest.raises(InputError):
        missed_deadlines(rows, "a", hz=0)


def test_a_readers_own_function_takes_three_lines(tmp_path):
    code = """
import sys, lab
rows = lab.compare({"mine": lambda: sum(range(30_000)), "theirs": lambda: sum(range(3_000))})
print(lab.stats.summary(rows))
assert "torch" not in sys.modules, "timing a function must not load torch"
"""
    out, err = python(code, tmp_path).communicate(timeout=120)
    assert "theirs" in out, err
    assert "True" in out
    assert "..." not in out
    assert lab.compare is compare


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_balanced_orders_balance_places_and_neighbours(count):
    rows = 2 * count if count % 2 else count
    drawn = balanced_orders(count, np.random.default_rng(3))
    squares = [np.array(list(islice(drawn, rows))) for _ in range(2)]
    for square in squares:
        times = rows // count
        for place in range(count):
            assert (np.bincount(square[:, place], minlength=count) == times).all()
        follows = np.zeros((count, count), int)
        for order in square:
            for before, after in pairwise(order):
                follows[before, after] += 1
        assert (follows + times * np.eye(count, dtype=int) == times).all()
    assert count == 2 or (squares[0] != squares[1]).any()


def test_compare_calls_arms_in_balanced_orders():
    arms = {name: (lambda name=name: name) for name in "abc"}
    rows = compare(arms, blocks=8, warmup=0, orders="balanced")
    places = rows[rows["stage"] == "total"].groupby(["arm", "order"]).size()
    assert (places == 2).all() and len(places) == 16  # four arms with the A/A arm, four places, two squares
    with pytest.raises(InputError, match="orders"):
        compare(arms, blocks=1, orders="sorted")
