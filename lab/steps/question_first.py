"""The question first, its keys and values kept: per frame only the image, a cue and the readouts are run."""

import time

from torch import Tensor

from lab.errors import InputError
from lab.measure import stage
from lab.models.vision import DecisionModel, whole_mask
from lab.steps.keyvalues import CACHES, cache_bytes, check_capturable, continue_text, make_cache, restore
from lab.steps.static import StaticStep
from lab.tokens import QUESTION_FIRST
from lab.workloads import Question


class QuestionFirstStep(StaticStep):
    """A static step whose fixed tokens come first; their keys and values are computed once, at construction.

    `layout` is `question_first` (unless given) or `published_simulation`, see `lab.tokens`. Readouts see the whole
    question, the image and, with option_attention="block", each other both ways; with "causal" only those before them.
    `cache` names the kind of key/value cache, see `lab.steps.keyvalues`; None keeps nothing and runs the whole row under
    the same mask, which every cached answer equals to 1e-4 on logits in fp32. The heads see the per-frame tokens only.
    Stages `restore` (the cache goes back to the question) and `language` beside those of StaticStep.

    Raises InputError for what StaticStep refuses, for another layout or cache, and for capture of a dynamic cache.
    """

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        batch: int = 1,
        layout: str | None = None,
        pixels: str | None = None,
        cache: str | None = "static",
        capture: bool | None = None,
        reuse: bool = False,
        filter: str | None = None,
        option_attention: str | None = None,
        name: str | None = None,
    ):
        if layout is None:
            taught = model.config.layout if isinstance(model, DecisionModel) else None
            layout = taught if taught in QUESTION_FIRST else "question_first"
        if layout not in QUESTION_FIRST:
            raise InputError(f"layout is {layout!r}; choose one of {', '.join(QUESTION_FIRST)}.")
        if cache is not None and cache not in CACHES:
            raise InputError(f"cache is {cache!r}; choose one of {', '.join(CACHES)}, or None.")
        capture = False if capture is None and cache == "dynamic" else capture
        check_capturable(cache, bool(capture))
        self.cache_kind = cache
        self.title = layout.replace("_", " ") + {None: ", uncached", "static": ""}.get(cache, f", {cache} cache")
        super().__init__(model, question, frames, batch, option_attention, pixels, capture, reuse, filter, layout, name)

    def _fix_text(self) -> None:
        super()._fix_text()
        start, kept = time.perf_counter(), self.start
        self.mask = whole_mask(self.row, self.setting.option_attention, self.model.dtype, self.device)
        self.cache = None
        if self.cache_kind:
            self.cache = make_cache(self.cache_kind, self.model, self.batch, len(self.row))
            continue_text(self.model, self.embeds[:, :kept], self.mask, self.rotary, self.cache, 0)
            self.embeds, self.positions = self.embeds[:, kept:].contiguous(), self.positions - kept
        self._cache_seconds = time.perf_counter() - start

    def _language(self) -> Tensor:
        if self.cache is None:
            return super()._language()
        with stage("restore"):
            restore(self.cache, self.start)
        with stage("language"):
            return continue_text(self.model, self._merged(), self.mask, self.rotary, self.cache, self.start)

    def describe(self) -> dict:
        return {
            **super().describe(),
            "cache": self.cache_kind,
            "tokens_per_frame": len(self.row) - (self.start if self.cache else 0),
        }

    def start_cost(self) -> dict:
        held = cache_bytes(self.cache) if self.cache else 0
        return {**super().start_cost(), "cache_s": self._cache_seconds, "cache_bytes": held}
