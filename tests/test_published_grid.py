"""Rows and answers against the published projects' own code, over a grid of inputs (`golden/grid.json`, `golden/grid.npz`).

A case is a question (type, texts, length), a state, a layout, a number of option orders, frames and temperatures. Its
values were made by running the published code: the vision project's sequence builder, forward and `predict` on the weights
in `golden/` (the layouts causal and block) and on a small ModernVBERT (mask), the text project's on a small ModernBERT
(text). The two small models are filled by `seeded`, so no weights of theirs are stored.
"""

import copy
import functools
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import lab
from lab.models.checkpoints import PRESETS, VOCABULARY
from lab.models.text import text_preset
from lab.models.vision import DecisionConfig, DecisionModel
from lab.question_tokens import TextPrompt, TextTokens, question_part, state_ids, text_row
from lab.tokens import SMOLVLM_TOKENS, TEXT_VOCABULARY, build_row, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
GRID = json.loads((GOLDEN / "grid.json").read_text(encoding="utf-8"))
CASES = GRID["cases"]
PIXELS = np.load(GOLDEN / "pixels_all_frames.npz")
LAYOUTS = ("causal", "block", "mask", "text")
PARTS = ("choice", "score", "noul", "extra")
DIMENSIONS = ("type", "texts", "length", "layout", "orders", "state", "frames", "heat")
LOGITS, PROBABILITIES = 3e-4, 5e-5  # absolute tolerances


def seeded(model):
    """`model` with all its parameters drawn from one generator seeded 7, in the sorted order of their names: a standard
    normal (`torch.randn` of the parameter's shape) times 0.1, plus 1 for a vector called `...weight`, which is a norm's.
    Embedding and position tables are parameters like any other; buffers stay."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters(), key=lambda pair: pair[0]):
            drawn = 0.1 * torch.randn(value.shape, generator=generator)
            value.copy_(1 + drawn if value.ndim == 1 and name.endswith("weight") else drawn)
    return model.eval().requires_grad_(False)


@functools.cache
def both_ways_encoder():
    """A small ModernVBERT: width 192, three text layers (the first sees the whole row, the others 64 tokens to either
    side), 128 px, SmolVLM's vocabulary."""
    from transformers import ModernVBertConfig, ModernVBertModel

    config = ModernVBertConfig(
        vision_config={
            **PRESETS["tiny"]["vision"],
            "model_type": "siglip_vision_model",
            "image_size": 128,
            "patch_size": 16,
        },
        text_config={
            "model_type": "modernbert",
            "hidden_size": 192,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "vocab_size": VOCABULARY,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2),
        },
        image_token_id=TEXT_VOCABULARY + SMOLVLM_TOKENS.index("<image>"),
    )

    class Encoder(ModernVBertModel):
        def _init_weights(self, module) -> None:
            """All parameters are filled by `seeded`; transformers' own draw takes seconds."""

    return Encoder(config)


@functools.cache
def golden():
    return lab.load_model(str(GOLDEN))


@functools.cache
def model_of(layout):
    if layout == "text":
        return seeded(text_preset("tiny"))
    if layout == "mask":
        config = DecisionConfig(image_size=128, readout="mask", layout="mask")
        return seeded(DecisionModel(both_ways_encoder(), config, "seeded", "grid"))
    return golden()


def configured(case):
    """The layout's model with the case's budgets and temperatures; the weights are shared."""
    model = copy.copy(model_of(case["layout"]))
    heat = GRID["temperatures"][case["heat"]]
    model.config = replace(
        model.config,
        max_len=case["max_len"],
        head_max_len=case["head_max_len"],
        temperature=tuple(heat["temperature"]),
        temperature_by_options=heat["temperature_by_options"],
    )
    return model


def question_of(case):
    said = GRID["questions"][case["question"]]
    return lab.Question(said["type"], said["instructions"], said["options"] or ())


def state_of(case):
    return GRID["states"][case["state"]]


class Values:
    """The arrays of `grid.npz` by case: all values of one name lie behind each other, `<name>_ends` says where each ends."""

    def __init__(self):
        self.arrays = dict(np.load(GOLDEN / "grid.npz"))
        self.place = {case["key"]: i for i, case in enumerate(CASES)}

    def __call__(self, case, name):
        ends, i = self.arrays[f"{name}_ends"], self.place[case["key"]]
        return self.arrays[name][ends[i - 1] if i else 0 : ends[i]]


VALUES = Values()


def orders_of(case):
    """The option orders of a case, [orders, options]; row i of `ids` and `readouts` belongs to order i."""
    count = len(VALUES(case, "logits"))
    return VALUES(case, "orders").reshape(-1, count).tolist()


class StoredPixels:
    """Stands in for a step's resize: the stored grey levels of the pictures."""

    path = "device"

    def __init__(self, cases):
        names = [name for case in cases for name in pictures(case)]
        self.levels = np.stack([PIXELS[f"{name}_gpu"] for name in names])

    def __call__(self, frames):
        return (torch.from_numpy(self.levels).float() - 127.5) / 127.5


def pictures(case):
    return [case["picture"]] if case["frames"] == 1 else [f"{case['picture']}_prev", case["picture"]]


def row_faults(case):
    question, state = question_of(case), state_of(case)
    if case["layout"] == "text":
        tokens = TextTokens.own()
        part = question_part(tokens, question, case["head_max_len"])
        given = state_ids(tokens, "" if state is None else state)
        ids, readouts = text_row(tokens, part, given, case["max_len"], isinstance(state, list))
        got = [(list(ids), list(readouts), None)]
    else:
        tokenizer = load_tokenizer() if case["layout"] == "mask" else model_of(case["layout"]).tokenizer
        got = []
        for order in orders_of(case):
            row = build_row(
                tokenizer,
                question.reordered(order),
                case["frames"],
                image_tokens=4,
                state=state,
                max_len=case["max_len"],
                head_max_len=case["head_max_len"],
                layout="mask" if case["layout"] == "mask" else "terminator",
            )
            got.append((row.ids.tolist(), row.readouts.tolist(), list(row.option_span)))
    rows = len(got)
    ids, readouts, span = (VALUES(case, name).tolist() for name in ("ids", "readouts", "span"))
    length, options = len(ids) // rows, len(readouts) // rows
    faults = []
    for i, (got_ids, got_readouts, got_span) in enumerate(got):
        if got_ids != ids[i * length : (i + 1) * length]:
            faults.append(f"ids of order {i}: {len(got_ids)} for {length}")
        elif got_readouts != readouts[i * options : (i + 1) * options]:
            faults.append(f"readouts of order {i}")
        elif got_span is not None and got_span != span:
            faults.append(f"option span of order {i}: {got_span} for {span}")
    return faults


def decide(cases):
    """The answers of cases that differ in state and picture alone, one batch; those of a text prompt, one call."""
    case = cases[0]
    model, question = configured(case), question_of(case)
    if case["layout"] == "text":
        prompt = TextPrompt("" if state_of(case) is None else state_of(case), tuple(map(question_of, cases)))
        return [
            (answer.logits[0], answer.probabilities[0], answer.p_act[0])
            for answer in lab.TextStep(model).decide(prompt)
        ]
    attention = "block" if case["layout"] == "block" else "causal"
    step = lab.EagerStep(model, question, case["frames"], attention, orders=case["orders"])
    step.pixels = StoredPixels(cases)
    frames = np.zeros((len(cases), case["frames"], 8, 8, 3), np.uint8)
    states = list(map(state_of, cases))
    given = {"states": states} if any(state is not None for state in states) else {}
    answer = step.decide(frames, **given)
    if [list(order) for order in step.orders] != orders_of(case):
        raise AssertionError(f"orders {[list(order) for order in step.orders]} for {orders_of(case)}")
    return list(zip(answer.logits, answer.probabilities, answer.p_act, strict=True))


def answer_faults(case, got):
    faults = []
    for name, value, most in zip(
        ("logits", "probabilities", "p_act"), got, (LOGITS, PROBABILITIES, PROBABILITIES), strict=True
    ):
        stored = VALUES(case, name)
        if np.shape(np.atleast_1d(value)) != stored.shape:
            faults.append(f"{name}: {np.shape(value)} for {stored.shape}")
        elif not (off := np.abs(value - stored).max()) <= most:
            faults.append(f"{name} off by {off:.2g}")
    return faults


def said(case):
    return " ".join(
        f"{name}={case[name]}" for name in ("key", "layout", "question", "orders", "state", "frames", "heat")
    )


def compare(cases, check):
    """Fail with a line per case that is not as published."""
    found = []
    for case in cases:
        try:
            wrong = check(case)
        except Exception as error:  # an exception is a fault of its case: the others are looked at too
            wrong = [f"{type(error).__name__}: {str(error)[:200]}"]
        if wrong:
            found.append(f"{said(case)}: {'; '.join(wrong)}")
    assert not found, "\n".join([f"{len(found)} of {len(cases)} are not as published:", *found])


def group(layout, part):
    """`part` is a question type, the product of the dimensions, or extra, what no product holds."""
    return [
        case
        for case in CASES
        if case["layout"] == layout and part == ("extra" if case["texts"] == "extra" else case["type"])
    ]


GROUPS = [(layout, part) for layout in LAYOUTS for part in PARTS]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("layout", "part"), GROUPS)
def test_rows_are_the_published_ones(layout, part):
    compare(group(layout, part), row_faults)


@pytest.mark.parametrize(("layout", "part"), GROUPS)
def test_answers_are_the_published_ones(layout, part):
    compare(group(layout, part), lambda case: answer_faults(case, decide([case])[0]))


@pytest.mark.parametrize("name", sorted({case["together"] for case in CASES if "together" in case}))
def test_rows_of_unlike_length_are_answered_together(name):
    cases = [case for case in CASES if case.get("together") == name]
    assert len({len(VALUES(case, "ids")) for case in cases}) > 1
    answers = dict(zip([case["key"] for case in cases], decide(cases), strict=True))
    compare(cases, lambda case: answer_faults(case, answers[case["key"]]))


def test_the_grid_holds_every_pair_of_values():
    """Of those that can go together: a text row has neither frames nor orders nor a picture with its state."""
    grid = [case for case in CASES if case["texts"] != "extra"]
    values = {name: {case[name] for case in grid} for name in DIMENSIONS}
    for one, other in combinations(DIMENSIONS, 2):
        have = {(case[one], case[other]) for case in grid}
        for pair in ((a, b) for a in values[one] for b in values[other]):
            alone = {one: pair[0], other: pair[1]}
            text = alone.get("layout") == "text" or alone.get("frames") == 0
            picture = alone.get("frames", 0) > 0 or alone.get("orders", 1) > 1 or alone.get("state") == "mixed"
            if text and (picture or alone.get("layout", "text") != "text"):
                continue
            assert pair in have, alone
    assert {case["texts"] for case in grid} == {"none", "all", "some"}
    assert {(case["type"], case["texts"]) for case in grid} == {
        (kind, texts) for kind in ("choice", "score", "noul") for texts in ("none", "all", "some")
    }
