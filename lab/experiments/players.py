"""Who plays while frames are compared: seeded random policies, one that does nothing, one that holds on, a model.

A player is a function from a frame to an action, built as `player(env, seed)`; the same seed plays the same game.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lab.envs import POLICIES, Action, Env, Policy
from lab.errors import InputError
from lab.workloads import Workload, load_workloads

HELD = 0.9  # the probability with which `repeat` takes its last action again
MODEL_POLICY = "pocket"

# one_hot: a uniformly random action per decision; per_button: the published Doom draw
PLAYERS = (*POLICIES, "no_op", "repeat", MODEL_POLICY)


def player(name: str, env: Env, seed: int = 0) -> Policy:
    """The player `name` for an environment. InputError for an unknown name, and where it cannot play `env`."""
    check(name, env.source)
    if name == "no_op":
        return no_op(env)
    if name == "repeat":
        return repeat(env, seed)
    if name == MODEL_POLICY:
        return ModelPlayer(env, name)
    return POLICIES[name](env, seed)


def check(name: str, source: str) -> None:
    """InputError for an unknown player, and for one that cannot play `source`, told without starting anything."""
    if name not in PLAYERS:
        raise InputError(f"Unknown policy {name!r}; choose one of {', '.join(PLAYERS)}.")
    if name == "per_button" and not source.startswith("doom:"):
        raise InputError(f"The policy per_button presses Doom's buttons one by one; for {source} take one_hot.")
    if name == MODEL_POLICY:
        workload_for(source, name)


def no_op(env: Env) -> Policy:
    """Never does anything: Atari's NOOP, or its first action where a game has none; none of Doom's buttons."""
    nothing: Action = [0] * len(env.actions)
    if env.source.startswith("atari:"):
        nothing = env.actions.index("NOOP") if "NOOP" in env.actions else 0
    return lambda frame: nothing


def repeat(env: Env, seed: int = 0) -> Policy:
    """Takes its last action again with probability 0.9, else a uniformly random one (which may be the same)."""
    generator, count = np.random.default_rng(seed), len(env.actions)
    last = int(generator.integers(count))

    def act(frame: np.ndarray) -> int:
        nonlocal last
        if generator.random() >= HELD:
            last = int(generator.integers(count))
        return last

    return act


def workload_for(source: str, model: str) -> Workload:
    """The shipped one-frame workload of a source. InputError where a trained model has never been shown that game."""
    known = {w.source: w for w in load_workloads().values() if w.frames == 1}
    taught = taught_games(model)
    if source not in known or (taught is not None and known[source].name not in taught):
        games = [w.source for w in known.values() if taught is None or w.name in taught]
        raise InputError(f"The model {model} does not know {source}; it knows {', '.join(games)}.")
    return known[source]


def taught_games(model: str) -> list[str] | None:
    """Names of the workloads that a trained checkpoint was taught; None for a model that was taught none."""
    from lab.models.checkpoints import TRAINED

    try:
        told = (Path(TRAINED.get(model, model)) / "training.json").read_text(encoding="utf-8")
        return [str(game) for game in json.loads(told)["recipe"]["games"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # there is none, or it tells something else
        return None


class ModelPlayer:
    """Greedy play of a decision model: the most probable option, FIRE (where there is one) at the start of every life.

    `seconds` adds up the time that its decisions took. The model runs on one thread, as in a worker.
    """

    def __init__(self, env: Env, model: str, step: Callable | None = None):
        import torch

        from lab.models import load_model
        from lab.steps import StaticStep

        torch.set_num_threads(1)
        workload = workload_for(env.source, model)
        if set(workload.question.names) != set(env.actions):
            raise InputError(f"The question of {workload.name} does not offer the actions of {env.source}.")
        self.step = step or StaticStep(load_model(model), workload.question)
        self.places = [env.actions.index(name) for name in workload.question.names]
        self.fire = env.actions.index("FIRE") if "FIRE" in env.actions else None
        self.env, self.lives, self.seconds = env, None, 0.0

    def __call__(self, frame: np.ndarray) -> int:
        lives, self.lives = self.lives, getattr(self.env, "lives", 0)
        if self.fire is not None and lives != self.lives:
            return self.fire
        began = time.perf_counter()
        choice = int(self.step.decide(frame[None, None]).choice[0])
        self.seconds += time.perf_counter() - began
        return self.places[choice]
