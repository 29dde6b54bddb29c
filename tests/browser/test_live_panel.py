"""The live panel of notebook 10 in a real JupyterLab: it plays, shows it, and hears the keyboard. The tests take turns on
one panel, in their order, and each also works alone."""

import re

import pytest

from lab.live_choices import SNAKE_MODELS, SNAKE_STEPS

MOVES = """() => {  // true once ten pictures and two rates were seen
    const seen = window.seen ??= {src: new Set(), rate: new Set()};
    seen.src.add(document.querySelector(".refrain-frame").src);
    seen.rate.add(document.querySelector(".refrain-rate").textContent);
    return seen.src.size > 10 && seen.rate.size > 2 && [...seen.rate];
}"""
CUT_OFF = """box => [...box.querySelectorAll("span")].filter(one => one.scrollWidth > one.clientWidth + 1)
    .map(one => one.textContent)"""


@pytest.fixture(scope="module")
def notebook(jupyter):
    notebook = jupyter.open("10_live_play", profile="smoke")
    notebook.run_all()
    return notebook


def test_run_all_and_it_plays_until_a_key_pauses_it(notebook):
    from playwright.sync_api import expect

    page, panel = notebook.page, notebook.page.locator(".refrain-panel")
    state, picture = panel.locator(".refrain-state"), panel.locator(".refrain-frame")
    expect(state).to_have_text("● playing")
    expect(picture).to_be_in_viewport()  # although "run all" goes to the notebook's end
    rates = page.wait_for_function(MOVES).json_value()
    assert all(re.fullmatch(r"\d+\.\d", said) for said in rates)
    notebook.shots("live-playing", ".refrain-panel")

    picture.click()
    assert panel.evaluate("panel => panel === document.activeElement"), "a click on the picture turns the keys on"
    page.keyboard.press("Space")
    expect(state).to_have_text("● paused")
    still = picture.get_attribute("src")
    page.wait_for_timeout(300)
    assert picture.get_attribute("src") == still

    actions = _actions(panel)
    page.keyboard.press("s")
    expect(panel).to_contain_text(f"{actions + 1} actions")
    page.keyboard.press("ArrowRight")
    expect(panel).to_contain_text(f"{actions + 2} actions")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    expect(panel.locator(".refrain-speed")).to_contain_text("60/s")
    cells = page.locator(".jp-Notebook .jp-Cell").count()
    for key in "abdm":  # JupyterLab's own: a new cell above, below, away with it, to text
        page.keyboard.press(key)
    page.keyboard.press("r")
    expect(panel).to_contain_text("0 actions")
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells, "the panel has the keys, not the notebook"


def test_a_changed_question_game_and_moment_show_in_the_panel(notebook):
    from playwright.sync_api import expect

    page, panel = notebook.page, notebook.page.locator(".refrain-panel")
    state, bars = panel.locator(".refrain-state"), panel.locator(".refrain-bars")
    _press(panel, "Pause")
    expect(state).to_have_text("● paused")

    panel.get_by_text("Change the question").click()
    before = bars.inner_text()
    text = panel.locator(".refrain-instructions textarea")
    text.press("Control+End")
    text.press_sequentially(" sr + Always step to left, r never shoot.")  # letters that are keys elsewhere
    expect(panel.locator(".refrain-question")).to_contain_text("sr + Always step to left, r never shoot.")
    expect(bars).not_to_have_text(before)
    expect(bars).to_contain_text(re.compile(r"[+-]\d"))  # the change, in points
    expect(state).to_have_text("● paused")
    notebook.shots("live-question", ".refrain-panel")
    text.fill(" ")
    expect(panel.locator(".refrain-note")).to_contain_text("A question needs instructions")
    panel.get_by_role("button", name="Original question").click()
    expect(panel.locator(".refrain-question")).not_to_contain_text("never shoot")

    panel.get_by_text("Game, model, step").click()
    panel.locator(".refrain-source select").select_option("atari:Boxing")
    expect(panel.locator(".refrain-head")).to_contain_text("atari:Boxing")
    expect(bars).to_contain_text("DOWNRIGHTFIRE")
    _press(panel, "Play")
    expect(panel).to_contain_text(re.compile(r"\b[2-9]\d actions"))
    panel.locator(".refrain-frame").click()
    page.keyboard.press("Space")
    expect(state).to_have_text("● paused")  # a decision that is still to come would move the slider on
    notebook.shots("live-boxing", ".refrain-panel")

    panel.get_by_text("Replay and save").click()
    panel.locator(".refrain-scrub .noUi-handle").press("Home")
    expect(panel).to_contain_text("decision 1: ")
    panel.locator(".refrain-path input").fill("boxing.gif")
    panel.get_by_role("button", name="Save as GIF").click()
    expect(panel).to_contain_text(re.compile(r"saved \d+ pictures, \d+ kB, in boxing.gif"))
    notebook.shots("live-replay", ".refrain-panel")


def test_snake_plays_with_its_own_models_and_gives_way_to_a_game_of_frames(notebook):
    from playwright.sync_api import expect

    page, panel = notebook.page, notebook.page.locator(".refrain-panel")
    state, head, bars, numbers = (panel.locator(f".refrain-{name}") for name in ("state", "head", "bars", "numbers"))
    source, model, step = (panel.locator(f".refrain-{name} select") for name in ("source", "model", "step"))
    panel.get_by_text("Game, model, step").click()
    frames = panel.locator(".refrain-frames")
    expect(frames).to_be_visible()
    before = head.inner_text().split("\n")[1]  # model, step, device, dtype

    source.select_option("snake:24x16")
    expect(head).to_contain_text("snake · eager · cpu fp32")
    expect(frames).to_be_hidden()
    assert [field.locator("option").all_inner_texts() for field in (model, step)] == [[*SNAKE_MODELS], [*SNAKE_STEPS]]
    _press(panel, "Play")
    expect(state).to_have_text("● playing")
    page.evaluate("() => { window.seen = undefined }")
    page.wait_for_function(MOVES)
    expect(numbers).to_contain_text(re.compile(r"score [1-9]"))
    for asked in (
        "Is there at least one safe route for the snake now?",
        "Can the food be reached over empty cells only?",
    ):
        expect(bars).to_contain_text(re.compile(re.escape(asked) + r"\s*yes\s*\d+%"))
    expect(bars).to_contain_text(re.compile(r"(UP|DOWN|LEFT|RIGHT) safe"))
    assert bars.evaluate(CUT_OFF) == []
    notebook.shots("live-snake", ".refrain-panel")

    _press(panel, "Pause")
    expect(state).to_have_text("● paused")
    actions = _actions(panel)
    _press(panel, "Step")
    expect(panel).to_contain_text(f"{actions + 1} actions")
    seed = panel.locator(".refrain-seed input")
    seed.fill("7")
    seed.press("Enter")
    expect(head).to_contain_text("seed 7")
    expect(numbers).to_contain_text("score 0 · 0 actions")
    panel.get_by_text("Change the question").click()
    expect(panel.locator(".refrain-instructions textarea")).to_have_value(re.compile("You steer a snake"))
    expect(panel.locator(".refrain-options")).to_be_hidden()  # the planner writes them, for every board anew
    notebook.shots("live-snake-question", ".refrain-panel")

    panel.get_by_text("Game, model, step").click()
    model.select_option("snake-tenth")  # which the shield has to help
    expect(head).to_contain_text("snake-tenth")
    expect(state).to_have_text("● paused")
    _press(panel, "Play")
    expect(numbers).to_contain_text(re.compile(r"interventions [1-9]"))
    source.select_option("atari:Pong")
    expect(head).to_contain_text("atari:Pong")
    expect(bars).to_contain_text("RIGHTFIRE")
    expect(state).to_have_text("● playing")
    expect(frames).to_be_visible()
    assert head.inner_text().split("\n")[1].split(" · ")[:3] == before.split(" · ")[:3]
    _press(panel, "Close")
    expect(state).to_have_text("● closed")


def _press(panel, name: str) -> None:
    """Press a button; Play where it plays already, and Pause where it rests, are not there to be pressed."""
    button = panel.get_by_role("button", name=name)
    if name not in ("Play", "Pause") or button.is_visible():
        button.click()


def _actions(panel) -> int:
    return int(re.search(r"(\d+) actions", panel.inner_text())[1])
