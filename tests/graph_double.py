"""A stand-in for CUDA graphs on a CPU, as strict as the real ones where a step could go wrong.

At capture every operation of torch is recorded and has no effect: what it wrote to tensors that were there before is put
back, and what it made holds NaN (or a number that is no place). A replay runs the recorded operations on the very same
tensors, whose contents it spoils first; so whoever keeps an output, or reads what a replay did not write, sees it. A read
to the host and a tensor made from host data are refused during capture, as a graph could not hold them.

`double_graphs(monkeypatch)` puts it in the place of `torch.cuda`'s, so that `lab.steps.replay` runs as it would there.
"""

import contextlib

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.audit import HOST_CALLS, INDEXING, MAKERS
from lab.steps import replay

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.item)
SPOILED = 1 << 40  # as an index, out of any bounds


class NotInAGraph(RuntimeError):
    pass


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self):
        self.log: list[tuple] = []
        self.replays = 0

    def replay(self):
        for made in self.made:
            _spoil(made)
        for func, args, kwargs, outputs in self.log:
            again = tree_leaves(func(*args, **kwargs))
            for old, new in zip(outputs, again, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.replays += 1


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func in MAKERS and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(args))
        if made or func in HOST_CALLS or func in (Tensor.item, torch.from_numpy):
            raise NotInAGraph(f"{getattr(func, '__name__', func)} while a graph is captured")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph):
        self.graph, self.before, self.own = graph, {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        places = args[1] if packet in INDEXING else ()
        if packet in READS or any(isinstance(at, Tensor) and at.dtype == torch.bool for at in tree_leaves(places)):
            raise NotInAGraph(f"{func} while a graph is captured")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for leaf in given:
                if leaf.untyped_storage().data_ptr() not in self.own:
                    self.before.setdefault(leaf.untyped_storage().data_ptr(), (leaf.untyped_storage(), _copy(leaf)))
        result = func(*args, **kwargs)
        outputs = tree_leaves(result)
        there = {leaf.untyped_storage().data_ptr() for leaf in given}
        for output in outputs:
            if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in there:
                self.own[output.untyped_storage().data_ptr()] = output
        self.graph.log.append((func, args, kwargs, outputs))
        return result


def _copy(tensor: Tensor):
    return tensor.untyped_storage().clone()


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else min(SPOILED, torch.iinfo(tensor.dtype).max))


@contextlib.contextmanager
def captured(graph: Graph, **_):
    """In the place of torch.cuda.graph."""
    recorder = _Recorder(graph)
    with recorder, _Calls():
        yield
    graph.made = list(recorder.own.values())
    for storage, content in recorder.before.values():
        storage.copy_(content)
    for made in graph.made:
        _spoil(made)


class _Stream:
    def __init__(self, *_):
        pass

    def wait_stream(self, other):
        pass


def double_graphs(monkeypatch) -> list[Graph]:
    """Let steps on the CPU capture; the graphs made from now on, in order."""
    graphs: list[Graph] = []

    def new() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    reserved = iter(range(10**9))
    monkeypatch.setattr(replay, "check_capture", lambda device: None)
    for name, stands_in in {
        "CUDAGraph": new,
        "graph": captured,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": contextlib.nullcontext,
        "synchronize": lambda *_: None,
        "graph_pool_handle": lambda: None,
        "memory_reserved": lambda *_: next(reserved),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    return graphs
