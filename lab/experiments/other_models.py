"""Other vision-language models in notebooks 01 and 02: where the tokens of the same question are, and what stages take."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.models.other import TINY, OtherModel, OtherStep, find_segments, load_other
from lab.tokens import Row
from lab.workloads import Workload, chosen, listed


def names_of(text: str) -> list[str]:
    """Model names from a comma list, each once; InputError where there is none."""
    names = listed(text)
    if not names:
        raise InputError(f"other names no model; give {', '.join(TINY)}, a folder or a hub name.")
    return names


def layout(model: OtherModel, workload: Workload, seed: int = 0) -> Row:
    """The token row of a workload's decision, its segments found by comparing the first two inputs that differ; where 20
    decisions bring no other frame, with the first one's negative."""
    inputs = frames_for(workload, 20, seed)
    other = next((one for one in inputs if (one != inputs[0]).any()), 255 - inputs[0])
    return find_segments(model, workload.question, inputs[0], other)


def layouts(names: Sequence[str], workload: Workload, seed: int = 0) -> dict[str, Row]:
    """`layout` of each model by its name (see `lab.models.other.load_other`)."""
    return {name: layout(load_other(name, seed=seed), workload, seed) for name in names}


def run(
    names: Sequence[str],
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    blocks: int = 8,
    budget_s: float = 60,
    workload: Path | str | None = None,
) -> pd.DataFrame:
    """Time one decision of each model beside the others, interleaved, with an A/A arm: raw rows, as `lab.compare` has them.

    The question is Pong's, or that of a file's first workload. Every model answers the same question on the same frames.
    """
    asked = chosen(["pong"], workload)[0]
    models = [load_other(name, device, dtype, seed) for name in names]
    steps = [OtherStep(model, asked.question, asked.frames) for model in models]
    tags = {"workload": asked.name, "question": asked.digest}
    frames = frames_for(asked, 8, seed)[:, None]
    title = f"other models, {asked.name}"
    return compare(
        [Arm.of(step) for step in steps],
        frames,
        blocks=blocks,
        budget_s=budget_s,
        seed=seed,
        out=out,
        title=title,
        tags=tags,
    )


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Median ms per model and stage with its interval, and its share of the whole."""
    table = stats.summary(rows)
    table = table[~table["arm"].str.endswith(stats.AGAIN)]
    total = table[table["stage"] == "total"].set_index("arm")["median"]
    return table.assign(share=table["median"] / table["arm"].map(total))[
        ["arm", "stage", "n", "median", "low", "high", "share"]
    ]
