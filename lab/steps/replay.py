"""What a step with fixed shapes stands on: work captured once and replayed, and a watch over the weights it reads."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.clocks import stage
from lab.errors import InputError

WARMUPS = 3


class Replay:
    """`work`, a function of no arguments over static tensors, as a CUDA graph; off CUDA it is simply called.

    The graph is captured by `prepare`, or at the first call, after three warm-up runs on a side stream, into a memory
    pool of its own; the warm-up runs do what `work` does to the tensors it writes. Its output tensors are overwritten
    by the next replay. `seconds` and `bytes` are what that cost, `graph` is None where nothing was captured.
    """

    def __init__(self, work: Callable[[], Tensor], device: torch.device, capture: bool):
        if capture:
            check_capture(device)
        self.work, self.device, self.capture = work, device, capture
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None
        self.seconds, self.bytes = 0.0, 0

    def __call__(self) -> Tensor:
        if not self.capture:
            return self.work()
        self.prepare()
        with stage("replay"):
            self.graph.replay()
        return self.output

    def prepare(self) -> None:
        """Capture the graph now, where there is to be one and is none yet."""
        if self.capture and self.graph is None:
            self._capture()

    def _capture(self) -> None:
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                self.work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=side):
                self.output = self.work()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"This step cannot be captured: {reason}; build it with capture=False, or let lab.audit name what breaks."
            ) from error
        torch.cuda.synchronize(self.device)
        self.graph = graph
        self.seconds = time.perf_counter() - start
        self.bytes = max(0, torch.cuda.memory_reserved(self.device) - before)


def check_capture(device: torch.device) -> None:
    """Raise InputError for a device that has no graphs."""
    if device.type != "cuda":
        raise InputError(f"capture=True needs a CUDA device, and this model is on {device}; leave capture out.")


class Watch:
    """Notices when a module's parameters or buffers are no longer the tensors, or hold no longer the values, they did.

    `check` compares identity, storage and version of each; a write through `.data` leaves all three alone and is not
    seen. A graph would go on reading the old storage, and what a step computed at construction would be out of date.
    `seconds` is what one check costs.
    """

    def __init__(self, module: nn.Module):
        self.seen = [
            (holder, key, tensor, tensor.data_ptr(), tensor._version, f"{name}.{key}".removeprefix("."))
            for name, part in module.named_modules()
            for holder in (part._parameters, part._buffers)
            for key, tensor in holder.items()
            if tensor is not None
        ]
        start = time.perf_counter()
        self.check()
        self.seconds = time.perf_counter() - start

    def check(self) -> None:
        """Raise InputError that names the first tensor which changed."""
        for holder, key, tensor, pointer, version, name in self.seen:
            now = holder.get(key)
            if now is not tensor or now.data_ptr() != pointer or now._version != version:
                raise InputError(f"{name} changed since this step was built; build a new step.")
