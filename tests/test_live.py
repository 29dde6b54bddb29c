"""Sessions, moments and players: one game played a decision at a time, without widgets."""

import ctypes
import math
import platform
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import lab
from lab.envs import make
from lab.envs.doom import CLONE_FS
from lab.errors import InputError
from lab.live import Session
from lab.live_choices import SNAKE, STEPS, question_for, remark, sources
from lab.live_views import bars, numbers, strip
from lab.moments import Moment, Recording
from lab.player import Player, others_playing
from lab.policy import play


@pytest.fixture(scope="module")
def tiny():
    return lab.load_model("tiny")


@pytest.fixture
def breakout(tiny):
    with Session("atari:Breakout", tiny) as session:
        yield session


def engines() -> list:
    return [child for child in psutil.Process().children(recursive=True) if child.name() == "vizdoom"]


def until(true, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())


@pytest.fixture
def player(tiny):
    """player(**settings) starts one on the tiny model, Pong by default; all are closed at the end."""
    made = []

    def make(show=lambda player, urgent: None, playing=True, speed=math.inf, **settings):
        made.append(Player({"source": "atari:Pong", "model": tiny} | settings, show, playing, speed))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- a session --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "choose"), [("doom:basic", "greedy"), ("atari:Breakout", "sampled")])
def test_its_episodes_are_those_of_the_lockstep_loop(tiny, source, choose):
    with Session(source, tiny, choose=choose, seed=3, max_decisions=10) as session:
        while len(session.episodes) < 3:
            session.tick()
        step = lab.EagerStep(tiny, session.question, option_attention=tiny.config.option_attention)
        taken = [[moment.action for moment in session.recording if moment.episode == n] for n in range(3)]
    expected = play(step, source, episodes=3, max_decisions=10, choose=choose, seed=3)
    assert taken == [[expected.names[action] for action in actions] for actions in expected.actions]
    assert [episode.score for episode in session.episodes] == expected.scores
    assert [episode.seed for episode in session.episodes] == [episode.seed for episode in expected.episodes]
    assert session.decisions == sum(expected.lengths) and sum(session.taken.values()) == session.decisions


def test_start_and_emulator_are_in_no_decision_time(breakout, monkeypatch):
    assert set(breakout.start_s) == {"emulator", "step", "warm_up"}, "a model that is given costs nothing"
    assert not len(breakout.decision_ms) and breakout.rate == 0
    slow = breakout.env.step

    def step(action):
        time.sleep(0.4)
        return slow(action)

    monkeypatch.setattr(breakout.env, "step", step)
    moments = [breakout.tick() for _ in range(3)]
    assert all(moment.emulator_ms > 400 for moment in moments)
    assert breakout.decision_ms.percentiles()["p50"] < 350
    assert breakout.rate < 2.5 < breakout.facts()["possible"]
    breakout.rest()
    assert breakout.rate == 0


def test_a_look_counts_nowhere_and_sees_what_the_next_decision_sees(breakout):
    breakout.tick()
    seen = breakout.look()
    assert not seen.action and breakout.decisions == 1 and len(breakout.recording) == 1
    moment = breakout.tick()
    np.testing.assert_array_equal(seen.frame, moment.frame)
    np.testing.assert_allclose(seen.probabilities, moment.probabilities, atol=1e-6)
    assert moment.action == moment.ranked[0][0] and moment.probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_another_question_is_asked_in_the_middle_of_an_episode(breakout):
    breakout.tick()
    before = breakout.look()
    asked = lab.Question("choice", "Never move.", dict(reversed(breakout.question.options)))
    breakout.ask(asked)
    after = breakout.look()
    np.testing.assert_array_equal(before.frame, after.frame)
    assert after.names == tuple(asked.names) != before.names
    assert max(abs(dict(before.ranked)[name] - share) for name, share in after.ranked) > 1e-5
    assert breakout.tick().episode == 0 and breakout.decisions == 2
    with pytest.raises(InputError, match="are not the actions of atari:Breakout"):
        breakout.ask(lab.Question("choice", "Which?", ["LEFT", "RIGHT"]))
    assert breakout.question is asked and breakout.tick().names == after.names


def test_restart_begins_the_same_games_again_or_others(breakout):
    first = [breakout.tick().action for _ in range(5)], breakout.look().frame
    breakout.restart()
    assert (breakout.decisions, len(breakout.recording), len(breakout.decision_ms)) == (0, 0, 0)
    again = [breakout.tick().action for _ in range(5)], breakout.look().frame
    assert first[0] == again[0] and np.array_equal(first[1], again[1])
    breakout.restart(seed=9)
    assert breakout.seed == 9 and breakout.tick().episode == 0


@pytest.mark.parametrize("step", [step for step in STEPS if "compiled" not in step])
def test_every_step_plays_two_frames_per_decision(tiny, step):
    with Session("atari:Pong", tiny, step=step, frames=2) as session:
        assert len([session.tick() for _ in range(3)][-1].probabilities) == 6
        assert session.describe()["step"] == STEPS[step].step and session.describe()["frames"] == 2


def test_every_named_step_is_there_and_reads_its_layout():
    from lab import steps

    for kind in STEPS.values():
        assert hasattr(steps, kind.step) and kind.about
    assert {kind.layout for kind in STEPS.values()} == {"terminator", "question_first"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "atari:Pomg"}, "Did you mean Pong"),
        ({"source": "doom:nowhere"}, "Unknown Doom scenario"),
        ({"source": "chess:blitz"}, "Unknown frame source"),
        ({"model": "no-such-model"}, "Unknown model"),
        ({"step": "magic"}, "Unknown step 'magic'; it is one of static"),
        ({"device": "abacus", "model": "tiny"}, "Unknown device"),
        ({"dtype": "fp8", "model": "tiny"}, "dtype is 'fp8'"),
        ({"frames": 0}, "frames is 0; give a whole number from 1 to 8"),
        ({"frames": 9}, "frames is 9"),
        ({"frames": 1.5}, "frames is 1.5"),
        ({"choose": "best"}, "choose is 'best'"),
        ({"seed": -1}, "seed is -1"),
        ({"max_decisions": 0}, "max_decisions is 0"),
        ({"question": lab.Question("choice", "Which?", ["A", "B"])}, "are not the actions"),
    ],
)
def test_what_cannot_be_played_is_refused_and_nothing_left_running(tiny, settings, sentence):
    with pytest.raises(InputError, match=sentence):
        Session(**{"source": "doom:basic", "model": tiny} | settings)
    assert not engines()


def test_a_small_model_plays_on_one_thread_and_the_setting_comes_back(breakout, monkeypatch):
    seen = []
    decide = breakout.step.decide
    monkeypatch.setattr(breakout.step, "decide", lambda frames: seen.append(torch.get_num_threads()) or decide(frames))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        breakout.tick()
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_every_game_has_a_question_with_words_for_its_actions():
    found = sources()
    assert found[:2] == ["atari:Breakout", "atari:Pong"] and len(found) == len(set(found)) > 110
    assert found.index(SNAKE) < 10, "with the games that have a workload, not below a hundred others"
    assert {"doom:basic", "doom:health_gathering", "atari:Freeway"} <= set(found)
    asked = question_for("atari:Freeway", ["NOOP", "UP", "DOWN"])
    assert "Freeway on an Atari" in asked.instructions and asked.rendered[1] == "UP: go up"
    assert question_for("doom:defend_the_center", ["TURN_LEFT", "SPEED"]).rendered == [
        "TURN_LEFT: turn left",
        "SPEED: speed",
    ]
    assert question_for("doom:basic", ["ATTACK", "MOVE_LEFT", "MOVE_RIGHT"]).options[0][1] == "step to left", (
        "the shipped one"
    )


def test_untrained_weights_are_spoken_of(tiny):
    assert remark(tiny, "doom:basic", "static", 1) == "tiny is not trained (random, seed 0): its choices mean nothing."


# --- moments ----------------------------------------------------------------------------------------------------------


def moment(number=0, episode=0, frame=None, **changes) -> Moment:
    frame = np.random.default_rng(number).integers(256, size=(40, 60, 3), dtype=np.uint8) if frame is None else frame
    share = np.array([0.2, 0.7, 0.1], np.float32)
    known = {"names": ("UP", "<FIRE>", "DOWN"), "probabilities": share, "confidence": 0.5, "p_act": 0.25, "score": 3.0}
    return Moment(number, episode, frame, **known | {"decision_ms": 12.5, "action": "<FIRE>"} | changes)


FACTS = {"percentiles": {"p50": 12.0, "p95": 20.5, "p99": 31.0}, "times": np.linspace(10, 30, 50), "emulator_ms": 0.7,
         "rate": 24.6, "possible": 80.0, "decisions": 412, "taken": {"UP": 7}, "scores": [1.0, 4.0]}  # fmt: skip


def test_a_recording_keeps_frames_exactly_and_stays_within_its_bytes():
    recording = Recording(5 * 40 * 60 * 3)  # noise does not pack: five frames and a bit of a sixth fit
    for number in range(20):
        recording.add(moment(number, number // 8, score=float(number)))
    assert len(recording) == 4 and recording.bytes <= recording.most_bytes
    np.testing.assert_array_equal(recording[-1].frame, moment(19).frame)
    assert [one.number for one in recording] == [16, 17, 18, 19] and recording[0].score == 16
    assert recording.episodes() == {2: range(0, 4)}
    assert [one.number for one in recording.spread(2)] == [16, 19]


def test_a_gif_shows_frames_and_answers_and_is_refused_where_it_cannot_be_written(tmp_path):
    recording = Recording(10**7)
    with pytest.raises(InputError, match="Nothing was recorded"):
        recording.save_gif(tmp_path / "none.gif")
    for number in range(7):
        recording.add(moment(number, number // 4, np.full((21, 16, 3), 30 * number, np.uint8)))
    assert recording.save_gif(tmp_path / "all.gif") == 7
    assert recording.save_gif(tmp_path / "one.gif", recording.episodes()[1]) == 3
    with Image.open(tmp_path / "one.gif") as picture:
        assert picture.n_frames == 3 and picture.size == (11 * 16 + 190, 240)
        levels = []
        for place in range(3):
            picture.seek(place)
            levels.append(picture.convert("RGB").getpixel((90, 100))[0])
    np.testing.assert_allclose(levels, [120, 150, 180], atol=12)
    for path, sentence in ((tmp_path / "x.png", "let it end in .gif"), (tmp_path / "no" / "x.gif", "is not there")):
        with pytest.raises(InputError, match=sentence):
            recording.save_gif(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.gif", "one.gif"]


def test_a_moment_survives_json():
    frame = np.zeros((8, 8, 3), np.uint8)
    frame[2:4] = 200  # few colours: kept without loss
    back = Moment.from_line(lab.records.clean(moment(3, 1, frame, reward=2.0, over=True).to_line()))
    np.testing.assert_array_equal(back.frame, frame)
    np.testing.assert_allclose(back.probabilities, [0.2, 0.7, 0.1])
    assert (back.number, back.episode, back.action, back.reward, back.over) == (3, 1, "<FIRE>", 2.0, True)


def test_bars_are_sorted_escaped_and_marked_and_show_what_changed():
    text = bars(moment(), taken={"UP": 7})
    assert text.index("&lt;FIRE&gt;") < text.index("UP") < text.index("DOWN") and "<FIRE>" not in text
    assert "70%" in text and "×7" in text and text.count("▶") == 1
    taken = bars(moment(action="DOWN"))
    assert taken.index("UP") < taken.index("▶") < taken.index("DOWN"), "the action taken, not the most probable"
    earlier = moment(probabilities=np.array([0.3, 0.5, 0.2], np.float32))
    changed = bars(moment(), before=earlier, taken={"UP": 7})
    assert "+20.0" in changed and "-10.0" in changed and "×7" not in changed


def test_numbers_and_strip_carry_the_figures_in_text_and_stand_alone():
    text = numbers(moment(), FACTS, draw_ms=2.2)
    for said in (
        "0.50",
        "0.25",
        "12.5 ms",
        "p95 20.5",
        "24.6",
        "of 80 possible",
        "emulator 0.7 ms",
        "drawing 2.2 ms",
        "412",
    ):
        assert said in text
    assert "<polyline" in text
    view = strip([moment(0), moment(5, 1, over=True)], FACTS, "atari:<Game>", "A remark & more.")
    assert view.html.count("data:image/") == 2 and "http" not in view.html and "<script" not in view.html
    assert "atari:&lt;Game&gt;" in view.html and "A remark &amp; more." in view.html
    for said in ("412 decisions", "80 a second", "p99 31.0", "2 episode(s), mean score 2.5"):
        assert said in view.html and said in view.text
    assert "episode 2, decision 5: <FIRE> (most probable <FIRE> 70%)" in view.text


# --- a player ---------------------------------------------------------------------------------------------------------


def test_two_players_at_once_play_pause_step_go_back_and_close(player):
    doom, pong = player(source="doom:basic"), player()
    assert until(lambda: doom.state == pong.state == "playing" and doom.session.decisions > 5 < pong.session.decisions)
    assert len(engines()) == 1 and others_playing().startswith("Taken while 2 panel(s)")
    doom.pause()
    assert until(lambda: doom.state == "paused") and pong.state == "playing"
    count = doom.session.decisions
    time.sleep(0.2)
    assert doom.session.decisions == count == len(doom.session.recording)
    doom.step()
    assert until(lambda: doom.session.decisions == count + 1) and doom.state == "paused" and doom.moment.action
    doom.back()
    assert until(lambda: doom.place == count - 1) and doom.moment.number == count
    doom.step()  # forward through what was played, before a decision is taken
    assert until(lambda: doom.place == count) and doom.session.decisions == count + 1
    doom.toggle()
    assert until(lambda: doom.session.decisions > count + 3) and doom.place is None
    doom.close()
    assert doom.state == "closed" and not engines() and pong.state == "playing"


def test_engines_that_start_at_once_in_threads_are_told_apart_and_move_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen, started = set(), []
    threads = [threading.Thread(target=lambda: started.append(make("doom:basic"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        (Path("here.txt")).write_text("a cell that runs meanwhile")
        seen.add(Path.cwd())
    assert len(engines()) == 2
    for env in started:
        env.close()
    assert not engines() and not [path for path in tmp_path.iterdir() if path.name != "here.txt"]
    if "Linux" not in platform.system() or not _own_folder():
        pytest.skip("here the working folder is the whole program's")
    assert seen == {tmp_path}


def _own_folder() -> bool:
    """Whether a thread may have a working folder of its own, which some containers forbid."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ctypes.CDLL(None).unshare, CLONE_FS).result() == 0


def test_speed_holds_it_back(player):
    def seconds(decisions: int) -> float:
        start, count = time.monotonic(), one.session.decisions
        assert until(lambda: one.session.decisions >= count + decisions)
        return time.monotonic() - start

    one = player(speed=5.0)
    assert until(lambda: one.state == "playing" and one.session.decisions > 2)
    assert seconds(6) > 0.7  # 1.2, but that the first may be due, and one be caught up on
    one.set_speed(math.inf)
    assert seconds(10) < 1.5


def test_a_question_typed_while_play_rests_shows_both_answers_to_one_picture(player):
    one = player(playing=False)
    assert until(lambda: one.state == "paused")
    words = dict(one.session.question.options)
    for more in ("a", "ab", "abc"):
        one.ask(lab.Question("choice", f"Catch the ball {more}.", words), typing=True)
    assert until(lambda: one.session.question.instructions == "Catch the ball abc.")
    assert until(lambda: not np.array_equal(one.before.probabilities, one.moment.probabilities))
    np.testing.assert_array_equal(one.before.frame, one.moment.frame)
    one.ask(lab.Question("choice", "Which?", ["A", "B"]))
    assert until(lambda: "are not the actions" in one.message)
    assert one.state == "paused" and one.session.question.instructions == "Catch the ball abc."
    one.play()
    assert until(lambda: one.session.decisions > 2) and one.before is None and one.message == ""


def test_a_step_that_is_slow_to_build_is_not_built_at_every_letter(player):
    one = player(playing=False)
    assert until(lambda: one.state == "paused")
    asked = lab.Question("choice", "Catch it!", dict(one.session.question.options))
    start, done = time.monotonic(), threading.Event()
    for _ in range(6):
        one.ask(asked)
    one.do(lambda _: done.set())
    assert done.wait(60)
    built = one.session.start_s
    assert built["step"] + built["warm_up"] < (time.monotonic() - start) / 3, "quick ones do not add up to a slow one"
    built["warm_up"] = 30.0
    one.ask(lab.Question("choice", "Catch it now!", dict(asked.options)), typing=True)
    assert until(lambda: "takes 30 s to build anew" in one.message) and one.session.question == asked
    one.ask(lab.Question("choice", "Catch it now!", dict(asked.options)))
    assert until(lambda: one.session.question.instructions == "Catch it now!" and not one.message)


def test_a_change_keeps_the_model_and_the_question_where_the_game_stays(player):
    one = player(playing=False, source="atari:Pong")
    assert until(lambda: one.state == "paused")
    model, asked = one.session.model, lab.Question("choice", "Hit it?", dict(one.session.question.options))
    one.ask(asked)
    one.change(step="eager")
    assert until(lambda: one.state == "paused" and one.session.kind == "eager")
    assert one.session.model is model and one.session.question == asked
    one.change(source="atari:Breakout", seed=4)
    assert until(lambda: one.state == "paused" and one.session.source == "atari:Breakout")
    assert "Breakout" in one.session.question.instructions and one.session.seed == 4


def test_what_fails_is_said_and_can_be_put_right(player):
    one = player(source="doom:basic")
    assert until(lambda: one.state == "playing")
    one.change(source="doom:nowhere")
    assert until(lambda: one.state == "failed") and "Unknown Doom scenario" in one.message and not engines()
    one.change(source="doom:basic")
    one.play()
    assert until(lambda: one.state == "playing")
    (engine,) = engines()
    engine.kill()
    assert until(lambda: one.state == "failed") and "ViZDoom" in one.message
    one.restart()
    assert until(lambda: one.state == "paused") and len(engines()) == 1


def test_a_drawing_that_fails_does_not_stop_the_play(player):
    def show(player, urgent):
        raise RuntimeError("the page is gone")

    one = player(show)
    assert until(lambda: one.state == "playing" and one.session.decisions > 2)
    assert "the page is gone" in str(one.trouble)


def test_an_interrupt_stops_it_from_a_signal_handler_and_leaves_the_emulator_alive(player):
    one = player(source="doom:basic")
    assert until(lambda: one.state == "playing")
    (engine,) = engines()
    before = signal.signal(signal.SIGINT, lambda *_: one.interrupt())
    try:
        engine.send_signal(signal.SIGINT)  # as Jupyter and a terminal signal the whole group
        signal.raise_signal(signal.SIGINT)
        assert until(lambda: one.state == "interrupted") and "interrupted" in one.message
    finally:
        signal.signal(signal.SIGINT, before)
    count = one.session.decisions
    one.step()
    assert until(lambda: one.session.decisions == count + 1) and engines() == [engine]


def test_closing_returns_soon_even_while_it_starts():
    one = Player({"source": "doom:basic", "model": "tiny"})
    one.close()
    assert one.state == "closed" and not engines()
    assert not any(thread.name == "refrain-player" and thread.is_alive() for thread in threading.enumerate())
