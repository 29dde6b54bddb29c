"""Steps: one file per way to take a decision. Whatever follows `Step` can be measured beside the others."""

from collections.abc import Sequence
from typing import Protocol

from lab.models.heads import Decisions
from lab.steps.compiled import CompiledQuestionFirstStep, CompiledSplitStep, CompiledStep
from lab.steps.eager import EagerStep
from lab.steps.last_answer import LastAnswerStep
from lab.steps.openvino import OpenVinoStep
from lab.steps.padded import PaddedStep
from lab.steps.quantised import QuantisedStep
from lab.steps.question_first import QuestionFirstStep
from lab.steps.split import SplitStep, StaticSplitStep
from lab.steps.static import StaticStep
from lab.steps.stock import StockStep
from lab.steps.text import TextStep
from lab.steps.tuned import TunedStep

__all__ = [
    "CompiledQuestionFirstStep",
    "CompiledSplitStep",
    "CompiledStep",
    "Decisions",
    "EagerStep",
    "LastAnswerStep",
    "OpenVinoStep",
    "PaddedStep",
    "QuantisedStep",
    "QuestionFirstStep",
    "SplitStep",
    "StaticSplitStep",
    "StaticStep",
    "Step",
    "StockStep",
    "TextStep",
    "TunedStep",
]


class Step(Protocol):
    """A way to take a decision, built once for a fixed model and question and called once per frame."""

    name: str

    def decide(self, inputs) -> Decisions:
        """Answer the question on frames uint8 [batch, frames, height, width, 3] (or on text states)."""

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """A new episode begins in these batch rows (all by default): forget what was kept for them."""

    def describe(self) -> dict:
        """The effective configuration; two arms of a comparison must differ here."""

    def start_cost(self) -> dict:
        """Seconds and bytes spent before the first decision, by what they were spent on."""
