"""The same decision in two passes: the image prefix, then question and options on its key/value cache."""

import torch
from torch import Tensor
from transformers import DynamicCache

from lab.errors import InputError
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import whole_mask
from lab.steps.eager import EagerStep, Inputs
from lab.steps.keyvalues import cache_bytes, check_capturable, continue_text, make_cache, restore
from lab.steps.one_thread import one_thread
from lab.steps.setting import Setting
from lab.steps.static import StaticStep
from lab.tokens import Row


def cut_of(row: Row, setting: Setting) -> int:
    """Where a row's question begins behind its images; InputError for a layout in which it does not."""
    if setting.layout != "terminator":
        raise InputError(
            f"A split step cuts a row behind its images, and in the layout {setting.layout!r} the question is not there; "
            "give layout='terminator', or use another step."
        )
    return row.segment("question").start


class SplitStep(EagerStep):
    """EagerStep's decision with the language stage cut where the frame's part ends.

    Stages `language_prefix` (prefix and image tokens, filling the cache), `language_question` (question and options on
    it) and `restore` (the cache emptied for the next frame). Equal to EagerStep to 1e-4 on logits in fp32; the prefix
    stage alone is what a decision's language part would cost if the question were free.
    """

    def __init__(self, *args, name: str | None = None, **kwargs):
        super().__init__(*args, name=name or "split", **kwargs)
        self.cut = cut_of(self.row, self.setting)
        self.cache, self._batch = self._empty_cache(), 0

    @one_thread
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3]."""
        if len(frames) != self._batch:  # an emptied cache still remembers its batch
            self.cache, self._batch = self._empty_cache(), len(frames)
        try:
            decisions = super().decide(frames)
        except BaseException:
            self.cache = self._empty_cache()  # an interrupted pass leaves layers of unequal length
            raise
        with stage("restore"):
            self.cache.crop(-len(self.row))
        return decisions

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.encoder.text_model.config)

    def _language(self, inputs: Inputs, image_rows: Tensor) -> Tensor:
        with stage("language_prefix"):
            embeds = self._embed(inputs, image_rows)
            prefix = self.model.language(embeds[:, : self.cut], cache=self.cache)
        with stage("language_question"):
            attention = (
                inputs.attention[:, :, self.cut :] if self.setting.option_attention == "block" else inputs.attention
            )
            question = self.model.language(embeds[:, self.cut :], attention, cache=self.cache)
            return torch.cat([prefix, question], dim=1)


class StaticSplitStep(StaticStep):
    """StaticStep's decision with the language stage cut where the frame's part ends; stages as SplitStep's.

    `cache` names the kind of key/value cache, see `lab.steps.keyvalues`. Equal to StaticStep to 1e-4 on logits in fp32.
    """

    def __init__(self, *args, cache: str = "static", name: str | None = None, **kwargs):
        self.cache_kind = cache
        self.title = "split" + ("" if cache == "static" else f", {cache} cache")
        super().__init__(*args, name=name, **kwargs)

    def _fix_text(self) -> None:
        check_capturable(self.cache_kind, self.capture)
        super()._fix_text()
        self.cut = cut_of(self.row, self.setting)
        self.mask = whole_mask(self.row, self.setting.option_attention, self.model.dtype, self.device)
        self.cache = make_cache(self.cache_kind, self.model, self.batch, len(self.row))

    def _language(self) -> Tensor:
        with stage("restore"):
            restore(self.cache, 0)
        with stage("language_prefix"):
            embeds = self._merged()
            prefix = continue_text(self.model, embeds[:, : self.cut], self.mask, self.rotary, self.cache, 0)
        with stage("language_question"):
            asked = continue_text(self.model, embeds[:, self.cut :], self.mask, self.rotary, self.cache, self.cut)
            return torch.cat([prefix, asked], dim=1)

    def describe(self) -> dict:
        return {**super().describe(), "cache": self.cache_kind}

    def start_cost(self) -> dict:
        return {**super().start_cost(), "cache_bytes": cache_bytes(self.cache)}
