import numpy as np
import pandas as pd
import pytest

import lab
from lab.envs import one_hot, record_frames
from lab.errors import InputError
from lab.experiments import frame_repeats as repeats
from lab.experiments import repeat_verdict, reuse
from lab.experiments.players import ModelPlayer
from lab.figures import flip_lines
from lab.records import as_frame
from lab.steps import EagerStep
from lab.steps.last_answer import LastAnswerStep

BREAKOUT = lab.load_workloads()["breakout"]


@pytest.fixture(scope="module")
def model():
    return lab.load_model("tiny")


@pytest.fixture(scope="module")
def watched() -> pd.DataFrame:
    cell = {"source": "atari:Breakout", "model": "tiny", "seed": 0, "steps": 120}
    return as_frame([{**cell, **reuse.watch(cell)}])


# --- answering repeats ------------------------------------------------------------------------------------------------


def test_repeats_get_the_last_answer_and_others_their_own(model):
    plain, step = (EagerStep(model, BREAKOUT.question, option_attention="block") for _ in range(2))
    last = LastAnswerStep(step)
    frames = record_frames("atari:Breakout", 6)
    played = frames[[0, 0, 1, 1, 1, 0, 2]]
    for frame in played:
        np.testing.assert_array_equal(last.decide(frame[None, None]).logits, plain.decide(frame[None, None]).logits)
    assert last.counts() == {"hits": 3, "misses": 4}
    assert last.describe() != plain.describe() and last.name != step.name


def test_one_changed_byte_is_no_repeat(model):
    last = LastAnswerStep(EagerStep(model, BREAKOUT.question, option_attention="block"))
    screen = record_frames("atari:Breakout", 1)[None].copy()
    last.decide(screen)
    screen[0, 0, 100, 80, 1] ^= 1  # in the very array that was given
    last.decide(screen)
    assert (last.hits, last.misses) == (0, 2)
    last.reset()
    last.decide(screen)
    assert last.misses == 3


# --- thresholds ---------------------------------------------------------------------------------------------------------


class Scripted:
    """A step whose answer is read off a frame: option 1 where its first pixel is odd."""

    def __init__(self):
        from types import SimpleNamespace

        config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=1))
        self.model = SimpleNamespace(encoder=SimpleNamespace(config=config))
        self.pixels = SimpleNamespace(uint8=lambda frames: __import__("torch").tensor(frames).permute(0, 3, 1, 2))


def test_thresholds_by_hand(monkeypatch):
    asked = object.__new__(reuse._Asked)
    asked.told, asked.patches, asked._resized, asked._difference = [], [], None, None
    asked._decide, asked._patch = Scripted(), 1
    monkeypatch.setattr(reuse, "THRESHOLDS", (0.0, 0.1, 1.1))
    asked._anchors = [None] * 3

    def see(*pixels):
        frame = np.array(pixels, np.uint8).reshape(4, 4, 1).repeat(3, -1)
        odd = pixels[0] % 2
        asked._note(frame, np.array([1 - odd, odd], float))
        return asked.told[-1].tolist()

    base = [0] * 16
    assert see(*base) == [[0, 0, 0]] * 3  # nothing to reuse yet
    assert see(*base) == [[1, 0, 0]] * 3  # identical: reused at every threshold
    one = [1] + base[1:]  # a sixteenth changed, another answer
    assert see(*one) == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    two = [1, 1] + base[2:]  # as much from the frame before, but more than a tenth from the one encoded
    assert see(*two) == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert see(*two) == [[1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert asked.patches == [0, 1 / 16, 1 / 16, 0]


def test_watching_a_model_play(watched, model):
    row = watched.iloc[0]
    assert [sum(block[0] for block in blocks) for blocks in row.reuse] == [120] * len(reuse.THRESHOLDS)
    nought = np.array(row.reuse[0])
    assert nought[:, 2].sum() == 0 and nought[:, 1].sum() == row.identical  # identical frames: no other answers
    reused = [sum(block[1] for block in blocks) for blocks in row.reuse]
    assert reused == sorted(reused) and reused[-1] > 100
    assert len(row.patches) == 119 and 0 < np.median(row.patches) < 0.5 and row.decision_s > 0
    table = reuse.flips(watched)
    assert table.threshold.tolist() == list(reuse.THRESHOLDS)
    assert (table.flipped <= table.reused).all()
    assert len(flip_lines(table).axes) == 2


def test_flips_by_hand():
    rows = as_frame(
        [
            {"source": "atari:Pong", "model": "tiny", "seed": 0, "thresholds": [0.0, 0.1], "patches": [0.5] * 999}
            | {"reuse": [[[100, 0, 0, 0.0]] * 10, [[100, 50, share, 5.0] for share in (10, 20) * 5]]}
        ]
    )
    nought, tenth = reuse.flips(rows).itertuples()
    assert (nought.reused, nought.flipped) == (0, 0) and 0 < nought.flipped_high < 0.005 and np.isnan(nought.moved)
    assert (tenth.reused, tenth.flipped, tenth.moved) == (0.5, 0.15, 0.1)
    assert 0.1 <= tenth.flipped_low < 0.15 < tenth.flipped_high <= 0.2
    bound = reuse.partial_bound(rows, 0.1).iloc[0]
    assert bound.changed == 0.5 and bound.saves == pytest.approx(0.05)


def test_changed_patches_by_hand():
    before = np.zeros((3, 4, 4), np.uint8)
    after = before.copy()
    after[2, 3, 0] = 1
    assert reuse.changed_patches(before, after, 2).tolist() == [[False, False], [True, False]]


def test_what_is_per_patch_is_counted_as_by_hand(model):
    found = reuse.per_patch_share(model)
    patches, width = (128 // 16) ** 2, 48
    assert found["per_patch"] == 2 * patches * (3 * 16 * 16 * width + 3 * width * width)
    assert 0 < found["share"] < 0.05


def test_what_is_before_the_first_attention_is_per_patch_and_what_is_after_is_not(model):
    """The claim behind the bound: one changed patch leaves the other rows alone before attention, and none after it."""
    import torch

    vision = model.encoder.vision_model
    pixels = torch.rand(1, 3, 128, 128)
    other = pixels.clone()
    other[:, :, :16, :16] = 0
    with torch.no_grad():
        mask = torch.ones(1, 8, 8, dtype=torch.bool)
        a, b = (vision.embeddings(x, mask) for x in (pixels, other))
        first = vision.encoder.layers[0]
        before = [first.self_attn.q_proj(first.layer_norm1(x)) for x in (a, b)]
        after = [vision.encoder.layers[0](x, None) for x in (a, b)]
        after = [x[0] if isinstance(x, tuple) else x for x in after]
    assert torch.equal(before[0][:, 1:], before[1][:, 1:]) and not torch.equal(before[0][:, 0], before[1][:, 0])
    assert not (after[0] == after[1]).all(dim=-1).any()


# --- times and savings --------------------------------------------------------------------------------------------------


def test_timing_tells_a_repeat_from_a_decision():
    rows = reuse.timing("atari:Breakout", "tiny", blocks=5)
    line = reuse.times(rows).iloc[0]
    assert line["repeat"] < line.decision / 3 and 0.6 < line.spared < 1
    told = rows[(rows.stage == "total") & (rows.phase == "timed") & rows.counts.notna()]
    for title, counts in zip(told.title, told.counts, strict=True):
        assert counts["misses" if title.endswith(reuse.SAME) else "hits"] == (1 if title.endswith(reuse.SAME) else 0)


def test_savings_are_rate_times_what_a_repeat_spares():
    rates = pd.DataFrame(
        [
            {"source": source, "policy": "one_hot", "identical": 0.2, "identical_low": 0.1, "identical_high": 0.3}
            | {"compared": 2000}
            for source in ("atari:Pong", "atari:Alien")
        ]
    )
    timed = pd.DataFrame(
        [
            {"source": "atari:Pong", "spared": 0.9, "decision": 10.0},
            {"source": "doom:basic", "spared": 0.7, "decision": 20.0},
        ]
    )
    pong, alien = repeat_verdict.savings(rates, timed).itertuples()
    assert (pong.saves, pong.saves_low, pong.saves_high, pong.ms) == pytest.approx((0.18, 0.09, 0.27, 1.8))
    assert (alien.saves, alien.ms) == pytest.approx((0.16, 2.4))  # the middle of the two that were timed


def test_the_answer_is_computed_from_the_tables(watched):
    lag, changed = [0] + [1] * 1000 + [0] * 1000, [-1] + [0] * 1000 + [3] * 1000
    line = {"policy": "one_hot", "seed": 0, "steps": 2000, "pixels": 10, "lag": lag, "changed": changed, "opens": [0]}
    line |= {"shows_last": True, "scan_s": 1.0, "blocks": [[100, 1.0, 0.9]] * 5}
    rows = as_frame([{"source": source, **line} for source in ("atari:Pong", "doom:basic")])
    rates = repeats.summary(rows)
    timed = pd.DataFrame([{"source": "atari:Pong", "spared": 0.9, "decision": 10.0}])
    compared = pd.DataFrame({"same": [True, False]})
    said = repeat_verdict.answer(rates, compared, repeat_verdict.savings(rates, timed), reuse.flips(watched))
    for part in (
        "50.0% of frames repeat",
        "1 Atari games",
        "1 Doom scenarios",
        "45.0%",
        "another answer of tiny",
        "1 of 2",
    ):
        assert part in said, part
    saved = repeat_verdict.results(rates, compared, answer=said)
    assert saved["speed"]["pace"].value == pytest.approx(0.9) and saved["rates"][0]["identical"].low > 0


# --- a model that plays -------------------------------------------------------------------------------------------------


def test_a_model_plays_greedily_and_starts_lives_with_fire(model):
    class Lives:
        source, actions, lives = "atari:Breakout", ["NOOP", "FIRE", "RIGHT", "LEFT"], 5

    env = Lives()
    player = ModelPlayer(env, "tiny")
    frame = record_frames("atari:Breakout", 2)[1]
    wanted = EagerStep(model, BREAKOUT.question, option_attention="block").decide(frame[None, None]).choice[0]
    assert player(frame) == 1  # a life begins
    assert env.actions[player(frame)] == BREAKOUT.question.names[wanted] and player.seconds > 0
    env.lives = 4
    assert player(frame) == 1
    assert one_hot(env)(frame) in range(4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: reuse.run("quick", model="tiny"), "smoke, standard, full"),
        (
            lambda: reuse.watch({"source": "atari:Alien", "model": "tiny", "seed": 0, "steps": 5}),
            "does not know atari:Alien",
        ),
        (lambda: reuse.run("smoke", model="nobody"), "nobody"),
        (lambda: reuse.flips(pd.DataFrame({"arm": ["eager"]})), "no answers against thresholds"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(InputError, match=says):
        call()
