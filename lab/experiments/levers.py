"""Notebook 08: what else is cheaper, without training anything: each lever beside the plain decision, with its answers."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.records import beside_rows, clean, join_rows
from lab.stats import AGAIN
from lab.workloads import Workload, chosen, get_workload

BASE = "eager"
KEPT = "frame features kept"
LAYER = "one vision layer"
SAME = 1e-4  # logits that lie closer are those of the same arithmetic in another order
WARMUP = 1  # after the call that starts a step
PEAKED = "pocket"  # a checkpoint that has learned its games: its answers are peaked, so that a flip means something
# `blocks` and `budget_s` of the main comparison, `decisions` whose answers are compared in it, `pairs` blocks of those of
# batches and of two frames; on the peaked checkpoint one comparison holds all.
PROFILES = {
    "smoke": {
        "preset": "tiny", "blocks": 6, "decisions": 2, "batches": [4], "pairs": 5, "budget_s": 20, "compiled": False,
        "peaked": {"blocks": 6, "decisions": 16, "batches": [4], "budget_s": 20, "compiled": False},
    },
    "standard": {
        "preset": "smolvlm-256m", "blocks": 8, "decisions": 1, "batches": [4], "pairs": 5, "budget_s": 130,
        "compiled": False,
        "peaked": {"blocks": 20, "decisions": 128, "batches": [4, 16], "budget_s": 30, "compiled": True},
    },
    "full": {
        "preset": "smolvlm-256m", "blocks": 30, "decisions": 8, "batches": [4, 16], "pairs": 30, "budget_s": 600,
        "compiled": True,
        "peaked": {"blocks": 30, "decisions": 512, "batches": [4, 16], "budget_s": 60, "compiled": True},
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
    per decision at the profile's preset, or what the first workload of a reader's own file `workload` asks; batches; two
    frames, with and without frame features kept; on a CPU without bf16 instructions one vision layer in fp32 and bf16 (a
    whole decision would take many times as long); and all levers on `pocket`, whose answers are peaked.

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
    tables = _measure(model, asked, settings | {"batches": []}, seed, out, preset, floor=True)
    tables += _batches(model, asked, settings, seed, out, preset)
    tables += _two_frames(model, replace(asked, frames=max(2, asked.frames)), settings, seed, out, preset)
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


def levers(model, asked: Workload, batches: list[int], compiled: bool) -> Iterator[Lever]:
    """The plain decision first, then whatever runs on this model's device and in its dtype."""
    from lab.steps import CompiledStep, EagerStep, OpenVinoStep, QuantisedStep, StaticStep, TunedStep

    given, on_cpu, half = (asked.question, asked.frames), model.device.type == "cpu", model.config.image_size // 2
    eager = EagerStep(model, *given, name=BASE)
    yield Lever(BASE, eager)
    yield Lever("static", StaticStep(model, *given, capture=False))
    makers = {"half-size pictures": lambda: EagerStep(model.at_size(half), *given, name=f"eager, {half} px")}
    if on_cpu:
        makers |= {
            "tuned": lambda: TunedStep(model, *given),
            "openvino": lambda: OpenVinoStep(model, *given),
            "int8": lambda: QuantisedStep(model, *given),
            "int8 vision": lambda: QuantisedStep(model, *given, parts="vision"),
        }
    else:
        makers["captured"] = lambda: StaticStep(model, *given)
    if compiled:
        makers["compiled"] = lambda: CompiledStep(model, *given)
    if model.dtype_name == "fp32" and (model.name == PEAKED or runs_bf16(model.device.type)):
        makers["bf16"] = lambda: EagerStep(copy.deepcopy(model).to_dtype("bf16"), *given, name="eager, bf16")
    for name, make in makers.items():
        try:
            yield Lever(name, make())
        except InputError as reason:
            print(f"not run: {name}: {reason}", flush=True)
    for batch in batches:
        yield Lever(f"batch {batch}", eager, batch)


def _measure(
    model, asked: Workload, settings: dict, seed: int, out, preset: str, floor: bool = False
) -> list[pd.DataFrame]:
    """The levers beside each other, and what is said about them; with `floor` also what limits the plain decision."""
    found = list(levers(model, asked, settings["batches"], settings["compiled"]))
    decisions, most = settings["decisions"], max(lever.batch for lever in found)
    needed = max(settings["blocks"] + WARMUP, -(-decisions // most))
    frames = frames_for(asked, needed * most, seed)
    inputs = frames.reshape(needed, most, *frames.shape[1:])
    for lever in found:
        lever.step.decide(inputs[0, : lever.batch])  # what it captures or compiles counts as its start
    tags = _tags(asked, model, preset)
    lines = _limits(found, inputs[0, :1], tags) if floor else []
    plain = _OneByOne(found[0].step)
    lines += [_parity(plain, lever, frames, decisions) for lever in found[1:]]
    said = beside_rows([line | tags for line in lines], out)
    return [said, _compare([lever.arm() for lever in found], inputs, settings, tags, seed, out)]


def _compare(arms: list[Arm], inputs, settings: dict, tags: dict, seed: int, out) -> pd.DataFrame:
    how = {"blocks": settings["blocks"], "warmup": WARMUP, "budget_s": settings["budget_s"], "keep_partial": False}
    return compare(arms, inputs, seed=seed, out=out, title=tags["title"], tags=tags, **how)


def _tags(asked: Workload, model, preset: str, note: str = "") -> dict:
    title = f"{preset}: {asked.name}, {asked.frames} frame(s), {model.dtype_name}{note}"
    named = {"preset": preset, "workload": asked.name, "frames": asked.frames, "dtype": model.dtype_name}
    return {"title": title, **named, "question": asked.digest}


class _OneByOne:
    """The plain decision of each input of a batch by itself; an input met again is not decided again."""

    def __init__(self, eager):
        self.name, self.eager, self.known = BASE, eager, {}

    def decide(self, inputs):
        from lab.models.heads import Decisions

        for one in inputs:
            if one.tobytes() not in self.known:
                self.known[one.tobytes()] = self.eager.decide(one[None])
        answers = [self.known[one.tobytes()] for one in inputs]
        parts = (np.concatenate([getattr(a, part) for a in answers]) for part in ("logits", "probabilities", "p_act"))
        return Decisions(self.eager.question, *parts)


def _parity(plain: _OneByOne, lever: Lever, frames: np.ndarray, decisions: int) -> dict:
    """A line about a lever's answers to the first frames [inputs, frames, height, width, 3] beside the plain decision's."""
    from lab.parity import compare_answers

    whole = max(lever.batch, decisions // lever.batch * lever.batch)
    inputs = frames[:whole].reshape(-1, lever.batch, *frames.shape[1:])
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


def _batches(model, asked: Workload, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    """Several inputs answered at once beside one."""
    from lab.steps import EagerStep

    eager = EagerStep(model, asked.question, asked.frames, name=BASE)
    found = [Lever(BASE, eager), *(Lever(f"batch {batch}", eager, batch) for batch in settings["batches"])]
    most = found[-1].batch
    frames = frames_for(asked, (settings["pairs"] + WARMUP) * most, seed)
    inputs = frames.reshape(-1, most, *frames.shape[1:])
    tags = _tags(asked, model, preset, ", batches")
    settings = settings | {"blocks": settings["pairs"]}
    return [_compare([lever.arm() for lever in found], inputs, settings, tags, seed, out)]


def _two_frames(model, asked: Workload, settings: dict, seed: int, out, preset: str) -> list[pd.DataFrame]:
    """Decisions on the previous and the current frame: encoded anew, and the earlier frame's features kept."""
    from lab.caches import FrameFeatures
    from lab.steps import EagerStep

    given = (model, asked.question, asked.frames)
    eager = EagerStep(*given, name=BASE)
    kept = EagerStep(*given, features=FrameFeatures(2 * asked.frames))
    inputs = frames_for(asked, settings["pairs"] + WARMUP, seed)[:, None]
    inputs = np.roll(inputs, -WARMUP, axis=0)  # the first block then follows the warm-up's last frame
    tags = _tags(asked, model, preset)
    rows = _compare(
        [Arm.of(eager), Arm.of(kept, KEPT)], inputs, settings | {"blocks": settings["pairs"]}, tags, seed, out
    )
    same = _parity(_OneByOne(eager), Lever(KEPT, kept), inputs[:, 0], settings["decisions"])
    return [rows, beside_rows([same | tags], out)]


def _one_layer(model, asked: Workload, seed: int, out, preset: str) -> pd.DataFrame:
    """One layer of the vision tower in fp32 and in bf16, on as many patches as a picture has."""
    import torch

    from lab.models.vision import DTYPES

    layer = model.encoder.vision_model.encoder.layers[0]
    patches = (model.config.image_size // model.encoder.config.vision_config.patch_size) ** 2
    hidden = torch.randn(1, patches, model.encoder.config.vision_config.hidden_size)
    arms = []
    for name, dtype in ((LAYER, "fp32"), (f"{LAYER}, bf16", "bf16")):
        part, given = copy.deepcopy(layer).to(DTYPES[dtype]), hidden.to(DTYPES[dtype])
        call = torch.inference_mode()(lambda part=part, given=given: part(given, attention_mask=None))
        arms.append(Arm(name, call, {"layer": 0, "patches": patches, "dtype": dtype}, device="cpu"))
    settings = {"blocks": stats.MIN_N, "budget_s": 60}
    return _compare(arms, None, settings, _tags(asked, model, preset, f", {LAYER}"), seed, out)


# ------------------------------------------------------------------------------------------------ rows -> results


def lever_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per comparison and arm: preset, workload, frames, batch, dtype, arm; ms a decision (median) with its
    interval; the paired ratio to the plain decision with its own, and whether it is shown; the largest difference of
    logits from the plain decision's, flips (share of `n` decisions; on `pocket` where that was asked, whose answers are
    peaked) and what the arm cost to start, in seconds. NaN where the answers were not compared."""
    each = rows[rows["preset"].notna() & (rows["stage"] == "total")]  # a lookup alone is no decision
    each = each.assign(ms=each["ms"] / each["describe"].map(lambda said: said.get("batch", 1)))
    costs = {(line["title"], line["arm"]): line["cost"] for line in _about(rows, "start_cost")}
    same = {(line["preset"], line["arm"]): line for line in _about(rows, "parity")}
    lines = []
    for title, part in each.groupby("title", sort=False):
        tags = part[["preset", "workload"]].iloc[0].to_dict() | {"frames": int(part["frames"].iloc[0])}
        for line in stats.summary(part).to_dict("records"):
            arm = line["arm"]
            own = same.get((tags["preset"], arm), {})
            peaked = same.get((PEAKED, arm), own)
            cost = costs.get((title, arm), {})
            said = part.loc[part["arm"] == arm, "describe"].iloc[0]
            tags |= {"batch": said.get("batch", 1), "dtype": said["dtype"]}
            kept = {key: line[key] for key in ("arm", "low", "high", "ratio", "ratio_low", "ratio_high", "shown")}
            answers = {
                "max_logit": np.fmax(own.get("max_logit", np.nan), peaked.get("max_logit", np.nan)),
                "flips": peaked.get("flips", {}).get("value", np.nan),
                "n": peaked.get("n", 0),
            }
            start = sum(
                value for key, value in cost.items() if key.endswith("_s") and key != "check_s" and key != "choose_s"
            )
            lines.append({**tags, **kept, "ms": line["median"], **answers, "start_s": start})
    return stats.Table(lines)


def floors(rows: pd.DataFrame) -> dict:
    """How near the machine's own ceilings the plain and the tuned decision run: by arm, what `roofline.share_of_floor`
    gives."""
    from lab.roofline import share_of_floor

    line = next(line for line in _about(rows, "floor"))
    part = rows[rows["title"] == line["title"]]
    stages = pd.DataFrame(line["stages"])
    return {arm: share_of_floor(stages, part, arm) for arm in (BASE, "tuned") if arm in set(part["arm"])}


def operations(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by kind of operation, a column per arm, from one profiled decision each."""
    return pd.DataFrame({line["arm"]: line["ms"] for line in _about(rows, "operations")})


def bounds(rows: pd.DataFrame) -> pd.DataFrame:
    """What preparing could save at most: rows and masks built once, and the question's embedded tokens kept; ms a decision
    with its interval and the share of the plain decision."""
    from lab.experiments.bidirectional import TITLE, gather_ms

    own = next(title for title in rows["title"] if title != TITLE)
    whole = stats.median_interval(stats.series(rows[rows["title"] == own], BASE))
    found = {
        "inputs built once": stats.median_interval(stats.series(rows[rows["title"] == own], BASE, "build_inputs")),
        "embedded question kept": gather_ms(rows),
    }
    return stats.Table(
        [
            {"what": what, "ms": ms.value, "low": ms.low, "high": ms.high, "share": ms.value / whole.value}
            for what, ms in found.items()
        ]
    )


def sentences(table: pd.DataFrame) -> list[str]:
    """What may be said of each lever in `lever_table`, by the one rule, with what becomes of its answers."""
    said = []
    for line in table[table["ratio"].notna() & ~table["arm"].str.endswith(AGAIN)].to_dict("records"):
        ratio = stats.spell(line["ratio"], line["ratio_low"], line["ratio_high"])
        what = f"{line['preset']}, {line['arm']}"
        what += f" ({line['frames']} frames)" if line["frames"] > 1 else ""
        time = f"took {ratio} times the time" if line["shown"] else f"no difference shown ({ratio})"
        if line["n"]:
            apart = f"at most {line['max_logit']:.1e} apart" if line["max_logit"] else "the same to the last bit"
            time += f"; {line['flips']:.1%} of {line['n']} answers change, logits {apart}"
        said.append(f"{what}: {time}.")
    return said


def against_openvino(rows: pd.DataFrame) -> str:
    """The tuned step beside OpenVINO, paired within the comparison at the run's own size; "" where one did not run."""
    title = rows["title"].iloc[0]
    part = rows[rows["title"] == title]
    if not {"tuned", "openvino"} <= set(part["arm"]):
        return ""
    ratio = stats.paired_ratio(part, "tuned", "openvino")
    return stats.sentence(f"{title}: tuned", ratio, stats.paired_ratio(part, BASE + AGAIN, BASE), "openvino")


def answer(table: pd.DataFrame) -> str:
    """The notebook's answer, from `lever_table`: levers that gain with the same answers, those that gain and change them,
    and the rest."""
    own = table[(table["preset"] == table["preset"].iloc[0]) & table["ratio"].notna()]
    own = own[~own["arm"].str.endswith(AGAIN)]
    gain, same = own["shown"] & (own["ratio"] < 1), (own["flips"] == 0) & (own["max_logit"] < SAME)
    groups = {
        "Faster, with the same answers": own[gain & same],
        "faster, but the answers change": own[gain & ~same],
        "slower": own[own["shown"] & (own["ratio"] > 1)],
        "no difference shown": own[~own["shown"]],
    }
    said = []
    for words, part in groups.items():
        names = [
            f"{a} {stats.spell(r, low, high)}"
            for a, r, low, high in zip(part["arm"], part["ratio"], part["ratio_low"], part["ratio_high"], strict=True)
        ]
        said.append(f"{words}: {', '.join(names) or 'none'}")
    return f"{own['preset'].iloc[0]}, times the plain decision's time. {'; '.join(said)}."


# ------------------------------------------------------------------------------------------------ lab bench levers


@dataclass(frozen=True)
class Bench:
    """What `lab bench levers` found: the rows and what is read from them."""

    rows: pd.DataFrame

    @cached_property
    def levers(self) -> pd.DataFrame:
        return lever_table(self.rows)

    def table(self) -> str:
        kept = [
            "preset",
            "frames",
            "batch",
            "arm",
            "ms",
            "ratio",
            "ratio_low",
            "ratio_high",
            "shown",
            "max_logit",
            "flips",
            "n",
            "start_s",
        ]
        return f"{stats.Table(self.levers[kept])!r}\n\n{bounds(self.rows)!r}"

    @property
    def verdict(self) -> str:
        return f"{answer(self.levers)} {against_openvino(self.rows)}".strip()

    def to_json(self) -> dict:
        found = {"rows": self.levers, "bounds": bounds(self.rows), "notes": stats.notes(self.rows)}
        return clean({**found, "verdict": self.verdict})


def bench(
    preset: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    out: Path | str | None = None,
    seed: int = 0,
    weights: str = "default",
) -> Bench:
    """All levers of the profile `full` on CUDA, of `standard` elsewhere, of `smoke` for the preset tiny; see `run`."""
    profile = "smoke" if preset == "tiny" else "standard" if device == "cpu" else "full"
    return Bench(run(profile, out=out, seed=seed, device=device, dtype=dtype or "fp32", preset=preset, weights=weights))


def _about(rows: pd.DataFrame, kind: str) -> list[dict]:
    return [line for line in rows.attrs.get("about", []) if line["kind"] == kind]
