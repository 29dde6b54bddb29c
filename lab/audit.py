"""Can a step be captured as one graph, and what would break it: by stage and operation, on a machine without a GPU.

A graph replays the same kernels on the same addresses. Whatever needs a look at values on the host, an output size that
depends on the data, a copy between host and device, or a tensor made from host data cannot be in it, or is frozen in
it. Two passes look for these, since each misses what the other sees:

- On real tensors: every operation and every Python-level tensor call is looked at while the step really runs, to the
  end. On a CPU a copy to the host is no operation at all; calls such as `.cpu()` and `.tolist()` are seen by name, while
  `.to(device)` is not seen.
- On meta tensors: the step's tensors and devices are exchanged for ones on torch's `meta` device, which have shapes and
  no values. Host and device are then two devices, so every copy between them is seen, as is host data that meets device
  tensors. This pass ends at the first value that somebody needs to know.

What happens inside one operation's own kernels is not seen by either. Where a library takes another path while a graph
is being captured (transformers skips checks of its masks then), the audit is stricter than the capture.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CellType, FunctionType, MethodType, ModuleType

import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.clocks import marked
from lab.steps.replay import Replay, Watch

COPYING = ("copy_in", "readback")  # stages that copy between host and device by intent, and stay outside a graph
NO_STAGE = "outside any stage"
REAL, META = "real tensors", "meta tensors"

aten = torch.ops.aten
READ = "reads values to the host"
HOST_CALLS = {
    Tensor.tolist: READ,
    Tensor.numpy: READ,
    Tensor.__array__: READ,
    Tensor.cpu: "copies from the device to the host",
}
MADE = "makes a tensor from host data"
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)  # others are known by what they lift
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
COPIES = (aten._to_copy, aten.copy_, aten.copy)


@dataclass(frozen=True)
class Finding:
    """What would break a capture (or, where `breaks` is False, only deserves a look).

    `operation` is the Python-level call, where there is one, and torch's operation; `where` is the module, line and
    function that called it, the innermost outside torch; `how_seen` names the pass, or both.
    """

    stage: str
    operation: str
    what: str
    where: str
    how_seen: str
    breaks: bool = True


@dataclass(frozen=True)
class Audit:
    """What an audit of the step called `name` found; `operations` counts those looked at, by stage."""

    name: str
    findings: list[Finding]
    operations: dict[str, int]

    @property
    def capturable(self) -> bool:
        """Nothing was found that would break a capture."""
        return not any(finding.breaks for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        broken = [finding for finding in self.findings if finding.breaks]
        if not broken:
            total, stages = sum(self.operations.values()), ", ".join(self.operations)
            return f"{self.name} can be captured: nothing in its {total} operations ({stages}) would break a graph."
        first, more = broken[0], len(broken) - 1
        also = f" {more} more finding{'s' * (more > 1)}." if more else ""
        said = f"{first.operation} {first.what} (stage {first.stage}, {first.where})"
        return f"{self.name} cannot be captured: {said}.{also}"

    def table(self) -> pd.DataFrame:
        """One row per finding, and one that says ok per stage without: stage, operation, finding, where, seen on."""
        rows = []
        for stage in dict.fromkeys([*self.operations, *(finding.stage for finding in self.findings)]):
            found = [finding for finding in self.findings if finding.stage == stage]
            rows += [
                (stage, f.operation, f.what if f.breaks else f"note: {f.what}", f.where, f.how_seen) for f in found
            ]
            if not any(finding.breaks for finding in found):
                rows.append((stage, f"all {self.operations.get(stage, 0)}", "ok", "", ""))
        return pd.DataFrame(rows, columns=["stage", "operation", "finding", "where", "seen on"])


def audit(step, frames) -> Audit:
    """Look for what would break capturing this step as a graph; `frames` are inputs that its `decide` takes.

    For a step built on `Replay` the work that its graphs hold is audited, and nothing in it may touch the host. For any
    other step the whole of `decide` is, save for the stages `copy_in` and `readback`. Compiled work is audited as it was
    before compiling. The step decides once beforehand, so that what it makes at its first call is there, and is reset
    afterwards; its weights and tensors are left as they were. Not to be used from a call that is being measured, nor
    while another thread uses the step. Raises whatever `decide` raises for these frames.
    """
    with torch.compiler.set_stance("force_eager"), _nothing_captured(step):
        try:
            step.decide(frames)
            works = _graph_works(step, frames)
            allowed = () if works else COPYING
            works = works or [lambda: step.decide(frames)]
            real, meta = _Log(REAL), _Log(META)
            for work in works:
                real.follow(work)
            with _on_meta(step):
                for work in works:
                    meta.follow(work)
        finally:
            step.reset()
    found: dict[tuple, Finding] = {}
    for finding in [*real.findings, *meta.findings]:
        key = finding.stage, finding.operation, finding.where
        seen = found.setdefault(key, finding).how_seen
        found[key] = replace(found[key], how_seen=seen if finding.how_seen in seen else f"{seen}, {finding.how_seen}")
    findings = [finding for finding in found.values() if finding.stage not in allowed]
    return Audit(step.name, findings, {name: n for name, n in real.operations.items() if name not in allowed})


def _graph_works(step, frames) -> list[Callable]:
    """What a decision's graphs hold: the work of each Replay that stands beside one which `decide` calls.

    Beside it: a step may keep a second graph for another case, and a step over others may hold some it does not use.
    """
    things, called = _reachable(step), []
    replays = [thing for thing in things if isinstance(thing, Replay)]
    works = [replay.work for replay in replays]

    def noting(replay: Replay, work: Callable) -> Callable:
        return lambda: (called.append(replay), work())[1]

    with _nothing_captured(step):
        try:
            for replay, work in zip(replays, works, strict=True):
                replay.work = noting(replay, work)
            step.decide(frames)
        finally:
            for replay, work in zip(replays, works, strict=True):
                replay.work = work
    held = [
        list(thing.values() if isinstance(thing, dict) else thing) for thing in things if isinstance(thing, dict | list)
    ]
    beside = [value for values in held if any(value is one for value in values for one in called) for value in values]
    return [replay.work for replay in replays if any(replay is value for value in beside)]


class _Log:
    """Follows runs, counting operations and writing down what would break a graph."""

    def __init__(self, how: str):
        self.how, self.findings, self.operations = how, [], Counter()
        self.noted: list[tuple[int, Finding]] = []  # of the run being followed, with the running number
        self.count = 0  # of operations and findings so far: the running number by which stages are told apart
        self.call, self.last, self.told = "", "", False  # told: of the last call or operation it is known what is wrong

    def follow(self, work: Callable) -> None:
        """Run `work`. On meta tensors an error ends the run and is a finding, where it does not follow from one."""
        self.noted, before = [], self.count
        with marked(lambda: self.count) as pieces:
            try:
                with torch.no_grad(), _Calls(self), _Operations(self):
                    work()
            except Exception as error:
                if self.how == REAL:
                    raise
                if not self.told:
                    said = f"ends the run on meta tensors: {type(error).__name__}: {str(error)[:150]}"
                    finding = Finding("", self.last, said, _where(error), self.how)
                    self.noted.append((self.count, finding))
        pieces = [piece for piece in pieces if piece[2] > piece[1]]
        for number, finding in self.noted:
            stage = next((name for name, begin, end in pieces if begin < number <= end), NO_STAGE)
            self.findings.append(replace(finding, stage=stage))
        for name, begin, end in pieces:
            self.operations[name] += end - begin
        rest = self.count - before - sum(end - begin for _, begin, end in pieces)
        if rest:
            self.operations[NO_STAGE] += rest

    def note(self, what: str, breaks: bool = True) -> None:
        if self.told:  # one finding a call
            return
        self.told = True
        self.count += 1
        self.noted.append((self.count, Finding("", self.last, what, _where(), self.how, breaks)))


class _Calls(TorchFunctionMode):
    """Sees Python-level tensor calls by name, also those that are no operation on a CPU."""

    def __init__(self, log: _Log):
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        log = self.log
        name = resolve_name(func) or str(func)
        if name.endswith("__get__"):  # an attribute such as .device
            return func(*args, **(kwargs or {}))
        log.call = log.last = name.replace("torch.Tensor.", "Tensor.")
        log.told = False
        try:
            if func in HOST_CALLS:
                log.note(HOST_CALLS[func])
            elif func in MAKERS and not any(isinstance(data, Tensor) for data in args[func is Tensor.new_tensor :][:1]):
                log.note(MADE)
            return func(*args, **(kwargs or {}))
        finally:
            log.call = ""


class _Operations(TorchDispatchMode):
    """Sees every operation, under whatever Python-level call it runs."""

    def __init__(self, log: _Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, log = kwargs or {}, self.log
        with self:  # in inference mode operations made of others come whole
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        log.count += 1
        if not log.call:
            log.told = False
        log.last = f"{log.call} > {func}" if log.call else str(func)
        if what := _fault(func, args, kwargs, log.call):
            log.note(what)
        elif func.overloadpacket in (aten.masked_scatter, aten.masked_scatter_):
            log.note("takes as many values as the mask holds; in a replay nobody notices a wrong number", breaks=False)
        return func(*args, **kwargs)


def _fault(func, args, kwargs, call: str) -> str | None:
    """What is wrong with one operation, or None."""
    packet, tensors = func.overloadpacket, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if packet in INDEXING:
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            return "picks by a boolean mask: how many depends on the data"
    elif torch.Tag.data_dependent_output in func.tags or packet is aten._linalg_check_errors:
        return READ
    elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        return "gives an output whose size depends on the data"
    # `x[0] = 5.0` lifts the number only on a CPU; elsewhere it is an argument of the kernel.
    if packet is aten.lift_fresh and not (call.endswith("__setitem__") and args[0].dim() == 0):
        return MADE
    copying = packet in COPIES
    places = {tensor.device.type for tensor in tensors if tensor.dim() or copying}  # a host number may join any kernel
    if copying and kwargs.get("device") is not None:
        places.add(torch.device(kwargs["device"]).type)
    if len(places) > 1:
        return "copies between host and device" if copying else "mixes tensors on the host and on the device"
    return None


def _where(error: Exception | None = None) -> str:
    """The innermost place outside torch: now, or where an error came from."""
    if error is None:
        frame, frames = sys._getframe(1), []
        while frame:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
    else:
        trace, frames = error.__traceback__, []
        while trace:
            frames.insert(0, (trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "?")
        if module != __name__ and module.split(".")[0] not in ("torch", "contextlib", "functools"):
            return f"{module}:{line} {frame.f_code.co_qualname}"
    return "?"


# ------------------------------------------------------------------------------------------ the step's own tensors


def _reachable(root) -> list:
    """Everything the step holds: attributes, modules, containers, what functions close over. No tensors, no arrays.

    Objects of the standard library, numpy and torch are not entered, modules (`nn.Module`) are.
    """
    found, seen, todo = [], set(), [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, Tensor | type | ModuleType | str | int | float | None):
            continue
        seen.add(id(thing))
        found.append(thing)
        if isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        elif isinstance(thing, CellType):
            todo.append(thing.cell_contents)
        elif isinstance(thing, MethodType):
            todo += [thing.__self__, thing.__func__]
        elif isinstance(thing, FunctionType):
            if _entered(thing.__globals__.get("__name__")):
                todo += (cell for cell in thing.__closure__ or () if cell != CellType())  # an empty one has no contents
        elif isinstance(thing, nn.Module) or (hasattr(thing, "__dict__") and _entered(type(thing).__module__)):
            todo.append(vars(thing))
    return found


def _entered(module: str | None) -> bool:
    package = (module or "").split(".")[0]
    return package not in ("numpy", "torch") and package not in sys.stdlib_module_names


@contextlib.contextmanager
def _nothing_captured(step) -> Iterator[None]:
    """Replays call their work while inside, where they would otherwise capture it."""
    replays = [(thing, thing.capture) for thing in _reachable(step) if isinstance(thing, Replay)]
    for replay, _ in replays:
        replay.capture = False
    try:
        yield
    finally:
        for replay, capture in replays:
            replay.capture = capture


@contextlib.contextmanager
def _on_meta(step) -> Iterator[None]:
    """The step with its tensors on the meta device, and that for its device; everything put back in the end."""
    model = getattr(step, "model", None)
    home = getattr(step, "device", None) or getattr(model, "device", None) or torch.device("cpu")
    meta: dict[int, Tensor] = {}

    def exchanged(value):
        if isinstance(value, Tensor) and value.device.type == home.type:
            if id(value) not in meta:
                meta[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            return meta[id(value)]
        if isinstance(value, torch.device) and value.type == home.type:
            return torch.device("meta")
        if isinstance(value, tuple):
            items = [exchanged(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        return value

    things = _reachable(step)
    kept = [(thing, thing.copy()) for thing in things if isinstance(thing, dict | list)]
    cells = [(thing, thing.cell_contents) for thing in things if isinstance(thing, CellType)]
    try:
        for thing, values in kept:
            for key, value in values.items() if isinstance(thing, dict) else enumerate(values):
                thing[key] = exchanged(value)
        for cell, value in cells:
            cell.cell_contents = exchanged(value)
        for thing in things:
            if isinstance(thing, Watch):
                thing.seen = []  # that the weights are others now is no finding
        yield
    finally:
        for thing, values in kept:
            if isinstance(thing, dict):
                thing.clear()
                thing.update(values)
            else:
                thing[:] = values
        for cell, value in cells:
            cell.cell_contents = value
