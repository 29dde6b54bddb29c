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
    "pairs": "lab.widgets.frame_pairs",
    "Panel": "lab.widgets.panel",
}

__all__ = ["interactive", "play", *_LAZY]


def interactive() -> bool:
    """Whether somebody can move a widget here: in a Jupyter kernel, unless LAB_HEADLESS=1 (which `lab run` sets)."""
    if os.environ.get("LAB_HEADLESS") == "1" or "IPython" not in sys.modules:
        return False
    return hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def play(source: str = "doom:basic", decisions: int = 40, **settings):
    """Watch a game being played: the live panel (`Panel`) where somebody can move it, which plays at once; elsewhere a
    strip of moments of the first `decisions`. `settings` are those of `lab.live.Session`. Raises InputError for settings
    that cannot be."""
    if interactive():
        return import_module("lab.widgets.panel").Panel(source=source, **settings)
    from lab.live import open_session
    from lab.live_views import strip

    with open_session(
        source, **{name: value for name, value in settings.items() if name not in ("playing", "speed")}
    ) as session:
        for _ in range(decisions):
            session.tick()
        return strip(session.recording.spread(4), session.facts(), session.title, session.remark())


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lab.widgets' has no attribute {name!r}")
