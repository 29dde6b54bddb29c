"""Refrain: where a fixed-question decision's time goes, and which ways to save it pay.

Importing `lab` is light: torch and transformers load only when a model is asked for.
"""

from importlib import import_module

from lab.errors import InputError
from lab.workloads import Question, Workload, load_workloads

_LAZY = {
    "load_model": "lab.models",
    "load_text_model": "lab.models.text",
    "EagerStep": "lab.steps",
    "SplitStep": "lab.steps",
    "StaticStep": "lab.steps",
    "StaticSplitStep": "lab.steps",
    "QuestionFirstStep": "lab.steps",
    "CompiledStep": "lab.steps",
    "QuantisedStep": "lab.steps",
    "OpenVinoStep": "lab.steps",
    "PaddedStep": "lab.steps",
    "TextStep": "lab.steps",
    "TunedStep": "lab.steps",
    "FrameFeatures": "lab.caches",
    "KeptStates": "lab.caches",
    "QuestionTokens": "lab.question_tokens",
    "play": "lab.policy",
    "Arm": "lab.measure",
    "compare": "lab.measure",
    "Run": "lab.records",
}

_MODULES = {
    "audit", "figures", "views", "measure", "models", "parity", "records", "resume", "roofline", "stats", "steps",
}  # fmt: skip

__all__ = ["InputError", "Question", "Workload", "load_workloads", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _MODULES:
        return import_module(f"lab.{name}")
    raise AttributeError(f"module 'lab' has no attribute {name!r}")
