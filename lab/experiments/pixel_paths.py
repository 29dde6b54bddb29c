"""Notebook 08: how far another way to resize lies from the processor's picture, and how many answers it changes."""

import numpy as np
import pandas as pd

from lab import stats
from lab.envs import frames_for, recorded_frames
from lab.pixels import make_pixels
from lab.published import published
from lab.workloads import get_workload

FILTERS = ("composed", "bicubic", "bilinear")


def grey_levels() -> pd.DataFrame:
    """The largest and the mean difference in grey levels from the processor's picture, by filter and size: of four recorded
    Breakout frames and as published for fifty. A single Lanczos hop is published only."""
    frames, lines = recorded_frames("atari:Breakout")[::3], []
    for size in (512, 256):
        wanted = make_pixels("processor", size).uint8(frames).int()
        for filter in FILTERS:
            off = (make_pixels("device", size, filter=filter).uint8(frames).int() - wanted).abs()
            lines.append({"filter": filter, "size": size, "max": int(off.max()), "mean": float(off.float().mean())})
    return _beside(published("grey_levels"), lines, ["filter", "size"])


def answers(model, decisions: int = 50, seed: int = 0) -> pd.DataFrame:
    """How far a model's probabilities lie from those on the processor's pictures, and how often another action is chosen,
    by filter: on frames of Breakout, here and as published of one checkpoint."""
    from lab.steps import EagerStep

    workload = get_workload("breakout")
    frames, common = frames_for(workload, decisions, seed), (model, workload.question)
    wanted, lines = EagerStep(*common, pixels="processor").decide(frames), []
    for filter in FILTERS[:2]:
        found = EagerStep(*common, filter=filter).decide(frames)
        off = np.abs(found.probabilities - wanted.probabilities)
        changed = int((found.choice != wanted.choice).sum())
        line = {"filter": filter, "mean_difference": off.mean(), "max_difference": off.max()}
        lines.append(line | {"actions_changed": changed, "frames": decisions})
    return _beside(published("pixel_paths"), lines, ["filter"])


def _beside(said: pd.DataFrame, lines: list[dict], key: list[str]) -> pd.DataFrame:
    return stats.Table(said.merge(pd.DataFrame(lines), on=key, how="left", suffixes=(", published", "")))
