"""`lab check`: what a checkpoint is, how it will be asked, and whether its answers hold together."""

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np

from lab.doctor import Finding
from lab.envs import RECORDED_SOURCES, recorded_frames
from lab.envs.snake import Snake
from lab.envs.snake_prompts import prompt
from lab.errors import InputError, foreign
from lab.experiments.players import taught_games
from lab.models.checkpoints import KNOWN, TRAINED, load_model
from lab.models.folders import CONFIG
from lab.models.heads import bucket, temperature_for
from lab.models.text import CONFIG as TEXT_CONFIG
from lab.models.text import PRESETS as TEXT_PRESETS
from lab.models.text import TEMPERATURES, TextModel, load_text_model
from lab.models.text import TRAINED as TEXT_TRAINED
from lab.parity import Parity, Remembering, compare_answers
from lab.pixels import PATHS
from lab.steps import EagerStep, SplitStep, StaticStep, TextStep
from lab.tokens import needed_tokens, token_id
from lab.workloads import QUESTION_TYPES, Question, Workload, load_workloads

SAME = 1e-4  # the largest difference of probabilities in fp32 that counts as the same answer
PEAKED = 1.5  # times the uniform share: below it answers are so even that their equality proves little
FEW, MANY, LARGE = 2, 4, 50e6  # recorded frames per game, fewer where the model has so many parameters
# Keys of the published configs that describe, or that the loader reads on its way.
DESCRIBING = {"backbone", "backbone_revision", "encoder", "dtype", "act_costs", "loaded_from"}
COUNTS = (2, 3, 6, 11)  # numbers of options, one of each bucket of temperatures


class Check:
    """A checkpoint under examination. `findings` are for people; `facts`, by name, for programs; `ok` unless something is
    wrong. Raises InputError where there is no checkpoint by that name."""

    def __init__(self, name: str):
        self.name, self.findings, self.facts = name, [], {}
        folder = Path({**TRAINED, **TEXT_TRAINED}.get(name, name))
        with foreign(f"There is no checkpoint {name:.80}"):
            there = folder.is_dir()
        known = there or name in {*KNOWN, *TEXT_PRESETS} or "/" in name
        if not known or (folder.is_absolute() and not there):
            raise InputError(f"There is no checkpoint {name}; give a folder, a hub name or one of {', '.join(KNOWN)}.")
        text = (folder / TEXT_CONFIG).is_file() or (name in TEXT_PRESETS and name not in KNOWN)
        try:
            model = (load_text_model if text else load_model)(name)
        except InputError as error:
            self.findings.append(Finding("load", "wrong", str(error), "mend this first: nothing else can be looked at"))
            return
        self.facts["weights"] = model.weights
        self._add("weights", "ok", f"{_parameters(model) / 1e6:.2f} M parameters, all finite: {model.weights}")
        try:
            (_text if text else _vision)(self, model, folder)
        except InputError as error:
            self._add("answers", "wrong", str(error), "mend this first: what comes behind it was not looked at")

    @property
    def ok(self) -> bool:
        return not any(finding.state == "wrong" for finding in self.findings)

    def document(self) -> dict:
        """For `--json`: the facts, the findings, and whether all is well."""
        findings = [finding._asdict() for finding in self.findings]
        return {"checkpoint": self.name, "ok": self.ok, **self.facts, "findings": findings}

    def _add(self, what: str, state: str, found: str, remedy: str = "") -> None:
        self.findings.append(Finding(what, state, found, remedy))

    def settings(self, model, path: Path) -> None:
        """Every setting, and whether the checkpoint's file says it."""
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.facts["settings"] = {}
        for field in fields(model.config):
            if field.name.startswith("temperature"):
                continue
            source = path.name if said.get(field.name) is not None else "default"
            value = getattr(model.config, field.name)
            self.facts["settings"][field.name] = {"value": value, "source": source}
        listed = {}
        for name, one in self.facts["settings"].items():
            listed.setdefault(one["source"], []).append(f"{name} {one['value']}")
        for source, lines in listed.items():
            self._add(f"settings: {source}", "ok", ", ".join(lines))
        unused = sorted(set(said) - {field.name for field in fields(model.config)} - DESCRIBING)
        if unused:
            remedy = "no step reads these; look whether one of them is a setting misspelt"
            self._add("keys not used", "note", ", ".join(unused), remedy)

    def temperatures(self, model, limits=(1e-3, math.inf)) -> None:
        """The temperature that divides the logits, by type and number of options."""
        config = model.config
        found = {}
        for kind in QUESTION_TYPES:
            for count in COUNTS[: 1 if kind == "noul" else None]:
                asked = Question(kind, "?", {} if kind == "noul" else [f"{i}" for i in range(count)])
                by_type, by_options = config.temperature, config.temperature_by_options
                found[bucket(asked)] = temperature_for(asked, by_type, by_options, limits)
        self.facts["temperatures"] = found
        raw = [*config.temperature, *config.temperature_by_options.values()]
        outside = [value for value in raw if not limits[0] <= value <= limits[1]]
        note = f"kept within {limits[0]:g} to {limits[1]:g}: " if outside else ""
        listed = ", ".join(f"{name} {value:g}" for name, value in found.items())
        self._add("temperatures", "note" if outside else "ok", note + listed)

    def special_tokens(self, found: dict[str, int]) -> None:
        self.facts["special_tokens"] = found
        self._add("special tokens", "ok", ", ".join(f"{name.strip() or 'newline'} {at}" for name, at in found.items()))

    def peaked(self, answers: list, of: str) -> None:
        """How far the most probable option leads, in the mean, beside an even share."""
        top = float(np.mean(np.concatenate([answer.probabilities.max(-1) for answer in answers])))
        even = float(np.mean([1 / len(answer.names) for answer in answers]))
        count = sum(map(len, answers))
        self.facts["peaked"] = {"decisions": count, "top_probability": top, "even_share": even}
        flat = top < PEAKED * even
        remedy = "no answers were learned for these: equal answers prove little" if flat else ""
        said = f"mean top probability {top:.2f} (an even share: {even:.2f}), {count} decisions on {of}"
        self._add("peaked answers", "note" if flat else "ok", said, remedy)

    def agreement(self, name: str, found: list[Parity], exact: bool, remedy: str) -> None:
        """One step against the plain decision: it must agree where it is `exact`, else what differs is said."""
        apart, count = max(one.max_probability for one in found), sum(one.n for one in found)
        flips = round(sum(one.flips.value * one.n for one in found))
        self.facts.setdefault("agreement", {})[name] = {"max_probability": apart, "flips": flips, "decisions": count}
        wrong = exact and apart > SAME
        state = "wrong" if wrong else "ok" if exact or not flips else "note"
        said = f"probabilities within {apart:.1e}, {flips} of {count} choices differ"
        self._add(name, state, said, remedy if state != "ok" else "")


def _vision(check: Check, model, folder: Path) -> None:
    shape, config = model.encoder.config, model.config
    folder = model.folder or folder  # of a hub name, the folder that the hub gave
    vision, text = shape.vision_config, shape.text_config
    check.facts["family"] = {
        "backbone": shape.model_type,
        "readout": config.readout,
        "image_tokens": model.image_tokens,
    }
    check._add(
        "family",
        "ok",
        f"{shape.model_type}: vision {vision.num_hidden_layers} layers of {vision.hidden_size}, text "
        f"{text.num_hidden_layers} of {text.hidden_size}; {config.image_size} px, {model.image_tokens} tokens a picture",
    )
    check.settings(model, folder / CONFIG)
    check.temperatures(model)
    needed = needed_tokens(config.readout == "mask", model.markers)
    check.special_tokens({name: token_id(model.tokenizer, name) for name in needed})

    asked = _workloads(folder)
    frames = {one.name: recorded_frames(one.source)[: FEW if _parameters(model) > LARGE else MANY] for one in asked}

    def inputs(workload: Workload) -> list[np.ndarray]:
        return [frame[None, None] for frame in frames[workload.name]]

    plain = {one.name: Remembering(EagerStep(model, one.question)) for one in asked}
    answers = [plain[one.name].decide(frame) for one in asked for frame in inputs(one)]
    check.peaked(answers, f"recorded frames of {', '.join(one.name for one in asked)}")

    steps = {"static": lambda q: StaticStep(model, q, capture=False), "split": lambda q: SplitStep(model, q)}
    for name in {"terminator": ("static", "split"), "mask": ()}.get(config.layout, ("static",)):
        found = [compare_answers(plain[one.name], steps[name](one.question), inputs(one)) for one in asked]
        check.agreement(name, found, True, "report it: this step must answer as the plain decision does")
    other, found = next(path for path in PATHS if path != config.pixels), []
    for one in asked:
        step = EagerStep(model, one.question)
        step.pixels = model.make_pixels(other)  # put in place, so that no setting is said to be overridden
        found.append(compare_answers(plain[one.name], step, inputs(one)))
    check.agreement(
        f"{other} pixels", found, False, f"the checkpoint was taught with pixels {config.pixels!r}: leave it so"
    )


def _workloads(folder: Path) -> list[Workload]:
    """The workloads of the recorded frames, one frame each; of a checkpoint that says what it was taught, those."""
    taught = taught_games(str(folder))
    known = [one for one in load_workloads().values() if one.frames == 1 and one.source in RECORDED_SOURCES]
    return [one for one in known if taught is None or one.name in taught] or known


def _text(check: Check, model: TextModel, folder: Path) -> None:
    shape, tokens = model.encoder.config, model.tokens
    check.facts["family"] = {"backbone": shape.model_type, "readout": "mask"}
    layers = f"{shape.num_hidden_layers} layers of {shape.hidden_size}"
    check._add("family", "ok", f"{shape.model_type}: {layers}, reads {model.config.max_len} tokens")
    check.settings(model, folder / TEXT_CONFIG)
    check.temperatures(model, TEMPERATURES)
    ids = {"CLS": tokens.cls, "SEP": tokens.sep, "MASK": tokens.mask, "PAD": tokens.pad}
    check.special_tokens(ids)

    game, prompts = Snake(seed=101), []
    for _ in range(MANY):
        plan = game.plan()
        prompts.append(prompt(game, plan))
        game.step(plan.preferred)
    plain = TextStep(model)
    answers = [plain.decide(one) for one in prompts]
    check.peaked([answer for each in answers for answer in each], "Snake boards")

    class Asked:
        """A text step that answers one of a prompt's questions, as `compare_answers` asks."""

        def __init__(self, step, number: int):
            self.name, self.step, self.number = step.name, step, number

        def decide(self, one):
            return self.step.decide(one)[self.number]

    for step in (TextStep(model, pad_to_multiple=16), TextStep(model, cache_prompts=True)):
        found = [
            compare_answers(Asked(plain, number), Asked(step, number), prompts) for number in range(len(answers[0]))
        ]
        check.agreement(step.name, found, True, "report it: this step must answer as the plain decision does")


def _parameters(model) -> int:
    return sum(value.numel() for value in model.parameters())
