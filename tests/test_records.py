import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab import records
from lab.errors import InputError
from lab.records import RowWriter, Run, clean, environment, read_rows, write_environment
from lab.stats import Estimate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_RUN_FOLDER", str(tmp_path / "run"))
    return tmp_path / "run"


# --- rows ---------------------------------------------------------------------------------------------------------------


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path):
    writer = RowWriter(tmp_path / "new" / "r.jsonl")
    for i in range(3):
        writer.append({"block": i, "ms": 1.5 * i})
        assert len(read_rows(writer.path)) == i + 1  # the writer is still open
    writer.about("note", text="cut")
    rows = read_rows(writer.path)
    assert rows.to_dict("list") == {"block": [0, 1, 2], "ms": [0.0, 1.5, 3.0]}
    assert rows.attrs["about"] == [{"kind": "note", "text": "cut"}]


def test_a_torn_last_line_is_left_out_and_said_and_the_next_writer_begins_a_new_one(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text('{"block": 0}\n{"block": 1}\n{"blo')
    assert list(read_rows(path).block) == [0, 1]
    assert "left out 1 torn line(s), number 3" in capsys.readouterr().err
    with RowWriter(path) as writer:
        writer.append({"block": 2})
    rows = read_rows(path)
    assert list(rows.block) == [0, 1, 2]
    assert rows.attrs["about"][0]["kind"] == "note"


def test_files_that_hold_no_rows_are_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "other").write_text("not rows\n[1, 2]\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name in ("missing", "empty", "other", "binary", "."):
        with pytest.raises(InputError, match="rows"):
            read_rows(tmp_path / name)
    for line in ('{"arm": "theirs", "ms": 1}', '{"source": "atari:Pong"}'):
        (tmp_path / "foreign").write_text(line)
        assert len(read_rows(tmp_path / "foreign")) == 1
        with pytest.raises(InputError, match="holds no rows of the arm 'mine'; give rows that this notebook"):
            read_rows(tmp_path / "foreign", arm="mine")


def test_values_json_cannot_hold_are_made_plain():
    value = {
        "nan": math.nan,
        "infinite": -math.inf,
        "numpy": np.float32(0.5),
        "array": np.array([[1, 2]]),
        "bool": np.bool_(True),
        "estimate": Estimate(0.5, math.nan, 1.0, 3),
        "single": Estimate(0.5, 0.4, 1.0, 3, "single runs"),
        "table": pd.DataFrame({"arm": ["a"], "ms": [math.nan]}),
        "path": Path("a/b"),
        3: (1, None),
    }
    assert json.loads(json.dumps(clean(value), allow_nan=False)) == {
        "nan": None,
        "infinite": None,
        "numpy": 0.5,
        "array": [[1, 2]],
        "bool": True,
        "estimate": {"value": 0.5, "low": None, "high": 1.0, "n": 3},
        "single": {"value": 0.5, "low": 0.4, "high": 1.0, "n": 3, "note": "single runs"},
        "table": [{"arm": "a", "ms": None}],
        "path": "a/b",
        "3": [1, None],
    }


# --- folders that cannot be written; the tests may run as root, whom permissions do not stop ----------------------------


def test_a_read_only_folder_is_refused_with_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/refrain"):
        monkeypatch.setenv("LAB_RUN_FOLDER", str(folder))
        for attempt in (lambda: Run("01", {}), lambda folder=folder: RowWriter(Path(folder) / "r.jsonl")):
            with pytest.raises(InputError, match="Cannot write to .*choose another output folder") as caught:
                attempt()
            assert "\n" not in str(caught.value)


def test_a_full_folder_is_refused_with_a_sentence(tmp_path):
    """A process that may write no byte to any file meets what it would meet on a full disk."""
    code = """
import resource, signal
from lab.errors import InputError
from lab.records import Run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    Run("01", {})
except InputError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "LAB_RUN_FOLDER": str(tmp_path / "run")},
    )
    assert done.stdout.startswith(f"refused: Cannot write to {tmp_path / 'run'} (File too large)"), done.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_that_fills_up_while_measuring_is_said_in_one_sentence():
    with RowWriter("/dev/full") as writer, pytest.raises(InputError, match="No space left on device.*free some space"):
        writer.append({"block": 0})


# --- the environment ----------------------------------------------------------------------------------------------------


def test_the_environment_says_what_can_move_a_time():
    import torch

    record = environment(seed=7)
    assert record["seed"] == 7
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["torch"]["threads"] == torch.get_num_threads()
    assert record["torch"]["tf32_matmul"] in (True, False)
    assert set(record["torch"]["attention_kernels"]) == {"flash", "mem_efficient", "math", "cudnn"}
    assert record["cpu"]["threads"] >= record["cpu"]["usable"] >= 1
    assert record["cpu"]["model"]
    assert record["cpu"]["native_bf16"] in (True, False)
    assert len(record["load"]) == 3
    assert record["memory"]["total"] > record["memory"]["available"] > 0
    assert isinstance(record["gpus"], list)
    assert record["git"] is None or len(record["git"]["commit"]) == 40
    json.dumps(clean(record), allow_nan=False)


def test_the_environment_follows_the_process(monkeypatch):
    import torch

    monkeypatch.setenv("OMP_PROC_BIND", "close")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert environment()["torch"]["threads"] == 1
    finally:
        torch.set_num_threads(before)
    assert environment()["torch"]["variables"]["OMP_PROC_BIND"] == "close"


def test_what_nvidia_smi_says_of_clocks_is_kept(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "fields = sys.argv[1].split('=')[1].split(',')\n"
        "sys.exit(6) if 'clocks.sm' not in fields else print(*(f'<{f}>' for f in fields), sep=', ')\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (gpu,) = records._gpus()
    assert gpu["clocks.sm"] == "<clocks.sm>"
    assert gpu["clocks_throttle_reasons.active"] == "<clocks_throttle_reasons.active>"
    smi.write_text(smi.read_text().replace("'clocks.sm' not in", "'clocks.sm' in"))  # a driver that knows fewer fields
    (gpu,) = records._gpus()
    assert gpu["name"] == "<name>"
    smi.unlink()
    assert records._gpus() == []


def test_before_and_after_stand_in_one_file(tmp_path):
    path = write_environment(tmp_path, "before", seed=1)
    assert set(json.loads(path.read_text())) == {"before"}
    write_environment(tmp_path, "after", seed=1)
    both = json.loads((tmp_path / "environment.json").read_text())
    assert set(both) == {"before", "after"}
    assert both["after"]["time"] >= both["before"]["time"]
    write_environment(tmp_path, "before")
    assert set(json.loads(path.read_text())) == {"before"}
    with pytest.raises(InputError):
        write_environment(tmp_path, "during")


# --- a notebook's run ---------------------------------------------------------------------------------------------------


def test_saved_results_echo_parameters_and_carry_the_interval(folder):
    run = Run("02_latency_breakdown", {"profile": "smoke", "seed": 9})
    assert run.folder == folder
    assert run.rows_path == folder / "02_latency_breakdown.rows.jsonl"
    path = run.save({"saving": Estimate(1.0, 0.5, 1.5, 20), "speedup": math.nan}, weights="random, seed 0")
    saved = json.loads(path.read_text())
    assert path == folder / "02_latency_breakdown.json"
    assert saved["parameters"] == {"profile": "smoke", "seed": 9}
    assert saved["results"] == {"saving": {"value": 1.0, "low": 0.5, "high": 1.5, "n": 20}, "speedup": None}
    assert saved["weights"] == "random, seed 0"
    assert saved["versions"]["numpy"] == np.__version__
    assert saved["machine"]["cpu"]["model"]
    assert saved["finished"].startswith("20")
    assert [p.name for p in folder.iterdir()] == ["02_latency_breakdown.json"]  # no temporary file stays


def test_results_are_replaced_whole_or_not_at_all(folder, monkeypatch):
    run = Run("05", {})
    run.save({"identical": 1})

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        run.save({"identical": 2})
    assert json.loads((folder / "05.json").read_text())["results"] == {"identical": 1}


def test_an_interactive_run_goes_beside_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.delenv("LAB_RUN_FOLDER", raising=False)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert Run("01", {}).folder == tmp_path / "reports" / "interactive"


def test_measuring_again_starts_a_new_rows_file_and_showing_rows_does_not(folder):
    first = Run("02", {"rows": ""})
    with RowWriter(first.rows_path) as writer:
        writer.append({"block": 0})
    assert Run("02", {"rows": str(first.rows_path)}).rows_path.exists()
    second = Run("02", {"rows": ""})
    assert not second.rows_path.exists()
    assert list(read_rows(folder / "02.rows.old.jsonl").block) == [0]


def test_a_log_is_said_and_kept(folder, capsys):
    run = Run("02", {})
    run.log("compiled arms: not run: no C++ compiler")
    assert "not run: no C++ compiler" in capsys.readouterr().err
    assert (folder / "02.log").read_text().endswith("compiled arms: not run: no C++ compiler\n")


def test_a_notebook_name_is_bare(folder):
    for name in ("", "a/b", "../b"):
        with pytest.raises(InputError, match="bare name"):
            Run(name, {})


def test_records_and_statistics_do_not_load_torch():
    code = "import sys, lab.records, lab.stats, lab.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
