"""When a live panel must stop by itself: at Jupyter's stop button, when its cell is run again, when the kernel ends."""

import inspect
import signal
import sys
import weakref
from typing import Any

from lab.player import close_all

_panels: "weakref.WeakSet[Any]" = weakref.WeakSet()
_from_cell: dict[str, tuple[str, list]] = {}  # by cell: the message that ran it last, and the panels it made
_listening: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(panel: Any) -> None:
    """Stop `panel` (which has a `player` and `close`) when one of these things happens."""
    _panels.add(panel)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return
    _listen(shell, kernel)
    parent = kernel.get_parent() if hasattr(kernel, "get_parent") else {}
    cell, execution = (parent.get("metadata") or {}).get("cellId"), (parent.get("header") or {}).get("msg_id")
    if cell:
        earlier, made = _from_cell.get(cell, ("", []))
        if earlier != execution:
            for old in filter(None, (reference() for reference in made)):
                old.close()
            made = []
        _from_cell[cell] = (execution, [*made, weakref.ref(panel)])


def _listen(shell: Any, kernel: Any) -> None:
    """Hear the stop button. While a cell runs, it ends the cell with KeyboardInterrupt, which is noticed afterwards. While
    the kernel is idle, ipykernel ignores the signal: the handler that it puts back after each cell is replaced."""
    if kernel in _listening:
        return
    _listening.add(kernel)
    shell.events.register("post_run_cell", _after_cell)
    before = getattr(kernel, "saved_sigint_handler", signal.SIG_IGN)

    def handler(number: int, frame: Any) -> None:
        interrupt_all()
        if callable(before):
            before(number, frame)

    kernel.saved_sigint_handler = handler
    shut_down = kernel.do_shutdown

    async def close_first(restart: bool) -> Any:
        """Before it ends, a kernel spends many seconds on children that do not heed SIGTERM, as Doom's engine, and is then
        killed itself with an emulator left behind."""
        close_all(wait_s=2)
        done = shut_down(restart)
        return await done if inspect.isawaitable(done) else done

    kernel.do_shutdown = close_first


def _after_cell(result: Any) -> None:
    if isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt):
        interrupt_all()


def interrupt_all() -> None:
    for panel in list(_panels):
        panel.player.interrupt()
