"""Notebook 07: what compiling, padding and keeping prompts bring a loop that asks three questions of every Snake board.

Seven candidates in balanced orders on shared boards, the loop with its stages, the compact prompt beside the verbose one.
What is no time (actions, distinct inputs, counters, memory, gameplay) is in `lab.experiments.snake_checks`.
"""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import pandas as pd

from lab.envs.snake import Board, Snake
from lab.envs.snake_prompts import classify, prompt
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.records import beside_rows, join_rows

EAGER, ALL = "eager", "compiled + padded to 16 + prompts kept"
# name: compile, pad_to_multiple, cache_prompts; the published names in the order of the published table
CANDIDATES = {
    EAGER: (False, None, False),
    "prompts kept": (False, None, True),
    "compiled": (True, None, False),
    "compiled + padded to 96": (True, 96, False),
    "compiled + prompts kept": (True, None, True),
    "compiled + padded to 16": (True, 16, False),
    ALL: (True, 16, True),
}
# `blocks` of the ablation, `moves` of the loop, `stream` decisions whose actions are compared, `calls` of the memory check
# A published shape takes a second or more a decision on two cores: what its own checks ask for, where it is asked for alone.
PUBLISHED = {"blocks": 20, "moves": 12, "warmup": 1, "one_length": 63, "pairs": 10, "stream": 20, "calls": 25}
PROFILES = {
    "smoke": {
        "models": {"snake": {"blocks": 8, "moves": 8, "budget_s": 20}}, "pairs": 8, "stream": 24, "calls": 60,
        "seeds": 5, "horizon": 40, "one_length": 64,
    },
    "standard": {
        "models": {
            "snake": {"blocks": 200, "moves": 300, "budget_s": 30},
            "multilingual": PUBLISHED | {"budget_s": 120},
        },
        "asked_for": {"english": PUBLISHED},  # ten minutes on two cores
        "pairs": 64, "stream": 600, "calls": 2000, "seeds": 20, "horizon": 300, "one_length": None,
    },
    "full": {
        "models": {
            "snake": {"blocks": 400, "moves": 2400, "budget_s": None},
            "multilingual": {"blocks": 200, "moves": 600, "budget_s": None},
            "english": {"blocks": 200, "moves": 600, "budget_s": None},
        },
        "pairs": 200, "stream": 2400, "calls": 2000, "seeds": 20, "horizon": 300, "one_length": None,
    },
}  # fmt: skip
# With random weights at a size of no one's there is nothing to find out but that all of it runs.
TRIAL = {"pairs": 8, "stream": 200, "calls": 400, "seeds": 5, "horizon": 100, "one_length": 64}
SEEDS = (101, 102, 103, 104)
SEED_MOVES = 600
WARM_UP = 3
SMALL = 64  # the width of the trained checkpoints
# The commonest classes of the four directions whose prompts have so many tokens.
COMMON = {63: ["best", "illegal", "illegal", "unsafe"], 64: ["best", "illegal", "unsafe", "unsafe"]}


def run(
    profile: str = "standard",
    *,
    out: Path | str | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    preset: str | None = None,
) -> pd.DataFrame:
    """Measure every model of the profile, or only `preset` (a name for `load_text_model`) without a budget and on the whole
    stream of boards; return rows.

    Titles are "ablation, MODEL", "loop, MODEL" and "prompts, MODEL". Rows of a decision carry, as `counts`, the seed and
    the number of the move, what was proposed and executed and with which probabilities, and the base arm's the board. Lines
    beside them say what the candidates cost to start (`start`), whether they act alike (`actions`), how memory goes
    (`memory`) and how games went (`game`). Raises InputError for an unknown profile, device, dtype or preset.
    """
    from lab.experiments import snake_checks
    from lab.live import threads, threads_for
    from lab.models.text import load_text_model

    if profile not in PROFILES:
        raise InputError(f"Unknown profile {profile!r}; choose one of {', '.join(PROFILES)}.")
    settings = {**PROFILES[profile], "seed": seed, "out": out}
    models = settings["models"]
    if preset is not None:
        counts = {**models, **settings.get("asked_for", {})}.get(preset, models["snake"])
        models = {preset: counts | {"moves": max(counts["moves"], counts["blocks"]), "budget_s": None}}
        settings["stream"] = len(SEEDS) * SEED_MOVES
    if preset == "tiny":
        settings |= {**TRIAL, "models": models}
        models["tiny"] |= {"blocks": 24, "moves": 24}
    tables = []
    for number, (name, counts) in enumerate(models.items()):
        model = load_text_model(name, device, dtype, seed)
        own = settings | {key: counts[key] for key in ("one_length", "pairs", "stream", "calls") if key in counts}
        with threads(threads_for(model)):
            steps = build(model, "layers" if profile == "smoke" else None)
            tables.append(beside_rows(snake_checks.warm_up(steps, own), out))
            tables += [ablation(model, steps, counts, own)]
            tables += [loop(model, steps, counts, own)] if counts["moves"] else []
            if number == 0:
                tables.append(prompts(model, steps, own))
                for check in (snake_checks.actions, snake_checks.memory):
                    tables.append(beside_rows([check(model, steps, own)], out))
        del model, steps
    tables.append(beside_rows(snake_checks.games(settings, device), out))
    return join_rows(tables)


def build(model, how: str | None = None) -> dict:
    """One step per candidate. `how` to compile is by default as a whole for a small model; for a larger one by the layer,
    which takes a fraction of the time."""
    from lab.steps.text import TextStep

    how = how or ("whole" if model.encoder.config.hidden_size <= SMALL else "layers")
    return {
        name: TextStep(model, how if compiled else False, multiple, kept, name)
        for name, (compiled, multiple, kept) in CANDIDATES.items()
    }


@lru_cache(maxsize=2)
def stream(moves: int, one_length: int | None = None) -> tuple[tuple[int, Board], ...]:
    """(seed, board) before each of `moves` moves: the planner's preferred play of seeds 101 to 104, 600 moves each.

    With `one_length` only boards of one kind, whose longest row has so many tokens (63 or 64, see `COMMON`): one shape to
    compile.
    """
    found = []
    for seed in SEEDS:
        game = Snake(seed=seed)
        for _ in range(SEED_MOVES):
            if len(found) == moves:
                return tuple(found)
            plan = game.plan()
            if not one_length or sorted(classify(move, plan) for move in plan.moves) == COMMON[one_length]:
                found.append((seed, game.board()))
            game.step(plan.preferred)
    return tuple(found)


def spread(count: int, settings: dict) -> list[tuple[int, Board]]:
    """`count` (seed, board) evenly from the stream of seeds 101 to 104."""
    boards = stream(count if settings["one_length"] else len(SEEDS) * SEED_MOVES, settings["one_length"])
    return [boards[i * len(boards) // count] for i in range(count)]


# ------------------------------------------------------------------------------------------------------------ measured


def ablation(model, steps: dict, counts: dict, settings: dict) -> pd.DataFrame:
    """All candidates on one board a block, in balanced orders: from the prompt to answers on the host."""
    asked = [prompt(game := Snake.at(board), game.plan()) for _, board in spread(counts["blocks"], settings)]
    return compare(
        [Arm.of(step, counts=_prefix(step)) for step in steps.values()],
        asked,
        blocks=counts["blocks"],
        warmup=counts.get("warmup", WARM_UP),
        budget_s=counts["budget_s"],
        title=f"ablation, {model.name}",
        orders="balanced",
        **_common(model, settings),
    )


def loop(model, steps: dict, counts: dict, settings: dict) -> pd.DataFrame:
    """Eager and all three options beside each other at every move of one stream of boards: everything but the game's own
    step, which both would take alike."""
    from lab.envs.snake_views import Screen
    from lab.snake_loop import Pilot

    given = [(seed, Snake.at(board)) for seed, board in stream(counts["moves"], settings["one_length"])]
    flights = [_Flight(Pilot(steps[name], screen=Screen()), name == EAGER) for name in (EAGER, ALL)]
    arms = [
        Arm(flight.pilot.step.name, flight, flight.pilot.describe, counts=flight.counts, device=str(model.device))
        for flight in flights
    ]
    return compare(
        arms,
        given,
        blocks=len(given),
        warmup=counts.get("warmup", WARM_UP),
        budget_s=counts["budget_s"],
        title=f"loop, {model.name}",
        **_common(model, settings),
    )


class _Flight:
    """What the loop's arm calls; it remembers which seed's board it was, and with `whole` the board, for the rows."""

    def __init__(self, pilot, whole: bool):
        self.pilot, self.whole, self.seed = pilot, whole, None

    def __call__(self, given: tuple[int, Snake]):
        self.seed, game = given
        return self.pilot.look(game)

    def counts(self) -> dict:
        turn, decision = self.pilot.last, self.pilot.last.decision
        kept = {
            "seed": self.seed,
            "tick": turn.board.tick,
            "proposed": decision.proposed,
            "executed": decision.executed,
            "probabilities": [round(float(p), 4) for p in decision.probabilities],
        }
        return kept | ({"board": asdict(turn.board)} if self.whole else {})


def prompts(model, steps: dict, settings: dict) -> pd.DataFrame:
    """The compact prompt beside the verbose one on the same boards, both eager."""
    pairs = [
        {kind: prompt(game, plan, kind) for kind in ("compact", "verbose")}
        for _, board in spread(settings["pairs"], settings)
        for game in [Snake.at(board)]
        for plan in [game.plan()]
    ]
    step = steps[EAGER]
    arms = [
        Arm(
            kind,
            lambda pair, kind=kind: step.decide(pair[kind]),
            describe={**step.describe(), "prompt": kind, "tokens": step.prepare(pairs[0][kind]).tokens},
            device=str(model.device),
        )
        for kind in ("compact", "verbose")
    ]
    return compare(
        arms, pairs, blocks=len(pairs), warmup=WARM_UP, title=f"prompts, {model.name}", **_common(model, settings)
    )


def _common(model, settings: dict) -> dict:
    return {
        "seed": settings["seed"],
        "out": settings["out"],
        "device": str(model.device),
        "tags": {"model": model.name},
        "keep_partial": False,
    }


def _prefix(step):
    return None if step.parts is None else step.parts.counts
