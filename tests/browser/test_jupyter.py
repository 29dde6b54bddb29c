"""A notebook opens in a real JupyterLab, on this Python, in both themes."""

import sys

import psutil
from PIL import Image


def kernels(jupyter) -> list[psutil.Process]:
    started = psutil.Process(jupyter.process.pid).children(recursive=True)
    return [process for process in started if "ipykernel_launcher" in process.cmdline()]


def test_it_opens_with_its_parameters_on_this_python_and_in_both_themes(jupyter):
    notebook = jupyter.open("05_duplicate_frames", profile="smoke", seed=7)
    page = notebook.page
    assert {"profile = 'smoke'", "seed = 7"} <= set(page.locator(".jp-CodeCell").first.inner_text().splitlines())
    (kernel,) = kernels(jupyter)  # that of the notebook opened before, in another test, has ended
    assert kernel.cmdline()[0] == sys.executable
    light, dark = notebook.shots("jupyter", ".jp-Notebook")
    assert Image.open(light).convert("L").getpixel((3, 3)) > 200
    assert Image.open(dark).convert("L").getpixel((3, 3)) < 60
    assert page.locator(".jp-toast-container, .Toastify__toast").count() == 0, "no news is asked for"
