"""How good are trained models? Agreement with the expert, and scores beside players that know nothing (notebooks 03, 04).

Rows of two kinds: an `agreement` row is one frame answered by one model with its options in one order; a `game` row is one
episode of one player. Players of a game meet the same seeds, so their scores are compared in pairs.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from lab.envs import Env, make
from lab.envs.experts import EXPERTS, expert
from lab.errors import InputError
from lab.models.heads import Decisions
from lab.policy import play
from lab.records import RowWriter, read_rows
from lab.stats import Estimate, median_interval, share_interval
from lab.training import lead
from lab.workloads import Question, Workload, get_workload

MODELS = ("pocket", "pocket-question-first")
GAMES = ("doom_basic", "breakout", "pong")
UNSEEN = 500_000  # seeds from here on are never trained on
PROFILES = {
    "smoke": {"workloads": ("doom_basic",), "episodes": 5, "max_decisions": 40, "frames": 60, "orders": 5},
    "standard": {"workloads": GAMES[:2], "episodes": 10, "max_decisions": 120, "frames": 100, "orders": 5},
    "full": {"workloads": GAMES, "episodes": 100, "max_decisions": 4500, "frames": 2000, "orders": 20},
}
SIZES = (1, 2, 4, 8, 12, 16, 20, 50)  # of the batches that a step is built for


def trained_step(model, question: Question, sizes: Sequence[int] = SIZES):
    """The step for any batch up to the largest of `sizes` that asks a trained model in the layout it was taught in."""
    from lab.steps import PaddedStep, QuestionFirstStep, StaticStep

    kind = QuestionFirstStep if model.config.layout == "question_first" else StaticStep
    return PaddedStep(
        lambda batch: kind(model, question, batch=batch, capture=False),
        sizes,
        keep=len(sizes),
        name=model.name,
    )


# ---------------------------------------------------------------------------------------------------- players


class Fixed:
    """A player that knows nothing: the same option always, or random ones from a seed."""

    def __init__(self, question: Question, option: int | None = None, seed: int = 0):
        self.question, self.frames, self.option = question, 1, option
        self.name = "random" if option is None else f"always {question.names[option]}"
        self._rng = np.random.default_rng(seed)

    def decide(self, frames: np.ndarray) -> Decisions:
        count = len(self.question.options)
        chosen = (
            self._rng.integers(count, size=len(frames)) if self.option is None else np.full(len(frames), self.option)
        )
        sure = np.eye(count, dtype=np.float32)[chosen]
        return Decisions(self.question, sure, sure, np.ones(len(frames), np.float32))

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Nothing is kept."""


class ByExpert:
    """An environment that its scripted expert plays: the action it is given is not taken."""

    def __init__(self, source: str, seed: int):
        self._env: Env = make(source, seed, **({"labels": True} if source.startswith("doom:") else {}))
        self._expert = expert(self._env)
        self.source, self.actions, self.terminal_frame = source, self._env.actions, self._env.terminal_frame

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        return self._env.step(self._expert.action())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


# ---------------------------------------------------------------------------------------------------- rows


def run(
    profile: str = "standard",
    models: Sequence[str] = MODELS,
    out: Path | str | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> pd.DataFrame:
    """All rows of a profile, appended to the file `out` as they are taken; see `games` and `agreement`.

    Games and frames come from `seed` + 500,000. Raises InputError for an unknown profile.
    """  # fmt: skip
    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    asked = PROFILES[profile]
    common = {"models": models, "workloads": asked["workloads"], "seed": UNSEEN + seed, "quiet": quiet}
    lines = chain(
        agreement(frames=asked["frames"], orders=asked["orders"], **common),
        games(episodes=asked["episodes"], max_decisions=asked["max_decisions"], **common),
    )
    if out is None:
        return pd.DataFrame(lines)
    with RowWriter(out) as writer:
        return pd.DataFrame(writer.append(line) for line in lines)


def read(path: Path | str) -> pd.DataFrame:
    """This experiment's rows in a rows file of notebook 03; InputError where there are none."""
    rows = read_rows(path)
    if "player" not in rows:
        raise InputError(f"{path} holds no answers of trained models; measure them again with notebook 03.")
    return rows[rows.player.notna()]


def games(
    models: Sequence[str] = MODELS,
    workloads: Sequence[str] = GAMES,
    episodes: int = 20,
    max_decisions: int = 1000,
    seed: int = UNSEEN,
    device: str = "cpu",
    dtype: str = "fp32",
    quiet: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows of `episodes` games by each player: the models, each model on black frames, random play, every constant
    action, the expert. Lengths are capped at `max_decisions`; a seed's game is the same for all players.

    Raises InputError for a workload without an expert.
    """  # fmt: skip
    from lab.models import load_model

    asked = _known(workloads)
    loaded = [load_model(name, device, dtype) for name in models]
    for workload in asked:
        question = workload.question
        steps = {model.name: trained_step(model, question) for model in loaded}
        players = {name: (step, workload.source) for name, step in steps.items()}
        players["random"] = (Fixed(question, seed=seed), workload.source)
        players |= {f"always {o}": (Fixed(question, i), workload.source) for i, o in enumerate(question.names)}
        # every black frame gets the same answer, so on them a model plays the games of that constant action
        black = np.zeros((1, 1, 64, 64, 3), np.uint8)
        blind = {model.name: trained_step(model, question, (1,)).decide(black).choice[0] for model in loaded}
        same = {f"{name}, black frames": f"always {question.names[option]}" for name, option in blind.items()}
        players["expert"] = (Fixed(question, 0), lambda s, source=workload.source: ByExpert(source, s))
        for name, (player, source) in tqdm(players.items(), desc=f"games of {workload.name}", disable=quiet):
            played = play(player, source, episodes=episodes, max_decisions=max_decisions, seed=seed)
            for known in [name, *(one for one, constant in same.items() if constant == name)]:
                for number, episode in enumerate(played.episodes):
                    yield {
                        "kind": "game", "workload": workload.name, "player": known, "episode": number,
                        "seed": episode.seed, "score": episode.score, "decisions": len(episode),
                        "ended": episode.ended, "dtype": dtype,
                    }  # fmt: skip


def agreement(
    models: Sequence[str] = MODELS,
    workloads: Sequence[str] = GAMES,
    frames: int = 500,
    orders: int = 6,
    seed: int = UNSEEN,
    device: str = "cpu",
    dtype: str = "fp32",
    quiet: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows of what each model answers on `frames` unseen frames of each game, and what the expert does there.

    The frames are led by the expert with stretches of random play. The options stand as given, and in `orders` other
    random orders; order 0 is the given one.
    """  # fmt: skip
    from lab.models import load_model

    asked = _known(workloads)
    loaded = [load_model(name, device, dtype) for name in models]
    for workload in asked:
        question = workload.question
        seen, wanted, _ = zip(*lead(workload, frames, seed), strict=True)
        inputs, rng = np.stack(seen)[:, None], np.random.default_rng(seed)
        for order in tqdm(range(orders + 1), desc=f"answers on {workload.name}", disable=quiet):
            places = rng.permutation(len(question.options)) if order else np.arange(len(question.options))
            for model in loaded:
                step = trained_step(model, question.reordered(places.tolist()), (min(SIZES[-1], frames),))
                for start in range(0, frames, SIZES[-1]):
                    answer = step.decide(inputs[start : start + SIZES[-1]])
                    for row, (option, confidence) in enumerate(
                        zip(answer.choice, answer.confidence, strict=True), start
                    ):
                        yield {
                            "kind": "agreement", "workload": workload.name, "player": model.name, "order": order,
                            "frame": row, "expert": int(wanted[row]), "option": int(places[option]),
                            "confidence": float(confidence), "layout": model.config.layout, "dtype": dtype,
                        }  # fmt: skip


def _known(workloads: Sequence[str]) -> list[Workload]:
    found = [get_workload(name) for name in workloads]
    for workload in found:
        if workload.source not in EXPERTS:
            raise InputError(
                f"There is no scripted expert for {workload.name}; there are some for {', '.join(EXPERTS)}."
            )
    return found


# ---------------------------------------------------------------------------------------------------- results


def agreement_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per game and model: the share of frames answered as the expert does, with the options as given and in other orders.

    Intervals: the exact binomial one for the given order; over the orders' shares, resampled, for the others. `flips` is
    the share of answers that another order changes.
    """
    lines = []
    for (workload, player), part in rows[rows.kind == "agreement"].groupby(["workload", "player"], sort=False):
        part = part.assign(right=part.option == part.expert)
        given, others = part[part.order == 0], part[part.order > 0]
        line = {"workload": workload, "player": player, "layout": part.layout.iloc[0], "frames": len(given)}
        line["given"] = share_interval(int(given.right.sum()), len(given))
        if len(others):
            line["shuffled"] = median_interval(others.groupby("order").right.mean(), statistic=np.mean)
            before = given.set_index("frame").option
            line["flips"] = float((others.option.to_numpy() != before[others.frame].to_numpy()).mean())
        lines.append(line)
    return pd.DataFrame(lines)


def score_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per game and player: the mean score over its episodes with its bootstrap interval, and their count."""
    found = rows[rows.kind == "game"].groupby(["workload", "player"], sort=False).score
    return pd.DataFrame(
        {"workload": w, "player": p, "score": median_interval(scores, statistic=np.mean), "episodes": len(scores)}
        for (w, p), scores in found
    )


def gains(rows: pd.DataFrame, *models: str) -> pd.DataFrame:
    """How much each of `models` scores above others on the same seeds: the mean paired difference with its interval.

    One line per game, model and rival: `random`, `best constant` (the constant action with the highest mean), its own
    play on black frames, and every other model. Intervals resample seeds; `shown` says that one excludes 0. `of_expert` is
    the mean gain over random play as a share of the expert's.
    """
    found = rows[rows.kind == "game"].groupby("workload", sort=False)
    return pd.DataFrame(line for workload, part in found for model in models for line in _gains(workload, part, model))


def _gains(workload: str, games: pd.DataFrame, model: str) -> Iterator[dict[str, Any]]:
    table = games.pivot(index="seed", columns="player", values="score")
    constants = table[[name for name in table if name.startswith("always ")]]
    best = constants.mean().idxmax()
    rivals = {
        "random": table["random"],
        f"best constant ({best.removeprefix('always ')})": constants[best],
        "black frames": table[f"{model}, black frames"],
    }
    rivals |= {name: table[name] for name in table if f"{name}, black frames" in table and name != model}
    for rival, scores in rivals.items():
        gain = median_interval(table[model] - scores, statistic=np.mean)
        yield {
            "workload": workload, "model": model, "rival": rival, "gain": gain, "shown": gain.low > 0 or gain.high < 0,
            "of_expert": share_of_expert(table, model) if rival == "random" else None,
        }  # fmt: skip


def share_of_expert(table: pd.DataFrame, model: str, seed: int = 0) -> Estimate:
    """The model's mean gain over random play divided by the expert's, seeds (rows of `table`) resampled together."""
    from scipy import stats

    own, best = (table[name].to_numpy() - table["random"].to_numpy() for name in (model, "expert"))

    def share(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return a.mean(axis) / b.mean(axis)

    found = stats.bootstrap((own, best), share, paired=True, method="percentile", rng=np.random.default_rng(seed))
    interval = found.confidence_interval
    return Estimate(float(share(own, best)), float(interval.low), float(interval.high), len(own))


def answer(rows: pd.DataFrame, model: str = "pocket-question-first", base: str = "pocket") -> str:
    """What the comparison of two models says, in a sentence per kind of evidence, from the rows."""
    said, table = [], agreement_table(rows).set_index(["workload", "player"])
    for workload in table.index.unique("workload"):
        one, other = table.loc[workload, base], table.loc[workload, model]
        said.append(
            f"{workload}: as the expert on {one.given:.1%} of frames with {one.layout}, {other.given:.1%} with "
            f"{other.layout} (in other orders {one.shuffled:.1%} and {other.shuffled:.1%})"
        )
    for line in gains(rows, model).itertuples():
        if line.rival == base:
            said.append(
                f"{line.workload}: score {line.gain:+.1f} against {base}, "
                + ("a difference is shown" if line.shown else "no difference shown")
            )
    return "; ".join(said) + "."
