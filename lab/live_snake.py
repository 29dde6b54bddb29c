"""Snake for the live panel and the terminal: a session whose step reads the game's state, not its frame."""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np

from lab.envs.snake import NAMES
from lab.envs.snake_prompts import decide, prompt
from lab.live import Session
from lab.live_choices import SNAKE, SNAKE_MODELS, SNAKE_STEPS, check_settings
from lab.moments import Moment
from lab.question_tokens import TextPrompt
from lab.workloads import Question

FPS = 12.0  # of a game that is watched in a terminal


@dataclass(frozen=True)
class SnakeMoment(Moment):
    """A moment with all that was asked: `told` is what the model read about each of `names`, `others` the other questions
    with P(yes), `refused` the direction that was proposed where the shield did not let it pass, else empty."""

    told: tuple[str, ...] = ()
    others: tuple[tuple[str, float], ...] = ()
    refused: str = ""


class SnakeStep:
    """Asks a text step about an environment's board: the `Step` that a session plays with.

    `question` is what is asked about the move, its options described anew for every board; other instructions than the
    usual ones are asked in their place.
    """

    frames = 1

    def __init__(self, step, env, question: Question):
        self.step, self.env, self.question, self.name = step, env, question, step.name
        self.answers = self.plan = None

    def decide(self, inputs=None):
        """The answer to the move question on the environment's present board; `inputs` are not looked at."""
        self.plan = self.env.game.plan()
        asked = prompt(self.env.game, self.plan)
        move = asked.questions[0]
        if move.instructions != self.question.instructions:
            move = Question("choice", self.question.instructions, dict(move.options))
        self.answers = self.step.decide(TextPrompt(asked.state, (move, *asked.questions[1:])))
        return self.answers[0]

    def decision(self, shield: bool = True):
        """What is made of the last answer."""
        move, safe, food = self.answers
        return decide(self.plan, move.probabilities[0], safe.probabilities[0, 1], food.probabilities[0, 1], shield)

    def reset(self, rows=None) -> None:
        self.step.reset(rows)

    def describe(self) -> dict:
        return self.step.describe()

    def start_cost(self) -> dict:
        return self.step.start_cost()


class SnakeSession(Session):
    """A `Session` on Snake: a text model answers, the shield has the last word, and every round takes the next seed.

    `model` is a name for `load_text_model`, or a loaded text model; `step` "eager", or "compiled" with all three options
    on. What a question's options say is written anew for every board, so that only its instructions can be changed.
    `interventions` counts the moves that the shield did not let pass. Raises InputError for a step that reads frames too.
    An answer that is no probability raises `NotFinite` or `NoMove`, and no move is made.
    """

    def __init__(self, source: str = SNAKE, model=SNAKE_MODELS[0], step: str = SNAKE_STEPS[0], **settings):
        check_settings(step, settings.get("frames", 1), settings.get("seed", 0), source=source)
        super().__init__(source, model, step, **settings)

    def restart(self, seed: int | None = None) -> None:
        self.interventions = 0
        super().restart(seed)

    def _load(self, model, device: str, dtype: str):
        load = import_module("lab.models.text").load_text_model
        return load(model, device, dtype) if isinstance(model, str) else model

    def usual_question(self) -> Question:
        """The move question about the present board."""
        return prompt(self.env.game, self.env.game.plan()).questions[0]

    def _make_step(self, question: Question) -> SnakeStep:
        options = {"compile": True, "pad_to_multiple": 16, "cache_prompts": True} if self.kind == "compiled" else {}
        return SnakeStep(import_module("lab.steps.text").TextStep(self.model, **options), self.env, question)

    def _seeds(self, number: int):
        generator = np.random.default_rng([self.seed, number]) if self.choose == "sampled" else None
        return self.seed + number, generator

    def _take(self, answer) -> None:
        """Execute what the shield lets pass: probabilities of 0 for what it does not."""
        decision = self.step.decision()
        self.interventions += decision.intervention
        shares = np.array(
            [
                share if name in self.step.plan.safe else 0.0
                for name, share in zip(NAMES, decision.probabilities, strict=True)
            ],
            np.float32,
        )
        if self.choose == "greedy" or not shares.sum():
            shares = np.eye(len(NAMES), dtype=np.float32)[NAMES.index(decision.executed)]
        self._running.take(answer.logits[0], shares, answer.p_act[0])

    def _moment(self, frame, answer, ms: float) -> SnakeMoment:
        decision, (move, *others) = self.step.decision(), self.step.answers
        return SnakeMoment(
            **vars(super()._moment(frame, answer, ms)),
            told=tuple(text for _, text in move.question.options),
            others=tuple((other.question.instructions, float(other.probabilities[0, 1])) for other in others),
            refused=decision.proposed if decision.intervention else "",
        )

    def facts(self) -> dict:
        return super().facts() | {"interventions": self.interventions}

    def remark(self) -> str:
        """What keeps the answers from meaning much: untrained weights; else empty."""
        if "random" in self.model.weights:
            return f"{self.model.name} is not trained ({self.model.weights}): its choices mean nothing."
        return ""


# ------------------------------------------------------------------------------------------------------ in a terminal


def watch(session: SnakeSession, moves: int, fps: float, show: bool, say: Callable[[str], None]) -> None:
    """Play `moves` moves in the terminal, `fps` a second at most; with `show` the board is drawn where it fits, else a line
    is said per round."""
    from rich.live import Live

    have, columns, lines = shutil.get_terminal_size(), max(2 * session.env.game.width, 60), session.env.game.height + 5
    if show and (have.columns < columns or have.lines < lines):
        say(f"not drawn: that takes {columns} columns and {lines} lines, and here are {have.columns} and {have.lines}")
        show = False
    due, said = time.perf_counter(), len(session.episodes)
    with Live(auto_refresh=False, transient=False) if show else nullcontext() as live:
        for _ in range(moves):
            moment = session.tick()
            if show:
                live.update(_screen(session, moment), refresh=True)
            for one in session.episodes[said:]:
                said += 1
                if not show:
                    how = "full board" if session.env.game.won else "over" if one.ended else "cut"
                    say(f"round {said} (seed {one.seed}): score {one.score:g}, {one.decisions} moves, {how}")
            due = max(due + 1 / fps, time.perf_counter() - 1 / fps)
            time.sleep(max(0.0, due - time.perf_counter()))


def _screen(session: SnakeSession, moment: Moment):
    from rich.console import Group
    from rich.text import Text

    from lab.envs.snake_views import rich_board
    from lab.snake_loop import said

    rate = f"{session.rate:.0f} moves/s  " if session.rate else ""
    lines = (
        *said(session.env.game, replace(session.step.decision(), executed=moment.action)),
        f"seed {session._running.seed}  interventions of the shield {session.interventions}",
        f"{moment.decision_ms:.1f} ms a decision  {rate}{session.step.name}",
    )
    return Group(rich_board(session.env.game), *map(Text, lines))
