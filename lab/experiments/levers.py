"""Notebook 08: what else is cheaper, without training anything: each lever beside the plain decision, with its answers."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.records import beside_rows, join_rows
from lab.workloads import Workload, chosen, get_workload

BASE = "eager"
KEPT = "frame features kept"
LAYER = "one vision layer"
PEAKED = "pocket"  # a checkpoint that has learned its games: its answers are peaked, so that a flip means something
# `decisions` whose answers are compared, `pairs` blocks of the comparison of two frames (0: none), `without` levers that
# take long and that another notebook or the smaller model shows; `warmup` blocks come after the call that starts a step,
# which at the real size in `standard` has to do.
PROFILES = {
    "smoke": {
        "preset": "tiny", "blocks": 6, "decisions": 4, "batches": [4], "pairs": 5, "budget_s": 20, "compiled": False,
        "warmup": 1, "without": (),
        "peaked": {
            "blocks": 6, "decisions": 16, "batches": [4], "pairs": 0, "budget_s": 20, "compiled": False, "warmup": 1,
            "without": (),
        },
    },
    "standard": {
        "preset": "smolvlm-256m", "blocks": 5, "decisions": 1, "batches": [4], "pairs": 0, "budget_s": 180,
        "compiled": False, "warmup": 0, "without": ("static", "int8 vision"),
        "peaked": {
            "blocks": 20, "decisions": 128, "batches": [4, 16], "pairs": 20, "budget_s": 15, "compiled": True, "warmup": 1,
            "without": (),
        },
    },
    "full": {
        "preset": "smolvlm-256m", "blocks": 30, "decisions": 8, "batches": [4, 16], "pairs": 30, "budget_s": 600,
        "compiled": True, "warmup": 1, "without": (),
        "peaked": {
            "blocks": 30, "decisions": 512, "batches": [4, 16], "pairs": 30, "budget_s": 60, "compiled": True, "warmup": 1,
            "without": (),
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Lever:
    """One way to take the decision: the step, how many inputs it answers at once, what it is said to be."""

    name: str
    step: object
    batch: int = 1

    def arm(self) -> Arm:
        said = lambda: {**self.step.describe(), "batch": self.batch}  # noqa: E731
        return Arm.of(self.step, self.name, call=lambda inputs: self.step.decide(inputs[: self.batch]), describe=said)


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    preset: str | None = None,
    weights: str = "default",
    workload: Path | str | None = None,
) -> pd.DataFrame:
    """Measure every lever beside the plain decision and return all raw rows, one comparison (title) each for: one frame
    per decision at the profile's preset, or what the first workload of a reader's own file `workload` asks; two frames,
    with and without frame features kept, where the profile asks for them; on a CPU without bf16 instructions one vision
    layer in fp32 and bf16 (a whole decision would take many times as long); and all of it on `pocket`, whose answers are
    peaked.

    Times of a batch are those of the whole call; `lever_table` divides them. Beside the rows stand, as lines about them:
    the floor of the plain decision, how its and the exact arms' time splits by kind of operation, and every lever's
    answers against eager's. Levers that cannot run here (an extra that is not installed, no compiler, no CPU) are said and
    left out. Raises InputError for an unknown profile, device or preset before anything is measured.
    """
    from lab.experiments.bidirectional import gather_rows
    from lab.models import load_model

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = PROFILES[profile]
    preset = preset or settings["preset"]
    model, asked = load_model(preset, device, dtype, seed, weights), chosen(["pong"], workload)[0]
    tables = _measure(model, asked, settings, seed, out, preset, floor=True)
    if not runs_bf16(device):
        tables.append(_one_layer(model, asked, seed, out, preset))
    tables.append(gather_rows(seed=seed, device=device, dtype=dtype, out=out))
    if preset != PEAKED:
        trained = load_model(PEAKED, device, dtype)
        tables += _measure(trained, get_workload("pong"), settings["peaked"], seed, out, PEAKED)
    return join_rows(tables)


def runs_bf16(device: str) -> bool:
    """Whether the device multiplies in bf16 by itself; on others a decision takes many times as long."""
    from lab.records import environment

    return device != "cpu" or environment()["cpu"]["native_bf16"]


def levers(model, asked: Workload, settings: dict) -> Iterator[Lever]:
    """The plain decision first, then what `settings` want of whatever runs on this model's device and in its dtype."""
    from lab.steps import CompiledStep, EagerStep, OpenVinoStep, QuantisedStep, StaticStep, TunedStep

    given, on_cpu, half = (asked.question, asked.frames), model.device.type == "cpu", model.config.image_size // 2
    eager = EagerStep(model, *given, name=BASE)
    yield Lever(BASE, eager)
    makers = {
        "static": lambda: StaticStep(model, *given, capture=False),
        "half-size pictures": lambda: EagerStep(model.at_size(half), *given, name=f"eager, {half} px"),
    }
    if on_cpu:
        makers |= {
            "tuned": lambda: TunedStep(model, *given),
            "openvino": lambda: OpenVinoStep(model, *given),
            "int8": lambda: QuantisedStep(model, *given),
            "int8 vision": lambda: QuantisedStep(model, *given, parts="vision"),
        }
    else:
        makers["captured"] = lambda: StaticStep(model, *given)
    if settings["compiled"]:
        makers["compiled"] = lambda: CompiledStep(model, *given)
    if model.dtype_name == "fp32" and (model.name == PEAKED or runs_bf16(model.device.type)):
        makers["bf16"] = lambda: EagerStep(copy.deepcopy(model).to_dtype("bf16"), *given, name="eager, bf16")
    for name in [name for name in makers if name not in settings["without"]]:
        try:
            yield Lever(name, makers[name]())
        except InputError as reason:
            print(f"not run: {name}: {reason}", flush=True)
    for batch in settings["batches"]:
        yield Lever(f"batch {batch}", eager, batch)


def _measure(
    model, asked: Workload, settings: dict, seed: int, out, preset: str, floor: bool = False
) -> list[pd.DataFrame]:
    """The levers beside each other, and what is said about them; with `floor` also what limits the plain decision."""
    found = list(levers(model, asked, settings))
    decisions, most = settings["decisions"], max(lever.batch for lever in found)
    needed = max(settings["blocks"] + settings["warmup"], -(-decisions // most))
    frames = frames_for(asked, needed * most, seed)
    inputs = frames.reshape(needed, most, *frames.shape[1:])
    for lever in found:
        lever.step.decide(inputs[0, : lever.batch])  # what it captures or compiles counts as its start
    tags = _tags(asked, model, preset)
    lines = _limits(found, inputs[0, :1], tags) if floor else []
    plain = _OneByOne(found[0].step)
    lines += [_parity(plain, lever, frames, decisions) for lever in found[1:] if lever.batch <= decisions]
    tables = [beside_rows([line | tags for line in lines], out)]
    tables.append(_compare([lever.arm() for lever in found], inputs, settings, tags, seed, out))
    if settings["pairs"]:
        tables += _two_frames(model, replace(asked, frames=max(2, asked.frames)), settings, seed, out, preset)
    return tables


def _compare(arms: list[Arm], inputs, settings: dict, tags: dict, seed: int, out) -> pd.DataFrame:
    how = {name: settings[name] for name in ("blocks", "warmup", "budget_s")} | {"keep_partial": False}
    return compare(arms, inputs, seed=seed, out=out, title=tags["title"], tags=tags, **how)


def _tags(asked: Workload, model, preset: str, note: str = "") -> dict:
    title = f"{preset}: {asked.name}, {asked.frames} frame(s), {model.dtype_name}{note}"
    named = {"preset": preset, "workload": asked.name, "frames": asked.frames, "dtype": model.dtype_name}
    return {"title": title, **named, "question": asked.digest}


class _OneByOne:
    """The plain decision of each input of a batch by itself; an input met again is not decided again."""

    def __init__(self, eager):
        from lab.parity import Remembering

        self.name, self.eager = BASE, Remembering(eager)

    def decide(self, inputs):
        from lab.models.heads import Decisions

        answers = [self.eager.decide(one[None]) for one in inputs]
        parts = (np.concatenate([getattr(a, part) for a in answers]) for part in ("logits", "probabilities", "p_act"))
        return Decisions(self.eager.question, *parts)


def _parity(plain: _OneByOne, lever: Lever, frames: np.ndarray, decisions: int) -> dict:
    """A line about a lever's answers to the first frames [inputs, frames, height, width, 3] beside the plain decision's."""
    from lab.parity import compare_answers

    inputs = frames[: decisions // lever.batch * lever.batch].reshape(-1, lever.batch, *frames.shape[1:])
    return {"kind": "parity", "arm": lever.name, **asdict(compare_answers(plain, lever.step, inputs))}


def _limits(found: list[Lever], inputs, tags: dict) -> list[dict]:
    """The floor of the plain decision's stages on this machine, and its and the exact arms' time by kind of operation."""
    from lab import roofline
    from lab.activity import operations

    eager = found[0].step
    said, costs = eager.describe(), roofline.stage_costs(eager, inputs)
    ceilings = roofline.ceilings(said["device"], said["dtype"], costs["total"].shapes)
    lines = [{"kind": "floor", "ceilings": ceilings, "stages": roofline.floor(costs, ceilings)}]
    exact = [lever for lever in found if lever.name in (BASE, "static", "tuned")]
    return lines + [{"kind": "operations", "arm": one.name, "ms": operations(one.step, inputs)} for one in exact]


def _two_frames(model, asked: Workload, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    """Decisions on the previous and the current frame: encoded anew, and the earlier frame's features kept."""
    from lab.caches import FrameFeatures
    from lab.steps import EagerStep

    given = (model, asked.question, asked.frames)
    eager = EagerStep(*given, name=BASE)
    kept = EagerStep(*given, features=FrameFeatures(2 * asked.frames))
    inputs = frames_for(asked, settings["pairs"] + 1, seed)[:, None]
    inputs = np.roll(inputs, -1, axis=0)  # the first block then follows the frame that starts both
    for step in (eager, kept):
        step.decide(inputs[-1])
    tags = _tags(asked, model, preset, f", {KEPT}")
    rows = _compare(
        [Arm.of(eager), Arm.of(kept, KEPT, counts=kept.features.counts)],
        inputs,
        settings | {"blocks": settings["pairs"], "warmup": 0},
        tags,
        seed,
        out,
    )
    same = _parity(_OneByOne(eager), Lever(KEPT, kept), inputs[:, 0], settings["decisions"])
    return [rows, beside_rows([same | tags], out)]


def _one_layer(model, asked: Workload, seed: int, out, preset: str) -> pd.DataFrame:
    """One layer of the vision tower in fp32 and in bf16, on as many patches as a picture has."""
    import torch

    from lab.models.vision import DTYPES

    layer = model.encoder.vision_model.encoder.layers[0]
    patches = (model.config.image_size // model.encoder.config.vision_config.patch_size) ** 2
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, patches, model.encoder.config.vision_config.hidden_size, generator=generator)
    arms = []
    for name, dtype in ((LAYER, "fp32"), (f"{LAYER}, bf16", "bf16")):
        part, given = copy.deepcopy(layer).to(DTYPES[dtype]), hidden.to(DTYPES[dtype])
        call = torch.inference_mode()(lambda part=part, given=given: part(given, attention_mask=None))
        arms.append(Arm(name, call, {"layer": 0, "patches": patches, "dtype": dtype}, device="cpu"))
    settings = {"blocks": stats.MIN_N, "warmup": 1, "budget_s": 60}
    return _compare(arms, None, settings, _tags(asked, model, preset, f", {LAYER}"), seed, out)
