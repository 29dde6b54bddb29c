"""What a decision must cost at least: operations and bytes per stage, the machine's measured ceilings, the time floor.

Operations come from torch's flop counter, bytes are compulsory reads (each weight and each earlier result once per
stage), ceilings are what this machine reaches on the model's own matrix shapes, on a large square product and in a large
copy. A floor is the larger of the two times (Williams et al., "Roofline", CACM 2009). A stage can come in under its
floor where its data stay in a processor cache, or where ceilings were measured on a busy machine: such shares are shown.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lab.clocks import clock_for, marked, time_call
from lab.errors import InputError
from lab.measure import device_lock
from lab.stats import median_interval, series

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST = {"cpu": 4096, "cuda": 16384}  # side of the square product, three of which are held
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}


@dataclass(frozen=True)
class Cost:
    """Floating-point operations (a multiply-add is two), bytes read at least once, and the operations in matrix
    products by their shape (m, k, n)."""

    flops: int = 0
    bytes: int = 0
    shapes: dict[tuple[int, int, int], int] = field(default_factory=dict)


# --- counting ---------------------------------------------------------------------------------------------------------


def count(call: Callable, *args) -> int:
    """The floating-point operations of `call(*args)`, a multiply-add being two.

    Nothing is calculated: what the call makes are fake tensors, which have shapes but no numbers. Only a call that must
    look at a number runs for real. Attention is counted as plain matrix products: torch's counter does not know the
    fused CPU kernel.
    """

    def counted():
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call(*args)
        return counter.get_total_flops()

    return _without_numbers(lambda: counted)


def _without_numbers(prepare: Callable[[], Callable]):
    """The result of `prepare()()`, the second call on fake tensors, or afresh on real ones where it needs numbers."""
    run = prepare()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _ZeroReadback():
            return run()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return prepare()()


def stage_costs(step, inputs, before=None) -> dict[str, Cost]:
    """What one `step.decide(inputs)` costs, by stage and in "total"; counted as `count` does.

    `inputs` is what the step takes; only shapes matter. What is made once (resize operators, kept states) is not
    counted: a decision on `before` (default: `inputs`) goes ahead. Both run on a copy of the step that shares its
    model, so the step stays as it is. Raises InputError for a step whose work cannot be seen, such as a captured graph.
    """
    shared = getattr(step, "model", None)

    def prepare():
        twin = copy.deepcopy(step, {id(shared): shared})

        def counted():
            twin.decide(inputs if before is None else before)
            return _count(twin.decide, (inputs,))

        return counted

    try:
        costs = _without_numbers(prepare)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The work of {step.name!r} cannot be counted ({type(error).__name__}: {error}); count its eager twin."
        ) from error
    if not costs["total"].flops:
        raise InputError(f"The work of {step.name!r} cannot be seen (a captured graph?); count its eager twin.")
    return costs


def _count(call: Callable, args: tuple) -> dict[str, Cost]:
    reads = _Reads()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, reads:

        def mark():
            reads.new_piece()
            return counter.get_total_flops(), len(reads.pieces) - 1

        with marked(mark) as pieces:
            begin = mark()
            call(*args)
            end = mark()
    found = {}
    for name, first, last in [*pieces, ("total", begin, end)]:
        found.setdefault(name, []).append((last[0] - first[0], reads.pieces[first[1] : last[1]]))
    return {name: _cost(parts) for name, parts in found.items()}


def _cost(parts: list) -> Cost:
    pieces = [piece for _, inside in parts for piece in inside]
    made = set().union(*(piece.made for piece in pieces))
    read = {key: size for piece in pieces for key, size in piece.read.items() if key[0] not in made}
    shapes: dict = {}
    for piece in pieces:
        for shape in piece.products:
            shapes[shape] = shapes.get(shape, 0) + 2 * math.prod(shape)
    return Cost(sum(flops for flops, _ in parts), sum(read.values()), shapes)


class _Piece:
    """Between two marks: storages made, (storage, offset, bytes) read, shapes of matrix products."""

    def __init__(self):
        self.made, self.read, self.products = set(), {}, []


class _Reads(TorchDispatchMode):
    """Notes what each operation reads and makes. A storage is known by a number that is never given twice."""

    def __init__(self):
        super().__init__()
        self.pieces, self._numbers, self._seen = [], {}, []

    def new_piece(self) -> None:
        self.pieces.append(_Piece())

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._seen.append(StorageWeakRef(storage))  # its address is given to no other while this is held
        return self._numbers[storage._cdata]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.pieces:
            return out
        piece = self.pieces[-1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        made = {self._number(result) for result in results} - {self._number(tensor) for tensor in tensors}
        if func.is_view and not made:  # a reshape that had to copy does make something
            return out
        piece.made |= made
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if func.overloadpacket in _GATHERS:  # reads only the rows it takes
                size = min(size, sum(result.numel() * result.element_size() for result in results))
            piece.read[self._number(tensor), tensor.storage_offset(), size] = size
        piece.products += _product(func.overloadpacket, args)
        return out


_GATHERS = {torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.index, torch.ops.aten.gather}


def _product(operation, args) -> list[tuple[int, int, int]]:
    if operation in (torch.ops.aten.mm, torch.ops.aten.addmm):
        a, b = args[-2:] if operation is torch.ops.aten.mm else args[1:3]
        return [(a.shape[0], a.shape[1], b.shape[1])]
    if operation is torch.ops.aten.linear:
        return [(args[0].shape[:-1].numel(), args[0].shape[-1], args[1].shape[0])]
    return []


class _ZeroReadback(TorchFunctionMode):
    """Fake tensors hold no numbers: read back to numpy they are zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            return np.zeros(tuple(args[0].shape), dtype=np.float32)
        return func(*args, **(kwargs or {}))


# --- ceilings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached: `gflops` (GFLOP/s, the best product) and `gbps` (GB/s, reading and writing, a copy).

    `square` is the best of the large square product of side `side`, `by_shape` the best of each shape (m, k, n).
    """

    device: str
    dtype: str
    gflops: float
    gbps: float
    square: float
    side: int
    by_shape: dict[tuple[int, int, int], float]


def ceilings(device: str = "cpu", dtype: str = "fp32", shapes=(), most: int = 8) -> Ceilings:
    """Measure the device's ceilings for `dtype` ("fp32" or "bf16") under torch's present settings (threads, TF32).

    `shapes` are the model's own products (m, k, n): the `most` largest are tried, as `Cost.shapes` of a total holds
    them. The square product grows until one takes 50 ms or memory forbids more. A ceiling is the best of several tries.
    """
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}.")
    clock = clock_for(device)
    kind = device.split(":")[0]
    largest = sorted(shapes, key=math.prod, reverse=True)[:most]
    with device_lock(device, "ceilings"), torch.inference_mode():
        by_shape = {tuple(shape): _product_rate(*shape, device, dtype, clock) for shape in largest}
        side, seconds = 512, 0.0
        while side < _LARGEST[kind] and seconds < 0.05:
            side *= 2
            square = _product_rate(side, side, side, device, dtype, clock)
            seconds = 2 * side**3 / (square * 1e9)
        source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.numel() / _best_seconds(lambda: target.copy_(source), clock)
    return Ceilings(device, dtype, max(square, *by_shape.values(), 0.0), copied / 1e9, square, side, by_shape)


def _product_rate(m: int, k: int, n: int, device: str, dtype: str, clock) -> float:
    """GFLOP/s of a linear layer of this shape."""
    x = torch.randn(m, k, device=device, dtype=_DTYPES[dtype])
    weight = torch.randn(n, k, device=device, dtype=_DTYPES[dtype])
    return 2 * m * k * n / _best_seconds(lambda: torch.nn.functional.linear(x, weight), clock) / 1e9


def _best_seconds(call: Callable, clock, spend: float = 0.1) -> float:
    """The shortest time of one call; several are timed together where one is short against the launching of it."""
    first = time_call(call, clock=clock)["total"] / 1e3
    if first > 1:  # bf16 on a processor without it: no second try would change the picture
        return first
    first = time_call(call, clock=clock)["total"] / 1e3
    together = max(1, math.ceil(2e-3 / first))

    def calls():
        for _ in range(together):
            call()

    tries = max(3, min(30, int(spend / (first * together))))
    return min(time_call(calls, clock=clock)["total"] for _ in range(tries)) / 1e3 / together


# --- floors -------------------------------------------------------------------------------------------------------------


def floor(costs: dict[str, Cost], ceilings: Ceilings) -> pd.DataFrame:
    """The least time of each stage, one line per stage, "total" (the sum of the stages' floors) last.

    Columns: stage, gflop, mbytes, compute_ms, memory_ms, floor_ms (the larger of the two), bound ("compute", "memory",
    or empty for a stage without either). The heads are fp32 in a bf16 model too: their floor is then a low one.
    """
    stages = {name: cost for name, cost in costs.items() if name != "total"} or {"total": costs["total"]}
    table = pd.DataFrame(
        {
            "stage": list(stages),
            "gflop": [cost.flops / 1e9 for cost in stages.values()],
            "mbytes": [cost.bytes / 1e6 for cost in stages.values()],
        }
    )
    table["compute_ms"] = table["gflop"] / ceilings.gflops * 1e3
    table["memory_ms"] = table["mbytes"] / ceilings.gbps
    table["floor_ms"] = table[["compute_ms", "memory_ms"]].max(axis=1)
    table["bound"] = np.where(table["compute_ms"] >= table["memory_ms"], "compute", "memory")
    table.loc[table["floor_ms"] == 0, "bound"] = ""
    if list(stages) != ["total"]:
        table.loc[len(table)] = {
            "stage": "total",
            **table.drop(columns=["stage", "bound"]).sum().to_dict(),
            "bound": "",
        }
    return table


def share_of_floor(floors: pd.DataFrame, rows: pd.DataFrame, arm: str) -> pd.DataFrame:
    """`floors` beside an arm's measured times: adds measured_ms, low, high and share (floor over measured median).

    A share says how much of a stage's time the machine's ceilings explain; over 1 it came in under its floor. Stages
    the arm did not mark have NaN.
    """
    measured = rows.loc[(rows["arm"] == arm) & (rows["phase"] == "timed"), "stage"].unique()
    lines = []
    for name in floors["stage"]:
        time = median_interval(series(rows, arm, name)) if name in measured else None
        lines.append((time.value, time.low, time.high) if time else (math.nan,) * 3)
    table = floors.assign(**dict(zip(("measured_ms", "low", "high"), zip(*lines, strict=True), strict=True)))
    return table.assign(share=table["floor_ms"] / table["measured_ms"])
