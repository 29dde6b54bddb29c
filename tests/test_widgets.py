"""The live panel, driven in Python and in a real kernel; tests/browser drives it by hand."""

import math
import time

import psutil
import pytest

import lab
import lab.widgets.panel
from lab import widgets
from lab.errors import InputError
from lab.views import View
from lab.widgets.panel import Panel

MAKE = "panel = widgets.play('doom:basic', model='tiny'); other = widgets.play('atari:Pong', model='tiny')"
WAIT = """
import time
def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(true())
"""


def until(true, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())


@pytest.fixture(scope="module")
def tiny():
    return lab.load_model("tiny")


@pytest.fixture
def panel(tiny):
    made = []

    def make(**settings) -> Panel:
        made.append(Panel(**{"source": "atari:Pong", "model": tiny} | settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def engines(process: psutil.Process | None = None) -> list[psutil.Process]:
    children = (process or psutil.Process()).children(recursive=True)
    return [child for child in children if child.name() == "vizdoom"]


def test_it_shows_picture_bars_numbers_and_state_while_it_plays(panel):
    one = panel(speed=math.inf)
    assert one._speed.label == "fastest"
    assert until(lambda: one.player.state == "playing" and one.player.session.decisions > 30)
    picture = one._image.value
    assert picture[:4] == b"\x89PNG" and "refrain-hide" not in one._image._dom_classes
    assert until(lambda: one._image.value != picture)
    assert "atari:Pong" in one._head.value and "tiny · static · cpu fp32 · greedy · seed 0" in one._head.value
    assert "● playing" in one._head.value and one._play.description == "Pause"
    assert "RIGHTFIRE" in one._bars.value and "decisions/s" in one._numbers.value and "drawing" in one._numbers.value
    assert "tiny is not trained" in one._note.value and one._instructions.value.startswith("You hold the right paddle")
    assert not one.player.trouble


def test_it_draws_at_most_so_often_however_fast_it_plays(panel, monkeypatch):
    one = panel(playing=False)
    assert until(lambda: one.player.state == "paused" and one._bars.value)
    drawn = {"encode": 0, "bars": 0}
    for name in drawn:
        work = getattr(lab.widgets.panel, name)
        counted = lambda *given, name=name, work=work: drawn.update({name: drawn[name] + 1}) or work(*given)  # noqa: E731
        monkeypatch.setattr(lab.widgets.panel, name, counted)
    calls, end = 0, time.monotonic() + 2
    while time.monotonic() < end:
        one._show(one.player, False)
        calls += 1
    assert calls > 500 and 2 < drawn["encode"] <= 2 * 24 + 2 and 2 < drawn["bars"] <= 2 * 10 + 2


def test_buttons_keys_and_fields_do_what_they_say(panel, tmp_path):
    one = panel(playing=False)
    player = one.player
    assert until(lambda: player.state == "paused")
    one._step.click()
    assert until(lambda: player.session.decisions == 1) and player.state == "paused"
    one._keys._handle_custom_msg({"key": "step"}, [])
    assert until(lambda: player.session.decisions == 2)
    one._keys._handle_custom_msg({"key": "faster"}, [])
    assert player.speed == 60.0 and one._speed.value == 60.0
    one._keys._handle_custom_msg({"key": "close()"}, [])  # not a key
    one._keys._handle_custom_msg({"key": "toggle"}, [])
    assert until(lambda: player.state == "playing" and player.session.decisions > 8)
    one._play.click()
    assert until(lambda: player.state == "paused" and one._play.description == "Play")
    assert until(lambda: one._place.max == len(player.session.recording) - 1 == one._place.value)
    one._place.value = 1
    assert until(lambda: player.place == 1 and one._where.value.startswith("decision 2: "))
    one._keys._handle_custom_msg({"key": "back"}, [])
    assert until(lambda: one._place.value == 0) and player.moment.number == 1
    one._path.value = str(tmp_path / "play.gif")
    player.do(one._save)
    assert until(lambda: one._saved.value.startswith("saved ")) and (tmp_path / "play.gif").stat().st_size > 1000
    one._path.value = str(tmp_path / "play.mp4")
    player.do(one._save)
    assert until(lambda: "let it end in .gif" in one._saved.value)
    one._restart.click()
    assert until(lambda: player.session.decisions == 0 and len(player.session.recording) == 0)
    one._chosen["seed"].value = 7
    assert until(lambda: player.session.seed == 7 and "seed 7" in one._head.value)
    one._chosen["step"].value = "question_first"
    assert until(lambda: player.state == "paused" and player.session.kind == "question_first")
    one._shut.click()
    assert player.state == "closed" and one._play.disabled and "● closed" in one._head.value


def test_the_question_is_edited_in_place(panel):
    one = panel(playing=False, source="doom:basic")
    assert until(lambda: one.player.state == "paused" and "ATTACK" in one._texts)
    before = one._bars.value
    one._texts["ATTACK"].value = "wait and see"
    assert until(lambda: one.player.session.question.rendered[2] == "ATTACK: wait and see")
    assert until(lambda: one.player.before is not None and one._bars.value != before)
    one._instructions.value = " "
    assert until(lambda: "needs instructions" in one._note.value)
    one._original()
    assert until(lambda: one.player.session.question.rendered[2] == "ATTACK: shoot")
    assert one._texts["ATTACK"].value == "shoot" and one._instructions.value.startswith("You are playing Doom")
    one._chosen["source"].value = "atari:Breakout"
    assert until(
        lambda: list(one._texts) == ["NOOP", "FIRE", "RIGHT", "LEFT"] and "Breakout" in one._instructions.value
    )
    assert not engines()


def test_closing_one_of_two_panels_frees_its_emulator_and_leaves_the_other(panel):
    doom, other = panel(source="doom:basic"), panel(source="doom:basic", seed=3)
    assert until(lambda: doom.player.state == other.player.state == "playing")
    assert len(engines()) == 2
    doom.close()
    assert len(engines()) == 1 and doom.player.state == "closed"
    count = other.player.session.decisions
    assert until(lambda: other.player.session.decisions > count + 3)
    other.close()
    assert not engines()


def test_what_cannot_be_is_refused_or_said(panel):
    with pytest.raises(InputError, match="Unknown step"):
        panel(step="magic")
    one = panel(source="doom:nowhere")
    assert until(lambda: one.player.state == "failed" and "Unknown Doom scenario" in one._note.value)
    one._chosen["source"].value = "atari:Pong"
    assert until(lambda: one.player.state == "paused")


def test_without_a_page_it_is_a_strip_and_on_a_page_it_carries_one(panel, tiny, monkeypatch):
    still = widgets.play("atari:Pong", model=tiny, decisions=6, speed=3.0)
    assert isinstance(still, View) and still.html.count("data:image/") == 4 and "6 decisions" in still.text
    one = panel()
    assert until(lambda: one.player.state == "playing" and one.player.session.decisions > 3)
    data = one._repr_mimebundle_()
    assert "data:image/" in data["text/html"] and "application/vnd.jupyter.widget-view+json" in data
    monkeypatch.setattr(widgets, "interactive", lambda: True)
    live = widgets.play("atari:Pong", model=tiny, playing=False)
    try:
        assert isinstance(live, Panel)
    finally:
        live.close()


@pytest.fixture(scope="module")
def kernel():
    """run(code, cell) -> what the code printed, in a kernel of its own; run.manager and run.process are its."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--IPKernelApp.log_level=ERROR"])

    def run(code: str, cell: str | None = None) -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "stop_on_error": True}
        message = client.session.msg("execute_request", content, metadata={"cellId": cell} if cell else {})
        client.shell_channel.send(message)
        said = ""
        while True:
            answer = client.get_iopub_msg(timeout=60)
            if answer["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            if answer["msg_type"] == "stream":
                said += answer["content"]["text"]
            if answer["msg_type"] == "error":
                said += answer["content"]["ename"]
            if answer["msg_type"] == "status" and answer["content"]["execution_state"] == "idle":
                return said.strip()

    run.manager, run.process = manager, psutil.Process(manager.provisioner.pid)
    assert run(WAIT + "from lab import widgets\n" + MAKE, "cell-1") == ""
    assert run("print(until(lambda: panel.player.state == other.player.state == 'playing'))") == "True"
    yield run
    client.stop_channels()
    if manager.is_alive():
        manager.shutdown_kernel(now=True)


def test_in_a_kernel_cells_go_on_and_the_stop_button_stops_the_play(kernel):
    states = "panel.player.state, other.player.state"
    (engine,) = engines(kernel.process)

    kernel.manager.interrupt_kernel()  # between cells, when a kernel by itself hears nothing
    assert kernel(f"print(until(lambda: ({states}) == ('interrupted', 'interrupted')), panel._note.value)").startswith(
        "True <div"
    )
    assert engines(kernel.process) == [engine]
    assert kernel("count = panel.player.session.decisions; panel.player.play(); "
                  "print(until(lambda: panel.player.session.decisions > count + 5))") == "True"  # fmt: skip

    kernel("import threading, signal, os; threading.Timer(1, lambda: os.killpg(0, signal.SIGINT)).start()")
    assert kernel("time.sleep(30)") == "KeyboardInterrupt"  # in the middle of a cell
    assert kernel("print(until(lambda: panel.player.state == 'interrupted'))") == "True"
    assert engines(kernel.process) == [engine]
    assert kernel("1 + 1; print('alive')") == "alive"


def test_running_its_cell_again_frees_what_it_had_started(kernel):
    kernel("earlier = panel, other")
    kernel(MAKE, "cell-1")
    assert kernel("print(*(one.player.state for one in earlier), until(lambda: panel.player.state == 'playing'))") == (
        "closed closed True"
    )
    assert len(engines(kernel.process)) == 1


def test_the_end_of_the_kernel_leaves_no_engine(kernel):
    (engine,) = engines(kernel.process)
    start = time.monotonic()
    kernel.manager.shutdown_kernel()
    assert until(lambda: not engine.is_running(), 5), "an engine without a kernel"
    assert time.monotonic() - start < 20
