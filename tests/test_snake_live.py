"""Snake in the live panel, the terminal and `lab play`: what is played, what is shown of it, and what is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab import widgets
from lab.cli import main
from lab.envs.snake import Snake
from lab.envs.snake_prompts import COMPACT, classify
from lab.errors import InputError
from lab.experiments import live_play
from lab.live import open_session
from lab.live_choices import SNAKE_MODELS, choices
from lab.live_snake import SnakeSession
from lab.live_views import bars, numbers
from lab.models.text import known, load_text_model
from lab.snake_loop import Pilot, play
from lab.steps import TextStep
from lab.workloads import Question


@pytest.fixture(scope="module")
def trained():
    return load_text_model("snake")


def test_a_session_plays_what_the_loop_plays(trained):
    with open_session("snake:24x16", model=trained, seed=101) as session:
        moments = [session.tick() for _ in range(40)]
    turns = play(Pilot(TextStep(trained)), Snake(seed=101), 40)
    assert isinstance(session, SnakeSession)
    assert [one.action for one in moments] == [turn.decision.executed for turn in turns]
    for moment, turn in zip(moments, turns, strict=True):
        np.testing.assert_allclose(moment.probabilities, turn.answers[0].probabilities[0], atol=1e-6)
    assert moments[0].frame.shape == (192, 288, 3) and session.remark() == ""
    for moment, turn in zip(moments, turns, strict=True):
        assert moment.told == tuple(COMPACT[classify(move, turn.plan)] for move in turn.plan.moves)
        assert [round(1 - moment.others[0][1], 4), round(moment.others[1][1], 4)] == [
            turn.decision.risk,
            turn.decision.food,
        ]


def test_what_the_shield_does_not_let_pass_is_counted_and_shown():
    with open_session("snake:24x16", model="snake-tenth", seed=7) as session:
        moments = [session.tick() for _ in range(30)]
        refused = [moment for moment in moments if moment.refused]
        assert 0 < len(refused) == session.interventions < 30
        assert all(moment.refused != moment.action for moment in refused)
        text = numbers(refused[0], session.facts())
        assert f"<b>{refused[0].refused}</b> was proposed, which is not safe" in text and "emulator" not in text
        assert f"interventions <b>{len(refused)}</b>" in text
        shown = bars(refused[0])
        assert (
            shown.count("yes</span>") == 2 and "safe route" in shown and all(text in shown for text in refused[0].told)
        )
        assert "yes" not in bars(refused[0], compact=True)
        session.restart(8)
        assert session.interventions == 0 and session.look().number == 0


@pytest.mark.parametrize(
    "settings, said", [({"step": "static"}, "choose eager or compiled"), ({"frames": 2}, "frames is 2"),
                       ({"model": "pocket"}, "Unknown text model 'pocket'"), ({"seed": -1}, "seed is -1")]
)  # fmt: skip
def test_what_snake_cannot_be_played_with_is_refused(settings, said):
    with pytest.raises(InputError, match=said):
        open_session("snake:24x16", **settings)


def test_every_model_of_the_panel_is_known():
    assert {*SNAKE_MODELS} == {*known()}
    assert choices("snake:8x8") == (SNAKE_MODELS, ("eager", "compiled")) and "snake" not in choices("atari:Pong")[0]


def test_headless_it_is_a_strip():
    still = widgets.play("snake:24x16", decisions=6)
    assert still.html.count("data:image/") == 4 and "interventions of the shield: " in still.text


def test_every_round_takes_the_next_seed_and_survives(trained):
    with open_session("snake:4x4", model=trained, seed=5) as session:
        while len(session.episodes) < 2:
            session.tick()
    assert [(one.seed, one.score, one.ended) for one in session.episodes] == [(5, 10, True), (6, 10, True)]


def test_another_question_can_be_asked_about_the_board(trained):
    with open_session("snake:24x16", model=trained) as session:
        before = session.look().probabilities
        session.ask(Question("choice", "Is it raining in the north of this board today?", session.question.names))
        assert np.abs(session.look().probabilities - before).max() > 0
        session.ask(session.usual_question())
        np.testing.assert_array_equal(session.look().probabilities, before)
    with open_session("snake:24x16", model="tiny") as session:
        assert "not trained" in session.remark()


def test_watching_in_a_terminal(trained, capsys, monkeypatch):
    said = []
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    with open_session("snake:4x4", model=trained) as session:
        assert live_play.watch(session, 120, said.append) == 0
        assert said and "full board" in said[0]
        live_play.watch(session, 2, said.append, terminal=True, fps=1000)
        out = capsys.readouterr().out
        assert "dead-end risk" in out and f"interventions of the shield {session.interventions}" in out
        monkeypatch.setenv("LINES", "8")
        live_play.watch(session, 1, said.append, terminal=True, fps=1000)
        assert said[-1] == "not drawn: that takes 60 columns and 9 lines, and here are 80 and 8"
        assert "dead-end risk" not in capsys.readouterr().out


@pytest.mark.parametrize("broken, said", [("_forward", "NaN or infinity"), ("decide", "not probabilities")])
def test_an_answer_that_is_none_makes_no_move_and_ends_the_play(trained, monkeypatch, broken, said):
    with open_session("snake:6x6", model=trained) as session:
        session.tick()
        before, lines = session.env.game.board(), []
        whole = getattr(session.step.step, broken)

        def spoil(given):
            if broken == "_forward":
                return tuple(torch.full_like(part, torch.nan) for part in whole(given))
            first, second, third = whole(given)
            return [first, replace(second, probabilities=second.probabilities * 0 + 1.5), third]

        monkeypatch.setattr(session.step.step, broken, spoil)
        assert live_play.watch(session, 5, lines.append) == 1
        assert session.env.game.board() == before and session.decisions == 1
        assert lines[0].startswith("stopped: ") and said in lines[0]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("snake --fps 0", "--fps is 0; give the number of moves a second"),
        ("snake --fps 3 --max-speed", "--max-speed"),
        ("snake --frames 2", "frames is 2"),
        ("snake --step split", "choose eager or compiled"),
        ("snake --optimize --step eager", "not both"),
        ("snake --model pocket", "Unknown text model"),
        ("snake:5x5", "no cycle"),
        ("Pong --optimize", "--optimize"),
    ],
)
def test_the_command_line_refuses_in_one_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as left:
        main(["play", "--game", *arguments.split()])
    err = capsys.readouterr().err
    assert left.value.code == 2 and said in err and len(err.splitlines()) == 1


def test_the_command_line_plays_and_sums_up(capsys):
    with pytest.raises(SystemExit) as left:
        main(["play", "--game", "snake", "--steps", "25", "--seed", "3", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert left.value.code == 0 and found["game"] == "snake:24x16" and found["decisions"] == 25
    assert (found["step"], found["seed"]) == ("eager", 3)
    with open_session(
        "snake:24x16", model=load_text_model("snake"), seed=3
    ) as session:  # the same moves, counted by hand
        moves = [session.tick() for _ in range(25)]
    assert found["interventions"] == session.interventions and len(moves) == 25
    assert 0 < found["played_per_second"] < found["decisions_per_second"]
    assert re.search(
        r"beside it: game [\d.]+ ms .* interventions of the shield: \d", live_play.summary_text(found), re.S
    )
