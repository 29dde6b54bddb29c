"""Notebook 04, what needs no timing: what could be captured, what a decision does in order, parity on peaked answers."""

from dataclasses import replace

import pandas as pd

from lab.envs import frames_for
from lab.errors import InputError
from lab.workloads import DATA, get_workload


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


def peaked_parity(frames: int = 64, decisions: int = 60, seed: int = 0) -> pd.DataFrame:
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
    from lab.parity import MaskedEagerStep, compare_answers, compare_games
    from lab.steps import EagerStep, StaticStep

    workload = get_workload(workload)
    inputs, question = frames_for(workload, frames, seed)[:, None], workload.question
    fp32, bf16 = (load_model(name, dtype=dtype) for dtype in ("fp32", "bf16"))
    how = {"option_attention": attention}
    eager = {model.dtype_name: EagerStep(model, question, **how, name="eager") for model in (fp32, bf16)}
    pairs = [("fp32", eager["fp32"], StaticStep(fp32, question, **how))]
    if attention == "causal":
        pairs.append(("fp32", eager["fp32"], MaskedEagerStep(fp32, question, **how)))
    pairs.append(("bf16", eager["bf16"], StaticStep(bf16, question, **how)))
    pairs.append(("bf16 against fp32", eager["fp32"], EagerStep(bf16, question, **how, name="eager, bf16")))
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

    return StaticStep(step.model, step.question, step.frames, batch, step.option_attention)
