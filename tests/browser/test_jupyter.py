"""A notebook opens in a real JupyterLab, on this Python, in both themes."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

OPENS = "test_it_opens_with_its_parameters_on_this_python_and_in_both_themes"


def kernels(jupyter) -> list[psutil.Process]:
    started = psutil.Process(jupyter.process.pid).children(recursive=True)
    return [process for process in started if "ipykernel_launcher" in process.cmdline()]


def test_it_opens_with_its_parameters_on_this_python_and_in_both_themes(jupyter):
    notebook = jupyter.open("05_duplicate_frames", profile="smoke", seed=7)
    page = notebook.page
    assert {"profile = 'smoke'", "seed = 7"} <= set(page.locator(".jp-CodeCell").first.inner_text().splitlines())
    (kernel,) = kernels(jupyter)  # that of the notebook opened before, in another test, serves this one
    assert kernel.cmdline()[0] == sys.executable
    light, dark = notebook.pictures("jupyter", ".jp-Notebook")
    assert Image.open(light).convert("L").getpixel((3, 3)) > 200
    assert Image.open(dark).convert("L").getpixel((3, 3)) < 60
    assert page.locator(".jp-toast-container, .Toastify__toast").count() == 0, "no news is asked for"


@pytest.mark.parametrize(("required", "said"), [("required", "1 error"), ("", "1 skipped")])
def test_without_a_browser_it_is_skipped_but_fails_where_required(required, said):
    """What .ci/run relies on; the remedy is named in both cases."""
    alone = ("-rs", "-p", "no:cacheprovider", f"--confcutdir={Path(__file__).parent}")  # the other fixtures need torch
    command = [sys.executable, "-m", "pytest", *alone, f"{__file__}::{OPENS}"]
    environment = {**os.environ, "PATH": "/nowhere", "REFRAIN_BROWSER": required}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode != 0) == bool(required)
    assert said in done.stdout and "install it (Debian: apt-get install chromium)" in done.stdout
