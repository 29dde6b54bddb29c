"""A real JupyterLab in a headless Chromium, shared by all tests of this folder (`jupyter` takes about ten seconds once),
and one kernel, which imports torch once and goes from notebook to notebook.

    def test_it(jupyter):
        notebook = jupyter.open("01_token_layout", profile="smoke", seed=3)   # a fresh copy, parameters written into it
        notebook.run_all()                                                    # fails where a cell fails
        notebook.page.locator(".my-class input").fill("9")                    # Playwright's page; own classes: add_class
        notebook.shots("name", ".my-class")                      # light and dark, where $REFRAIN_SHOTS says where to

Without Chromium or playwright the tests are skipped; with REFRAIN_BROWSER=required (set by .ci/run) that is a failure.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
REQUIRED = os.environ.get("REFRAIN_BROWSER") == "required"
START_S = 60
PATIENCE_MS = 60_000  # for one thing to show: other tests share the machine
WIDTH, HEIGHT = 1250, 950
SETTINGS = {  # nothing pops up, the theme follows what the page prefers
    "notification": {"fetchNews": "false", "checkForUpdates": False},
    "themes": {"adaptive-theme": True},
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Where the browser is required, a skipped test is a failed one, whatever it was skipped for; a failed one leaves a
    picture of its page."""
    report = yield
    if REQUIRED and report.skipped:
        report.outcome, report.longrepr = "failed", f"skipped although REFRAIN_BROWSER=required: {report.longrepr}"
    jupyter = getattr(item, "funcargs", {}).get("jupyter")
    if report.failed and jupyter and jupyter.notebook:
        with suppress(Exception):
            path = jupyter.shots_folder / f"failed-{item.name}.png"
            jupyter.notebook.page.screenshot(path=path)
            report.sections.append(("the page", str(path)))
    return report


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="package")
def jupyter(tmp_path_factory) -> Iterator["Jupyter"]:
    """JupyterLab on a copy of notebooks/, and a browser; both end with the tests of this folder."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install -e '.[test]'")
    if chromium() is None:
        pytest.skip("there is no chromium: install it (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("jupyter")
    shutil.copytree(NOTEBOOKS, folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    flags = ["--no-sandbox"] if root else []
    with server(folder, root) as (process, address, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=flags)
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")  # one cache
        context.set_default_timeout(PATIENCE_MS)
        yield Jupyter(folder, process, address, token, context)
        browser.close()


@contextmanager
def server(folder: Path, root: bool) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """A JupyterLab of this Python with folders of its own: process, address and token. Its kernels end with it."""
    own = {name: folder / name.lower() for name in (
        "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
    )}  # fmt: skip
    for path in own.values():
        path.mkdir()
    for name, values in SETTINGS.items():
        path = own["JUPYTERLAB_SETTINGS_DIR"] / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    away = (
        "LAB_HEADLESS",
        "LAB_RUN_FOLDER",
        "JUPYTER_PATH",
        "JUPYTER_CONFIG_PATH",
        "MPLBACKEND",
        "PYTEST_CURRENT_TEST",
    )
    environment = {name: value for name, value in os.environ.items() if name not in away}
    environment |= {name: str(path) for name, path in own.items()}
    environment |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1", "OMP_NUM_THREADS": "1"}
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'notebooks'}"]
    command += ["--allow-root"] if root else []
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process, _answers(process, own["JUPYTER_RUNTIME_DIR"], token, folder / "server.log"), token
        finally:
            kernels = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for left in [*kernels, process]:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    left.kill()
            process.wait(10)


def _answers(process: subprocess.Popen, runtime: Path, token: str, log: Path) -> str:
    """The server's address, once it answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        for record in runtime.glob("jpserver-*.json"):
            with suppress(ValueError, OSError, urllib.error.URLError):
                address = json.loads(record.read_text())["url"].rstrip("/")
                urllib.request.urlopen(f"{address}/api/status?token={token}", timeout=5).close()
                return address
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start in {START_S} s:\n{log.read_text()[-2000:]}")


@dataclass
class Jupyter:
    """The running server on `folder`/notebooks, the browser, and the notebook that is open."""

    folder: Path
    process: subprocess.Popen
    address: str
    token: str
    context: Any
    notebook: "Notebook | None" = None

    @property
    def shots_folder(self) -> Path:
        folder = Path(os.environ.get("REFRAIN_SHOTS") or self.folder / "shots")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def open(self, name: str, until: str = "", **parameters: Any) -> "Notebook":
        """Open a fresh copy of notebooks/NAME.ipynb, `parameters` written into its parameters cell; its kernel is up.

        The notebook opened before is closed and hands its kernel on. Cells below the first that holds `until` are left out.
        """
        self.close()
        path = self.folder / "notebooks" / f"{name}.ipynb"
        source = json.loads((NOTEBOOKS / path.name).read_text(encoding="utf-8"))
        code = [cell for cell in source["cells"] if cell["cell_type"] == "code"]
        cell = next(cell for cell in code if "parameters" in cell["metadata"].get("tags", []))
        cell["source"] += [f"\n{key} = {value!r}" for key, value in parameters.items()]
        if until:
            last = next(cell for cell in code if until in "".join(cell["source"]))
            del source["cells"][source["cells"].index(last) + 1 :]
        path.write_text(json.dumps(source), encoding="utf-8")
        for session in self._ask("sessions"):
            self._ask(f"sessions/{session['id']}", "PATCH", {"path": path.name, "name": path.name, "type": "notebook"})
        page = self.context.new_page()
        self.notebook = Notebook(page, name, self.shots_folder)
        page.goto(f"{self.address}/doc/tree/{path.name}?token={self.token}&reset")
        page.get_by_text(
            "(ipykernel) | Idle"
        ).wait_for()  # in the status bar; the notebook's own mark is idle from the start
        return self.notebook

    def close(self) -> None:
        """Close the open notebook, if there is one; a kernel that is still at work, as after a failed test, is ended."""
        if self.notebook:
            self.notebook.page.close()
            self.notebook = None
        for session in self._ask("sessions"):
            if session["kernel"]["execution_state"] != "idle":
                self._ask(f"sessions/{session['id']}", "DELETE")

    def _ask(self, what: str, method: str = "GET", body: dict | None = None) -> Any:
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/api/{what}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or "null")


@dataclass
class Notebook:
    """One notebook, open in a page of its own."""

    page: Any
    name: str
    shots_folder: Path

    def run_all(self, timeout_s: float = 180) -> None:
        """Run every cell and wait for the last; fails with the error's text where a cell fails."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.locator("[data-command='runmenu:run-all']").click()
        self.page.wait_for_function(  # a cell that waits or runs shows [*], one that never will shows [ ]
            "() => [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')]"
            ".every(prompt => /^\\[\\d+\\]/.test(prompt.textContent)) || document.querySelector('"
            '.jp-Notebook [data-mime-type="application/vnd.jupyter.error"]\')',
            timeout=1000 * timeout_s,
        )
        errors = self.page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
        assert not errors, errors[0][-2000:]
        self.idle(timeout_s)

    def idle(self, timeout_s: float = 60) -> None:
        """Wait until the kernel has nothing to do."""
        idle = self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']")
        idle.wait_for(state="attached", timeout=1000 * timeout_s)

    def theme(self, name: str) -> None:
        """Switch JupyterLab to its `light` or `dark` theme."""
        self.page.emulate_media(color_scheme=name)
        light = {"light": "true", "dark": "false"}[name]
        self.page.locator(f"body[data-jp-theme-light='{light}']").wait_for(state="attached")
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def shots(self, name: str, selector: str) -> None:
        """Pictures of the first element that `selector` finds, in both themes, where somebody wants to keep them."""
        if os.environ.get("REFRAIN_SHOTS"):
            self.pictures(name, selector)

    def pictures(self, name: str, selector: str) -> list[Path]:
        """Pictures of the first element that `selector` finds, in the light and in the dark theme."""
        element, paths = self.page.locator(selector).first, []
        height = element.bounding_box()["height"]
        self.page.set_viewport_size({"width": WIDTH, "height": int(max(HEIGHT, height + 200))})  # else it is cut off
        for theme in ("light", "dark"):
            self.theme(theme)
            paths.append(self.shots_folder / f"{name}-{theme}.png")
            element.screenshot(path=paths[-1])
        self.theme("light")
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        return paths
