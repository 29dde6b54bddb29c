"""A text decision: a prompt's questions as rows of one batch, answered in one pass of the text model."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from lab.clocks import stage, unmarked
from lab.errors import InputError, whole
from lab.models.heads import Decisions
from lab.models.text import TextModel
from lab.question_tokens import QuestionTokens, TextPrompt, question_part, state_ids, text_row
from lab.steps.compiled import compiler, counters
from lab.steps.one_thread import one_thread
from lab.steps.replay import Watch
from lab.workloads import QUESTION_TYPES, Question

MOST_SHAPES = 64  # compiled per step; a prompt of yet another shape runs uncompiled


@dataclass(frozen=True)
class Prepared:
    """A prompt as the model takes it: ids int64 and mask bool [rows, length], types int64 [rows], readouts int64 and present
    bool [rows, options]; `tokens` counts ids, padding left out."""

    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray
    readouts: np.ndarray
    present: np.ndarray
    tokens: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.ids.shape, self.readouts.shape[1]

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.mask, self.types, self.readouts, self.present


class TextStep:
    """Answers a `TextPrompt`: one row per question, the longest deciding the length. Three options, independent, all off:

    `compile`: the model through torch.compile, made once and specialised to each shape (rows, length, options) that it
    meets; "whole" (or True) compiles the model as one, "layers" each encoder layer, which for a deep model is far
    quicker to compile. The first call of each shape compiles; more than 64 shapes run uncompiled.
    `pad_to_multiple`: lengths are rounded up to a multiple of it, at most the model's `max_len`; masks leave padding out.
    `cache_prompts`: question parts come from `QuestionTokens`, True for one of its own, or one that steps share.

    Once the model's weights have changed `decide` raises InputError; where its output is not finite, NotFinite.
    """

    def __init__(
        self,
        model: TextModel,
        compile: bool | str = False,
        pad_to_multiple: int | None = None,
        cache_prompts: bool | QuestionTokens = False,
        name: str | None = None,
    ):
        start = time.perf_counter()
        if not isinstance(model, TextModel):
            raise InputError(f"A text step takes a model from lab.models.text.load_text_model, not {model!r:.60}.")
        if compile not in (False, True, "whole", "layers"):
            raise InputError(f"compile is {compile!r}; choose whole or layers, or leave it out.")
        if pad_to_multiple is not None:
            whole("pad_to_multiple", pad_to_multiple, 1)
        if not isinstance(cache_prompts, bool | QuestionTokens):
            raise InputError(f"cache_prompts is {cache_prompts!r}; give True, or a QuestionTokens.")
        if compile and model.device.type == "cpu" and not compiler():
            raise InputError("Compiling for the CPU needs a C++ compiler (g++ or clang++), and there is none here.")
        self.model, self.device = model, model.device
        self.compile, self.pad_to_multiple = "whole" if compile is True else compile or None, pad_to_multiple
        self.parts = cache_prompts if isinstance(cache_prompts, QuestionTokens) else None
        if cache_prompts is True:
            self.parts = QuestionTokens()
        on = {"compiled": self.compile, f"padded to {pad_to_multiple}": pad_to_multiple, "prompts kept": self.parts}
        self.name = name or " + ".join([said for said, is_on in on.items() if is_on is not None] or ["eager"])
        self.watch, self.temperatures = Watch(model), self._temperatures()
        self.compile_s, self.shapes = 0.0, {}
        self.counts = {"graphs": 0, "graph_breaks": 0, "disk_hits": 0}
        self._call = {None: model, "whole": None, "layers": None}[self.compile]
        if self.compile == "whole":
            self._call = torch.compile(model.forward, dynamic=False)
        elif self.compile == "layers":
            self._call = _ByLayer(model)
        self._build_seconds = time.perf_counter() - start

    def _temperatures(self) -> tuple:
        return self.model.config.temperature, dict(self.model.config.temperature_by_options)

    # ------------------------------------------------------------------------------------------ at every call

    @one_thread
    @torch.no_grad()
    def decide(self, prompt: TextPrompt) -> list[Decisions]:
        """One answer (a batch of 1) per question of the prompt, in order."""
        with stage("prepare"):
            self._check()
            prepared = self.prepare(prompt)
        with stage("forward"):
            logits, act = self._forward(prepared)
        with stage("readout"):
            heat = torch.tensor([self.model.temperature_of(question) for question in prompt.questions])
            probabilities = (logits.cpu() / heat[:, None]).softmax(-1).numpy()
            logits, act = logits.cpu().numpy(), act.softmax(-1)[:, 0].cpu().numpy()
            counts = prepared.present.sum(1)
            return [
                Decisions(question, logits[i : i + 1, :k], probabilities[i : i + 1, :k], act[i : i + 1])
                for i, (question, k) in enumerate(zip(prompt.questions, counts, strict=True))
            ]

    def _check(self) -> None:
        self.watch.check()
        if self._temperatures() != self.temperatures:
            raise InputError("The model's temperature changed since this step was built; build a new step.")

    def prepare(self, prompt: TextPrompt) -> Prepared:
        """Tokenise and collate; what `decide` runs on. The state is tokenised once, whatever the number of questions."""
        if not isinstance(prompt, TextPrompt) or not all(isinstance(asked, Question) for asked in prompt.questions):
            raise InputError(f"A text step answers a TextPrompt(state, questions), not {prompt!r:.60}.")
        if not prompt.questions:
            raise InputError("The prompt asks no question; give one or more.")
        model, config = self.model, self.model.config
        state = state_ids(model.tokens, prompt.state)
        keep_end = isinstance(prompt.state, list)
        part = self.parts.part if self.parts is not None else question_part
        rows = [
            text_row(model.tokens, part(model.tokens, question, config.head_max_len), state, config.max_len, keep_end)
            for question in prompt.questions
        ]
        length, options = max(len(ids) for ids, _ in rows), max(len(readouts) for _, readouts in rows)
        tokens = sum(len(ids) for ids, _ in rows)
        if self.pad_to_multiple:
            length = min(-(-length // self.pad_to_multiple) * self.pad_to_multiple, config.max_len)
        ids = np.full((len(rows), length), model.tokens.pad, np.int64)
        mask, present = np.zeros(ids.shape, bool), np.zeros((len(rows), options), bool)
        readouts = np.zeros(present.shape, np.int64)
        for i, (row, places) in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = row, True
            readouts[i, : len(places)], present[i, : len(places)] = places, True
        types = np.array([QUESTION_TYPES.index(question.type) for question in prompt.questions])
        return Prepared(ids, mask, types, readouts, present, tokens)

    def _forward(self, prepared: Prepared):
        inputs = [torch.from_numpy(array).to(self.device) for array in prepared.arrays()]
        if self.compile is None:
            return self.model(*inputs)
        if prepared.shape in self.shapes:
            with unmarked():
                return self._call(*inputs)
        if len(self.shapes) >= MOST_SHAPES:
            return self.model(*inputs)
        return self._first(prepared.shape, inputs)

    def _first(self, shape: tuple[int, int, int], inputs: list):
        """The first call of a shape, which compiles; its seconds are start cost."""
        before, start = _counters(), time.perf_counter()
        # torch's own limit of 8 shapes would otherwise fall back to uncompiled work without a word
        limits = {"recompile_limit": 4 * MOST_SHAPES, "accumulated_recompile_limit": 100 * MOST_SHAPES}
        with torch._dynamo.config.patch(**limits), unmarked():
            output = self._call(*inputs)
        self.shapes[shape] = time.perf_counter() - start
        self.compile_s += self.shapes[shape]
        for name, now, then in zip(self.counts, _counters(), before, strict=True):
            self.counts[name] += now - then
        return output

    # ------------------------------------------------------------------------------------------ about it

    def reset(self, rows=None) -> None:
        """Nothing is kept from one state to the next, only question parts, which no episode changes."""

    def describe(self) -> dict:
        capacity = None if self.parts is None else self.parts.capacity
        return {
            "step": type(self).__name__,
            **self.model.describe(),
            "compile": self.compile,
            "pad_to_multiple": self.pad_to_multiple,
            "cache_prompts": capacity,
        }

    def start_cost(self) -> dict:
        return {
            "build_s": self._build_seconds,
            "compile_s": self.compile_s,
            "shapes": len(self.shapes),
            **self.counts,
            "check_s": self.watch.seconds,
        }


def _counters() -> tuple[int, int, int]:
    """Graphs compiled, graph breaks, and graphs taken from torch's cache on disk, so far in this process."""
    counts = torch._dynamo.utils.counters
    return *counters(), counts["inductor"]["fxgraph_cache_hit"] + counts["aot_autograd"]["autograd_cache_hit"]


class _ByLayer:
    """The text model with each of its encoder layers and its heads compiled; layers of one kind share a compilation."""

    def __init__(self, model: TextModel):
        self.model = model
        self.layers = [torch.compile(layer.forward, dynamic=False) for layer in model.encoder.layers]
        self.score = torch.compile(model.score, dynamic=False)

    def __call__(self, ids, mask, types, readouts, present):
        embeds = self.model.encoder.embeddings.tok_embeddings(ids)
        first = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        hidden = self.model.encode(embeds, mask, self.layers)
        return self.score(hidden, types, readouts, first, mask, present)
