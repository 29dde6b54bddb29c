"""The live panel of notebook 10 in a real JupyterLab: it plays, shows it, and hears the keyboard."""

import re

import pytest


@pytest.fixture
def notebook(jupyter):
    return jupyter.open("10_live_play", profile="smoke")


def test_run_all_and_it_plays_until_a_key_pauses_it(notebook):
    from playwright.sync_api import expect

    notebook.run_all()
    page, panel = notebook.page, notebook.page.locator(".refrain-panel")
    state, picture, rate = (panel.locator(f".refrain-{name}") for name in ("state", "frame", "rate"))
    expect(state).to_have_text("● playing")
    expect(picture).to_be_in_viewport()  # although "run all" goes to the notebook's end
    seen = {(picture.get_attribute("src"), rate.inner_text()) for _ in range(20) if page.wait_for_timeout(150) is None}
    assert len({src for src, _ in seen}) > 10, "the picture moves"
    assert len({said for _, said in seen}) > 2 and all(re.fullmatch(r"\d+\.\d", said) for _, said in seen)
    notebook.shots("live-playing", ".refrain-panel")

    picture.click()
    assert panel.evaluate("panel => panel === document.activeElement"), "a click on the picture turns the keys on"
    page.keyboard.press("Space")
    expect(state).to_have_text("● paused")
    still = picture.get_attribute("src")
    page.wait_for_timeout(500)
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

    notebook.run_all()
    page, panel = notebook.page, notebook.page.locator(".refrain-panel")
    state, bars = panel.locator(".refrain-state"), panel.locator(".refrain-bars")
    expect(state).to_have_text("● playing")
    panel.get_by_role("button", name="Pause").click()
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
    panel.get_by_role("button", name="Play").click()
    expect(panel).to_contain_text(re.compile(r"\b[2-9]\d actions"))
    panel.locator(".refrain-frame").click()
    page.keyboard.press("Space")
    notebook.shots("live-boxing", ".refrain-panel")

    panel.get_by_text("Replay and save").click()
    panel.locator(".refrain-scrub .noUi-handle").press("Home")
    expect(panel).to_contain_text("decision 1: ")
    panel.locator(".refrain-path input").fill("boxing.gif")
    panel.get_by_role("button", name="Save as GIF").click()
    expect(panel).to_contain_text(re.compile(r"saved \d+ pictures, \d+ kB, in boxing.gif"))
    notebook.shots("live-replay", ".refrain-panel")
    panel.get_by_role("button", name="Close").click()
    expect(state).to_have_text("● closed")


def _actions(panel) -> int:
    return int(re.search(r"(\d+) actions", panel.inner_text())[1])
