"""What a model is asked about a Snake board: three questions on one state, compact or verbose; and what is done with the
answer.

The wording is Refrain's own. With the tokenizer used here the compact prompt's rows are about as long as the published
ones (59 to 64 tokens the longest, 150 to 155 the three together with the multilingual tokenizer), so that padding to 16
makes 64 here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.envs.snake import NAMES, Move, Plan, Snake
from lab.errors import InputError
from lab.question_tokens import TextPrompt
from lab.workloads import Question

PROMPTS = ("compact", "verbose")
CLASSES = ("illegal", "unsafe", "eats", "best", "slower")
COMPACT = {
    "illegal": "hits an obstacle",
    "unsafe": "legal but not safe",
    "eats": "safe and eats the food",
    "best": "safe, the best progress",
    "slower": "safe but slower",
}
VERBOSE = {
    "wall": "illegal, runs into the wall",
    "reverse": "illegal, turns into the neck",
    "body": "illegal, runs into the body",
    "unsafe": "legal, but leaves the safe order",
    "eats": "safe, and eats the food at once",
    "best": "safe, with the best progress",
    "slower": "safe, with slower progress",
}
ASKED = {
    "compact": (
        "You steer a snake. Which way should it go in its next move?",
        "Is there at least one safe route for the snake now?",
        "Can the food be reached over empty cells only?",
    ),
    "verbose": (
        "You steer the snake on a walled board. Which direction should it take?",
        "Is there at least one safe route for the snake now?",
        "Can the snake reach the food over cells that are empty now?",
    ),
}
NOULS = {"false": "no, it is not so", "true": "yes, it is so"}


def classify(move: Move, plan: Plan) -> str:
    """One of the five classes that a direction's description has, checked in the published order."""
    if not move.legal:
        return "illegal"
    if not move.safe:
        return "unsafe"
    if move.eats:
        return "eats"
    return "best" if move.direction == plan.preferred else "slower"


def key(plan: Plan) -> tuple:
    """All that the compact prompt depends on: safe yes/no, reachable yes/no, a class per direction."""
    return bool(plan.safe), plan.reachable, *(classify(move, plan) for move in plan.moves)


def prompt(game: Snake, plan: Plan, kind: str = "compact") -> TextPrompt:
    """The three questions about a board, in the order move, risk, food; `kind` is compact or verbose.

    Raises InputError for another kind.
    """
    if kind not in PROMPTS:
        raise InputError(f"There is no {kind!r} prompt; there are {' and '.join(PROMPTS)}.")
    safe, reachable = ("yes" if said else "no" for said in (plan.safe, plan.reachable))
    if kind == "compact":
        state = f"safe route: {safe}, food reachable: {reachable}"
        options = {move.direction: COMPACT[classify(move, plan)] for move in plan.moves}
    else:
        closing = "A safe route exists." if plan.safe else "No safe route exists."
        state = (
            f"Safe route: {safe}. Food reachable: {reachable}. Safe moves: {len(plan.safe)}. Open cells: "
            f"{plan.open_cells}. Length: {len(game.body)}. {closing}"
        )
        options = {
            move.direction: VERBOSE[move.outcome if not move.legal else classify(move, plan)] for move in plan.moves
        }
    move, risk, food = ASKED[kind]
    return TextPrompt(state, (Question("choice", move, options), _noul(risk), _noul(food)))


_KEPT: dict[str, Question] = {}


def _noul(instructions: str) -> Question:
    if instructions not in _KEPT:
        _KEPT[instructions] = Question("noul", instructions, NOULS)
    return _KEPT[instructions]


@dataclass(frozen=True)
class Decision:
    """What came of one answer: `proposed` by the model, `executed` after the shield; they differ in an `intervention`.

    `probabilities` fp32 [4] are the move's, rounded to 4 decimals as published, unaltered by the shield; `risk` is 1 -
    P(a safe route), `food` P(the food can be reached).
    """

    proposed: str
    executed: str
    probabilities: np.ndarray
    risk: float
    food: float

    @property
    def intervention(self) -> bool:
        return self.proposed != self.executed


class NoMove(RuntimeError):
    """An answer that no move may be made of: it is not finite, no probability, or the shield leaves no direction."""


def decide(plan: Plan, move: Sequence[float], safe: float, food: float, shield: bool = True) -> Decision:
    """Make a move of an answer: `move` [4], the probabilities of UP, DOWN, LEFT, RIGHT; `safe` and `food`, P(true).

    Proposed is the most probable direction of the rounded probabilities; executed is the same if it is safe or there is
    no shield, else the most probable safe one. Ties go to the first. Raises NoMove for a number that is not finite or
    lies outside 0..1, and where the shield is up and no direction is safe.
    """
    numbers = np.array([*move, safe, food], dtype=np.float64)
    if len(move) != len(NAMES) or not np.isfinite(numbers).all() or (numbers < 0).any() or (numbers > 1).any():
        raise NoMove(f"The model answered {numbers.tolist()}, which are not probabilities; no move was made.")
    rounded = np.round(numbers, 4)
    proposed = executed = NAMES[int(rounded[:4].argmax())]
    if shield and proposed not in plan.safe:
        if not plan.safe:
            raise NoMove("No direction is safe on this board, so the shield lets none pass; no move was made.")
        executed = max(plan.safe, key=lambda name: rounded[NAMES.index(name)])
    return Decision(
        proposed, executed, rounded[:4].astype(np.float32), float(round(1 - rounded[4], 4)), float(rounded[5])
    )
