"""The explorers of notebooks 01 and 02, moved by hand in a real JupyterLab."""

import re


def src(notebook, name: str) -> str:
    """The address of the explorer's picture: another one whenever the picture's bytes are others."""
    return notebook.page.locator(f".lab-explorer-{name} img").get_attribute("src")


def changed(notebook, name: str, before: str) -> None:
    notebook.page.wait_for_function(
        "([name, before]) => document.querySelector(`.lab-explorer-${name} img`).src !== before", arg=[name, before]
    )


def number(notebook, name: str, words: str) -> int:
    return int(re.search(words, notebook.page.locator(f".lab-explorer-{name}").inner_text())[1])


def test_an_edited_question_moves_picture_strip_and_cost(jupyter):
    notebook = jupyter.open("01_token_layout", profile="smoke")
    notebook.run_all()
    explorer = notebook.page.locator(".lab-explorer-tokens")
    explorer.scroll_into_view_if_needed()
    notebook.shots("tokens", ".lab-explorer-tokens")
    before, tokens = src(notebook, "tokens"), number(notebook, "tokens", r"of its (\d+) tokens")
    explorer.locator(".lab-instructions textarea").press_sequentially("Think of the score, too, before you answer.")
    changed(notebook, "tokens", before)
    explorer.get_by_text(re.compile(r"of its 1[3-9]\d tokens")).wait_for()
    assert 5 < number(notebook, "tokens", r"of its (\d+) tokens") - tokens < 20
    before = src(notebook, "tokens")
    explorer.locator(".lab-frames .noUi-handle").press("ArrowRight")
    changed(notebook, "tokens", before)
    explorer.get_by_text(re.compile(r"of its 2[4-6]\d tokens")).wait_for()

    explorer.locator(".lab-options textarea").fill("UP")
    error = explorer.locator(".lab-error")
    error.wait_for()
    assert error.inner_text() == "A question needs two or more options, this one has 1: add an alternative."
    notebook.shots("tokens-error", ".lab-explorer-tokens")

    before = src(notebook, "tokens")
    explorer.locator(".lab-workload select").select_option("boxing")
    changed(notebook, "tokens", before)
    explorer.locator(".lab-layout select").select_option("question_first")
    explorer.get_by_text("yours, question first").wait_for()
    assert error.count() == 0
    notebook.shots("tokens-boxing", ".lab-explorer-tokens")


def test_a_chosen_workload_and_arm_change_bars_and_table(jupyter):
    notebook = jupyter.open("02_latency_breakdown", profile="smoke")
    notebook.run_all()
    explorer = notebook.page.locator(".lab-explorer-latency")
    explorer.scroll_into_view_if_needed()
    notebook.shots("latency", ".lab-explorer-latency")
    lines = explorer.locator("tbody tr")
    assert lines.count() == 5 and explorer.locator("thead").inner_text().split()[:2] == ["workload", "arm"]
    before, total = src(notebook, "latency"), lines.first.inner_text()
    explorer.locator(".lab-arm select").select_option("split")
    changed(notebook, "latency", before)
    explorer.get_by_text("pong: split").wait_for()
    assert lines.count() == 2 and lines.first.inner_text() == total
    explorer.locator(".lab-workload select").select_option("pong_two_frames")
    explorer.get_by_text("pong_two_frames: split").wait_for()
    assert lines.count() == 2 and lines.first.inner_text() != total
    notebook.shots("latency-split", ".lab-explorer-latency")
