"""Timing one call: stages marked inside it, and clocks that wait for the device they time."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from lab.errors import InputError

STAGES = ("build_inputs", "resize", "vision", "language", "heads", "readback")  # of a decision, in their usual order

_recorder = None  # of the call being timed; None when nobody measures
_NOBODY = contextlib.nullcontext()


def stage(name: str):
    """Mark a part of the current decision: `with stage("vision"): ...`.

    Costs next to nothing when nobody measures. A stage that occurs several times in one call adds up; inside another
    stage it interrupts that one, so that no time counts twice and the stages' sum never exceeds the whole. The usual
    names are those of `STAGES`; any other is kept as given.
    """
    return _NOBODY if _recorder is None else _Stage(name, _recorder)


class _Recorder:
    """The pieces of one call: (stage, mark at its begin, mark at its end)."""

    def __init__(self, mark: Callable[[], Any]):
        self.mark, self.pieces, self.open, self.last = mark, [], [], None

    def enter(self, name: str) -> None:
        now = self.mark()
        if self.open:
            self.pieces.append((self.open[-1], self.last, now))
        self.open.append(name)
        self.last = now

    def leave(self) -> None:
        now = self.mark()
        self.pieces.append((self.open.pop(), self.last, now))
        self.last = now


@contextlib.contextmanager
def marked(mark: Callable[[], Any]) -> Iterator[list[tuple[str, Any, Any]]]:
    """Collect the stages met inside, as (name, mark at its begin, mark at its end); `mark()` is any running count.

    Raises InputError inside another one: a call measured within a measured call would mix the two.
    """
    global _recorder
    if _recorder is not None:
        raise InputError("A call is being measured already; do not measure inside a measured call.")
    _recorder = _Recorder(mark)
    try:
        yield _recorder.pieces
    finally:
        _recorder = None


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Leave stages met inside unmarked: a compiler that traces through a mark would meet a clock it cannot trace."""
    global _recorder
    kept, _recorder = _recorder, None
    try:
        yield
    finally:
        _recorder = kept


class _Stage:
    __slots__ = ("name", "recorder")

    def __init__(self, name: str, recorder: _Recorder):
        self.name, self.recorder = name, recorder

    def __enter__(self):
        self.recorder.enter(self.name)

    def __exit__(self, *_):
        self.recorder.leave()


class HostClock:
    """Marks are host times. For devices whose work is done when the call returns."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def sync(self) -> None:
        """Return when all work given to the device so far is done."""

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Milliseconds between two marks; ask only after `sync`."""
        return (end - begin) / 1e6


class CudaClock:
    """Marks are events in the current CUDA stream, so that a stage's time is that of its queued work.

    A stage met while a graph is being captured is not marked: an event recorded there would belong to the graph.
    """

    def __init__(self, device: str = "cuda"):
        import torch

        if not torch.cuda.is_available():
            raise InputError(f"Device {device!r} was asked for, but torch finds no CUDA here; use device='cpu'.")
        self._cuda, self._device = torch.cuda, torch.device(device)

    def mark(self):
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def sync(self) -> None:
        self._cuda.synchronize(self._device)

    def elapsed_ms(self, begin, end) -> float:
        return begin.elapsed_time(end)


def clock_for(device: str):
    """The clock that times `device`: "cpu", "cuda" or "cuda:N". InputError for any other, or where there is no CUDA."""
    if device == "cpu":
        return HostClock()
    if device.split(":")[0] == "cuda":
        return CudaClock(device)
    raise InputError(f"Device {device!r} cannot be timed; use 'cpu' or 'cuda', or pass a clock of your own.")


def default_device() -> str:
    """The device in use: "cuda" where this process has touched it, else "cpu".

    A reader's function may run on the GPU without saying so; timed without waiting for it, it would look fast.
    """
    torch = sys.modules.get("torch")
    return "cuda" if torch is not None and torch.cuda.is_initialized() else "cpu"


def time_call(call: Callable, *args, clock=None) -> dict[str, float]:
    """Time one call: {stage: ms, ..., "total": ms}.

    The total is host time from the call to a usable answer: all work it queued on the device is waited for. Stages are
    measured by the clock's marks inside that same call. A clock has `mark()`, `sync()` and `elapsed_ms(begin, end)`;
    by default it is that of the device in use.
    """
    clock = clock or clock_for(default_device())
    clock.sync()
    with marked(clock.mark) as pieces:
        begin = time.perf_counter_ns()
        answer = call(*args)  # held until the clock has stopped: freeing it is not part of the decision
        clock.sync()
        end = time.perf_counter_ns()
    del answer
    times: dict[str, float] = {}
    for name, first, last in pieces:
        if first is None or last is None:  # not marked: inside a capture
            continue
        times[name] = times.get(name, 0.0) + clock.elapsed_ms(first, last)
    return times | {"total": (end - begin) / 1e6}
