"""The Snake loop: what happens between two moves, in the parts that are timed.

planner   the four moves, the safe ones, what the head can reach
prepare   the prompt's text, its tokens, the batch
forward   the text model
readout   probabilities on the host, proposed and executed direction
draw      the board in 24-bit colours, as the characters a terminal takes, written to memory
"""

from dataclasses import dataclass

from lab.clocks import stage
from lab.envs.snake import NAMES, Board, Plan, Snake
from lab.envs.snake_prompts import Decision, NoMove, decide, prompt
from lab.envs.snake_views import Screen
from lab.errors import InputError
from lab.models.heads import Decisions

STAGES = ("planner", "prepare", "forward", "readout", "draw")


@dataclass(frozen=True)
class Turn:
    """One decision of the loop: the board, what the planner knew, the three answers, and what was made of them."""

    board: Board
    plan: Plan
    answers: tuple[Decisions, Decisions, Decisions]
    decision: Decision

    @property
    def margin(self) -> float:
        """How far the most probable direction lies ahead of the next, before rounding."""
        first, second = sorted(self.answers[0].probabilities[0], reverse=True)[:2]
        return float(first - second)


class Pilot:
    """Plays Snake with a text step; `kind` is the prompt (compact, verbose), `screen` draws each board where given.

    `look` decides and leaves the game as it is; `move` decides and takes the step. An answer that is not finite raises
    before the game is touched.
    """

    def __init__(self, step, kind: str = "compact", shield: bool = True, screen: Screen | None = None):
        self.step, self.kind, self.shield, self.screen = step, kind, shield, screen
        self.last: Turn | None = None

    def look(self, game: Snake) -> Turn:
        """The decision on a board; marks the loop's stages."""
        with stage("planner"):
            plan = game.plan()
        with stage("prepare"):
            asked = prompt(game, plan, self.kind)
        answers = self.step.decide(asked)  # which marks prepare, forward, readout
        with stage("readout"):
            decision = self._decide(plan, answers)
        if self.screen is not None:
            with stage("draw"):
                self.screen.draw(game, "  ".join(said(game, decision)), self.step.name)
        self.last = Turn(game.board(), plan, tuple(answers), decision)
        return self.last

    def _decide(self, plan: Plan, answers: list[Decisions]) -> Decision:
        move, safe, food = answers
        return decide(plan, move.probabilities[0], safe.probabilities[0, 1], food.probabilities[0, 1], self.shield)

    def move(self, game: Snake) -> Turn:
        """Decide and take the step."""
        turn = self.look(game)
        game.step(turn.decision.executed)
        return turn

    def describe(self) -> dict:
        return {**self.step.describe(), "prompt": self.kind, "shield": self.shield, "drawn": self.screen is not None}


def said(game: Snake, decision: Decision) -> tuple[str, str]:
    """Two lines of text about a decision: the move, and what the other two answers say."""
    share = {name: f"{name} {p:.0%}" for name, p in zip(NAMES, decision.probabilities, strict=True)}
    shield = f" (proposed {share[decision.proposed]})" if decision.intervention else ""
    return (
        f"move {game.tick}  score {game.score}  {share[decision.executed]}{shield}",
        f"dead-end risk {decision.risk:.0%}  food reachable {decision.food:.0%}",
    )


def play(pilot: Pilot, game: Snake, moves: int) -> list[Turn]:
    """Up to `moves` moves of a game, to its end at the most."""
    turns = []
    while len(turns) < moves and not game.over:
        turns.append(pilot.move(game))
    return turns


def replay(seed: int, actions: list[str]) -> list[Board]:
    """The boards of a recorded game, one before each action: the game played again from its seed.

    Raises InputError where an action cannot be taken, for then the recording is not of this game.
    """
    game, boards = Snake(seed=seed), []
    for action in actions:
        if game.over:
            raise InputError(f"The recording goes on after the game of seed {seed} was over; it is of another game.")
        boards.append(game.board())
        game.step(action)
    return boards


__all__ = ["STAGES", "NoMove", "Pilot", "Turn", "play", "replay", "said"]
