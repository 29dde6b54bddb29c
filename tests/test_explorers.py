import asyncio
import io
import sys
from types import SimpleNamespace

import ipywidgets
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from PIL import Image

from lab import widgets
from lab.errors import InputError
from lab.experiments import token_layout
from lab.figures import new_figure
from lab.tokens import build_row, load_tokenizer
from lab.widgets.explorers import Explorer, picture, read_options
from lab.workloads import Question


def figure(count: int = 1):
    drawn, axes = new_figure(3, 2)
    axes.plot(range(count))
    return drawn


def text_of(part: ipywidgets.HTML) -> str:
    return " ".join(BeautifulSoup(part.value, "html.parser").get_text(" ").split())


def explorer(show, **controls) -> Explorer:
    return Explorer("test", show, controls or {"count": ipywidgets.IntSlider(1, 0, 9)})


# --- what all explorers share -----------------------------------------------------------------------------------------


def test_a_moved_control_changes_the_picture_in_its_place():
    moved = explorer(lambda count: (figure(count), f"{count} points & more"))
    shown, before = moved.shown, moved.shown[0].value
    moved.controls["count"].value = 4
    assert moved.shown == shown, "the same widgets, so that the page does not jump"
    assert moved.shown[0].value != before and text_of(moved.shown[1]) == "4 points & more"


def test_a_picture_has_no_ground_and_the_size_the_notebook_shows():
    drawn = figure()
    image = Image.open(io.BytesIO(picture(drawn).value))
    assert image.mode == "RGBA" and image.getpixel((0, 0))[3] == 0
    assert abs(int(picture(drawn).width) - 3 * drawn.dpi) < 0.1 * 3 * drawn.dpi
    assert image.width > 1.9 * int(picture(drawn).width), "sharp on a fine screen"


def test_bad_input_is_a_sentence_above_what_was_shown_last():
    def show(count):
        if count > 5:
            raise InputError("count is too large; give <= 5.")
        return [f"{10 // (count - 1)}"] if count != 2 else ["two", figure()]

    moved = explorer(show, count=ipywidgets.IntText(3))
    moved.set(count=6)
    assert moved.error == "count is too large; give <= 5."
    assert "&lt;= 5." in moved._error.value and "lab-stale" in moved._shown._dom_classes
    assert text_of(moved.shown[0]) == "5", "what was shown last"
    moved.set(count=1)
    assert moved.error.startswith("ZeroDivisionError"), "a fault of ours is not swallowed either"
    with pytest.raises(ZeroDivisionError):
        explorer(show, count=ipywidgets.IntText(1))  # in the cell itself, where it can be seen
    moved.set(count=2)
    assert (moved.error, moved._error.value, moved._shown._dom_classes) == ("", "", ())
    assert [type(part) for part in moved.shown] == [ipywidgets.HTML, ipywidgets.Image]


def test_what_changes_while_somebody_types_is_shown_once():
    calls = []

    async def typing():
        moved = explorer(lambda text: calls.append(text) or [text], text=ipywidgets.Textarea("a"))
        moved.wait_s = 0.05
        for text in ("ab", "abc", "abcd"):
            moved.controls["text"].value = text
            await asyncio.sleep(0.005)
        assert calls == ["a"]
        await asyncio.sleep(0.2)

    asyncio.run(typing())
    assert calls == ["a", "abcd"]


def test_a_widget_is_shown_only_where_it_can_be_moved(monkeypatch):
    moved = explorer(lambda count: ["here"])
    still = moved._repr_mimebundle_()
    assert set(still) == {"text/plain", "text/html"} and "JupyterLab" in still["text/html"]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    monkeypatch.delenv("LAB_HEADLESS", raising=False)
    assert widgets.interactive()
    assert "application/vnd.jupyter.widget-view+json" in moved._repr_mimebundle_()
    monkeypatch.setenv("LAB_HEADLESS", "1")
    assert not widgets.interactive() and set(moved._repr_mimebundle_()) == {"text/plain", "text/html"}
    monkeypatch.delenv("LAB_HEADLESS")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not widgets.interactive(), "plain Python"


# --- notebook 01 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens():
    return widgets.tokens(preset="tiny")


def cells(table: ipywidgets.HTML) -> list[list[str]]:
    rows = BeautifulSoup(table.value, "html.parser").find_all("tr")
    return [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in rows]


def test_it_opens_with_a_shipped_workload_unchanged(tokens):
    tokens.set(workload="pong")
    _, shipped, yours, change = cells(tokens.shown[2])
    assert shipped[0] == "pong, as shipped" and yours[1:] == shipped[1:]
    assert change[1:] == ["+0", "+0", "+0.0%", "+0"]


def test_an_edited_question_shows_its_tokens_and_what_they_cost(tokens):
    tokens.set(workload="pong")
    before = tokens.shown[0].value
    tokens.set(instructions="Which?", options="UP: go up\n\nDOWN\nJUMP: now: or never")
    assert tokens.error == "" and tokens.shown[0].value != before
    question = Question("choice", "Which?", {"UP": "go up", "DOWN": "", "JUMP": "now: or never"})
    row = build_row(load_tokenizer(), question, 1, 4)
    line = token_layout.line("yours", row)
    _, shipped, yours, change = cells(tokens.shown[2])
    assert yours[:3] == ["yours", str(len(row)), str(line["fixed_share"])]
    assert change[1] == str(len(row) - int(shipped[1]))
    assert f"first {row.kept} of its {len(row)} tokens" in text_of(tokens.shown[1])
    assert f"{len(row)} tokens" in text_of(tokens.shown[3]) and "▪" in text_of(tokens.shown[3])


def test_frames_and_layout_move_picture_and_cost(tokens):
    tokens.set(workload="pong")
    one = cells(tokens.shown[2])[2]
    tokens.set(frames=3)
    three = cells(tokens.shown[2])[2]
    assert int(three[1]) - int(one[1]) == 2 * 7, "two more runs of 4 image tokens and 3 around them"
    assert float(three[3]) > float(one[3])
    for layout in ("question_first", "mask", "published_simulation"):
        before = tokens.shown[0].value
        tokens.set(layout=layout)
        assert tokens.error == "" and tokens.shown[0].value != before, layout
    tokens.set(layout="terminator", frames=1)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"instructions": " "}, "A question needs instructions: a text that is not empty."),
        ({"options": "UP: go up"}, "this one has 1"),
        ({"options": "UP: go up\nUP: again"}, "'UP' appears twice"),
        ({"options": ": nameless\nUP"}, "empty name"),
        ({"type": "noul"}, "the options false and true"),
        ({"options": "\n".join(f"option number {i}" for i in range(90))}, "are read as the same 4 tokens"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_in_one_sentence(tokens, values, sentence):
    tokens.set(workload="breakout")
    tokens.set(workload="pong")
    tokens.set(**values)
    assert sentence in tokens.error and "\n" not in tokens.error
    tokens.set(workload="breakout")
    assert tokens.error == "", "another workload fills the fields anew"


def test_it_says_what_was_too_long(tokens):
    tokens.set(workload="pong")
    assert "left out" not in text_of(tokens.shown[1])
    tokens.set(instructions="word " * 300)
    assert "left out of: the question." in text_of(tokens.shown[1])
    tokens.set(instructions="Which?", options="UP: " + "up " * 60 + "\nDOWN: down")
    assert "left out of: UP." in text_of(tokens.shown[1])


def test_options_are_read_line_by_line():
    assert read_options("A: one: two\n\n  B  \nC:") == {"A": "one: two", "B": "", "C": ""}
    assert read_options("A: x\nA: y") == ["A", "A"]


# --- notebook 02 ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    """Rows as notebook 02's, of arms that do nothing but mark their stages: two workloads, the second with one arm less."""
    from lab.experiments import latency
    from lab.measure import Arm, compare, stage
    from lab.records import join_rows

    def arm(name, *stages):
        def call(_):
            for each in stages:
                with stage(each):
                    sum(range(2000))

        return Arm(name, call, describe={"dtype": "bf16", "arm": name})

    arms = [arm("causal", "vision", "language"), arm("split", "vision", "language_prefix", "language_question")]
    tables = [compare(arms, [0], blocks=6, title="pong"), compare(arms[:1], [0], blocks=6, title="doom_basic")]
    assert {"causal", "split"} < set(latency.ARMS)
    return join_rows(tables)


def test_bars_and_table_are_those_of_the_choice(rows):
    chosen = widgets.latency(rows)
    assert chosen.controls["dtype"].options == ("bf16",) and chosen.controls["arm"].options == (
        "all of them", "causal", "split",
    )  # fmt: skip
    head, *lines = cells(chosen.shown[3])
    assert [line[:2] for line in lines] == [["pong", "causal"], ["pong", "split"]]
    assert head[2] == "total" and "language question" in head
    assert "pong: split" in text_of(chosen.shown[1])
    before = chosen.shown[0].value
    chosen.set(arm="causal")
    assert chosen.shown[0].value != before
    assert [line[:2] for line in cells(chosen.shown[3])[1:]] == [["pong", "causal"]]
    chosen.set(workload="all of them", arm="all of them")
    assert [line[:2] for line in cells(chosen.shown[3])[1:]] == [
        ["pong", "causal"], ["pong", "split"], ["doom_basic", "causal"],
    ]  # fmt: skip


def test_an_arm_that_a_workload_lacks_is_said_so(rows):
    chosen = widgets.latency(rows)
    chosen.set(workload="doom_basic", arm="split")
    assert chosen.error == "doom_basic has no arm 'split' in bf16; choose another."
    chosen.set(workload="pong")
    assert chosen.error == ""


def test_rows_of_two_dtypes_are_kept_apart(rows):
    other = rows[rows["title"] == "pong"].copy()
    other["describe"] = [said | {"dtype": "fp32"} for said in other["describe"]]
    other["ms"] *= 1000
    chosen = widgets.latency(pd.concat([rows, other]))
    quick = [float(line[2].split()[0]) for line in cells(chosen.shown[3])[1:]]
    chosen.set(dtype="fp32")
    slow = [float(line[2].split()[0]) for line in cells(chosen.shown[3])[1:]]
    assert len(slow) == 2 and all(one > 100 * other for one, other in zip(slow, quick, strict=True))
    chosen.set(workload="doom_basic")
    assert chosen.error == "doom_basic has no rows in fp32; choose another."
