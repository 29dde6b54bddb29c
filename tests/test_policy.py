"""Acting with a step: the loop's rules on a scripted environment, and equal actions of different steps in real games."""

import json
from pathlib import Path

import numpy as np
import pytest

import lab
from lab.caches import FrameFeatures
from lab.errors import InputError
from lab.models.heads import Decisions
from lab.policy import MAX_DECISIONS, play
from lab.steps import PaddedStep, StaticStep

GOLDEN = Path(__file__).parent / "golden"
QUESTIONS = json.loads((GOLDEN / "questions.json").read_text())
NAMES = ["NOOP", "FIRE", "UP"]


@pytest.fixture(scope="module")
def model():
    return lab.load_model(str(GOLDEN))


def question(name: str) -> lab.Question:
    said = QUESTIONS[name]
    return lab.Question(said["type"], said["instructions"], said["criteria"])


class Scripted:
    """An environment whose frame shows how many steps (auto-fires included) were taken since the reset.

    Ends at step `length`; a life is lost at each of the steps `deaths`; every step brings the reward 1, FIRE brings 10.
    One array is drawn into over and over.
    """

    source, actions, terminal_frame = "scripted:game", NAMES, True

    def __init__(self, seed: int = 0, length: int = 5, deaths=()):
        self.seed, self.length, self.deaths = seed, length, deaths
        self.taken: list[str] = []
        self.screen, self.closed, self.lives = np.zeros((1, 1, 3), np.uint8), False, 3

    def reset(self, seed=None):
        self.screen[:] = 0
        return self.screen

    def step(self, action):
        self.taken.append(NAMES[action])
        self.screen[:] = len(self.taken) % 256
        self.lives -= len(self.taken) in self.deaths
        return self.screen, 10.0 if NAMES[action] == "FIRE" else 1.0, len(self.taken) >= self.length

    def describe(self):
        return {"source": self.source}

    def close(self):
        self.closed = True


class Answering:
    """A step whose probabilities and P(act) are functions of the newest frame's number; notes what it was shown."""

    name = "answering"

    def __init__(self, probabilities=lambda number: [0.1, 0.2, 0.7], p_act=lambda number: 1.0, frames=1, names=NAMES):
        self.probabilities, self.p_act, self.frames = probabilities, p_act, frames
        self.question = lab.Question("choice", "Which?", names)
        self.shown, self.resets = [], []

    def decide(self, frames) -> Decisions:
        assert frames.shape[1:] == (self.frames, 1, 1, 3)
        self.shown.append(frames[..., 0, 0, 0].tolist())
        newest = [row[-1] for row in self.shown[-1]]
        share = np.array([self.probabilities(number) for number in newest], np.float32)
        return Decisions(self.question, np.log(share), share, np.array([self.p_act(n) for n in newest], np.float32))

    def reset(self, rows=None):
        self.resets.append(rows)


def scripted(*lengths: int, **settings):
    """A source of scripted environments, of the given lengths in turn, and the list of those made."""
    made: list[Scripted] = []

    def source(seed):
        made.append(Scripted(seed, lengths[len(made) % len(lengths)], **settings))
        return made[-1]

    return source, made


def test_the_package_offers_it():
    assert lab.play is play and lab.PaddedStep is PaddedStep and lab.FrameFeatures is FrameFeatures


# ------------------------------------------------------------------------------------------ the loop's rules


def test_auto_fire_opens_the_game_and_is_no_decision():
    source, made = scripted(4)
    game = play(Answering(), source).episodes[0]
    assert made[0].taken == ["FIRE", "UP", "UP", "UP"]
    assert game.actions.tolist() == [2, 2, 2] and len(game) == 3
    assert (game.fires, game.start_reward, game.rewards.tolist(), game.score) == (1, 10, [1, 1, 1], 13)
    assert game.ended


def test_auto_fire_follows_a_lost_life():
    source, made = scripted(8, deaths=(3, 6))
    step = Answering(frames=2)
    game = play(step, source).episodes[0]
    assert made[0].taken == ["FIRE", "UP", "UP", "FIRE", "UP", "UP", "FIRE", "UP"]
    # the previous frame is a copy of the current one at the start and after each auto-fire
    assert step.shown == [[[1, 1]], [[1, 2]], [[4, 4]], [[4, 5]], [[7, 7]]]
    assert game.rewards.tolist() == [1, 11, 1, 11, 1] and game.fires == 3


def test_no_auto_fire_where_it_is_off_or_there_is_no_such_button():
    source, made = scripted(4, deaths=(2,))
    step = Answering(frames=3)
    assert play(step, source, auto_fire=False).episodes[0].fires == 0
    assert made[0].taken == ["UP"] * 4
    assert step.shown == [[[0, 0, 0]], [[0, 0, 1]], [[0, 1, 2]], [[1, 2, 3]]]


def test_an_episode_that_auto_fire_ends_has_no_decisions():
    source, _ = scripted(1, 3)
    result = play(Answering(), source, episodes=2, record=True)
    assert result.lengths == [0, 2] and result.scores == [10, 12] and result.batches == [1, 1]
    assert result.episodes[0].ended and len(result.episodes[0].decisions) == 0 and len(result.episodes[0].frames) == 0


def test_caps_cut_episodes_each_by_its_own():
    source, _ = scripted(9)
    result = play(Answering(), source, episodes=3, max_decisions=[2, 20, 5])
    assert result.lengths == [2, 8, 5]
    assert [episode.ended for episode in result.episodes] == [False, True, False]
    assert result.batches == [3, 3, 2, 2, 2, 1, 1, 1]
    source, _ = scripted(MAX_DECISIONS + 9)
    assert play(Answering(), source).lengths == [4500]


def test_the_gate_repeats_the_last_action_once_there_is_one():
    choices = {1: [0.1, 0.1, 0.8], 2: [0.8, 0.1, 0.1], 3: [0.8, 0.1, 0.1], 4: [0.1, 0.1, 0.8], 5: [0.8, 0.1, 0.1]}
    p_act = {1: 0.1, 2: 0.4, 3: 0.5, 4: 0.2, 5: 0.9}
    source, made = scripted(6)
    game = play(Answering(choices.get, p_act.get), source, gate=True).episodes[0]
    # at 1 there is nothing to repeat (auto-fire is no action), 0.5 is not below 0.5, at 4 the NOOP of 3 comes again
    assert made[0].taken[1:] == ["UP", "UP", "NOOP", "NOOP", "NOOP"]
    assert game.repeated.tolist() == [False, True, False, True, False]
    source, made = scripted(6)
    play(Answering(choices.get, p_act.get), source, gate=False)
    assert made[0].taken[1:] == ["UP", "NOOP", "NOOP", "UP", "NOOP"]


def test_sampling_follows_the_probabilities_and_the_seed():
    def actions(seed, episodes=1, **settings):
        step = Answering(lambda number: [0.2, 0.3, 0.5], lambda number: number % 2)
        source, _ = scripted(2000)
        result = play(step, source, episodes, max_decisions=1500, seed=seed, choose="sampled", **settings)
        return result.actions

    one, two = actions(0, episodes=2)
    shares = np.bincount(one, minlength=3) / len(one)
    np.testing.assert_allclose(shares, [0.2, 0.3, 0.5], atol=0.05)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(actions(0)[0], one)  # whatever the number of episodes
    assert not np.array_equal(actions(1)[0], one)
    gated = actions(0, gate=True)[0]
    free = np.arange(1, 1501) % 2 == 1  # P(act) is 1 there: the same draws, though others were not used
    np.testing.assert_array_equal(gated[free], one[free])
    np.testing.assert_array_equal(gated[1:][~free[1:]], gated[:-1][~free[1:]])


def test_episodes_start_from_different_seeds_that_runs_do_not_share():
    seeds = []
    for seed in (0, 1, 2):
        source, made = scripted(3)
        result = play(Answering(), source, episodes=4, seed=seed)
        assert [episode.seed for episode in result.episodes] == [env.seed for env in made]
        seeds += [env.seed for env in made]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**31 for seed in seeds)


def test_options_in_another_order_press_the_same_buttons():
    source, made = scripted(3)
    result = play(Answering(names=["UP", "NOOP", "FIRE"]), source)  # the last option is the most probable
    assert made[0].taken == ["FIRE", "FIRE", "FIRE"]
    assert result.names == NAMES and result.actions[0].tolist() == [1, 1]


def test_rows_that_change_hands_are_reset():
    source, _ = scripted(4, 9, 3, 9)
    step = Answering()
    result = play(step, source, episodes=4)
    assert result.batches == [4, 4, 3, 2, 2, 2, 2, 2]
    # all at the start; then the third ends and the fourth moves up; then the first ends and two move up
    assert step.resets == [None, [2], [0, 1]]


def test_recorded_frames_are_what_the_step_saw():
    source, _ = scripted(6, 4)
    step = Answering(frames=2)
    result = play(step, source, episodes=2, record=True)
    first, second = (episode.frames for episode in result.episodes)
    assert first.shape == (5, 2, 1, 1, 3) and first.dtype == np.uint8
    assert first[..., 0, 0, 0].tolist() == [call[0] for call in step.shown]
    assert second[..., 0, 0, 0].tolist() == [call[1] for call in step.shown[:3]]
    assert play(step, source).episodes[0].frames is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"episodes": 0}, "episodes is 0"),
        ({"episodes": "2"}, "episodes is '2'"),
        ({"max_decisions": 0}, "max_decisions is 0"),
        ({"max_decisions": 4.5}, "max_decisions is 4.5"),
        ({"max_decisions": [3, 4]}, "2 numbers for 1 episodes"),
        ({"seed": -1}, "seed is -1"),
        ({"choose": "best"}, "choose is 'best'; it is one of greedy, sampled"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    source, made = scripted(3)
    with pytest.raises(InputError, match=words):
        play(Answering(), source, **settings)
    assert not made


def test_a_question_about_other_actions_is_refused():
    source, made = scripted(3)
    with pytest.raises(InputError, match=r"options \(NOOP, FIRE, DOWN\) are not the actions of scripted:game"):
        play(Answering(names=["NOOP", "FIRE", "DOWN"]), source, episodes=2)
    assert [env.closed for env in made] == [True] and made[0].taken == []
    with pytest.raises(InputError, match="is no step"):
        play("eager", source)


def test_a_fixed_batch_is_refused_where_it_would_shrink(model):
    source, made = scripted(3)
    for batch, episodes in ((2, 2), (2, 1), (1, 2)):
        with pytest.raises(InputError, match=f"takes a batch of {batch} and nothing else"):
            play(StaticStep(model, question("pong"), batch=batch), source, episodes)
    assert not made


def test_environments_are_closed_also_after_an_error():
    source, made = scripted(3)
    play(Answering(), source, episodes=2)

    def fails(number):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        play(Answering(fails), source)
    assert [env.closed for env in made] == [True] * 3


# ------------------------------------------------------------------------------------------ real games


def margin(result) -> float:
    """The smallest lead of the option taken over the next: what noise between two steps must stay below."""
    top = [np.sort(episode.decisions.probabilities, 1)[:, -2:] for episode in result.episodes]
    return min((pair[:, 1] - pair[:, 0]).min() for pair in top)


@pytest.mark.parametrize(
    ("game", "frames", "reuse", "choose"),
    [("Pong", 2, False, "greedy"), ("Pong", 2, True, "sampled"), ("Breakout", 1, False, "sampled")],
)
def test_same_actions_as_the_eager_policy_while_the_batch_shrinks(model, game, frames, reuse, choose):
    """With causal attention, under which this checkpoint's greedy choice in Pong changes from frame to frame. In Breakout
    it always picks one option, so there the actions are drawn."""
    asked, settings = question(game.lower()), {"max_decisions": [4, 40, 9], "choose": choose}
    eager = play(lab.EagerStep(model, asked, frames, "causal"), f"atari:{game}", 3, **settings)
    step = PaddedStep(lambda batch: StaticStep(model, asked, frames, batch, "causal", reuse=reuse), sizes=(1, 2, 4))
    static = play(step, f"atari:{game}", 3, **settings)
    assert static.batches == eager.batches == [3] * 4 + [2] * 5 + [1] * 31
    assert step.built == [1, 4, 2]
    for one, other in zip(eager.episodes, static.episodes, strict=True):
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_allclose(one.decisions.logits, other.decisions.logits, atol=5e-5, rtol=0)
        np.testing.assert_allclose(one.decisions.p_act, other.decisions.p_act, atol=5e-5, rtol=0)
        assert one.score == other.score
    print(f"{game}: smallest margin {margin(eager):.4f}")
    assert margin(eager) > 1e-4
    assert len(set(eager.actions[1].tolist())) > 1
    first, second = (episode.decisions.logits[1:4] for episode in eager.episodes[:2])
    assert np.abs(first - second).max() > 1e-3  # the games differ, so answers cannot have been mixed up unseen


def test_a_function_of_the_batch_is_padded_and_plays_doom_to_its_end(model):
    asked = question("doom_basic")
    settings = {"episodes": 2, "max_decisions": 80, "seed": 2, "choose": "sampled"}
    eager = play(lab.EagerStep(model, asked), "doom:basic", **settings)
    static = play(lambda batch: StaticStep(model, asked, batch=batch), "doom:basic", **settings)
    assert [a.tolist() for a in eager.actions] == [a.tolist() for a in static.actions]
    assert eager.scores == static.scores
    assert all(episode.ended and episode.fires == 0 for episode in eager.episodes)
    assert eager.lengths[0] != eager.lengths[1]  # one ended while the other went on
    assert eager.names == ["MOVE_LEFT", "MOVE_RIGHT", "ATTACK"] and eager.environment["source"] == "doom:basic"


def test_kept_frame_features_leave_the_actions_alone(model):
    asked = question("pong")
    plain = play(lab.EagerStep(model, asked, 2), "atari:Pong", 2, 12, seed=5)
    step = lab.EagerStep(model, asked, 2, features=FrameFeatures(4))
    kept = play(step, "atari:Pong", 2, 12, seed=5)
    assert [a.tolist() for a in kept.actions] == [a.tolist() for a in plain.actions]
    assert step.features.hits >= 24  # every previous frame, and the second of two equal ones at the start
    assert step.features.hits + step.features.misses == 48


def test_breakout_is_served_once_for_each_of_its_five_lives(model):
    step = lab.EagerStep(model, question("breakout"))
    game = play(step, "atari:Breakout", 1, 300).episodes[0]
    assert game.ended and game.fires == 5
    again = play(step, "atari:Breakout", 1, 20).episodes[0]
    np.testing.assert_array_equal(again.decisions.logits, game.decisions.logits[:20])
    assert play(step, "atari:Breakout", 1, 3, auto_fire=False).episodes[0].fires == 0


def test_recorded_frames_give_the_same_answers_again(model):
    step = lab.EagerStep(model, question("pong"), 2)
    episode = play(step, "atari:Pong", 1, 6, record=True).episodes[0]
    assert episode.frames.shape == (6, 2, 210, 160, 3)
    np.testing.assert_array_equal(episode.frames[1:, 0], episode.frames[:-1, 1])  # the newest becomes the previous
    answers = step.decide(episode.frames)
    np.testing.assert_allclose(answers.logits, episode.decisions.logits, atol=5e-5, rtol=0)
    assert answers.names == episode.decisions.names
