"""What can be chosen for a session of play: games with their questions, models, ways to take a decision; and what is to be
said of a choice. Light to import."""

import json
from importlib import import_module
from typing import NamedTuple

from lab.errors import InputError, whole
from lab.workloads import MAX_FRAMES, Question, get_workload, load_workloads

DEFAULT_MODEL = "pocket"
MODELS = ("pocket", "pocket-question-first", "tiny", "smolvlm-256m")
DEFAULT_SOURCE = "doom:basic"
SNAKE = "snake:24x16"
SNAKE_MODELS = ("snake", "snake-tenth", "tiny", "multilingual", "english")  # these read text
SNAKE_STEPS = ("eager", "compiled")


class Kind(NamedTuple):
    """A way to take decisions: the class in `lab.steps`, the layout it reads, and what it is in a few words."""

    step: str
    layout: str
    about: str


STEPS = {
    "static": Kind("StaticStep", "terminator", "fixed shapes; on a GPU one captured graph"),
    "eager": Kind("EagerStep", "terminator", "everything anew for every decision"),
    "split": Kind("StaticSplitStep", "terminator", "the text model in two passes, cut after the picture"),
    "compiled": Kind("CompiledStep", "terminator", "fixed shapes through torch.compile; slow to start"),
    "question_first": Kind("QuestionFirstStep", "question_first", "the question first, its keys and values kept"),
    "question_first_compiled": Kind("CompiledQuestionFirstStep", "question_first", "the same through torch.compile"),
}


def check_settings(
    step: str, frames: int, seed: int, max_decisions: int | None = None, source: str = DEFAULT_SOURCE
) -> None:
    """Raise InputError for a setting of a session that no game or model would take, or that `source` has no use for."""
    if step not in STEPS:
        raise InputError(f"Unknown step {step!r}; it is one of {', '.join(STEPS)}.")
    if isinstance(frames, bool) or not isinstance(frames, int) or not 1 <= frames <= MAX_FRAMES:
        raise InputError(f"frames is {frames!r}; give a whole number from 1 to {MAX_FRAMES}.")
    whole("seed", seed, 0)
    if max_decisions is not None:
        whole("max_decisions", max_decisions, 1)
    if is_snake(source) and step not in SNAKE_STEPS:
        raise InputError(
            f"The step {step!r} reads frames, and Snake is put into words; choose {' or '.join(SNAKE_STEPS)}."
        )
    if is_snake(source) and frames != 1:
        raise InputError(f"frames is {frames}, and Snake is put into words, without a frame; leave it at 1.")


def sources() -> list[str]:
    """Every game that can be played here: those with a workload of their own first, then all others by name."""
    from lab.envs import EmulatorMissing, atari, doom

    known = list(dict.fromkeys([*(workload.source for workload in load_workloads().values()), SNAKE]))
    for kind, names in (("atari", atari.games), ("doom", doom.scenarios)):
        try:
            known += [source for name in names() if (source := f"{kind}:{name}") not in known]
        except EmulatorMissing:
            known = [source for source in known if not source.startswith(kind)]
    return known


def is_snake(source: str) -> bool:
    """Whether the game is Snake, whose board is put into words, so that models read text and no frame is looked at."""
    return source.partition(":")[0] == "snake"


def choices(source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The models and the steps to choose from for a game, what it is played with by default first."""
    return (SNAKE_MODELS, SNAKE_STEPS) if is_snake(source) else (MODELS, tuple(STEPS))


def question_for(source: str, actions: list[str]) -> Question:
    """The shipped workload's question about `source`; where there is none, one made for its `actions`, with the
    descriptions that shipped questions give to actions of these names."""
    workloads = load_workloads().values()
    for workload in workloads:
        if workload.source == source and set(workload.question.names) == set(actions):
            return workload.question
    told = {name: text for workload in workloads for name, text in workload.question.options}
    kind, _, name = source.partition(":")
    where = f"{name} on an Atari" if kind == "atari" else f"the Doom scenario {name}"
    words = {action: told.get(action, action.lower().replace("_", " ")) for action in actions}
    return Question("choice", f"You are playing {where}. Which button is the right one now?", words)


def remark(model, source: str, step: str, frames: int) -> str:
    """What keeps a model's answers from meaning much: untrained weights, or a game, layout or number of frames that it was
    not trained on; empty where there is nothing to say."""
    if "random" in model.weights:
        return f"{model.name} is not trained ({model.weights}): its choices mean nothing."
    trained, said = trained_on(model), []
    if trained and source not in trained:
        said.append(
            f"{model.name} was not trained on {source}, only on {', '.join(trained)}: its choices mean little here."
        )
    if STEPS[step].layout != model.config.layout:
        fitting = ", ".join(name for name, kind in STEPS.items() if kind.layout == model.config.layout)
        said.append(
            f"{model.name} was trained with the layout {model.config.layout}, and {step} reads {STEPS[step].layout}; "
            f"fitting steps are {fitting}."
        )
    if trained and frames > 1:
        said.append(f"{model.name} was trained on one frame per decision, not on {frames}.")
    return " ".join(said)


def trained_on(model) -> list[str]:
    """The games that a model of the package was trained on, as its checkpoint says; empty for any other model."""
    folder = import_module("lab.models.checkpoints").TRAINED.get(model.name)
    if folder is None or not (folder / "training.json").is_file():
        return []
    told = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return [get_workload(game).source for game in told["recipe"]["games"]]
