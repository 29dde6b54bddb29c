"""The static step's device work through torch.compile."""

import shutil
import time

import torch

from lab.clocks import stage, unmarked
from lab.errors import InputError
from lab.steps.question_first import QuestionFirstStep
from lab.steps.split import StaticSplitStep
from lab.steps.static import StaticStep

MODES = ("default", "reduce-overhead")


class Compiled:
    """Put in front of a static step class: its device work compiled. `mode` is torch.compile's.

    Compiling happens in the first call of `decide` and is told apart as the start cost `compile_s`, with the number of
    graphs, graph breaks and recompiles that torch counts. In mode `reduce-overhead` torch captures CUDA graphs itself
    (the first call warms up, the second records). Raises InputError where the compiler's own compiler is missing: on a
    CPU a C++ compiler is needed.
    """

    def __init__(self, *args, mode: str = "default", name: str | None = None, **kwargs):
        if mode not in MODES:
            raise InputError(f"mode is {mode!r}; choose one of {', '.join(MODES)}.")
        super().__init__(*args, capture=False, name=name, **kwargs)
        self.name = name or self._name(f"compiled, {mode}")
        if getattr(self, "cache_kind", None) == "dynamic":
            raise InputError("A dynamic cache grows by new tensors at every decision; compile over cache='static'.")
        if self.device.type == "cpu" and not compiler():
            raise InputError("Compiling for the CPU needs a C++ compiler (g++ or clang++), and there is none here.")
        self.mode, self.compile_s, self.counts = mode, 0.0, {"graphs": 0, "graph_breaks": 0, "recompiles": 0}
        for replay in filter(None, (self.all_frames, self.newest_frame)):
            replay.work = self._compiled(replay.work)

    def _compiled(self, work):
        compiled = torch.compile(work, mode=self.mode)
        known = False

        def call():
            nonlocal known
            before, start = counters(), time.perf_counter()
            if self.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            with stage("compiled"), unmarked():
                output = compiled()
            graphs, breaks = (now - then for now, then in zip(counters(), before, strict=True))
            if graphs:
                self.compile_s += time.perf_counter() - start
                self.counts["recompiles"] += known
                known = True
            self.counts["graphs"] += graphs
            self.counts["graph_breaks"] += breaks
            return output

        return call

    def describe(self) -> dict:
        return {**super().describe(), "compiled": self.mode}

    def start_cost(self) -> dict:
        return {**super().start_cost(), "compile_s": self.compile_s, **self.counts}


class CompiledStep(Compiled, StaticStep):
    """StaticStep with its device work compiled; `mode` is torch.compile's, `default` or `reduce-overhead`."""


class CompiledSplitStep(Compiled, StaticSplitStep):
    """StaticSplitStep with its device work compiled, its key/value cache included; `mode` as for CompiledStep.

    Raises InputError for cache="dynamic", whose tensors are new ones at every decision.
    """


class CompiledQuestionFirstStep(Compiled, QuestionFirstStep):
    """QuestionFirstStep with its device work compiled, its key/value cache included; `mode` as for CompiledStep.

    Raises InputError for cache="dynamic", whose tensors are new ones at every decision.
    """


def compiler() -> str | None:
    """The C++ compiler that torch would call, or None."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def counters() -> tuple[int, int]:
    """Graphs compiled and graph breaks met so far in this process."""
    counts = torch._dynamo.utils.counters
    return counts["stats"]["unique_graphs"], sum(counts["graph_break"].values())
