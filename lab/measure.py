"""Timing things beside each other: interleaved arms in random blocks, an A/A arm, rows on disk as they are taken.

Knows no model: an arm is any callable. Three lines time a reader's own functions:

    rows = lab.compare({"mine": f, "theirs": g})
    print(lab.stats.summary(rows))
"""

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.clocks import STAGES, CudaClock, HostClock, clock_for, default_device, stage, time_call
from lab.errors import InputError
from lab.locks import held
from lab.records import RowWriter, as_frame, clean, cores, environment
from lab.stats import AGAIN, attribution, missed_deadlines, percentiles

__all__ = [
    "STAGES", "Arm", "CudaClock", "HostClock", "compare", "device_lock", "missed_deadlines", "percentiles", "stage",
    "time_call",
]  # fmt: skip


@dataclass
class Arm:
    """One thing under measurement beside others.

    `call` is what is timed; it takes one input, or nothing where `compare` gets no inputs. `describe` is the effective
    configuration (a dict or a function that returns one): two arms must differ in it. `start_cost` is what was spent
    before the first decision (seconds, bytes; a dict or a function, asked after the warm-up). `before` is called
    untimed before every call, for example an environment's step: then the pace is "in_loop". `counts` is read untimed
    after every call and kept with the row of its total (cache hits, graph launches).
    """

    name: str
    call: Callable
    describe: dict | Callable[[], dict] | None = None
    start_cost: dict | Callable[[], dict] = field(default_factory=dict)
    before: Callable[[], Any] | None = None
    pace: str = "back_to_back"
    device: str | None = None
    counts: Callable[[], dict] | None = None

    @classmethod
    def of(cls, step, name: str | None = None, **changes) -> "Arm":
        """An arm that times `step.decide`, with the step's own name, description and start cost."""
        device = getattr(step, "device", None)
        arm = cls(
            name=name or step.name,
            call=step.decide,
            describe=step.describe,
            start_cost=getattr(step, "start_cost", dict),
            device=None if device is None else str(device),
        )
        return replace(arm, **changes)

    def in_loop(self, before: Callable[[], Any], name: str | None = None) -> "Arm":
        """The same arm as it runs in a loop: `before` (an environment's step, a pause) precedes every call, untimed."""
        return replace(self, name=name or f"{self.name} in loop", before=before, pace="in_loop")

    def configuration(self) -> dict:
        """What the arm says about itself now; a plain callable says its name."""
        if self.describe is None:
            return {"callable": getattr(self.call, "__qualname__", repr(self.call))}
        return clean(self.describe() if callable(self.describe) else self.describe)

    def same_as(self, other: "Arm") -> bool:
        """Whether the two would measure the same thing twice."""
        if (self.pace, self.device) != (other.pace, other.device):
            return False
        if self.describe is None and other.describe is None:
            return self.call == other.call
        return self.configuration() == other.configuration()


def compare(
    arms: dict[str, Callable] | list[Arm],
    inputs: Sequence | None = None,
    *,
    blocks: int = 20,
    warmup: int = 3,
    seed: int = 0,
    out: Path | str | None = None,
    again: str | bool | None = None,
    budget_s: float | None = None,
    device: str | None = None,
    clock=None,
    title: str = "",
    tags: dict | None = None,
    keep_partial: bool = True,
    orders: str = "random",
) -> pd.DataFrame:
    """Time `arms` beside each other and return raw rows, one per stage of each call.

    In block b every arm is called once, in random order (seeded), all with `inputs[b % len(inputs)]`, or without an
    argument where `inputs` is None. With `orders="balanced"` the orders of successive blocks form squares in which every
    arm stands equally often at each place and right after each other arm (`balanced_orders`). `warmup` blocks come first,
    with inputs from the end; their rows have phase "warmup" and reach no statistic. The A/A arm calls one arm a second
    time in each block, so that the rows tell how far two equal arms lie apart: `again` names that arm (default: the
    first; False: none). Its call is the very same object, so give it an arm that keeps nothing from one call to the
    next.

    Rows: run, title, arm, block, order, phase (warmup or timed), pace, device, stage ("total" or a marked stage), ms,
    again, describe, the constant columns of `tags`, and counts where the arm has them. With `out` they are appended to
    that JSON-lines file as they are taken, with the plan, the environment before and after, and what the arms cost to
    start; the returned table has the same in `.attrs["about"]`. `device` is by default that of the arms, or "cuda" where
    the process has used it, else "cpu"; `clock` replaces its clock.

    `budget_s` (seconds, warm-up included) cuts whole blocks, and says so; Ctrl-C does the same, or with `keep_partial`
    off, for one of several comparisons, goes on to end the program once it has said where the rows are. One
    measurement runs at a time per device: others wait, and say for whom. Raises InputError, before anything is timed,
    for arms with the same name or effective configuration, an empty `inputs`, or a folder that cannot be written.
    """
    arms = _as_arms(arms)
    twice = _again_arm(arms, again)
    _check_numbers(blocks, warmup, budget_s)
    if orders not in ORDERS:
        raise InputError(f"orders is {orders!r}; choose one of {', '.join(ORDERS)}.")
    if inputs is not None and not len(inputs):
        raise InputError("inputs is empty; give at least one input, or None for arms that take no argument.")
    device = device or next((arm.device for arm in arms if arm.device), None) or default_device()
    lineup = [replace(arm, device=arm.device or device) for arm in arms]
    lineup += [replace(lineup[arms.index(twice)], name=twice.name + AGAIN)] if twice else []
    clocks = {arm.device: clock or clock_for(arm.device) for arm in lineup}
    run = Path(os.environ.get("LAB_RUN_FOLDER") or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").name
    common = {"run": run, "title": title}
    plan = {"arms": [arm.name for arm in lineup], "blocks": blocks, "warmup": warmup, "seed": seed, "device": device}

    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_Log(out))
        log.about("plan", **common, **plan)
        for name in sorted(clocks):
            stack.enter_context(device_lock(name, title))
        log.about("environment", moment="before", **environment(seed, import_torch=False))
        _warn_if_loaded(log)
        drawn = ORDERS[orders](len(lineup), np.random.default_rng(seed))
        gc.collect()
        done, began = 0, time.perf_counter()
        show = stack.enter_context(_Progress(title or arms[0].name, blocks))
        try:
            for number in range(-warmup, blocks):
                block_began = time.perf_counter()
                if number == 0:
                    _after_warmup(log, arms, title)
                phase = (
                    {"block": number, "phase": "timed"}
                    if number >= 0
                    else {"block": number + warmup, "phase": "warmup"}
                )
                args = () if inputs is None else (inputs[number % len(inputs)],)
                for order, index in enumerate(next(drawn)):
                    arm = lineup[index]
                    if arm.before is not None:
                        arm.before()
                    times = time_call(arm.call, *args, clock=clocks[arm.device])
                    row = {**common, "arm": arm.name, **phase, "order": order, "pace": arm.pace, "device": arm.device}
                    row |= {"again": index >= len(arms), "describe": arm.configuration(), **(tags or {})}
                    for name, ms in times.items():
                        counts = {"counts": arm.counts()} if arm.counts and name == "total" else {}
                        log.row({**row, "stage": name, "ms": ms, **counts})
                log.whole_block()
                if number < 0:
                    continue
                done = number + 1
                show.block(done)
                now = time.perf_counter()
                if budget_s is not None and done < blocks and now - began + (now - block_began) > budget_s:
                    log.note(f"{show.title}: stopped after {done} of {blocks} blocks; the budget is {budget_s:g} s.")
                    break
        except KeyboardInterrupt:
            if not done:
                raise
            where = f" Rows are in {out}." if out else ""
            log.note(f"{show.title}: interrupted after {done} of {blocks} blocks.{where}")
            if not keep_partial:
                raise
        log.about("environment", moment="after", **environment(seed, import_torch=False))
    rows = as_frame(log.lines)
    for warning in filter(None, attribution(rows)["warning"]):
        _say(warning)
    return rows


def random_orders(count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Orders of `count` arms without end, each drawn anew."""
    while True:
        yield rng.permutation(count)


def balanced_orders(count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Orders of `count` arms without end, in squares of `count` (of twice as many where it is odd).

    Within a square every arm stands equally often at each place and comes equally often right after each other one
    (Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949). Which arm is
    which, and the order of a square's rows, are drawn for each square.
    """
    first = np.array([(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)])
    square = (first + np.arange(count)[:, None]) % count
    if count % 2:
        square = np.concatenate([square, square[:, ::-1]])
    while True:
        names = rng.permutation(count)
        yield from names[rng.permutation(square)]


ORDERS = {"random": random_orders, "balanced": balanced_orders}


# --- checks before anything is timed --------------------------------------------------------------------------------


def _as_arms(arms) -> list[Arm]:
    named = arms.items() if isinstance(arms, dict) else ((None, arm) for arm in arms)
    made = []
    for name, arm in named:
        if isinstance(arm, Arm):
            made.append(replace(arm, name=name or arm.name))
        elif hasattr(arm, "decide"):
            made.append(Arm.of(arm, name))
        elif name is not None and callable(arm):
            made.append(Arm(name, arm))
        else:
            raise InputError(f"{arm!r} cannot be timed; give a dict of functions by name, steps, or lab.Arm objects.")
    if not made:
        raise InputError("There is nothing to compare; give at least one arm.")
    for arm in made:
        if arm.pace not in ("back_to_back", "in_loop") or (arm.pace == "in_loop") != (arm.before is not None):
            raise InputError(
                f"Arm {arm.name!r}: the pace is 'in_loop' if something comes before each call, and only then."
            )
    _check_distinct(made)
    return made


def _check_distinct(arms: list[Arm]) -> None:
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            if other.name == arm.name or other.name + AGAIN == arm.name or arm.name + AGAIN == other.name:
                raise InputError(f"Arms {other.name!r} and {arm.name!r} cannot be told apart by name; rename one.")
            if arm.same_as(other):
                raise InputError(
                    f"Arms {other.name!r} and {arm.name!r} have the same effective configuration, "
                    f"{arm.configuration()}; change one (the A/A arm measures the noise already)."
                )


def _again_arm(arms: list[Arm], again: str | bool | None) -> Arm | None:
    if again is False:
        return None
    if again is None or again is True:
        return arms[0]
    found = next((arm for arm in arms if arm.name == again), None)
    if found is None:
        raise InputError(f"The A/A arm {again!r} is none of the arms: {', '.join(arm.name for arm in arms)}.")
    return found


def _check_numbers(blocks, warmup, budget_s) -> None:
    for name, value, least in (("blocks", blocks, 1), ("warmup", warmup, 0)):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
            raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    if budget_s is not None and not (isinstance(budget_s, (int, float)) and budget_s > 0):
        raise InputError(f"budget_s must be a number of seconds above 0, or None, not {budget_s!r}.")


def _after_warmup(log: "_Log", arms: list[Arm], title: str) -> None:
    # what an arm says of itself may change with its first calls (a graph that could not be captured)
    _check_distinct(arms)
    for arm in arms:
        cost = arm.start_cost() if callable(arm.start_cost) else arm.start_cost
        if cost:
            log.about("start_cost", title=title, arm=arm.name, cost=cost)


def _warn_if_loaded(log: "_Log") -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores():
        log.note(f"This machine is busy: load {load:.1f} on {cores()} cores before measuring; times will be too long.")


# --- while measuring --------------------------------------------------------------------------------------------------


class _Log:
    """The lines of one comparison: in memory, and on disk at once where asked for. Rows count when their block is whole."""

    def __init__(self, out: Path | str | None):
        self.writer = RowWriter(out) if out else None
        self.lines, self.block = [], []

    def _write(self, line: dict) -> dict:
        return self.writer.append(line) if self.writer else clean(line)

    def row(self, row: dict) -> None:
        self.block.append(self._write(row))

    def whole_block(self) -> None:
        self.lines += self.block
        self.block = []

    def about(self, kind: str, **fields) -> None:
        self.lines.append(self._write({"about": {"kind": kind, **fields}}))

    def note(self, text: str) -> None:
        self.about("note", text=text)
        _say(text)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.writer:
            self.writer.close()


def device_lock(device: str, title: str = "") -> contextlib.AbstractContextManager[None]:
    """Measure alone on `device`: hold its lock, shared by all processes of this machine; wait, and say for whom.

    Raises InputError where this very process holds it already, and for a link in the lock's place.
    """

    def busy(pid: str, what: str) -> None:
        if pid == str(os.getpid()):
            raise InputError(f"This process is measuring on {device} already; wait for that to end.")
        _say(f"Waiting for process {pid or '?'}, which is measuring on {device} ({what or 'no title'}).")

    return held(Path(tempfile.gettempdir()) / f"refrain-{device.replace(':', '-')}.lock", title, busy, keep=True)


class _Progress:
    """A bar; or, where LAB_HEADLESS=1 (set by `lab run`), a few plain lines. Both end with one plain line."""

    def __init__(self, title: str, blocks: int):
        self.title, self.blocks, self.done, self.began = title, blocks, 0, time.perf_counter()
        self.bar = None
        if os.environ.get("LAB_HEADLESS") != "1":
            from tqdm import tqdm

            self.bar = tqdm(total=blocks, desc=title, unit="block", leave=False)

    def block(self, done: int) -> None:
        self.done = done
        if self.bar is not None:
            self.bar.update()
        elif done < self.blocks and done % max(1, self.blocks // 4) == 0:
            _say(f"{self.title}: {done} of {self.blocks} blocks")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.close()
        _say(f"{self.title}: {self.done} of {self.blocks} blocks in {time.perf_counter() - self.began:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
