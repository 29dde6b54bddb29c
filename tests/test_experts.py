from contextlib import closing
from itertools import islice

import numpy as np
import pytest

import lab
from lab.envs import make, one_hot, play
from lab.envs.experts import EXPERTS, expert

COLOURS = {"atari:Breakout": {"ball": (200, 72, 72), "paddle": (200, 72, 72)},
           "atari:Pong": {"ball": (236, 236, 236), "paddle": (92, 186, 92)}}  # fmt: skip


@pytest.mark.parametrize("source", COLOURS)
def test_boxes_lie_on_the_things_they_name(source):
    seen = dict.fromkeys(COLOURS[source], 0)
    with closing(make(source, 3)) as env:
        guide = expert(env)
        for frame, _ in islice(play(env, one_hot(env, 3)), 300):
            for name, (left, top, right, bottom) in guide.boxes().items():
                here = frame[top:bottom, left:right]
                # a thing that flies through the bricks or leaves the court is drawn over, or not at all
                seen[name] += int((here == COLOURS[source][name]).all())
    assert all(count > 100 for count in seen.values()), seen


def test_doom_says_where_the_monster_is_without_changing_the_frames():
    with closing(make("doom:basic", 5)) as plain, closing(make("doom:basic", 5, labels=True)) as labelled:
        first, second = plain.reset(), labelled.reset()
        assert np.array_equal(first, second)
        left, top, right, bottom = expert(labelled).boxes()["monster"]
        assert 0 <= left < right <= 320 and 0 <= top < bottom <= 240
        for action in (0, 1, 1):
            assert np.array_equal(plain.step(action)[0], labelled.step(action)[0])
        assert plain.labels() == []


@pytest.mark.parametrize(("source", "better_than"), [("doom:basic", 30), ("atari:Breakout", 10)])
def test_experts_play_well(source, better_than):
    scores = []
    for seed in range(4):
        with closing(make(source, seed, **({"labels": True} if source == "doom:basic" else {}))) as env:
            guide, ended, score = expert(env), False, 0.0
            env.reset()
            while not ended:
                _, reward, ended = env.step(guide.action())
                score += reward
        scores.append(score)
    assert np.mean(scores) > better_than, scores


def test_an_expert_acts_on_the_state_whoever_led_there():
    with closing(make("atari:Breakout", 0)) as env:
        env.reset()
        guide = expert(env)
        assert env.actions[guide.action()] == "FIRE"  # no ball yet
        for _ in range(3):
            env.step(env.actions.index("FIRE"))
        for _ in range(6):
            env.step(env.actions.index("RIGHT"))  # past the ball, which comes down on the left
        assert env.actions[guide.action()] == "LEFT"


def test_a_game_without_an_expert_is_refused():
    with closing(make("atari:Boxing", 0)) as env, pytest.raises(lab.InputError, match="no scripted expert"):
        expert(env)
    assert len(EXPERTS) == 3
