"""What must hold when a prompt with pictures resumes, over transformers' own classes, tiny and seeded random."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch

from lab import conversations
from lab.caches import KeptStates
from lab.conversations import GREEDY, OPENINGS, Sampling, Server, prompt_lookup
from lab.errors import InputError
from lab.models.families import FAMILIES, load_family
from lab.models.states import TokenState
from lab.resume import MalformedPrompt, before_image, plan
from lab.tokens import IMAGE

ROOM = 1 << 26
PER_IMAGE = [name for name in FAMILIES if name != "qwen3_5"]


@functools.cache
def family_of(name: str):
    return load_family(name)


@pytest.fixture(params=FAMILIES)
def family(request):
    return family_of(request.param)


def frame(rng, high: int = 0, wide: int = 0) -> np.ndarray:
    """A random picture whose sides are 16, 32 or 48 pixels."""
    sides = [16 * (side or int(rng.integers(1, 4))) for side in (high, wide)]
    return rng.integers(0, 256, (*sides, 3), dtype=np.uint8)


def words(rng, count: int) -> list[int]:
    return rng.integers(3, 240, count).tolist()


def three_images(family, seed: int = 0):
    """A prompt of three pictures (of six rows each where their size decides it) among text."""
    rng = np.random.default_rng(seed)
    parts = [words(rng, 4)]
    for _ in range(3):
        parts += [frame(rng, 2, 3), words(rng, 3)]
    return family.request(parts)


def kept_up_to(family, request, length: int, **options) -> Server:
    """A server that keeps the state of the prompt's first `length` tokens."""
    server = Server(family, KeptStates(ROOM), **options)
    if length:
        server.prefill(request, length)
    return server


def close(one, other) -> None:
    torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=2e-5)


# --- the adapters are the library's models ----------------------------------------------------------------------------


def test_a_cold_pass_is_the_librarys_own(family):
    request = three_images(family)
    prompt, name = request.prompt, family.name
    reply = Server(family).reply(request, 1)
    ids = torch.as_tensor(prompt.array)[None]
    kinds = (ids == family.placeholder).int()
    with torch.inference_mode():
        if name == "smolvlm":
            pixels = family.pixels(np.stack(request.frames))[None]
            hidden = family.model.encoder(input_ids=ids, pixel_values=pixels).last_hidden_state
        elif name == "gemma4":
            seen = []
            hook = family.tower.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
            for one in request.frames:
                family.rows([one])
            hook.remove()
            pixels, places = (torch.cat([k[n] for k in seen]) for n in ("pixel_values", "pixel_position_ids"))
            inputs = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
            hidden = family.model(input_ids=ids, **inputs).last_hidden_state
        else:
            inputs = {"pixel_values": torch.as_tensor(np.concatenate([family.pixels(f) for f in request.frames]))}
            inputs["image_grid_thw"] = torch.tensor([picture.grid for picture in prompt.pictures])
            hidden = family.model(input_ids=ids, mm_token_type_ids=kinds, **inputs).last_hidden_state
            family.model.rope_deltas = None
        expected = family.logits(hidden[0, -1])
    torch.testing.assert_close(reply.logits, expected, rtol=0, atol=2e-5)


def test_patches_are_those_of_the_librarys_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = frame(np.random.default_rng(0), 2, 3)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": False}
    library = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, **half)
    expected = library(picture, input_data_format="channels_last", return_tensors="np")
    family = family_of("qwen2_5_vl")
    np.testing.assert_allclose(family.pixels(picture), expected["pixel_values"], atol=1e-6)
    assert tuple(expected["image_grid_thw"][0]) == family.picture(picture).grid


# --- 1 and 2: what is encoded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("name", PER_IMAGE)
def test_of_three_images_only_those_past_the_resume_point_are_encoded(name, opening):
    family = family_of(name)
    request = three_images(family)
    spans, last = request.prompt.spans, len(request.prompt) - 1
    cold = Server(family).reply(request, 4)
    assert cold.tower_calls == 3
    for kept, calls in ((spans[1][1], 1), (0, 3), (last, 0), (spans[0][1], 2), (spans[1][0], 2)):
        reply = kept_up_to(family, request, kept, opening=opening).reply(request, 4)
        assert (reply.cached_tokens, reply.tower_calls, reply.encoded) == (kept, calls, calls)
        assert reply.tokens == cold.tokens
        old = kept_up_to(family, request, kept, opening=opening, skip=False).reply(request, 4)
        assert (old.cached_tokens, old.tokens) == (kept, cold.tokens)
        assert old.tower_calls == 3, "before the change every image was encoded"


@pytest.mark.parametrize("opening", OPENINGS)
def test_of_two_runs_the_second_is_encoded_and_inside_the_first_both(opening):
    family = family_of("qwen3_5")
    request = three_images(family)  # 24 patches each, so two to a run of 48
    spans = request.prompt.spans
    assert plan(request.prompt, 0, family.patch_budget).calls == ((0, 1), (2,))
    cold = Server(family).reply(request, 4)
    assert (cold.tower_calls, cold.encoded) == (2, 3)
    inside = spans[0][1] + 1
    for kept, calls, encoded in ((spans[1][1], 1, 1), (inside, 2, 3), (spans[1][0] + 2, 2, 3), (spans[2][1], 0, 0)):
        reply = kept_up_to(family, request, kept, opening=opening).reply(request, 4)
        assert (reply.cached_tokens, reply.tower_calls, reply.encoded) == (kept, calls, encoded)
        assert reply.tokens == cold.tokens
        old = kept_up_to(family, request, kept, opening=opening, skip=False).reply(request, 4)
        assert (old.tower_calls, old.tokens) == (2, cold.tokens)


# --- 3 and 5: whose rows, and where -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 5])
def test_every_chunk_from_the_resume_splices_the_cold_passs_rows_bit_for_bit(family, chunk):
    request = three_images(family)
    spans = request.prompt.spans
    cold = Server(family).reply(request, 1)
    rows = dict(zip(cold.positions.tolist(), cold.spliced, strict=True))
    assert set(rows) == {place for span in spans for place in range(*span)}
    points = [spans[0][1], spans[1][0], spans[1][1], spans[2][0]]
    points += [] if family.whole_images else [spans[0][0] + 2, spans[1][0] + 1, spans[2][0] + 3]
    for point in points:
        reply = kept_up_to(family, request, point, chunk=chunk).reply(request, 1)
        assert reply.cached_tokens == point
        assert reply.positions.tolist() == [place for place in rows if place >= point]
        assert torch.equal(reply.spliced, torch.stack([rows[place] for place in reply.positions.tolist()]))
        close(reply, cold)


def test_the_rows_come_from_the_images_own_pixels_under_the_same_plan(family):
    request = three_images(family)
    third = request.prompt.spans[2]
    reply = kept_up_to(family, request, request.prompt.spans[1][1]).reply(request, 1)
    with torch.inference_mode():
        alone = family.rows([request.frames[2]])[0]
    assert reply.positions.tolist() == list(range(*third)) and torch.equal(reply.spliced, alone)
    cold, found = (plan(request.prompt, point, family.patch_budget) for point in (0, third[0]))
    assert found.splices == cold.splices[-1:] and found.calls == cold.calls[-1:]
    swapped = type(request)(request.prompt, (*request.frames[:2], request.frames[2][::-1].copy()))
    other = kept_up_to(family, request, request.prompt.spans[1][1]).reply(swapped, 1)
    assert not torch.allclose(other.logits, reply.logits, atol=1e-2), "another picture is another answer"


# --- 4: one image -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_IMAGE)
def test_a_prefix_kept_past_the_only_image_calls_no_tower(name):
    family, rng = family_of(name), np.random.default_rng(1)
    request = family.request([words(rng, 5), frame(rng, 2, 3), words(rng, 6)])
    ((start, stop),) = request.prompt.spans
    cold = Server(family).reply(request, 4)
    for kept, calls in ((stop, 0), (stop + 3, 0), (start, 1), (start - 2, 1), (start + 1, 1), (stop - 1, 1)):
        reply = kept_up_to(family, request, kept).reply(request, 4)
        assert reply.tower_calls == calls and reply.tokens == cold.tokens
        assert reply.cached_tokens <= before_image(request.prompt, kept), "no image is cut"
        close(reply, cold)


# --- 6: conversations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, seed=5)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("opening", OPENINGS)
def test_three_turns_equal_cold_passes_and_a_fresh_servers(family, opening, sampling):
    rng = np.random.default_rng(2)
    servers = [Server(family, KeptStates(ROOM), opening=opening), Server(family, KeptStates(ROOM), skip=False)]
    cold = Server(family)
    request = family.request([words(rng, 3), frame(rng), words(rng, 2), frame(rng), words(rng, 3)])
    cached = 0
    for turn, parts in enumerate(([words(rng, 4)], [frame(rng), words(rng, 2)], [])):
        expected = cold.reply(request, 6, sampling)
        drafted = Server(family, KeptStates(ROOM)).reply(request, 6, sampling, draft=3)
        assert drafted.tokens == expected.tokens and drafted.cached_tokens == 0
        for server in servers:
            reply = server.reply(request, 6, sampling, draft=3 * (turn == 2))
            assert (reply.tokens, reply.cached_tokens) == (expected.tokens, cached)
            close(reply, expected)
        cached = len(request.prompt) + len(expected.tokens) - 1
        request = family.request(parts, request, expected.tokens)


def expected_point(prompts, states, prompt, whole_images) -> int:
    """The resume point, worked out token by token: an independent reading of the rule."""

    def elements(prompt):
        number, found = -1, []
        for place, token in enumerate(prompt.ids):
            if token == prompt.placeholder:
                number += place == 0 or prompt.ids[place - 1] != prompt.placeholder
                found.append((token, prompt.pictures[number].key))
            else:
                found.append((token, None))
        return found

    best, ours = 0, elements(prompt)
    for held, state in zip(prompts, states, strict=True):
        theirs = elements(held)
        common = 0
        while common < min(len(theirs), len(ours) - 1) and theirs[common] == ours[common]:
            common += 1
        inside = whole_images and common > 0 and ours[common][1] is not None and ours[common - 1][1] is not None
        while inside and common > 0 and ours[common - 1][1] is not None:
            common -= 1
        if common == len(theirs) or state.croppable():
            best = max(best, common)
    return best


def test_twenty_random_conversations_equal_cold_passes(family, capsys):
    met = sum((converse(family, seed) for seed in range(20)), Counter())
    assert met["turns"] == 60 and met["resumed"] > 15
    assert met["failed"] > 1 and met["evicted"] > 1 and met["between"] > 1 and met["drafted"] > 10
    assert (met["inside"] > 1) == (not family.whole_images), "a resume point inside an image is for runs only"
    assert met["skipped"] > 10


def converse(family, seed: int) -> Counter:
    """Three random turns, each against a cold pass: what is restored, encoded, spliced and said; what was met, counted."""
    met = Counter()
    rng = np.random.default_rng([seed, *family.name.encode()])
    kept = KeptStates(int(rng.choice([ROOM, 90 * token_bytes(family), 50 * token_bytes(family)])))
    server = Server(family, kept, True, str(rng.choice(OPENINGS)), rng.choice([None, 4, 9]))
    cold = Server(family)
    sampling = Sampling(float(rng.choice([0.0, 0.6])), seed)
    draft = int(rng.choice([0, 3]))
    request, asked = None, []
    for turn in range(3):
        parts = [words(rng, int(rng.integers(1, 5)))]
        for _ in range(int(rng.integers(turn == 0, 3))):
            parts += [frame(rng), words(rng, int(rng.integers(1, 4)))]
        if asked and rng.random() < 0.25:  # go on from an earlier turn, so that conversations share a prefix
            request, tokens = asked[int(rng.integers(len(asked)))]
            request = family.request(parts, request, tokens)
        elif asked:
            request = family.request(parts, *asked[-1])
        else:
            request = family.request(parts)
        failed, evictions, torn = kept.failures, kept.evictions, []
        event = str(rng.choice(["none", "none", "evict", "torn", "raises", "inside", "between"]))
        spans = request.prompt.spans
        if event in ("inside", "between") and spans:
            start, stop = spans[int(rng.integers(len(spans)))]
            server.prefill(
                request, int(rng.integers(start + 1, stop)) if event == "inside" and stop > start + 1 else stop
            )
        if event == "evict":
            kept.evict()
        point = expected_point(*zip(*kept._kept, strict=True), request.prompt, family.whole_images) if len(kept) else 0
        assert kept.point(request.prompt, family.whole_images) == point
        failures = failed
        with pytest.MonkeyPatch.context() as patch:
            if event == "torn":
                torn = [state for _, state in kept._kept]
                for state in torn:
                    state.length -= 1  # no layer agrees with it any more
            if event == "raises":
                patch.setattr(TokenState, "crop", _out_of_memory)
            if event in ("torn", "raises"):
                point, failures = 0, failures + (point > 0)
            before, held = family.tower_calls, kept.lent
            reply = server.reply(request, 5, sampling, draft * (event != "raises"))
            for state in torn:
                state.length += 1
        expected = cold.reply(request, 5, sampling)
        planned = plan(request.prompt, point, family.patch_budget)
        assert reply.cached_tokens == point and kept.failures == failures
        assert (reply.plan, reply.tower_calls) == (planned, len(planned.calls))
        assert family.tower_calls - before == reply.tower_calls + expected.tower_calls
        assert reply.tokens == expected.tokens
        assert (kept.lent, held) == (0, 0) and kept.bytes <= kept.max_bytes
        wanted = np.isin(expected.positions, reply.positions)
        assert torch.equal(reply.spliced, expected.spliced[wanted] if wanted.any() else reply.spliced[:0])
        close(reply, expected)
        asked.append((request, reply.tokens))
        met.update(turns=1, resumed=point > 0, failed=kept.failures - failed, drafted=reply.drafted)
        met.update(skipped=expected.encoded - reply.encoded, evicted=kept.evictions - evictions)
        met.update(inside=before_image(request.prompt, point) != point, between=point in {stop for _, stop in spans})
    return met


def token_bytes(family) -> int:
    """What a kept state takes for each token, roughly."""
    state = family.empty()
    ids = torch.arange(3, 43)[None]
    family.hidden(ids, family.embed(ids), state, family.tables(family.request([ids[0].tolist()]).prompt))
    return state.bytes // 40


def _out_of_memory(state, length):
    raise RuntimeError("out of memory")


def test_the_same_text_with_other_pictures_shares_no_state_and_no_features(family):
    one, other = (three_images(family, seed) for seed in (0, 0))
    rng = np.random.default_rng(9)
    changed = tuple(frame(rng, 2, 3) for _ in range(3))
    picture = family.picture
    prompt = type(one.prompt)(one.prompt.ids, tuple(map(picture, changed)), one.prompt.placeholder)
    other = type(one)(prompt, changed)
    assert one.prompt.ids == other.prompt.ids, "the same text"
    server, first = Server(family, KeptStates(ROOM)), one.prompt.spans[0][0]
    mine = server.reply(one, 5)
    theirs = server.reply(other, 5)
    assert theirs.cached_tokens <= first and theirs.encoded == 3
    assert not torch.allclose(mine.spliced, theirs.spliced, atol=1e-2)
    assert theirs.tokens == Server(family).reply(other, 5).tokens
    assert server.reply(one, 5).tokens == mine.tokens, "and the first one's state is what it was"
    assert not torch.allclose(mine.logits, theirs.logits, atol=1e-2), "pictures matter to this model"


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_malformed_placeholder_is_refused_before_any_reply_and_the_state_given_back(family, opening, monkeypatch):
    rng = np.random.default_rng(3)
    server = Server(family, KeptStates(ROOM), opening=opening)
    first = family.request([words(rng, 3), frame(rng), words(rng, 3)])
    reply = server.reply(first, 4)
    good = family.request([words(rng, 2), frame(rng), words(rng, 2)], first, reply.tokens)
    start, stop = good.prompt.spans[-1]
    ids = good.prompt.ids[:start] + good.prompt.ids[start + 1 :]
    bad = type(good)(type(good.prompt)(ids, good.prompt.pictures, family.placeholder), good.frames)
    restored, chosen = [], []
    lend, choose = KeptStates.lend, Sampling.choose
    monkeypatch.setattr(KeptStates, "lend", lambda *args: restored.append(1) or lend(*args))
    monkeypatch.setattr(Sampling, "choose", lambda *args: chosen.append(1) or choose(*args))
    before, counts = family.tower_calls, server.kept.counts()
    with pytest.raises(MalformedPrompt, match=f"Picture 1 has {stop - start} rows"):
        server.reply(bad, 4)
    assert restored == [1] * (opening == "restored") and not chosen and family.tower_calls == before
    after = server.kept.counts()
    assert (after["lent"], after["kept_bytes"], after["kept"]) == (0, counts["kept_bytes"], counts["kept"])
    monkeypatch.undo()
    reply = server.reply(good, 4)
    assert reply.tokens == Server(family).reply(good, 4).tokens and reply.cached_tokens > len(first.prompt)


def test_what_cannot_be_answered_is_said():
    family, rng = family_of("gemma4"), np.random.default_rng(0)
    with pytest.raises(InputError, match="multiples of 16 pixels, not 20 x 32"):
        family.request([rng.integers(0, 256, (20, 32, 3), dtype=np.uint8)])
    with pytest.raises(InputError, match=r"uint8 \[height, width, 3\]"):
        family.request([np.zeros((16, 16))])
    with pytest.raises(InputError, match="opening is 'open'"):
        Server(family, opening="open")
    with pytest.raises(InputError, match="0 tokens"):
        Server(family).reply(family.request([[5]]), 0)
    with pytest.raises(InputError, match="Unknown family 'llava'"):
        load_family("llava")
    with pytest.raises(InputError, match="dtype is 'fp8'"):
        load_family("gemma4", dtype="fp8")
    kept = KeptStates(100)
    Server(family, kept)
    with pytest.raises(InputError, match="another model"):
        Server(family_of("qwen3_5"), kept)


# --- drafting ---------------------------------------------------------------------------------------------------------


def test_drafts_are_looked_up_in_the_prompt():
    assert prompt_lookup([1, 2, 3, 4, 1, 2], 3, 99) == [3, 4, 1]
    assert prompt_lookup([1, 2, 3, 1, 2, 7, 1, 2], 1, 99) == [7], "the last place counts"
    assert prompt_lookup([5, 2, 8, 1, 2], 2, 99) == [8, 1], "one token where two never stood together"
    assert prompt_lookup([1, 2, 99, 99, 1, 2], 3, 99) == [] and prompt_lookup([1, 2, 3, 99, 1, 2], 3, 99) == [3]
    assert prompt_lookup([1, 2, 3], 3, 99) == [] and prompt_lookup([1, 2, 1], 0, 99) == []


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, seed=3)], ids=["greedy", "seeded"])
def test_right_and_wrong_drafts_leave_the_same_tokens_and_state(family, wrong_at, sampling, monkeypatch):
    """Drafts that are right up to `wrong_at`, whatever the model says: every way that a pass can end is taken."""
    request = three_images(family)
    spelled = Server(family).reply(request, 9, sampling)
    truth = [*request.prompt.ids, *spelled.tokens]

    def draft(ids, count, stop_at):
        guess = truth[len(ids) : len(ids) + count]
        return [token + (place == wrong_at) for place, token in enumerate(guess)]

    monkeypatch.setattr(conversations, "prompt_lookup", draft)
    server = Server(family, KeptStates(ROOM))
    reply = server.reply(request, 9, sampling, draft=3)
    assert reply.tokens == spelled.tokens
    assert reply.drafted > 0 and (reply.accepted > 0) == (wrong_at > 0)
    monkeypatch.undo()
    more = family.request([[7, 8]], request, reply.tokens)
    again = server.reply(more, 4, sampling)
    assert again.cached_tokens == len(request.prompt) + 8 and again.tower_calls == 0
    assert again.tokens == Server(family).reply(more, 4, sampling).tokens


def test_drafts_are_found_and_taken_in_ordinary_replies():
    counts = np.zeros(2, int)
    for name in FAMILIES:
        reply = Server(family_of(name)).reply(three_images(family_of(name), 4), 40, draft=3)
        counts += reply.drafted, reply.accepted
    assert counts[0] > 20 and counts[1] > 0


# --- SmolVLM ----------------------------------------------------------------------------------------------------------


def test_smolvlm_takes_text_and_lays_pictures_out_as_decisions_do():
    family = family_of("smolvlm")
    picture = np.zeros((10, 20, 3), np.uint8)
    request = family.request([family.text("Look: "), picture])
    said = family.tokenizer.decode(list(request.prompt.ids), skip_special_tokens=False)
    rows = request.prompt.pictures[0].rows
    assert said == f"Look: <fake_token_around_image><global-img>{IMAGE * rows}<fake_token_around_image>"
    assert rows == family.model.image_tokens == 4


def test_at_the_real_shape_a_kept_image_is_not_encoded():
    family = load_family("smolvlm", preset="smolvlm-256m", weights="random")
    picture = np.random.default_rng(0).integers(0, 256, (210, 160, 3), dtype=np.uint8)
    request = family.request([family.text("What is here?"), picture, family.text("Say it.")])
    assert request.prompt.pictures[0].rows == 64
    server = Server(family, KeptStates(ROOM))
    first = server.reply(request, 2)
    more = family.request([family.text(" And now?")], request, first.tokens)
    resumed, cold = server.reply(more, 2), Server(family).reply(more, 2)
    assert (first.tower_calls, resumed.tower_calls, cold.tower_calls) == (1, 0, 1)
    assert resumed.tokens == cold.tokens and resumed.cached_tokens == len(request.prompt) + 1


@pytest.mark.cuda
def test_on_a_gpu_every_family_answers_as_a_cold_pass_does():
    from lab.experiments.resume import family_lines

    lines = family_lines("cuda")
    assert [line["equal"] for line in lines] == [line["replies"] for line in lines] and len(lines) == 12
