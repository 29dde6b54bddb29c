"""Work as cells: independent pieces, on this machine's processors or on many machines, rows as they finish.

A cell is a dict of names and numbers that says all about its piece of work; `work` is a function, importable by its name,
from a cell to a row. Both kinds of pool are used through the futures interface of `concurrent.futures`: a pool of fresh
processes here, or Dask's scheduler with its workers elsewhere. Rows do not depend on who did the work, times apart.

Knows nothing of what the work is. Light to import: a worker sets its threads before numpy or torch is loaded.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.errors import InputError

Cell = dict[str, Any]

TRIES = 2  # a cell that fails, or whose worker dies, is tried once more
CONNECT_S = 6
MARK = "REFRAIN_WORKER"  # in the environment of what a worker starts: the worker's process id


def run_cells(
    work: Callable[[Cell], dict],
    cells: Sequence[Cell],
    *,
    out: Path | str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    title: str = "cells",
):
    """Do the work of every cell and return a table, a row per cell in the order of `cells`; one given twice is one.

    A row is the cell, what `work` returned of it, `seconds` and `worker` (host:process). With `out`, rows are appended to
    that JSON-lines file as they finish, and cells whose rows it holds already are not worked again. `workers` processes
    (default: as many as there are processors) work here; `scheduler`, an address such as "tcp://host:8786", gives the
    cells to Dask's workers instead.

    A cell whose work raises, or whose worker dies, is tried once more and then reported: its line in `.attrs["about"]` has
    the kind "failed" and the reason. (Dask counts deaths itself, by its `allowed-failures`.) An InputError is no failure
    of the work: such a cell is "skipped", at once. Ctrl-C lets the cells at work finish, keeps their rows, and goes on to
    end the program. Raises InputError, before any work, for a scheduler that does not answer within ten seconds, fewer
    than one worker, and a file that cannot be written or that another process writes.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InputError(f"workers is {workers!r}; give a whole number of 1 or more.")
    records = import_module("lab.records")
    cells, about = unique(cells), []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_Dask(scheduler)) if scheduler else None
        writer = stack.enter_context(records.RowWriter(out)) if out else None
        rows = on_disk(out, cells)  # once nobody else adds to them
        todo = [cell for cell in cells if _key(cell) not in rows]
        pool = pool or stack.enter_context(_Local(min(workers or 10**6, len(todo))))
        show = stack.enter_context(_Progress(title, len(cells), len(cells) - len(todo)))
        if not todo:
            pool = None
        elif note := pool.note():
            show.say(note)
        try:
            for cell, row, trouble in _finished(pool, work, todo) if pool else ():
                if row is not None:
                    rows[_key(cell)] = writer.append({**cell, **row}) if writer else records.clean({**cell, **row})
                else:
                    line = {"kind": trouble[0], **cell, "reason": trouble[1]}
                    about.append(writer.about(**line)["about"] if writer else line)
                    show.say(f"{trouble[0]}: {', '.join(map(str, cell.values()))}: {trouble[1]}")
                show.one()
        except KeyboardInterrupt:
            where = f"; their rows are in {out}, and the same call takes up from there" if out else ""
            show.say(f"Stopped: {len(rows)} of {len(cells)} done{where}.")
            raise
    found = [rows[_key(cell)] for cell in cells if _key(cell) in rows]
    return records.as_frame(found + [{"about": line} for line in about])


def _key(line: dict, names: Sequence[str] | None = None) -> tuple:
    return tuple((name, line.get(name)) for name in names or sorted(line))


def unique(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, each once, in their order."""
    return list({_key(cell): cell for cell in cells}.values())


def on_disk(out: Path | str | None, cells: Sequence[Cell]) -> dict[tuple, dict]:
    """The rows of these cells that an earlier run has left in `out`, as they were written, each cell's first by its key."""
    if not out or not Path(out).is_file():
        return {}
    wanted, found = {_key(cell) for cell in cells}, {}
    kinds = {tuple(sorted(cell)) for cell in cells}
    for line in Path(out).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError, TypeError, AttributeError):  # torn by a kill, or another's
            row = json.loads(line)
            for names in kinds:
                if "about" not in row and (key := _key(row, names)) in wanted:
                    found.setdefault(key, row)
    return found


# --- handing out ------------------------------------------------------------------------------------------------------


def _finished(pool, work: Callable, todo: list[Cell]) -> Iterator[tuple[Cell, dict | None, tuple[str, str] | None]]:
    """(cell, its row, None) or (cell, None, (kind, reason)), in the order in which they finish."""
    waiting, tries = deque(todo), Counter()
    running: dict[Future, Cell] = {}

    def settle(cell: Cell, future: Future):
        """What to yield of a cell that has ended, or None where it is to be tried again."""
        try:
            return cell, future.result(), None
        except InputError as error:
            return cell, None, ("skipped", str(error))
        except CancelledError:
            raise InputError(
                "The scheduler is gone; start it again, and the same call takes up what is missing."
            ) from None
        except Exception as error:
            # counted apart: beside a cell that kills its worker, another dies without being to blame
            count = isinstance(error, BrokenExecutor), _key(cell)
            tries[count] += 1
            if tries[count] < TRIES and not pool.retried(error):
                return None
            return cell, None, ("failed", pool.reason(error))

    try:
        while waiting or running:
            while waiting and len(running) < pool.limit:
                cell = waiting.popleft()
                running[pool.submit(_work, work, cell)] = cell
            done = wait(running, return_when=FIRST_COMPLETED).done
            if any(isinstance(future.exception(), BrokenExecutor) for future in done if not future.cancelled()):
                # A dead process takes its pool along, with all that ran there. Each of these is tried again alone, so
                # that the one to blame is blamed alone.
                done = wait(running).done
                pool.renew()
                suspects = [(running.pop(future), future) for future in list(done)]
                for cell, future in suspects:
                    ended = settle(cell, future)
                    while ended is None:
                        future = pool.submit(_work, work, cell)
                        wait([future])
                        if isinstance(future.exception(), BrokenExecutor):
                            pool.renew()
                        ended = settle(cell, future)
                    yield ended
                continue
            for future in done:
                cell = running.pop(future)
                ended = settle(cell, future)
                if ended is None:
                    waiting.appendleft(cell)
                else:
                    yield ended
    except KeyboardInterrupt:
        # what is at work is let finish, what only waits is not begun
        for future in running:
            future.cancel()
        for future in wait([future for future in running if not future.cancelled()], timeout=pool.patience).done:
            if future.exception() is None:
                yield running[future], future.result(), None
        raise


class _Local:
    """A pool of fresh processes on this machine; nothing of this process (threads, emulators) is inherited."""

    patience = None  # its workers end with this process, so they are waited for

    def __init__(self, workers: int):
        self.limit = min(workers, import_module("lab.records").cores())
        self._workers, self._executor = workers, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._executor:
            self._executor.shutdown(cancel_futures=True)

    def submit(self, *task) -> Future:
        if self._executor is None:
            self._executor = ProcessPoolExecutor(self.limit, multiprocessing.get_context("spawn"), _begin, (True,))
        try:
            return self._executor.submit(*task)
        except BrokenExecutor:  # a worker died while it had nothing to do
            self.renew()
            return self.submit(*task)

    def renew(self) -> None:
        self._executor.shutdown()
        self._executor = None
        end_orphans()

    def note(self) -> str:
        return ""

    def retried(self, error: Exception) -> bool:
        return False

    def reason(self, error: Exception) -> str:
        if isinstance(error, BrokenExecutor):
            return "its worker died twice (killed, for instance for want of memory)"
        return f"{type(error).__name__}: {error}"


class _Dask:
    """Dask's workers behind a scheduler. A worker that dies is noticed there, and its cells go to the others."""

    limit = 10**6  # all at once: the scheduler knows best who is free
    patience = 60

    def __init__(self, address: str):
        try:
            from distributed import Client
        except ImportError:
            raise InputError("A scheduler needs Dask; install it with `pip install 'refrain-lab[cluster]'`.") from None
        import logging

        logging.getLogger("distributed").setLevel(logging.ERROR)

        class Closed(Client):
            def __del__(self):  # Client's own waits long for what never answered; we close ours below
                pass

        try:
            self._client = Closed(address, timeout=CONNECT_S, set_as_default=False)
        except Exception as error:  # refused, silent, or somebody who speaks another language
            raise InputError(
                f"No scheduler answers at {address!r} ({type(error).__name__}); start one with `dask scheduler`, and give "
                "the address that it prints, such as tcp://host:8786."
            ) from None
        self._executor: Executor = self._client.get_executor(pure=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._executor.shutdown(wait=False)
        self._client.close()

    def submit(self, *task) -> Future:
        return self._executor.submit(*task)

    def note(self) -> str:
        if self._client.scheduler_info()["workers"]:
            return ""
        return "The scheduler has no worker yet; start some with `dask worker ADDRESS --nthreads 1`."

    def retried(self, error: Exception) -> bool:
        return type(error).__name__ == "KilledWorker"  # only after the scheduler has tried other workers

    def reason(self, error: Exception) -> str:
        return "its workers died" if self.retried(error) else f"{type(error).__name__}: {error}"


# --- in a worker --------------------------------------------------------------------------------------------------------

_alone = threading.Lock()  # one cell at a time in a process, however many threads a Dask worker has
_begun = False


def _begin(local: bool = False) -> None:
    """Once per worker: one thread for each library, a mark for what it starts, and no trace of an earlier worker."""
    global _begun
    _begun = True
    if local:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act on
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.environ[MARK] = str(os.getpid())
    end_orphans()


def _work(work: Callable[[Cell], dict], cell: Cell) -> dict:
    with _alone:
        if not _begun:
            _begin()
        began = time.perf_counter()
        try:
            row = work(dict(cell))
        except SystemExit as error:  # it would end the worker, or be raised in the caller and end that as a success
            raise RuntimeError(f"the work left with sys.exit({error.code!r})") from None
        seconds = round(time.perf_counter() - began, 4)
        return {**row, "seconds": seconds, "worker": f"{socket.gethostname()}:{os.getpid()}"}


def end_orphans() -> int:
    """End the processes that a worker had started before it was killed (a game's engine goes on for ever); how many."""
    import psutil

    ended = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            owner = process.environ().get(MARK)
            if owner and not psutil.pid_exists(int(owner)):
                process.kill()
                ended += 1
    return ended


# --- progress -----------------------------------------------------------------------------------------------------------


class _Progress:
    """A bar on stderr; or, where LAB_HEADLESS=1, a few plain lines."""

    def __init__(self, title: str, total: int, done: int):
        self.title, self.total, self.done, self.bar = title, total, done, None
        if os.environ.get("LAB_HEADLESS") != "1":
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, desc=title, unit="cell", leave=False)
        if done:
            self.say(f"{title}: {done} of {total} are there already")

    def one(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()
        elif self.done < self.total and self.done % max(1, self.total // 8) == 0:
            self.say(f"{self.title}: {self.done} of {self.total}")

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()
