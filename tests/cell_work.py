"""Work for tests of lab.cells: in a module of its own, which workers can import."""

import os
import signal
import time
from pathlib import Path

from lab.errors import InputError


def square(cell: dict) -> dict:
    return {"square": cell["n"] ** 2, "threads": os.environ["OMP_NUM_THREADS"]}


def troubled(cell: dict) -> dict:
    """Counts its tries in files; n = 1 raises once, 2 always, 3 kills its worker once, 4 always, 5 is bad input."""
    tries = Path(cell["folder"], str(cell["n"]))
    with open(tries, "a") as file:
        file.write("x")
    first = len(tries.read_text()) == 1
    if cell["n"] == 2 or (cell["n"] == 1 and first):
        raise RuntimeError(f"no luck with {cell['n']}")
    if cell["n"] == 4 or (cell["n"] == 3 and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if cell["n"] == 5:
        raise InputError("Nobody can play this; take another.")
    time.sleep(0.05)
    return {"square": cell["n"] ** 2}


def slow(cell: dict) -> dict:
    """Says who works on what, then takes half a second."""
    Path(cell["folder"], f"{cell['n']}.{os.getpid()}").touch()
    time.sleep(0.5)
    return {"square": cell["n"] ** 2}


def with_child(cell: dict) -> dict:
    """Starts a process that outlives its worker, says its number, and kills the worker the first time."""
    import subprocess

    said = Path(cell["folder"], "child")
    if said.exists():
        return {"child": int(said.read_text())}
    child = subprocess.Popen(["sleep", "600"])
    said.write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves(cell: dict) -> dict:
    """Leaves with sys.exit(n) where n is 0."""
    if cell["n"] == 0:
        raise SystemExit(0)
    return {"n": cell["n"]}
