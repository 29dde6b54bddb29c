"""What reuse would do to a model's answers: of a repeated frame the answer, of a nearly equal one the features.

With one frame per decision, features of an earlier frame give the earlier frame's answer, so reusing features where few
pixels changed is answering from that frame: `watch` plays a game with the model, asks it of every frame, and notes for
each threshold how often the answer of the last encoded frame would have been another. The frame it is compared with is
the last one encoded, not the one before: small changes add up. What is noted is each decision by itself; the game goes on
with the model's own answers.
"""

import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from lab.cells import Cell, run_cells
from lab.envs import make, one_hot, play
from lab.errors import InputError
from lab.experiments.frame_repeats import Blocks
from lab.experiments.frame_scan import BLOCK, Difference
from lab.experiments.players import ModelPlayer, workload_for
from lab.measure import Arm, compare
from lab.models import load_model
from lab.records import join_rows
from lab.roofline import count, stage_costs
from lab.stats import AGAIN, difference_shown, median_interval, paired_ratio, series
from lab.steps import EagerStep, LastAnswerStep, StaticStep
from lab.workloads import load_workloads

THRESHOLDS = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6)  # share of a frame's pixels; 0: identical only
NEW, SAME = "a new frame", "the same frame again"
PROFILES = {
    "smoke": {"games": 1, "steps": 100, "seeds": 1, "blocks": 5},
    "standard": {"games": None, "steps": 500, "seeds": 1, "blocks": 30},
    "full": {"games": None, "steps": 2000, "seeds": 5, "blocks": 60},
}


def sources_of(model: str) -> list[str]:
    """The games that a model can be asked about with one frame: those it was taught, or all with a question."""
    found = []
    for workload in load_workloads().values():
        try:
            found.append(workload_for(workload.source, model).source)
        except InputError:
            continue
    return list(dict.fromkeys(found))


def run(profile: str = "standard", *, model: str = "pocket", seed: int = 0, out=None, **how: Any) -> pd.DataFrame:
    """Watch the model play every game that it knows, then time it with and without its last answer; all rows.

    Rows are appended to `out`. `how` goes to `lab.cells.run_cells`. InputError for an unknown profile or model.
    """
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    chosen = PROFILES[profile]
    loaded, sources = load_model(model), sources_of(model)[: chosen["games"]]
    cells = [
        {"source": source, "model": model, "seed": each, "steps": chosen["steps"]}
        for each in range(seed, seed + chosen["seeds"])
        for source in sources
    ]
    watched = run_cells(watch, cells, title="asking the model", out=out, **how)
    return join_rows(
        [watched, *(timing(s, model, loaded, blocks=chosen["blocks"], seed=seed, out=out) for s in sources)]
    )


# --- answers against thresholds -----------------------------------------------------------------------------------------


def watch(cell: Cell) -> dict[str, Any]:
    """Play `cell` (`source`, `model`, `seed`, `steps` decisions of the model) and note what reuse would have done.

    `thresholds`, and for each of them `reuse`: per block of 100 decisions [decisions, answered from an earlier frame, of
    these with another answer, sum of their total variation distances]. `patches`, per decision but the first, the share
    of the vision tower's patches in which any resized pixel differs from the decision before; `identical`, how many
    frames repeat the one before; `options`; `decision_s`, seconds per decision.
    """
    workload = workload_for(cell["source"], cell["model"])
    with closing(make(cell["source"], cell["seed"])) as env:
        player = _Asked(env, cell["model"])
        for _ in islice(play(env, player), 1, None):
            if len(player.told) >= cell["steps"]:
                break
    told = np.array(player.told)  # [decisions, thresholds, 3]
    blocks = np.array_split(told, max(1, round(len(told) / BLOCK)))
    return {
        "thresholds": list(THRESHOLDS),
        "reuse": [
            [[len(part), *part[:, i].sum(axis=0).round(6).tolist()] for part in blocks] for i in range(len(THRESHOLDS))
        ],
        "patches": np.round(player.patches, 5).tolist(),
        "identical": int(np.count_nonzero(told[:, 0, 0])),
        "options": len(workload.question.options),
        "decision_s": player.seconds / len(told),
    }


class _Asked(ModelPlayer):
    """A model that plays, with what each threshold would have answered beside it."""

    def __init__(self, env, model: str):
        super().__init__(env, model)
        self.told: list[np.ndarray] = []
        self.patches: list[float] = []
        self._anchors: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(THRESHOLDS)
        self._resized: np.ndarray | None = None
        self._difference: Difference | None = None
        self._decide, self.step = self.step, self  # decisions pass through `decide` below
        self._patch = self._decide.model.encoder.config.vision_config.patch_size

    def decide(self, frames):
        began = time.perf_counter()
        answer = self._decide.decide(frames)
        spent = time.perf_counter() - began
        self._note(frames[0, 0], answer.probabilities[0])
        self.seconds -= time.perf_counter() - began - spent  # what is noted is not the model's time
        return answer

    def _note(self, frame: np.ndarray, probabilities: np.ndarray) -> None:
        self._difference = self._difference or Difference(frame.size)
        told = np.zeros((len(THRESHOLDS), 3))
        for place, (threshold, anchor) in enumerate(zip(THRESHOLDS, self._anchors, strict=True)):
            if anchor is not None:
                changed = self._difference.pixels(anchor[0], frame) * 3 / frame.size
                if changed < threshold or changed == 0:
                    flips = anchor[1].argmax() != probabilities.argmax()
                    told[place] = 1, flips, np.abs(anchor[1] - probabilities).sum() / 2
                    continue
            self._anchors[place] = (frame.copy(), probabilities)
        self.told.append(told)
        resized = self._decide.pixels.uint8(frame[None])[0].cpu().numpy()
        if self._resized is not None:
            self.patches.append(float(changed_patches(self._resized, resized, self._patch).mean()))
        self._resized = resized


def changed_patches(before: np.ndarray, after: np.ndarray, patch: int) -> np.ndarray:
    """Which patches of `patch` x `patch` pixels differ anywhere between two pictures [3, S, S]: bool [S/patch, S/patch]."""
    grid = before.shape[-1] // patch
    return (before != after).reshape(3, grid, patch, grid, patch).any(axis=(0, 2, 4))


def flips(rows: pd.DataFrame) -> pd.DataFrame:
    """Per source and threshold, over its seeds: the share of decisions `reused`, the share of all decisions `flipped` (the
    answer would have been another), with intervals over seeds and blocks, and `moved`, the mean total variation distance
    of the reused ones."""
    lines = []
    for (source, model), part in watched(rows).groupby(["source", "model"], sort=False):
        for place, threshold in enumerate(part.iloc[0].thresholds):
            table = np.array([block for row in part.itertuples() for block in row.reuse[place]])
            line = {"source": source, "model": model, "threshold": threshold, "decisions": int(table[:, 0].sum())}
            for name, column in (("reused", 1), ("flipped", 2)):
                values = [
                    np.concatenate([np.arange(b[0]) < b[column] for b in row.reuse[place]]) for row in part.itertuples()
                ]
                found = Blocks(values).share(lambda v: v)
                line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
            line["moved"] = float(table[:, 3].sum() / table[:, 1].sum()) if table[:, 1].sum() else np.nan
            lines.append(line)
    return pd.DataFrame(lines)


def watched(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of watched games among `rows`, one for each seed of a model; InputError where there are none."""
    if "reuse" not in rows or not (found := rows[rows["reuse"].map(lambda value: isinstance(value, list))]).size:
        raise InputError(
            "These rows hold no answers against thresholds; give rows that 05_duplicate_frames has written."
        )
    found = found.drop_duplicates(["source", "model", "seed"])
    return found.sort_values(["source", "seed"], kind="stable")  # files hold them as they finished


# --- the bound on exact partial reuse -----------------------------------------------------------------------------------


def per_patch_share(model) -> dict[str, float]:
    """How many of a decision's operations are per patch, so that an unchanged patch could spare them exactly.

    From the first layer's attention on, every row depends on every patch. What is before it: the patch embedding and the
    first layer's three projections. {"per_patch", "decision", "share"}, the first two in operations, a multiply-add two.
    """
    model = getattr(model, "model", model)
    vision, size = model.encoder.vision_model, model.config.image_size
    attention = vision.encoder.layers[0].self_attn
    pixels = torch.zeros(1, 3, size, size, dtype=model.dtype, device=model.device)
    rows = torch.zeros(
        1, vision.embeddings.num_patches, vision.config.hidden_size, dtype=model.dtype, device=model.device
    )
    before = count(vision.embeddings.patch_embedding, pixels)
    before += sum(count(layer, rows) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    workload = next(iter(load_workloads().values()))
    step = EagerStep(model, workload.question, frames=1)
    whole = stage_costs(step, np.zeros((1, 1, 210, 160, 3), np.uint8))["total"].flops
    return {"per_patch": float(before), "decision": float(whole), "share": before / whole}


def partial_bound(rows: pd.DataFrame, share: float) -> pd.DataFrame:
    """Per source: the median share of patches `changed` from one decision to the next, and `saves`, the most that exact
    reuse of the others could spare of a decision's operations, `share` of which are per patch (means over decisions)."""
    lines = []
    for (source, model), part in watched(rows).groupby(["source", "model"], sort=False):
        changed = [np.array(row.patches) for row in part.itertuples()]
        middle = Blocks(changed).median()
        lines.append(
            {
                **{"source": source, "model": model, "changed": middle.value},
                **{"changed_low": middle.low, "changed_high": middle.high},
                "saves": share * (1 - float(np.concatenate(changed).mean())),
            }
        )
    return pd.DataFrame(lines)


# --- the time of a decision that is not taken ---------------------------------------------------------------------------


def timing(
    source: str, model: str = "pocket", loaded=None, *, blocks: int = 30, seed: int = 0, out: Path | str | None = None
):
    """Time a model with and without its last answer, on frames that are all new and on one frame over and over.

    `loaded` is the model of that name, where it is loaded already.
    Rows as `lab.compare` returns them, titles "source: a new frame" and "source: the same frame again".
    """
    workload = workload_for(source, model)
    frames = new_frames(source, seed=seed)
    step = StaticStep(loaded or load_model(model), workload.question)
    tables = []
    for title, inputs in ((NEW, frames), (SAME, frames[:1])):
        last = LastAnswerStep(step)
        arms = [Arm.of(step), Arm.of(last, counts=last.counts)]
        tags = {"source": source, "model": model}
        tables.append(
            compare(
                arms,
                [f[None, None] for f in inputs],
                blocks=blocks,
                seed=seed,
                out=out,
                title=f"{source}: {title}",
                tags=tags,
            )
        )
    return join_rows(tables)


def new_frames(source: str, n: int = 16, seed: int = 0) -> np.ndarray:
    """Frames of random play of which none equals the one before, nor the last the first: uint8 [n, height, width, 3]."""
    kept: list[np.ndarray] = []
    with closing(make(source, seed)) as env:
        for frame, _ in play(env, one_hot(env, seed)):
            if not any(np.array_equal(frame, other) for other in kept):
                kept.append(frame.copy())
            if len(kept) == n:
                return np.stack(kept)


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Per source: ms of a decision, of a repeated frame's, and what looking costs at a new frame.

    `decision`, `repeat` (medians with intervals), `spared`, the share of a decision's time that a repeat spares;
    `look`, the ratio of a new frame's time with looking over without, and `look_shown`, whether the one rule shows it.
    """
    lines = []
    timed = rows[rows["stage"].notna()] if "stage" in rows else rows.iloc[:0]
    timed.attrs = {}
    for source, part in timed.groupby("source", sort=False):
        new, same = (part[part["title"] == f"{source}: {title}"] for title in (NEW, SAME))
        plain = next(arm for arm in dict.fromkeys(new["arm"]) if arm + AGAIN in set(new["arm"]))
        other = next(arm for arm in dict.fromkeys(new["arm"]) if arm not in (plain, plain + AGAIN))
        decision, repeat = (median_interval(series(same, arm)) for arm in (plain, other))
        look, again = paired_ratio(new, other, plain), paired_ratio(new, plain + AGAIN, plain)
        lines.append(
            {
                **{"source": source, "decision": decision.value, "decision_low": decision.low},
                **{"decision_high": decision.high, "repeat": repeat.value, "repeat_low": repeat.low},
                **{"repeat_high": repeat.high, "spared": 1 - paired_ratio(same, other, plain).value},
                **{"look": look.value, "look_low": look.low, "look_high": look.high},
                "look_shown": difference_shown(look, again),
            }
        )
    return pd.DataFrame(lines)
