"""Frame features: what is kept, what is dropped, and that answers stay those of the uncached step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lab
from lab.caches import FrameFeatures
from lab.errors import InputError
from lab.measure import time_call

GOLDEN = Path(__file__).parent / "golden"
FRAMES = np.load(GOLDEN / "frames.npz")
QUESTIONS = json.loads((GOLDEN / "questions.json").read_text())
CALLS = json.loads((GOLDEN / "feature_cache.json").read_text())
ATARI = [name for name in FRAMES.files if FRAMES[name].shape == (210, 160, 3)]


@pytest.fixture(scope="module")
def golden():
    return lab.load_model(str(GOLDEN))


def question():
    said = QUESTIONS["pong"]
    return lab.Question(said["type"], said["instructions"], said["criteria"])


def picture(number: int, shape=(2, 2, 3)) -> np.ndarray:
    return np.full(shape, number, np.uint8)


def pictures(*numbers: int) -> np.ndarray:
    return np.stack([picture(number) for number in numbers])


class Encoder:
    """Features [N, 2, 3] filled with the picture's number, in one buffer that every call overwrites."""

    def __init__(self):
        self.calls: list[list[int]] = []
        self.buffer = torch.zeros(16, 2, 3)

    def __call__(self, frames: np.ndarray) -> torch.Tensor:
        numbers = frames[:, 0, 0, 0]
        self.calls.append(numbers.tolist())
        rows = self.buffer[: len(frames)]
        rows[:] = torch.from_numpy(numbers).float()[:, None, None]
        return rows


def test_only_missing_frames_are_encoded_and_equal_ones_once():
    features, encode = FrameFeatures(8), Encoder()
    rows = features.rows(pictures(1, 2, 1), encode)
    assert rows[:, 0, 0].tolist() == [1, 2, 1]
    rows = features.rows(pictures(3, 1, 3, 2), encode)
    assert rows[:, 0, 0].tolist() == [3, 1, 3, 2]
    features.rows(pictures(1, 2), encode)
    assert encode.calls == [[1, 2], [3]]
    assert (features.hits, features.misses, features.evictions, len(features)) == (6, 3, 0, 3)


def test_least_recently_used_is_dropped_and_a_hit_refreshes():
    features, encode = FrameFeatures(3), Encoder()
    for number in (1, 2, 3, 1, 4):  # 1 is met again before 4 needs room, so 2 is the oldest
        features.rows(pictures(number), encode)
    assert [picture(number) in features for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert (features.hits, features.misses, features.evictions) == (1, 4, 1)
    features.rows(pictures(3, 1), encode)  # now 4 is the oldest
    features.rows(pictures(5, 6), encode)  # which drops it, then 3
    assert [picture(number) in features for number in (1, 3, 4, 5, 6)] == [True, False, False, True, True]


def test_a_screen_that_stands_still_is_encoded_once():
    features, encode = FrameFeatures(2), Encoder()
    for _ in range(20):
        features.rows(pictures(7, 7), encode)
    assert encode.calls == [[7]] and features.hits == 39


def test_memory_stays_bounded():
    features, encode = FrameFeatures(5), Encoder()
    for start in range(0, 200, 4):
        features.rows(pictures(*range(start, start + 4)), encode)
        assert len(features) <= 5
        assert features.bytes == len(features) * 2 * 3 * 4
    assert features.counts() == {"hits": 0, "misses": 200, "evictions": 195, "kept": 5, "kept_bytes": 120}


def test_a_call_may_bring_more_frames_than_there_is_room_for():
    features, encode = FrameFeatures(2), Encoder()
    features.rows(pictures(1), encode)
    rows = features.rows(pictures(4, 3, 2, 1, 4), encode)
    assert rows[:, 0, 0].tolist() == [4, 3, 2, 1, 4]
    assert [picture(number) in features for number in (1, 2, 3, 4)] == [True, False, False, True]
    assert (features.hits, features.misses, features.evictions) == (2, 4, 2)


def test_kept_features_are_copies_in_both_directions():
    features, encode = FrameFeatures(4), Encoder()
    first = features.rows(pictures(1), encode)
    features.rows(pictures(2), encode)  # overwrites the encoder's buffer
    assert first[0, 0, 0] == 1
    first.fill_(9)  # the caller may write into what it was given
    assert features.rows(pictures(1), encode)[0, 0, 0] == 1
    assert encode.calls == [[1], [2]]


def test_frames_of_equal_bytes_and_other_sizes_are_different():
    features, encode = FrameFeatures(4), Encoder()
    features.rows(picture(1, (2, 4, 3))[None], encode)
    features.rows(picture(1, (4, 2, 3))[None], encode)
    assert features.misses == 2


def test_a_view_with_other_strides_is_the_same_frame():
    features, encode = FrameFeatures(4), Encoder()
    wide = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    features.rows(np.ascontiguousarray(wide[:, ::2])[None], encode)
    features.rows(wide[None][:, :, ::2], encode)
    assert (features.hits, features.misses) == (1, 1)


def test_a_failing_encoder_leaves_everything_as_it_was():
    features, encode = FrameFeatures(2), Encoder()
    features.rows(pictures(1, 2), encode)

    def fails(frames):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features.rows(pictures(1, 3), fails)
    assert (features.hits, features.misses, features.evictions) == (0, 2, 0)
    features.rows(pictures(4), encode)
    assert picture(1) not in features and picture(2) in features


def test_clear_forgets_features_and_counters():
    features, encode = FrameFeatures(2), Encoder()
    features.rows(pictures(1, 2, 3), encode)
    features.clear()
    assert set(features.counts().values()) == {0}
    features.rows(pictures(1), encode)
    assert (features.hits, features.misses) == (0, 1)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, True, None])
def test_capacity_must_be_a_whole_number(capacity):
    with pytest.raises(InputError, match="give the number of frames to keep"):
        FrameFeatures(capacity)


# ------------------------------------------------------------------------------------------ in a step


def test_eight_frames_give_the_eight_answers_of_the_uncached_step(golden):
    frames = np.stack([FRAMES[name][None] for name in ATARI[:8]])
    assert len(np.unique(frames.reshape(8, -1), axis=0)) == 8
    plain = lab.EagerStep(golden, question())
    step = lab.EagerStep(golden, question(), features=FrameFeatures(8))
    expected = np.concatenate([plain.decide(frame[None]).logits for frame in frames])
    for turn in range(2):  # the second time all of them come out of the cache
        got = np.concatenate([step.decide(frame[None]).logits for frame in frames])
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)
        assert (step.features.misses, step.features.hits) == (8, 8 * turn)
    np.testing.assert_allclose(step.decide(frames).logits, expected, atol=1e-4, rtol=0)
    apart = np.abs(got[:, None] - got[None]).max(-1)[np.triu_indices(8, 1)]
    assert apart.min() > 1e-3


def test_features_of_one_frame_outlive_the_next(golden):
    step = lab.EagerStep(golden, question(), features=FrameFeatures(4))
    one, other = FRAMES["pong_a"][None], FRAMES["pong_b"][None]
    with torch.inference_mode():
        kept = step.features.rows(one, step._encode)
        step.decide(other[None])
        step.features.rows(other, step._encode)
        assert torch.equal(kept, lab.EagerStep(golden, question())._encode(one))  # bit for bit
        assert torch.equal(kept, step.features.rows(one, step._encode))


@pytest.mark.parametrize("capacity", [2, 64])
def test_published_two_frame_calls(golden, capacity):
    """The published cache keeps what was encoded in the last two calls, here it is the last frames used: the same
    answers, and other counts in two places. Its fifth call encodes a standing screen again, which hits here (and of two
    equal frames in a call it counts one only). Its last call meets a frame of five calls ago: with room, that hits too.
    """
    step = lab.EagerStep(golden, question(), frames=2, option_attention="causal", features=FrameFeatures(capacity))
    counts = []
    for call in CALLS:
        before = step.features.hits, step.features.misses
        answer = step.decide(np.stack([FRAMES[call["prev"]], FRAMES[call["cur"]]])[None])
        # up to 4e-4 where own grey levels fall on the other side of a rounding tie; 5e-5 otherwise, and none here does
        np.testing.assert_allclose(answer.probabilities[0], call["probs"], atol=5e-5, rtol=0)
        counts.append((step.features.hits - before[0], step.features.misses - before[1]))
    published = [(call["hits"], call["misses"]) for call in CALLS]
    assert published[4] == (0, 1) and published[6] == (1, 1)
    published[4] = (2, 0)
    published[6] = (2, 0) if capacity == 64 else (1, 1)
    assert counts == published


@pytest.mark.parametrize("settings", [{"pixels": "processor"}, {"filter": "bicubic"}, {"orders": 3}])
def test_other_settings_keep_their_answers(golden, settings):
    frames = np.stack([FRAMES["pong_a"][None], FRAMES["pong_b"][None]])
    step = lab.EagerStep(golden, question(), features=FrameFeatures(4), **settings)
    expected = lab.EagerStep(golden, question(), **settings).decide(frames).logits
    for _ in range(2):
        np.testing.assert_allclose(step.decide(frames).logits, expected, atol=2e-5, rtol=0)
    assert step.features.hits == 2


def test_split_step_takes_features_too(golden):
    frames = FRAMES["pong_a"][None, None]
    step = lab.SplitStep(golden, question(), features=FrameFeatures(4))
    first = step.decide(frames).logits
    np.testing.assert_array_equal(step.decide(frames).logits, first)
    assert step.features.hits == 1


def test_a_cache_belongs_to_one_step(golden):
    features = FrameFeatures(4)
    lab.EagerStep(golden, question(), features=features).decide(FRAMES["pong_a"][None, None])
    with pytest.raises(InputError, match="belongs to another step"):
        lab.EagerStep(golden, question(), pixels="processor", features=features)


def test_changed_weights_are_refused(golden):
    model = lab.load_model("tiny")
    step = lab.EagerStep(model, question(), features=FrameFeatures(4))
    step.decide(FRAMES["pong_a"][None, None])
    with torch.no_grad():
        next(model.encoder.connector.parameters()).mul_(2)
    with pytest.raises(InputError, match="changed since this step was built; build a new step"):
        step.decide(FRAMES["pong_a"][None, None])


def test_description_and_stages_tell_the_cache(golden):
    plain, step = lab.EagerStep(golden, question()), lab.EagerStep(golden, question(), features=FrameFeatures(4))
    assert step.describe() == {**plain.describe(), "features_capacity": 4} != plain.describe()
    assert step.name != plain.name
    first = time_call(step.decide, FRAMES["pong_a"][None, None])
    again = time_call(step.decide, FRAMES["pong_a"][None, None])
    assert {"features", "vision", "resize"} <= set(first)
    assert "features" in again and "vision" not in again and "resize" not in again
