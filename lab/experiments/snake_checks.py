"""What notebook 07 checks beside the times: what candidates cost to start, whether they act alike, how memory goes over
many calls, and how games go."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import psutil

from lab.envs.snake import NAMES, Snake, play_greedy, play_random
from lab.envs.snake_prompts import decide, prompt
from lab.experiments.snake import ALL, EAGER, SEED_MOVES, SEEDS, stream
from lab.question_tokens import TextPrompt

GAME_SEED = 2000  # the published games are those of seeds 2000 to 2019
MODELS = ("snake", "snake-tenth")
GREEDY, RANDOM = "planner-greedy", "random-safe"
SAMPLES = 100


def asked(settings: dict) -> list[TextPrompt]:
    """The compact prompt of every board of the stream."""
    boards = stream(min(settings["stream"], len(SEEDS) * SEED_MOVES), settings["one_length"])
    return [prompt(game := Snake.at(board), game.plan()) for _, board in boards]


def warm_up(steps: dict, settings: dict) -> list[dict]:
    """Let every candidate meet every length of the stream, so that no compiling falls into a timed call; return what it
    took, a line (kind `start`) per candidate. Candidates share the graphs of a shape, whose cost each is charged."""
    by_length = {steps[EAGER].prepare(one).ids.shape[1]: one for one in dict.fromkeys(asked(settings))}
    for step in steps.values():
        for one in by_length.values():
            step.decide(one)
    spent: dict[tuple, float] = {}  # the first step that meets a shape compiles it for all
    for step in steps.values():
        for shape, seconds in step.shapes.items():
            spent[shape] = max(seconds, spent.get(shape, 0.0))
    lines = []
    for name, step in steps.items():
        cost = step.start_cost() | {"compile_s": sum(spent[shape] for shape in step.shapes)}
        lines.append({"kind": "start", "model": step.model.name, "candidate": name, "lengths": len(by_length), **cost})
    return lines


def actions(model, steps: dict, settings: dict) -> dict:
    """Every candidate on every board of the stream: how many proposed and executed actions are eager's, the largest
    difference of raw logits, the smallest lead of the first direction over the second, distinct inputs, counters of the
    last candidate's kept prompts."""
    boards = [board for _, board in stream(settings["stream"], settings["one_length"])]
    games = [Snake.at(board) for board in boards]
    same = {name: {"proposed": 0, "executed": 0, "max_logit": 0.0} for name in steps}
    seen, interventions, margin = set(), 0, np.inf
    if steps[ALL].parts is not None:
        steps[ALL].parts.clear()
    for game in games:
        plan = game.plan()
        one = prompt(game, plan)
        seen.add(one)
        answers = {name: step.decide(one) for name, step in steps.items()}
        made = {name: _decision(plan, answer) for name, answer in answers.items()}
        interventions += made[EAGER].intervention
        first, second = np.sort(answers[EAGER][0].probabilities[0])[:-3:-1]
        margin = min(margin, float(first - second))
        for name, found in same.items():
            found["proposed"] += made[name].proposed == made[EAGER].proposed
            found["executed"] += made[name].executed == made[EAGER].executed
            apart = max(np.abs(a.logits - b.logits).max() for a, b in zip(answers[name], answers[EAGER], strict=True))
            found["max_logit"] = max(found["max_logit"], float(apart))
    return {
        "kind": "actions",
        "model": model.name,
        "moves": len(games),
        "distinct_inputs": len(seen),
        "interventions": interventions,
        "min_margin": margin,
        "candidates": same,
        "prefix_cache": steps[ALL].parts.counts(),
    }


def _decision(plan, answers):
    move, safe, food = answers
    return decide(plan, move.probabilities[0], safe.probabilities[0, 1], food.probabilities[0, 1])


# ------------------------------------------------------------------------------------------------------------- memory


def memory(model, steps: dict, settings: dict) -> dict:
    """The process's resident memory and the allocator's bytes over many calls whose shapes change, for eager and for all
    three options: samples, and the slope in bytes per call with its 95 % interval after the first fifth.

    Eager's lengths go over ten lengths of state, those of the padded candidate over the compiled shapes.
    """
    rng, ones = np.random.default_rng(settings["seed"]), list(dict.fromkeys(asked(settings)))
    found = {}
    for name, repeats in ((EAGER, range(1, 11)), (ALL, (1, 3))):
        several = [TextPrompt(", ".join([one.state] * times), one.questions) for one in ones for times in repeats]
        shapes = set()
        for one in several if len(several) < 200 else several[:: len(several) // 200]:
            shapes.add(steps[name].prepare(one).shape)
            steps[name].decide(one)
        calls = [several[i] for i in rng.integers(0, len(several), settings["calls"])]
        found[name] = {"shapes": len(shapes), **_slopes(calls, steps[name].decide, model.device)}
    return {"kind": "memory", "model": model.name, "calls": settings["calls"], "candidates": found}


def _slopes(calls: list, call: Callable, device) -> dict:
    process, every = psutil.Process(), max(1, len(calls) // SAMPLES)
    samples = []
    for number, one in enumerate(calls):
        if number % every == 0:
            samples.append((number, process.memory_info().rss, allocated(device)))
        call(one)
    samples.append((len(calls), process.memory_info().rss, allocated(device)))
    table = np.array([[np.nan if value is None else value for value in sample] for sample in samples], float)
    kept = table[len(table) // 5 :]
    slopes = {}
    for place, what in ((1, "rss"), (2, "allocator")):
        slope, spread = _slope(kept[:, 0], kept[:, place])
        slopes[what] = {"slope": slope, "low": slope - spread, "high": slope + spread, "first": table[0, place],
                        "last": table[-1, place]}  # fmt: skip
    return slopes | {"samples": samples}


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """A straight line's slope and half its 95 % interval."""
    from scipy import stats

    if np.isnan(y).any() or len(x) < 3:
        return float("nan"), float("nan")
    fit = stats.linregress(x, y)
    error = np.nan_to_num(fit.stderr)  # points exactly on a line leave the root of a number just below 0
    return float(fit.slope), float(error * stats.t.ppf(0.975, len(x) - 2))


def allocated(device) -> int | None:
    """Bytes that the device's allocator has given out (CUDA: torch's, CPU: the C library's); None where it does not say."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    call = _mallinfo()
    if call is None:
        return None
    told = call()
    return told.uordblks + told.hblkhd


@lru_cache(maxsize=1)
def _mallinfo():
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    fields = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    call = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if call is not None:
        call.restype = fields
    return call


# -------------------------------------------------------------------------------------------------------------- games


def games(settings: dict, device: str) -> list[dict]:
    """One line (kind `game`) per policy and seed: score, moves, interventions, survived. Both trained checkpoints, the
    planner's preferred move, a random safe one. Each distinct prompt is asked once per checkpoint: an answer is a function
    of it, and no time is taken here."""
    from lab.models.text import load_text_model
    from lab.steps.text import TextStep

    seeds, horizon = range(GAME_SEED, GAME_SEED + settings["seeds"]), settings["horizon"]
    lines = []
    for seed in seeds:
        for policy, game in (
            (GREEDY, play_greedy(Snake(seed=seed), horizon)),
            (RANDOM, play_random(Snake(seed=seed), horizon, seed)),
        ):
            lines.append(_line(policy, seed, game, 0))
    for name in MODELS:
        step, known = TextStep(load_text_model(name, device)), {}
        for seed in seeds:
            game, interventions, taken = Snake(seed=seed), 0, []
            while game.tick < horizon and not game.over:
                plan = game.plan()
                one = prompt(game, plan)
                if one not in known:
                    known[one] = step.decide(one)
                decision = _decision(plan, known[one])
                interventions += decision.intervention
                taken.append(NAMES.index(decision.executed))
                game.step(decision.executed)
            lines.append(_line(name, seed, game, interventions) | {"actions": "".join(map(str, taken))})
    return lines


def _line(policy: str, seed: int, game: Snake, interventions: int) -> dict:
    return {
        "kind": "game",
        "policy": policy,
        "seed": seed,
        "score": game.score,
        "moves": game.tick,
        "survived": game.dead is None,
        "interventions": interventions,
    }
