"""`lab play` and notebook 10's rows: play without a notebook, its lines, its figures, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

import lab
from lab.cli import main
from lab.errors import InputError
from lab.experiments import live_play
from lab.records import read_rows


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(["play", "--model", "tiny", *arguments])
        code = 0
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_line_per_episode_and_a_summary(capsys, tmp_path):
    code, out, _ = call(
        capsys, "--scenario", "basic", "--steps", "78", "--seed", "2", "--record", f"{tmp_path}/out.gif"
    )
    lines = out.splitlines()
    assert code == 0 and out.index("starting the game") < out.index("warming up")
    episode = next(line for line in lines if line.startswith("episode 1 (seed"))
    score, count = re.search(r"score (-?\d+), (\d+) decisions; \2 of 78 decisions", episode).groups()
    assert (
        f"78 decisions, 1 episode(s), mean score {score}.0; the last one unfinished after {78 - int(count)} decisions"
        in out
    )
    assert re.search(r"a decision: p50 [\d.]+, p95 [\d.]+, p99 [\d.]+ ms; [\d.]+ a second", out)
    assert re.search(r"before the first: emulator [\d.]+, model [\d.]+, step [\d.]+, warm_up [\d.]+ s", out)
    assert "tiny is not trained" in lines[-1]
    with Image.open(tmp_path / "out.gif") as picture:
        assert picture.n_frames == 78


def test_json_is_the_last_and_only_document_and_says_the_same_as_the_play_loop(capsys):
    code, out, err = call(capsys, "--game", "Breakout", "--steps", "60", "--choose", "sampled", "--seed", "5", "--json")
    found = json.loads(out)
    assert code == 0 and "warming up" in err
    model = lab.load_model("tiny")
    asked = lab.load_workloads()["breakout"].question
    step = lab.EagerStep(model, asked, option_attention=model.config.option_attention)
    expected = lab.play(step, "atari:Breakout", 1, 60, seed=5, choose="sampled")
    counts = np.bincount(expected.actions[0], minlength=4)
    assert found["actions"] == {
        name: count for name, count in zip(expected.names, counts.tolist(), strict=True) if count
    }
    assert found["unfinished"]["score"] == expected.scores[0] and found["episodes"] == []
    assert found["decisions"] == 60 and found["decision_ms"]["p50"] <= found["decision_ms"]["p99"]
    assert set(found["start_s"]) == {"emulator", "model", "step", "warm_up"} and found["emulator_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--game", "Pomg"], "Unknown Atari game 'Pomg'. Did you mean Pong"),
        (["--game", ""], "Unknown frame source"),
        (["--scenario", "nowhere"], "Unknown Doom scenario 'nowhere'"),
        (["--game", "Pong", "--scenario", "basic"], "Give either --game (Atari) or --scenario (Doom)."),
        (["--model", "nobody"], "Unknown model 'nobody'"),
        (["--step", "magic"], "Unknown step 'magic'; it is one of static"),
        (["--device", "abacus"], "Unknown device 'abacus'"),
        (["--dtype", "fp8"], "dtype is 'fp8'"),
        (["--frames", "0"], "frames is 0; give a whole number from 1 to 8"),
        (["--frames", "9"], "frames is 9"),
        (["--choose", "best"], "choose is 'best'"),
        (["--steps", "0"], "--steps is 0; give the number of decisions to play, 1 or more."),
        (["--seed", "-1"], "seed is -1"),
        (["--record", "out.png"], "out.png is no name of a GIF; let it end in .gif"),
        (["--record", "nowhere/out.gif"], "The folder nowhere is not there"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(capsys, arguments, sentence):
    code, out, err = call(capsys, *arguments)
    assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1
    assert "episode" not in out


def test_ctrl_c_says_what_was_played_and_leaves_no_engine(tmp_path):
    command = [sys.executable, "-m", "lab.cli", "play", "--model", "tiny", "--steps", "100000"]
    child = subprocess.Popen(
        [*command, "--record", "out.gif"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = []
    for line in child.stdout:
        said.append(line)
        if line.startswith("episode 1"):
            os.killpg(child.pid, signal.SIGINT)  # as a terminal does: the engine is in the group too
            break
    rest, _ = child.communicate(timeout=60)
    assert child.returncode == 130, "".join(said) + rest
    assert "stopped from the keyboard" in rest and "pictures in out.gif" in rest and re.search(r"a decision: p50", rest)
    assert (tmp_path / "out.gif").stat().st_size > 10_000 and "Traceback" not in rest
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)  # nobody is left in the group


# --- notebook 10's rows -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "10.rows.jsonl"
    return live_play.run("smoke", out=path, seed=2), path


def test_rows_hold_every_decision_and_read_back_they_say_the_same(rows):
    taken, path = rows
    assert len(taken) == 40 and set(taken["title"]) == {"atari:Breakout"} and (taken["ms"] > 0).all()
    assert (taken["emulator_ms"] > 0).all() and (taken["draw_ms"] > 0).all()
    back = read_rows(path)
    assert live_play.answer(back) == live_play.answer(taken)
    assert live_play.table(back).equals(live_play.table(taken))
    line = live_play.table(back).iloc[0]
    assert line["p50"] == pytest.approx(np.median(taken["ms"])) and line["a second"] == pytest.approx(
        1e3 / taken["ms"].mean()
    )
    assert f"{line['p50']:.1f} ms" in live_play.answer(back) and "tiny is not trained" in live_play.answer(back)


def test_rows_hold_the_moments_that_the_strip_and_the_figure_show(rows):
    from lab import figures

    taken, path = rows
    back = read_rows(path)
    moments = live_play.moments(back, "atari:Breakout")
    assert [one.number for one in moments] == [1, 9, 17, 24, 32, 40] and moments[0].frame.shape == (210, 160, 3)
    view = live_play.view(back, "atari:Breakout")
    assert view.html.count("data:image/png") == 6 and "40 decisions" in view.text
    figure = figures.live_strip(moments, taken["ms"], taken["emulator_ms"], "Breakout")
    assert len(figure.axes) == 2 * 6 + 1 and "p95" in " ".join(text.get_text() for text in figure.axes[-1].texts)


def test_an_unknown_profile_is_refused():
    with pytest.raises(InputError, match="Unknown profile 'quick'"):
        live_play.run("quick")
