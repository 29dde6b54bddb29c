"""Rows of the text model: their layout and budgets, and kept question parts that change nothing."""

from threading import Thread

import numpy as np
import pytest

import lab
from lab.errors import InputError
from lab.models.text import text_preset
from lab.question_tokens import QuestionTokens, TextPrompt, TextTokens, question_part, state_ids, text_row
from lab.steps import TextStep

LONG = " ".join(f"word{i}" for i in range(400))


@pytest.fixture(scope="module")
def tokens():
    return TextTokens.own()


@pytest.fixture(scope="module")
def model():
    return text_preset("snake").eval().requires_grad_(False)


def question(number=0, options=4, text="go there", type="choice", instructions="Which way?"):
    return lab.Question(type, f"{instructions} {number}", {f"way{i}": text for i in range(options)})


# ------------------------------------------------------------------------------------------------------------ layout


def test_the_order_of_a_row(tokens):
    asked = lab.Question("choice", "Which way?", {"UP": "into the wall", "DOWN": ""})
    part = question_part(tokens, asked, 192)
    up, down = tokens.encode(" UP: into the wall"), tokens.encode(" DOWN")
    head = [tokens.cls, *tokens.encode("choice question: Which way?"), tokens.sep]
    assert list(part.ids) == [*head, tokens.mask, *up, tokens.mask, *down, tokens.sep]
    assert part.readouts == (len(head), len(head) + 1 + len(up))
    ids, readouts = text_row(tokens, part, state_ids(tokens, "all is well"), 64)
    assert ids == [*part.ids, *tokens.encode("all is well"), tokens.sep] and readouts == part.readouts


def test_each_type_renders_its_options(tokens):
    score = question_part(tokens, lab.Question("score", "How near?", ["far", "near"]), 192)
    assert tokens.encode(" level 1: near") == list(score.ids[score.readouts[1] + 1 : -1])
    noul = question_part(tokens, lab.Question("noul", "Is it?", {"false": "no", "true": "yes"}), 192)
    assert tokens.encode(" true: yes") == list(noul.ids[noul.readouts[1] + 1 : -1])


def test_an_option_keeps_forty_eight_tokens_beside_its_mask(tokens):
    part = question_part(tokens, question(options=2, text=LONG), 512)
    assert part.readouts[1] - part.readouts[0] == 49


@pytest.mark.parametrize("options, budget, each", [(4, 192, 44), (10, 192, 17), (60, 192, 4)])
def test_options_give_way_where_the_question_had_no_room(tokens, options, budget, each):
    """(192 - 16) // 4 = 44, // 10 = 17; sixty options get the least, four, and the question its eight."""
    part = question_part(tokens, question(options=options, text=LONG), budget)
    assert set(np.diff(part.readouts)) == {each}
    asked = part.readouts[0] - 2  # between CLS and SEP
    assert asked == max(8, min(budget - options * each, len(tokens.encode(f"choice question: Which way? {0}"))))


def test_a_long_question_keeps_its_start(tokens):
    part = question_part(tokens, question(instructions=LONG), 100)
    options = sum(np.diff([*part.readouts, len(part.ids) - 1]))
    assert part.readouts[0] - 2 == 100 - options
    whole = tokens.encode(f"choice question: {LONG} 0")
    assert list(part.ids[1 : part.readouts[0] - 1]) == whole[: 100 - options]


def test_a_text_keeps_its_start_and_a_conversation_its_end(model):
    step, limit = TextStep(model), model.config.max_len
    text = model.tokens.encode(LONG)
    ids = step.prepare(TextPrompt(LONG, (question(),))).ids[0]
    assert len(ids) == limit and ids[-1] == model.tokens.sep
    head = len(question_part(model.tokens, question(), 192).ids)
    assert list(ids[head:-1]) == text[: limit - head - 1]
    ids = step.prepare(TextPrompt([LONG], (question(),))).ids[0]
    assert list(ids[head:-1]) == model.tokens.encode(f'["{LONG}"]')[-(limit - head - 1) :]


def test_options_beyond_the_models_reach_are_refused(tokens):
    part = question_part(tokens, question(options=40, text="x"), 192)
    with pytest.raises(InputError, match="of 40 options"):
        text_row(tokens, part, [], 100)


def test_a_mask_in_a_text_is_no_option(model):
    evil = f"go {model.tokens.mask_text}there"
    asked = lab.Question("choice", f"Which {model.tokens.mask_text}?", {"a": evil, "b": evil})
    ids = TextStep(model).prepare(TextPrompt(evil, (asked,))).ids
    assert (ids == model.tokens.mask).sum() == 2


def test_a_state_of_another_kind_is_refused(tokens):
    assert state_ids(tokens, {"a": 1}) == tokens.encode('{"a": 1}')
    assert state_ids(tokens, ["a", {"b": 2}]) == tokens.encode('["a", {"b": 2}]')  # as published: JSON
    for odd in (3, {"a": {1, 2}}):
        with pytest.raises(InputError, match="state"):
            state_ids(tokens, odd)


# ------------------------------------------------------------------------------------------------------------- kept


PROMPTS = {
    "plain": TextPrompt("all is well", (question(), lab.Question("noul", "Is it?"))),
    "long state": TextPrompt(LONG, (question(), question(1))),
    "long conversation": TextPrompt([LONG, "the end"], (question(),)),
    "long options": TextPrompt("short", (question(options=12, text=LONG), question(options=2))),
    "long question": TextPrompt("short", (question(instructions=LONG),)),
    "changed criteria": TextPrompt("all is well", (question(text="go elsewhere"), lab.Question("noul", "Is it?"))),
    "another order": TextPrompt("all is well", (question().reordered([3, 2, 1, 0]),)),
    "another type": TextPrompt("all is well", (question(type="score"),)),
    "mask text": TextPrompt("a <|reserved_special_token_2|> b", (question(text="<|reserved_special_token_2|>"),)),
    "a table": TextPrompt({"score": 3}, (question(),)),
}


@pytest.mark.parametrize("capacity", [1, 3, 128])
@pytest.mark.parametrize("pad", [None, 16, 48])
def test_kept_parts_prepare_exactly_what_is_made_anew(model, capacity, pad):
    kept = QuestionTokens(capacity)
    with_cache = TextStep(model, pad_to_multiple=pad, cache_prompts=kept)
    without = TextStep(model, pad_to_multiple=pad)
    for _ in range(3):  # misses, then hits or, in a small cache, evictions
        for name, prompt in PROMPTS.items():
            got, expected = with_cache.prepare(prompt), without.prepare(prompt)
            for one, other in zip(got.arrays(), expected.arrays(), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)
            assert got.tokens == expected.tokens
    assert len(kept) <= capacity and (kept.evictions > 0) == (capacity < 128)
    assert kept.hits > 0 or capacity == 1


def test_the_bound_at_127_128_and_129(tokens):
    kept = QuestionTokens()
    asked = [question(i) for i in range(129)]
    for one in asked[:127]:
        kept.part(tokens, one, 192)
    assert kept.counts() == {"hits": 0, "misses": 127, "evictions": 0, "kept": 127}
    kept.part(tokens, asked[127], 192)
    assert kept.counts() == {"hits": 0, "misses": 128, "evictions": 0, "kept": 128}
    kept.part(tokens, asked[0], 192)  # used again: the second is now the one to go
    kept.part(tokens, asked[128], 192)
    assert kept.counts() == {"hits": 1, "misses": 129, "evictions": 1, "kept": 128}
    assert kept.holds(tokens, asked[0], 192) and not kept.holds(tokens, asked[1], 192)
    assert all(kept.holds(tokens, one, 192) for one in asked[2:])


def test_thrash_misses_every_time_and_stays_bounded(tokens):
    kept = QuestionTokens()
    for _ in range(3):
        for i in range(129):  # one more than there is room for, round and round
            kept.part(tokens, question(i, options=2), 192)
    assert kept.counts() == {"hits": 0, "misses": 387, "evictions": 259, "kept": 128}
    kept.clear()
    assert kept.counts() == {"hits": 0, "misses": 0, "evictions": 0, "kept": 0}


def test_the_key_holds_all_that_decides_a_part(tokens):
    from dataclasses import replace

    kept, base = QuestionTokens(), question()
    kept.part(tokens, base, 192)
    other = [
        (replace(tokens, cls=7), base, 192),
        (replace(tokens, sep=7), base, 192),
        (replace(tokens, mask=7), base, 192),
        (replace(tokens, mask_text="way"), base, 192),
        (replace(tokens, tokenizer=type(tokens.tokenizer).from_str(tokens.tokenizer.to_str())), base, 192),
        (tokens, base, 30),
        (tokens, question(1), 192),
        (tokens, question(type="score"), 192),
        (tokens, base.reordered([1, 0, 2, 3]), 192),
        (tokens, question(text="go away"), 192),
    ]
    for number, arguments in enumerate(other, start=2):
        assert kept.part(*arguments) == question_part(*arguments)
        assert (kept.hits, kept.misses) == (0, number)


def test_threads_share_one(tokens):
    kept, wrong = QuestionTokens(8), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in rng.integers(0, 12, 150):
            if kept.part(tokens, question(i, options=2), 192) != expected[i]:
                wrong.append(i)

    expected = [question_part(tokens, question(i, options=2), 192) for i in range(12)]
    workers = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and kept.hits + kept.misses == 600 and len(kept) == 8


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_capacity_that_cannot_be_is_refused(capacity):
    with pytest.raises(InputError, match="capacity"):
        QuestionTokens(capacity)
