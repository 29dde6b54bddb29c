"""From notebook 07's rows to its tables and sentences, and `lab bench snake`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as t_distribution

from lab import stats
from lab.errors import InputError
from lab.experiments.snake import ALL, CANDIDATES, EAGER, run
from lab.experiments.snake_checks import GREEDY, MODELS, RANDOM
from lab.published import published
from lab.records import clean
from lab.snake_loop import STAGES


def lines(rows: pd.DataFrame, kind: str) -> list[dict]:
    """What stands beside the rows, of one kind: `start`, `actions`, `memory` or `game`."""
    found = [line for line in rows.attrs.get("about", []) if line.get("kind") == kind]
    if not found:
        raise InputError(f"These rows say nothing of kind {kind!r}; give rows that 07_snake_loop has written.")
    return found


def models(rows: pd.DataFrame, what: str = "ablation") -> list[str]:
    """The models with a comparison of this kind, in order."""
    titles = dict.fromkeys(rows["title"])
    return [title.split(", ", 1)[1] for title in titles if title.startswith(f"{what}, ")]


def _part(rows: pd.DataFrame, title: str) -> pd.DataFrame:
    part = rows[rows["title"] == title].copy()
    part.attrs = {}
    if part.empty:
        raise InputError(f"There is no {title!r} in these rows; give rows that 07_snake_loop has written.")
    return part


def ablation(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """One line per candidate: n, median ms with its interval, p95, the paired ratio to eager with its own, whether a
    difference is shown, what compiling cost (s), and after how many moves that is paid back (NaN: never, or none shown)."""
    part = _part(rows, f"ablation, {model}")
    again = stats.paired_ratio(part, EAGER + stats.AGAIN, EAGER)
    cost = {line["candidate"]: line["compile_s"] for line in lines(rows, "start") if line["model"] == model}
    found = []
    for name in CANDIDATES:
        time = stats.median_interval(stats.series(part, name))
        ratio = stats.paired_ratio(part, name, EAGER)
        saved = -stats.paired_difference(part, (name, "total"), (EAGER, "total")).value
        shown = name != EAGER and stats.difference_shown(ratio, again)
        pays = cost[name] and shown and saved > 0
        found.append(
            {
                "candidate": name,
                "n": time.n,
                "ms": time.value,
                "low": time.low,
                "high": time.high,
                "p95": stats.percentiles(part, name)["p95"],
                "ratio": ratio.value,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "shown": shown,
                "compile_s": cost[name],
                "pays_back_after": np.ceil(1e3 * cost[name] / saved) if pays else np.nan,
            }
        )
    return pd.DataFrame(found)


def again(rows: pd.DataFrame, model: str) -> tuple[float, float]:
    """The interval of eager timed against itself, in the ablation of a model."""
    found = stats.paired_ratio(_part(rows, f"ablation, {model}"), EAGER + stats.AGAIN, EAGER)
    return found.low, found.high


@dataclass(frozen=True)
class Loop:
    """The loop of one model: how many times faster all three options are than eager (eager's time over theirs, paired by
    move), the same of all moves together (`pooled`) and of eager against itself, and the sentence that says whether a
    difference is shown."""

    model: str
    speedup: stats.Estimate
    pooled: float
    again: stats.Estimate
    shown: bool
    sentence: str


def loop(rows: pd.DataFrame, model: str) -> Loop:
    part = _part(rows, f"loop, {model}")
    ratio, again = (stats.paired_ratio(part, name, EAGER) for name in (ALL, EAGER + stats.AGAIN))
    speedup, same = (
        stats.Estimate(1 / found.value, 1 / found.high, 1 / found.low, found.n) for found in (ratio, again)
    )
    shown = stats.difference_shown(ratio, again)
    said = (
        f"A whole loop with all three options ran {speedup:.3f} times as fast as eager on {model} ({speedup.n} moves, A/A "
        f"{same:.3f}): "
    )
    verdict = "a difference is shown." if shown else "no difference shown."
    pooled = stats.series(part, EAGER).sum() / stats.series(part, ALL).sum()
    return Loop(model, speedup, pooled, same, shown, said + verdict)


def stages(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """One line per arm of the loop: the median ms of each stage, of the whole, and moves a second."""
    part = _part(rows, f"loop, {model}")
    found = []
    for name in (EAGER, ALL):
        medians = {stage: stats.median_interval(stats.series(part, name, stage)).value for stage in (*STAGES, "total")}
        found.append({"arm": name, **medians, "moves a second": 1e3 / medians["total"]})
    return pd.DataFrame(found)


def prompt_kinds(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """The compact prompt beside the verbose one: tokens of one call, median ms, the paired ratio to compact, and the
    published figures (tokens by another tokenizer)."""
    said = published("snake_prompts").set_index("prompt")
    part = _part(rows, f"prompts, {model}")
    again = stats.paired_ratio(part, "compact" + stats.AGAIN, "compact")
    found = []
    for kind in ("compact", "verbose"):
        time, ratio = stats.median_interval(stats.series(part, kind)), stats.paired_ratio(part, kind, "compact")
        tokens = part.loc[part["arm"] == kind, "describe"].iloc[0]["tokens"]
        found.append(
            {"prompt": kind, "tokens": tokens, "n": time.n, "ms": time.value, "low": time.low, "high": time.high,
             "ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high,
             "shown": kind != "compact" and stats.difference_shown(ratio, again),
             "published tokens": f"{said.loc[kind, 'tokens_from']} to {said.loc[kind, 'tokens_to']}",
             "published ms": said.loc[kind, "median_ms"],
             "published ratio": said.loc[kind, "median_ms"] / said.loc["compact", "median_ms"]}
        )  # fmt: skip
    return pd.DataFrame(found)


def start(rows: pd.DataFrame) -> pd.DataFrame:
    """What each candidate cost before its first timed call."""
    columns = ["model", "candidate", "build_s", "compile_s", "shapes", "graphs", "disk_hits", "graph_breaks", "check_s"]
    return pd.DataFrame(lines(rows, "start"))[columns]


def actions(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per candidate: moves on which proposed and executed actions were eager's, the largest difference of raw
    logits."""
    (line,) = lines(rows, "actions")
    return pd.DataFrame(
        {"candidate": name, "moves": line["moves"], **found} for name, found in line["candidates"].items()
    )


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per candidate and kind of memory: the slope in bytes per call with its interval."""
    (line,) = lines(rows, "memory")
    return pd.DataFrame(
        {"candidate": name, "shapes": found["shapes"], "memory": what, "calls": line["calls"], **found[what]}
        for name, found in line["candidates"].items()
        for what in ("rss", "allocator")
    )


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per policy: games, mean and median score, interventions, survivals and moves, and the mean paired difference
    to random-safe play on the same seeds with its bootstrap interval; `shown` where that excludes 0."""
    table = pd.DataFrame(lines(rows, "game")).pivot(index="seed", columns="policy")
    found = []
    for policy in (GREEDY, RANDOM, *MODELS):
        own = table["score"][policy]
        found.append(
            {
                "policy": policy,
                "games": len(own),
                "mean": own.mean(),
                "median": own.median(),
                "interventions": int(table["interventions"][policy].sum()),
                "survived": int(table["survived"][policy].sum()),
                "moves": int(table["moves"][policy].sum()),
                **_difference(own, table["score"][RANDOM], policy == RANDOM),
            }
        )
    return pd.DataFrame(found)


def _difference(own: pd.Series, other: pd.Series, same: bool) -> dict:
    if same:
        return {"above_random": np.nan, "low": np.nan, "high": np.nan, "shown": False}
    gain = stats.median_interval(own - other, statistic=np.mean)
    return {
        "above_random": gain.value,
        "low": gain.low,
        "high": gain.high,
        "shown": bool(gain.low > 0 or gain.high < 0),
    }


def scores_beside_published(rows: pd.DataFrame) -> pd.DataFrame:
    """How games went here and as published, with the 50th and 95th percentile of an eager decision (ms), which here were
    taken from the ablation."""
    here, said = scores(rows).assign(where="here").set_index("policy"), published("snake_scores")
    for model in set(models(rows)) & set(MODELS):
        taken = stats.percentiles(_part(rows, f"ablation, {model}"), EAGER)
        here.loc[model, ["p50_ms", "p95_ms"]] = taken["p50"], taken["p95"]
    both = pd.concat([here.reset_index(), said.assign(where="published")], ignore_index=True)
    whole = dict.fromkeys(["survived", "moves", "interventions"], "Int64")
    return both[["where", *said.columns]].astype(whole)


def data_difference(rows: pd.DataFrame) -> stats.Estimate:
    """How much the checkpoint from all the data scores above the one from a tenth: the mean paired difference."""
    table = pd.DataFrame(lines(rows, "game")).pivot(index="seed", columns="policy", values="score")
    return stats.median_interval(table[MODELS[0]] - table[MODELS[1]], statistic=np.mean)


def replay_seed(rows: pd.DataFrame) -> tuple[int, list[str]]:
    """The best game of the trained checkpoint: its seed and the directions it took, with which it can be played again."""
    from lab.envs.snake import NAMES

    own = [line for line in lines(rows, "game") if line["policy"] == MODELS[0]]
    best = max(own, key=lambda line: line["score"])
    return best["seed"], [NAMES[int(place)] for place in best["actions"]]


def replayed(seed: int, directions: list[str]):
    """That game as a moving picture: a View."""
    from lab.envs.snake_views import moving_picture
    from lab.snake_loop import replay

    return moving_picture(replay(seed, directions), f"the trained checkpoint, seed {seed}")


def stacked(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Several models' ablations as one table."""
    return pd.concat([table.assign(model=model) for model, table in tables.items()], ignore_index=True)[
        ["model", *next(iter(tables.values()))]
    ]


def loop_beside_published(loops: list["Loop"], table: pd.DataFrame) -> pd.DataFrame:
    """How many times faster the loop ran: the published seeds, their geometric mean with its t interval, and ours; and of
    all moves together (`pooled`)."""
    logs = np.log(table["ratio"])
    half = float(t_distribution.ppf(0.975, len(logs) - 1) * logs.std() / np.sqrt(len(logs)))
    mean, found = float(logs.mean()), []
    for line in table.itertuples():
        found.append({"loop": f"published, seed {line.seed}", "times faster": line.ratio})
    bounds = {"low": np.exp(mean - half), "high": np.exp(mean + half)}
    rate = published("snake_pooled").set_index("arm")["moves_per_s"]
    pooled = rate["optimised"] / rate["eager"]
    found.append({"loop": "published, mean of four", "times faster": np.exp(mean), **bounds, "pooled": pooled})
    for own in loops:
        ours = {"low": own.speedup.low, "high": own.speedup.high, "A/A low": own.again.low, "A/A high": own.again.high}
        ours |= {"pooled": own.pooled}
        found.append({"loop": f"{own.model}, ours", "times faster": own.speedup.value, **ours})
    return pd.DataFrame(found)


def beside_published(rows: pd.DataFrame) -> pd.DataFrame:
    """The published medians of the seven candidates beside ours, as ratios to eager: other hardware, precision and tokens,
    so that only ratios compare."""
    table = published("snake_ablation")
    for model in models(rows):
        own = ablation(rows, model).set_index("candidate")
        table[f"{model}, ours"] = [
            stats.spell(*own.loc[name, ["ratio", "ratio_low", "ratio_high"]], ".3f") for name in table["candidate"]
        ]
    for name in ("multilingual", "english"):
        table[f"{name}, published"] = table[f"{name}_p50_ms"] / table[f"{name}_p50_ms"].iloc[0]
    return table[[c for c in table if not c.endswith("_ms")]]


def answer(rows: pd.DataFrame) -> str:
    """The notebook's answer, computed from rows."""
    said = [loop(rows, model).sentence for model in models(rows, "loop")]
    for model in models(rows):
        table = ablation(rows, model).iloc[1:]
        shown = table[table["shown"]]
        told = ", ".join(f"{line.candidate} {line.ratio:.3f}" for line in shown.itertuples()) or "none"
        said.append(f"Decisions alone on {model}, candidates with a difference shown, times eager's time: {told}.")
    (acted,) = lines(rows, "actions")
    equal = min(found["executed"] for found in acted["candidates"].values())
    apart = max(found["max_logit"] for found in acted["candidates"].values())
    said.append(
        f"All {len(acted['candidates'])} candidates executed the same action on {equal} of {acted['moves']} moves, which "
        f"hold {acted['distinct_inputs']} distinct inputs (logits at most {apart:.1g} apart)."
    )
    table = scores(rows).set_index("policy")
    gain = stats.spell(*table.loc[MODELS[0], ["above_random", "low", "high"]], ".2f")
    said.append(
        f"In games the trained checkpoint scores {gain} above random safe moves, the planner itself "
        f"{table.loc[GREEDY, 'above_random']:.2f}; a tenth of the data costs {data_difference(rows):.2f}."
    )
    return " ".join(said)


# -------------------------------------------------------------------------------------------------------------- bench


@dataclass(frozen=True)
class Bench:
    """What `lab bench snake` found; `model` is the one of the first comparison."""

    rows: pd.DataFrame

    @property
    def model(self) -> str:
        return models(self.rows)[0]

    def table(self) -> str:
        parts = [stats.Table(ablation(self.rows, model)) for model in models(self.rows)]
        parts += [stats.Table(stages(self.rows, model)) for model in models(self.rows, "loop")]
        parts += [stats.Table(found(self.rows)) for found in (actions, memory, scores, start)]
        return "\n\n".join(repr(part) for part in parts)

    @property
    def verdict(self) -> str:
        return answer(self.rows)

    def to_json(self) -> dict:
        (acted,) = lines(self.rows, "actions")
        found = loop(self.rows, self.model)
        table = ablation(self.rows, self.model)
        slope = lines(self.rows, "memory")[0]["candidates"][ALL]["rss"]
        return clean(
            {
                "model": self.model,
                "ablation": table,
                "loop": {
                    "ratio": found.speedup.value,
                    "low": found.speedup.low,
                    "high": found.speedup.high,
                    "aa_ratio": found.again.value,
                    "aa_low": found.again.low,
                    "aa_high": found.again.high,
                    "shown": found.shown,
                },
                "stages": stages(self.rows, self.model),
                "actions_equal": all(f["executed"] == acted["moves"] for f in acted["candidates"].values()),
                "actions": actions(self.rows),
                "distinct_inputs": acted["distinct_inputs"],
                "min_margin": acted["min_margin"],
                "prefix_cache": {name: acted["prefix_cache"][name] for name in ("hits", "misses", "evictions")},
                "memory_slope_bytes_per_call": slope["slope"],
                "memory": memory(self.rows),
                "prompts": prompt_kinds(self.rows, self.model),
                "gameplay": scores(self.rows),
                "start": start(self.rows),
                "notes": stats.notes(self.rows),
                "verdict": self.verdict,
            }
        )


def bench(
    preset: str | None = None,
    device: str = "cpu",
    dtype: str = "fp32",
    out: Path | str | None = None,
    seed: int = 0,
    profile: str | None = None,
) -> Bench:
    """The profile `full` on CUDA, `standard` elsewhere, on one model (default: the trained checkpoint); see `run`."""
    profile = profile or ("standard" if device == "cpu" else "full")
    return Bench(run(profile, out=out, seed=seed, device=device, dtype=dtype, preset=preset or "snake"))
