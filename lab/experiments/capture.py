"""Notebook 04, what needs no timing: what could be captured, what a decision does in order, parity on peaked answers."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from lab.envs import frames_for
from lab.errors import InputError
from lab.records import about, beside_rows, join_rows
from lab.workloads import DATA, get_workload

# `frames` answered and `decisions` played by each pair of steps whose peaked answers are compared
PROFILES = {
    "smoke": {"frames": 8, "decisions": 8},
    "standard": {"frames": 16, "decisions": 8},
    "full": {"frames": 64, "decisions": 60},
}


def beside(
    rows: pd.DataFrame, profile: str = "standard", *, out: Path | str | None = None, seed: int = 0, device: str = "cpu"
) -> pd.DataFrame:
    """`rows` with what this module finds as lines beside them, kinds `audit`, `peaked` and `timeline`, also into `out`.

    Rows that have these lines, since they were measured elsewhere, are returned as they are. InputError outside a checkout.
    """
    if about(rows, "audit"):
        return rows
    found = audits(seed=seed)
    listed = audit_table(found)
    lines = [
        {
            "kind": "audit",
            "step": name,
            "capturable": one.capturable,
            "sentence": one.sentence,
            "findings": listed[listed["step"] == name].to_dict("records"),
        }
        for name, one in found.items()
    ]
    peaked = peaked_parity(**PROFILES[profile], seed=seed)
    lines += [{"kind": "peaked", **line} for line in peaked.to_dict("records")]
    for arm, events in timelines(seed=seed, device=device).groupby("arm", sort=False):
        lines.append({"kind": "timeline", "arm": arm, "events": events.to_dict("list")})
    return join_rows([rows, beside_rows(lines, out)])


def audited(rows: pd.DataFrame) -> pd.DataFrame:
    """The audits beside rows, one line per step: step, capturable, sentence, findings (a list of dicts)."""
    return pd.DataFrame(about(rows, "audit")).drop(columns="kind")


def findings(rows: pd.DataFrame) -> pd.DataFrame:
    """The audits' findings beside rows, as `audit_table` lists them."""
    return pd.DataFrame([finding for line in about(rows, "audit") for finding in line["findings"]])


def peaked(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of `peaked_parity` beside rows."""
    return pd.DataFrame(about(rows, "peaked")).drop(columns="kind")


def events(rows: pd.DataFrame) -> pd.DataFrame:
    """The timelines beside rows, as `timelines` returned them."""
    return pd.concat([pd.DataFrame(line["events"]) for line in about(rows, "timeline")], ignore_index=True)


def audits(preset: str = "tiny", workload: str = "pong", frames: int = 1, seed: int = 0) -> dict:
    """What could be captured, by step name (see `lab.audit`): the plain forward of transformers, the eager step, and the
    static one. Audited at a small size: operations do not depend on it."""
    from lab.audit import audit
    from lab.models import load_model
    from lab.steps import EagerStep, StaticStep, StockStep

    asked = replace(get_workload(workload), frames=frames)
    model = load_model(preset, seed=seed)
    inputs = frames_for(asked, 1, seed)
    steps = [kind(model, asked.question, frames) for kind in (StockStep, EagerStep, StaticStep)]
    return {step.name: audit(step, inputs) for step in steps}


def audit_table(audited: dict) -> pd.DataFrame:
    """The audits' findings, one line each: step, stage, operation, finding."""
    tables = [found.table().assign(step=name) for name, found in audited.items()]
    return pd.concat(tables, ignore_index=True)[["step", "stage", "operation", "finding"]].drop_duplicates(
        ignore_index=True
    )


def timelines(preset: str = "tiny", seed: int = 0, device: str = "cpu") -> pd.DataFrame:
    """One eager and one static decision as `lab.activity.timeline` sees them, with a column `arm`."""
    from lab.activity import timeline
    from lab.models import load_model
    from lab.steps import EagerStep, StaticStep

    workload = get_workload("pong")
    model, inputs = load_model(preset, device, seed=seed), frames_for(workload, 1, seed)
    steps = [EagerStep(model, workload.question), StaticStep(model, workload.question)]
    return pd.concat([timeline(step, inputs).assign(arm=step.name) for step in steps], ignore_index=True)


def peaked_parity(frames: int, decisions: int, seed: int = 0) -> pd.DataFrame:
    """Parity where it proves something, on checkpoints with peaked answers: the one in tests/golden, with causal attention
    and Pong, and `pocket`, with block attention and games that it plays well.

    Pairs: static against eager in fp32 and in bf16, causal eager with its mask written out against without, and bf16
    against fp32. Over `frames` frames of random play: largest differences, flips with interval, smallest margin; and over
    two episodes of at most `decisions` each (the golden checkpoint's sampled, since greedy it always answers alike; the
    pocket model's greedy): the first decision at which the actions differ, and the scores. Raises InputError outside a
    checkout.
    """
    folder = DATA.parent / "tests" / "golden"
    if not folder.is_dir():
        raise InputError(f"The checkpoint {folder} is not there; run in a checkout of the repository.")
    lines = _peaked(str(folder), "pong", "causal", "sampled", frames, decisions, seed)
    for workload in ("doom_basic", "breakout"):
        lines += _peaked("pocket", workload, "block", "greedy", frames, decisions, seed)
    return pd.DataFrame(lines)


def _peaked(
    name: str, workload: str, attention: str, choose: str, frames: int, decisions: int, seed: int
) -> list[dict]:
    from lab.models import load_model
    from lab.parity import MaskedEagerStep, Remembering, compare_answers, compare_games
    from lab.steps import EagerStep, StaticStep

    workload = get_workload(workload)
    inputs, question = frames_for(workload, frames, seed)[:, None], workload.question
    fp32, bf16 = (load_model(name, dtype=dtype) for dtype in ("fp32", "bf16"))
    how = {"option_attention": attention}
    eager = {
        model.dtype_name: Remembering(EagerStep(model, question, **how, name=name))
        for model, name in ((fp32, "eager"), (bf16, "eager, bf16"))
    }
    pairs = [("fp32", eager["fp32"], StaticStep(fp32, question, **how))]
    if attention == "causal":
        pairs.append(("fp32", eager["fp32"], MaskedEagerStep(fp32, question, **how)))
    pairs.append(("bf16", eager["bf16"], StaticStep(bf16, question, **how)))
    pairs.append(("bf16 against fp32", eager["fp32"], eager["bf16"]))
    lines = []
    for dtype, one, other in pairs:
        same = compare_answers(one, other, inputs)
        makers = [step if not hasattr(step, "batch") else (lambda n, s=step: _rebatched(s, n)) for step in (one, other)]
        games = compare_games(*makers, workload.source, episodes=2, max_decisions=decisions, seed=seed, choose=choose)
        lines.append(
            {"checkpoint": fp32.name, "workload": workload.name, "dtype": dtype, "arm": other.name, "against": one.name}
            | {"n": same.n, "max_logit": same.max_logit, "max_probability": same.max_probability}
            | {"smallest_margin": same.smallest_margin}
            | {"flips": same.flips.value, "flips_low": same.flips.low, "flips_high": same.flips.high}
            | {"games": choose, "first_other_action": str(games.diverged), "scores": str(games.scores)}
        )
    return lines


def _rebatched(step, batch: int):
    """The same static step for another batch."""
    from lab.steps import StaticStep

    return StaticStep(step.model, step.question, step.frames, batch, step.setting.option_attention)
