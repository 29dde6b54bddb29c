import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lab.caches import KeptStates, content_key
from lab.errors import InputError
from lab.models.families import load_family
from lab.models.states import TokenState
from lab.resume import Picture, Prompt

IMAGE = 99


class Plain:
    """A state of 10 bytes a token."""

    def __init__(self, length=0, crops=True):
        self.length, self.crops = length, crops

    @property
    def bytes(self):
        return 10 * self.length

    def copy(self):
        return Plain(self.length, self.crops)

    def croppable(self, length=None):
        return self.crops

    def crop(self, length):
        assert self.crops or length == self.length
        self.length = length

    def check(self, length):
        assert self.length == length


def text(*ids) -> Prompt:
    return Prompt(tuple(ids), (), IMAGE)


def with_picture(name: str, after: int = 3) -> Prompt:
    """Two tokens, a picture of three rows, and `after` more."""
    return Prompt((1, 2, IMAGE, IMAGE, IMAGE, *range(after)), (Picture((name,), 3, 9),), IMAGE)


def restored(kept: KeptStates, prompt: Prompt, whole_images=True) -> int:
    with kept.lend(prompt, Plain, whole_images) as loan:
        assert loan.state.length == loan.tokens
        return loan.tokens


def test_the_longest_usable_prefix_is_lent():
    kept = KeptStates(10_000)
    kept.keep(text(1, 2, 3), Plain(3))
    kept.keep(text(1, 2, 9, 9, 9), Plain(5))
    assert restored(kept, text(1, 2, 3, 4)) == 3
    assert restored(kept, text(1, 2, 9, 9, 8)) == 4, "cut back to what is common"
    assert restored(kept, text(1, 2, 9)) == 2, "the last token is left to run"
    assert restored(kept, text(7, 2, 9)) == 0
    assert (kept.hits, kept.misses, kept.lent) == (3, 1, 0)
    assert len(kept) == 2 and sorted(state.length for _, state in kept._kept) == [3, 5], "what is lent is a copy"


def test_a_state_that_cannot_be_cut_serves_the_whole_only():
    kept = KeptStates(10_000)
    kept.keep(text(1, 2, 3), Plain(3, crops=False))
    kept.keep(text(1, 2, 3, 4, 5), Plain(5, crops=False))
    assert len(kept) == 2, "the shorter snapshot is of use yet"
    assert restored(kept, text(1, 2, 3, 4, 5, 6)) == 5
    assert restored(kept, text(1, 2, 3, 4, 9)) == 3
    assert restored(kept, text(1, 2, 3)) == 0, "its last token must be run"


def test_a_longer_state_that_can_be_cut_replaces_the_shorter():
    kept = KeptStates(10_000)
    kept.keep(text(1, 2, 3), Plain(3))
    kept.keep(text(1, 2, 3, 4), Plain(4))
    kept.keep(text(1, 2, 3, 4), Plain(4))
    assert len(kept) == 1 and restored(kept, text(1, 2, 3, 9)) == 3


def test_a_state_that_ends_inside_an_image_is_refused_and_an_earlier_point_used():
    prompt = with_picture("a")
    for crops, whole_images, tokens in ((True, True, 2), (False, True, 0), (True, False, 4), (False, False, 4)):
        kept = KeptStates(10_000)
        kept.keep(prompt, Plain(4, crops))
        assert kept.point(prompt, whole_images) == restored(kept, prompt, whole_images) == tokens
    kept = KeptStates(10_000)
    kept.keep(prompt, Plain(1, crops=False))
    kept.keep(prompt, Plain(4, crops=False))
    assert restored(kept, prompt) == 1, "the longest snapshot that may be used"


def test_the_same_text_with_another_picture_shares_nothing_from_it_on():
    kept = KeptStates(10_000)
    kept.keep(with_picture("a"), Plain(8))
    assert restored(kept, with_picture("a")) == 7
    assert restored(kept, with_picture("b")) == 2
    kept = KeptStates(10_000)
    kept.keep(with_picture("a"), Plain(8, crops=False))
    assert restored(kept, with_picture("b", after=9)) == 0 and restored(kept, with_picture("a", after=9)) == 8


def test_bytes_bound_what_is_kept_and_the_oldest_use_goes_first():
    kept = KeptStates(100)
    kept.keep(text(1, 1, 1, 1), Plain(4))
    kept.keep(text(2, 2, 2, 2), Plain(4))
    assert restored(kept, text(1, 1, 1, 1, 1)) == 4, "now the first is the newer"
    kept.keep(text(3, 3, 3, 3), Plain(4))
    assert kept.bytes == 80 and kept.evictions == 1
    assert restored(kept, text(2, 2, 2, 2, 2)) == 0 and restored(kept, text(1, 1, 1, 1, 1)) == 4
    assert kept.keep(text(*range(11)), Plain(11)) is False and kept.refused == 1 and kept.bytes == 80
    assert kept.keep(text(*range(10)), Plain(10)) and len(kept) == 1 and kept.bytes == 100
    kept.clear()
    assert kept.counts() == dict.fromkeys(kept.counts(), 0)


@pytest.mark.parametrize("fault", ["raises", "partial"])
def test_a_restore_that_fails_gives_the_state_back_and_starts_at_0(fault, capsys):
    class Torn(Plain):
        def copy(self):
            if fault == "raises":
                raise RuntimeError("out of memory")
            return Plain(self.length - 1)

    kept = KeptStates(1000)
    kept.keep(text(1, 2, 3), Plain(3))
    kept._kept[0] = (kept._kept[0][0], Torn(3))
    with kept.lend(text(1, 2, 3, 4), Plain) as loan:
        assert (loan.tokens, loan.state.length, loan.failed) == (0, 0, True) and kept.lent == 1
        kept.keep(text(1, 2, 3, 4), Plain(4))
    assert (kept.failures, kept.misses, kept.hits, kept.lent) == (1, 1, 0, 0)
    assert "starts anew" in capsys.readouterr().err
    assert restored(kept, text(1, 2, 3, 4, 5)) == 4, "the next turn finds the new state, not the torn one"


def test_a_turn_that_ends_badly_gives_back_what_was_lent():
    kept = KeptStates(1000)
    kept.keep(text(1, 2, 3), Plain(3))
    with pytest.raises(KeyError), kept.lend(text(1, 2, 3, 4), Plain) as loan:
        loan.state.length = 77
        raise KeyError
    assert kept.lent == 0 and loan.state is None and restored(kept, text(1, 2, 3, 4)) == 3


def test_a_store_belongs_to_one_model():
    kept, one, other = KeptStates(10), type("A", (), {})(), type("B", (), {})()
    kept.claim(one)
    kept.claim(one)
    with pytest.raises(InputError, match="another model"):
        kept.claim(other)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_a_store_needs_room(size):
    with pytest.raises(InputError, match="max_bytes"):
        KeptStates(size)


def test_a_state_may_not_hold_more_than_its_prompt():
    with pytest.raises(InputError, match="holds 4 tokens, the prompt only 2"):
        KeptStates(100).keep(text(1, 2), Plain(4))


def test_content_keys_tell_pictures_apart():
    frame = np.zeros((4, 6, 3), np.uint8)
    other = frame.copy()
    other[3, 5, 2] = 1
    keys = {content_key(f) for f in (frame, other, frame.reshape(6, 4, 3), frame.copy())}
    assert len(keys) == 3


# --- real states --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma4", "qwen3_5"])
def family(request):
    return load_family(request.param)


def run(family, state: TokenState, ids) -> torch.Tensor:
    ids = torch.tensor([ids])
    tables = family.tables(Prompt(tuple(ids[0].tolist()), (), family.placeholder))
    if "positions" in tables:
        tables["positions"] = torch.arange(200).expand(3, 1, -1)
    return family.hidden(ids, family.embed(ids), state, tables)


def test_a_copy_is_a_snapshot_that_serves_twice_bit_for_bit(family):
    state = family.empty()
    run(family, state, range(3, 33))
    snapshot = state.copy()
    first = run(family, state, [40, 41])
    again = [run(family, snapshot.copy(), [40, 41]) for _ in range(2)]
    assert torch.equal(first, again[0]) and torch.equal(first, again[1])
    assert (snapshot.length, state.length) == (30, 32)
    assert not torch.equal(first, run(family, snapshot, [50, 41]))


def test_which_states_can_be_cut_back(family):
    short, long = family.empty(), family.empty()
    run(family, short, range(3, 13))
    run(family, long, range(3, 43))
    can = {"qwen2_5_vl": (True, True), "gemma4": (True, False), "qwen3_5": (False, False)}[family.name]
    assert (short.croppable(), long.croppable()) == can
    assert short.croppable(40) == can[1], "asked ahead: a window that is passed cannot be cut"
    for state, ok in zip((short, long), can, strict=True):
        length = state.length
        if not ok:
            with pytest.raises(RuntimeError, match="cannot be cut back"):
                state.crop(length - 2)
            continue
        expected = run(family, state.copy(), [60])
        run(family, state, [70, 71, 72])
        state.crop(length)
        state.check(length)
        torch.testing.assert_close(run(family, state, [60]), expected, rtol=0, atol=1e-5)
    with pytest.raises(RuntimeError):
        long.crop(1000)


def test_a_copy_leaves_behind_what_was_cut():
    family = load_family("qwen2_5_vl")
    state = family.empty()
    run(family, state, range(3, 43))
    whole = state.bytes
    state.crop(10)
    layer = state.copy().cache.layers[0]
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes == state.cache.layers[0].keys.nbytes
    assert state.copy().bytes == state.bytes < whole / 3


def test_a_torn_state_is_found(family):
    state = family.empty()
    state.check(0)
    run(family, state, range(3, 13))
    state.check(10)
    with pytest.raises(RuntimeError, match="does not hold the 9 tokens"):
        state.check(9)
    layer = state.cache.layers[1]
    layer.keys = layer.keys[:, :, :-1]
    with pytest.raises(RuntimeError, match="Layer 1"):
        state.check(10)


def test_an_empty_state_is_one_of_no_tokens():
    state = TokenState(DynamicCache())
    state.check(0)
    assert (state.length, state.bytes, state.croppable()) == (0, 0, True)
