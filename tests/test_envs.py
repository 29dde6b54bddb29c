import hashlib
import os
import sys
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
from jupyter_client.manager import start_new_kernel

from lab import envs
from lab.envs import EmulatorMissing, frames_for, make, one_hot, per_button, play, record_frames, recorded_frames
from lab.errors import InputError
from lab.workloads import Question, Workload

SOURCES = ("atari:Pong", "doom:basic")


def workload(source: str, frames: int) -> Workload:
    return Workload("test", "a test", Question("choice", "Which?", ["A", "B"]), source, frames)


def fingerprint(source: str, seed: int) -> str:
    return hashlib.sha256(record_frames(source, 100, seed).tobytes()).hexdigest()


@pytest.mark.parametrize("source", SOURCES)
def test_same_seed_same_hundred_frames(source):
    first = fingerprint(source, 0)
    assert first == fingerprint(source, 0)
    assert first != fingerprint(source, 1)


@pytest.mark.parametrize("source", SOURCES)
def test_a_seeded_reset_starts_the_game_over(source):
    with closing(make(source)) as env:

        def replay(seed: int) -> bytes:
            frames = islice(play(env, one_hot(env, 0), seed), 40)
            return np.stack([frame for frame, _ in frames]).tobytes()

        first = replay(3)
        assert replay(4) != first
        assert replay(3) == first


def test_describe_states_frameskip_and_repeat_probability():
    with closing(make("atari:Pong")) as pong, closing(make("doom:basic", tics=7)) as doom:
        assert pong.describe()["frameskip"] == 4
        assert pong.describe()["repeat_probability"] == 0.25
        assert pong.describe()["screen"] == [210, 160, 3]
        assert "ale-py" in pong.describe()["emulator"]
        assert doom.describe()["frameskip"] == 7
        assert doom.describe()["repeat_probability"] == 0.0
        assert doom.describe()["screen"] == [240, 320, 3]


def test_action_sets():
    expected = {
        "atari:Breakout": ["NOOP", "FIRE", "RIGHT", "LEFT"],
        "atari:Pong": ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"],
        "doom:basic": ["MOVE_LEFT", "MOVE_RIGHT", "ATTACK"],
        "doom:deadly_corridor": [
            *("MOVE_LEFT", "MOVE_RIGHT", "ATTACK", "MOVE_FORWARD", "MOVE_BACKWARD", "TURN_LEFT", "TURN_RIGHT"),
        ],
    }
    for source, actions in expected.items():
        with closing(make(source)) as env:
            assert env.actions == actions
    with closing(make("atari:Boxing")) as boxing, closing(make("atari:Pong", full_actions=True)) as pong:
        assert len(boxing.actions) == len(pong.actions) == 18
        assert pong.describe()["full_actions"] is True


@pytest.mark.parametrize("source", SOURCES)
def test_steps_give_frames_rewards_and_ends(source):
    with closing(make(source)) as env:
        shape = tuple(env.describe()["screen"])
        assert env.reset().shape == shape
        frame, reward, ended = env.step(len(env.actions) - 1)
        assert frame.shape == shape and frame.dtype == np.uint8
        assert isinstance(reward, float) and ended is False
        for wrong in (-1, len(env.actions)):
            with pytest.raises(InputError, match=str(wrong)):
                env.step(wrong)


def test_doom_repeats_its_last_frame_at_the_end_and_play_leaves_it_out():
    with closing(make("doom:basic", tics=30)) as env:  # an episode lasts at most 300 tics
        policy = one_hot(env, 0)
        frame, ended = env.reset(), False
        while not ended:
            previous = frame
            frame, _, ended = env.step(policy(frame))
        np.testing.assert_array_equal(frame, previous)
        opens = [opens for _, opens in islice(play(env, policy), 40)]
        assert opens[0] and 2 <= sum(opens) < 20


def test_doom_takes_several_buttons_at_once():
    with closing(make("doom:basic")) as env:
        env.reset()
        left = env.step([1, 0, 0])[0]
        env.reset(0)
        assert env.step([1, 0, 1])[0].shape == left.shape
        with pytest.raises(InputError, match="3 buttons"):
            env.step([1, 0])


def test_policies_are_seeded_and_as_published():
    with closing(make("doom:deadly_corridor")) as env:
        frame = np.zeros((1, 1, 3), np.uint8)
        policy, again, other = per_button(env, 0), per_button(env, 0), per_button(env, 1)
        drawn = [policy(frame) for _ in range(2000)]
        assert drawn == [again(frame) for _ in range(2000)]
        assert drawn != [other(frame) for _ in range(2000)]
        pressed = np.array(drawn).sum(axis=1)
        # published: no button in 30-34 % of decisions, two or more in 26 %
        assert 0.30 < (pressed == 0).mean() < 0.38
        assert 0.22 < (pressed >= 2).mean() < 0.30
        counts = np.bincount(list(map(one_hot(env, 1), [frame] * 700)), minlength=7)
        assert counts.min() > 60
    with closing(make("atari:Pong")) as pong, pytest.raises(InputError, match="one_hot"):
        per_button(pong, 0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("atari:Pung", "Did you mean Pong"),
        ("atari:pong", "Did you mean Pong\\?"),
        ("atari:zzzz", "Known are"),
        ("doom:basc", "Did you mean basic"),
        ("doom:multi_duel", "several players"),
        ("doom:doom2", "lacks a file"),
        ("nes:Mario", "atari:GAME"),
        ("Pong", "atari:GAME"),
        ("atari:", "atari:GAME"),
    ],
)
def test_unknown_sources_are_named(source, says):
    with pytest.raises(InputError, match=says):
        make(source)


def test_bad_options_and_seeds_are_named():
    for bad in (-1, 1.5, "0", True, 2**31):
        with pytest.raises(InputError, match="seed"):
            make("atari:Pong", bad)
    with pytest.raises(InputError, match="tics"):
        make("atari:Pong", tics=4)
    with pytest.raises(InputError, match="0 tics"):
        make("doom:basic", tics=0)


def test_missing_rom_and_emulators_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(InputError, match="ROM of Pong"):
        make("atari:Pong")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    for source, package in (("atari:Pong", "pip install ale-py"), ("doom:basic", "pip install vizdoom")):
        with pytest.raises(EmulatorMissing, match=package):
            make(source)


@pytest.mark.parametrize("source", envs.RECORDED_SOURCES)
def test_recorded_frames_are_real_consecutive_ones(source):
    recorded = recorded_frames(source)
    assert len(recorded) >= 8 and recorded.dtype == np.uint8
    np.testing.assert_array_equal(recorded, record_frames(source, len(recorded), 0))


def test_recording_is_small():
    assert envs.RECORDING.stat().st_size < 300_000
    with pytest.raises(InputError, match="atari:Pong"):
        recorded_frames("atari:Tennis")


@pytest.mark.parametrize("installed", [True, False])
def test_frames_for_pairs_previous_and_current(installed, monkeypatch):
    if not installed:
        monkeypatch.setitem(sys.modules, "ale_py", None)
        with pytest.warns(UserWarning, match="recorded frames"):
            inputs = frames_for(workload("atari:Pong", 2), 20)
    else:
        inputs = frames_for(workload("atari:Pong", 2), 20)
    assert inputs.shape == (20, 2, 210, 160, 3) and inputs.dtype == np.uint8
    np.testing.assert_array_equal(inputs[0, 0], inputs[0, 1])  # an episode's first frame has no earlier one
    np.testing.assert_array_equal(inputs[5, 1], inputs[6, 0])
    np.testing.assert_array_equal(inputs[:12, 1], recorded_frames("atari:Pong"))
    with pytest.raises(InputError):
        frames_for(workload("atari:Pong", 2), 0)


def test_a_fresh_kernel_needs_only_lab_and_leaves_no_file(tmp_path):
    code = """
import lab.envs
for source in ("atari:Pong", "doom:basic"):
    env = lab.envs.make(source)
    env.reset()
    env.step(0)
    env.close()
print("played")
"""
    manager, client = start_new_kernel(cwd=str(tmp_path), kernel_name="python3")
    printed = []
    try:
        client.execute_interactive(
            code, timeout=60, output_hook=lambda message: printed.append(str(message["content"]))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "played" in "".join(printed), printed
    assert os.listdir(tmp_path) == []
