"""The explorers of notebooks 01 and 02, moved by hand in a real JupyterLab."""

import re

import lab
from lab.experiments import token_layout

MORE = " Think of the score, too, before you answer."


def tokens_of(more: str, frames: int = 1) -> int:
    """How many tokens pong's row has with a longer question and so many frames."""
    pong = lab.load_workloads()["pong"]
    asked = lab.Question(pong.question.type, pong.question.instructions + more, dict(pong.question.options))
    return len(token_layout.rows_of([lab.Workload("pong", "", asked, pong.source, frames)])["pong"])


def test_an_edited_question_moves_picture_strip_and_cost(jupyter):
    from playwright.sync_api import expect

    notebook = jupyter.open("01_token_layout", profile="smoke")
    notebook.run_all()
    explorer = notebook.page.locator(".lab-explorer-tokens")
    picture, error = explorer.locator("img"), explorer.locator(".lab-error")
    notebook.shots("tokens", ".lab-explorer-tokens")

    before = picture.get_attribute("src")  # another address whenever the picture's bytes are others
    explorer.locator(".lab-instructions textarea").press("Control+End")
    explorer.locator(".lab-instructions textarea").press_sequentially(MORE)
    expect(explorer).to_contain_text(f"of its {tokens_of(MORE)} tokens")
    expect(picture).not_to_have_attribute("src", before)

    before = picture.get_attribute("src")
    explorer.locator(".lab-frames .noUi-handle").press("ArrowRight")
    expect(explorer).to_contain_text(f"of its {tokens_of(MORE, 2)} tokens")
    expect(picture).not_to_have_attribute("src", before)

    explorer.locator(".lab-options textarea").fill("UP")
    expect(error).to_have_text("A question needs two or more options, this one has 1: add an alternative.")
    notebook.shots("tokens-error", ".lab-explorer-tokens")

    explorer.locator(".lab-workload select").select_option("boxing")
    expect(error).to_have_count(0)
    explorer.locator(".lab-layout select").select_option("question_first")
    expect(explorer).to_contain_text("yours, question first")
    expect(explorer).to_contain_text(re.compile(r"readouts 18\b"))
    notebook.shots("tokens-boxing", ".lab-explorer-tokens")


def test_a_chosen_workload_and_arm_change_bars_and_table(jupyter):
    from playwright.sync_api import expect

    notebook = jupyter.open("02_latency_breakdown", until="widgets.latency", profile="smoke")
    notebook.run_all()
    explorer = notebook.page.locator(".lab-explorer-latency")
    picture, lines = explorer.locator("img"), explorer.locator("tbody tr")
    notebook.shots("latency", ".lab-explorer-latency")
    expect(lines).to_have_count(5)
    before, causal = picture.get_attribute("src"), lines.first.inner_text().split()
    assert causal[:2] == ["pong", "causal"]

    explorer.locator(".lab-arm select").select_option("split")
    expect(lines).to_have_count(2)
    expect(picture).not_to_have_attribute("src", before)
    assert lines.first.inner_text().split()[:5] == causal[:5], "the arm that all are compared with stays"

    before = picture.get_attribute("src")
    explorer.locator(".lab-workload select").select_option("pong_two_frames")
    expect(lines.first).to_contain_text("pong_two_frames")
    expect(picture).not_to_have_attribute("src", before)
    assert lines.first.inner_text().split()[2:5] != causal[2:5]
    notebook.shots("latency-split", ".lab-explorer-latency")
