"""Questions and the workload file: what is understood and what is refused."""

import numpy as np
import pytest

import lab
from lab.errors import InputError
from lab.models.heads import Decisions
from lab.workloads import get_workload, load_workloads


def test_the_six_shipped_workloads():
    known = load_workloads()
    assert list(known) == ["breakout", "pong", "boxing", "doom_basic", "doom_deadly_corridor", "pong_two_frames"]
    assert known["pong_two_frames"].question == known["pong"].question
    assert known["pong_two_frames"].frames == 2
    assert known["boxing"].source == "atari:Boxing" and len(known["boxing"].question.options) == 18


def test_options_render_as_name_and_description():
    question = lab.Question("choice", "Which?", {"LEFT": "move left", "WAIT": None})
    assert question.rendered == ["LEFT: move left", "WAIT"]
    assert question.names == ["LEFT", "WAIT"]
    assert lab.Question("score", "How much?", ["none", "all"]).rendered == ["level 0: none", "level 1: all"]
    assert lab.Question("noul", "Is it?", {"true": "it is"}).rendered == [
        "false: no, the statement does not hold",  # the published prompt's words where the question has none
        "true: it is",
    ]
    assert question.reordered([1, 0]).names == ["WAIT", "LEFT"]


def test_reordered_options_keep_what_they_are():
    levels = lab.Question("score", "How near?", ["far", "near", "here"]).reordered([2, 0, 1])
    assert levels.rendered == ["level 2: here", "level 0: far", "level 1: near"]
    p = np.array([[0.6, 0.1, 0.3]], np.float32)
    assert Decisions(levels, p, p, np.ones(1)).value == pytest.approx([2 * 0.6 + 0.3])
    turned = lab.Question("noul", "Is it?").reordered([1, 0])
    assert turned.names == ["true", "false"]
    assert Decisions(turned, p[:, :2], p[:, :2], np.ones(1)).value == pytest.approx([0.6])
    for odd in ([0, 0, 1], [0], [-1, 0, 1], [3, 1, 0]):
        with pytest.raises(InputError, match="no order of 3 options"):
            levels.reordered(odd)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("noul", "Is it?", ["true", "true"]), "each once"),
        (("pick", "Which?", ["a", "b"]), "Unknown question type 'pick'"),
        (("choice", " ", ["a", "b"]), "needs instructions"),
        (("choice", "Which?", ["a"]), "two or more options, this one has 1"),
        (("choice", "Which?", ["a", "b", "a"]), "'a' appears twice"),
        (("choice", "Which?", [str(i) for i in range(256)]), "256 options are more than the 255"),
        (("choice", "Which?", "abc"), "not the single text 'abc'"),
        (("choice", "Which?", None), "a list or a table of names, not None"),
        (("choice", "Which?", [("a", "b"), ("c", "d")]), "are texts, not"),
        (("choice", "Which?", {"a": {"b": 1}, "c": None}), "are texts, not"),
        (("choice", "Which?", ["a", " "]), "an empty name"),
        (("noul", "Is it?", ["yes", "no"]), "the options false and true, not yes, no"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        lab.Question(*arguments)


def test_unknown_workload_names_the_nearest():
    with pytest.raises(InputError, match="Unknown workload 'pongg'.*Did you mean 'pong'"):
        get_workload("pongg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nsource = 'atari:Pong'\n", "'a' lacks 'instructions'"),
        ("[a]\nsource = 1\nfps = 3\n", "unknown key 'fps'"),
        ("a = 1\n", "outside a table"),
        ("[a\n", "cannot be read"),
        ("[a]\nlike = 'b'\n", "is like 'b'"),
        ("[a]\nlike = ['a']\n", "is like"),
        ("[a]\nsource = 1\ninstructions = 'W?'\noptions = ['a', 'b']\n", "source is 1"),
        ("[a]\nsource = 'atari:Pong'\ninstructions = 'W?'\noptions = 3\n", "'a': Options are a list or a table"),
        ("[a]\nsource = 'atari:Pong'\ninstructions = 'W?'\noptions = ['a']\n", "workload 'a': A question needs two"),
        ("[a]\nsource = 'atari:Pong'\ninstructions = 'W?'\noptions = ['a', 'b']\nframes = 9\n", "frames is 9"),
    ],
)
def test_workload_files_that_cannot_be_read_are_refused(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        load_workloads(path)


def test_missing_workload_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_workloads(tmp_path / "none.toml")
    (tmp_path / "old.toml").write_bytes("title = 'Gr\u00fcn'".encode("latin-1"))
    with pytest.raises(InputError, match="cannot be read: 'utf-8' codec"):
        load_workloads(tmp_path / "old.toml")


def test_importing_lab_loads_no_torch():
    import subprocess
    import sys

    code = "import lab, sys; print(sorted({'torch', 'transformers', 'matplotlib', 'gymnasium'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
