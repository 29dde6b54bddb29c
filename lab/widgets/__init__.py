"""What a notebook shows to be moved by hand: ipywidgets, each over the same figure or view that the notebook shows still.

Whoever runs headless, or has no ipywidgets, never meets them: everything here but `interactive` loads when it is asked for.
"""

import os
import sys
from importlib import import_module

_LAZY: dict[str, str] = {
    "Explorer": "lab.widgets.explorers",
    "tokens": "lab.widgets.explorers",
    "latency": "lab.widgets.explorers",
}

__all__ = ["interactive", *_LAZY]


def interactive() -> bool:
    """Whether somebody can move a widget here: in a Jupyter kernel, unless LAB_HEADLESS=1 (which `lab run` sets)."""
    if os.environ.get("LAB_HEADLESS") == "1" or "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lab.widgets' has no attribute {name!r}")
