"""Snake for the live panel and the terminal: a session whose step reads the game's state, not its frame."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module

import numpy as np

from lab.envs.snake import NAMES
from lab.live import Session
from lab.workloads import Question

MODEL = "snake"
SOURCE = "snake:24x16"


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
        from lab.envs.snake_prompts import prompt
        from lab.question_tokens import TextPrompt

        self.plan = self.env.game.plan()
        asked = prompt(self.env.game, self.plan)
        move = asked.questions[0]
        if move.instructions != self.question.instructions:
            move = Question("choice", self.question.instructions, dict(move.options))
        self.answers = self.step.decide(TextPrompt(asked.state, (move, *asked.questions[1:])))
        return self.answers[0]

    def decision(self, shield: bool = True):
        """What is made of the last answer."""
        from lab.envs.snake_prompts import decide

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

    `model` is a name for `load_text_model`; any other gives way to the trained checkpoint, since no picture is looked at.
    `step` "compiled" turns all three options on, every other one none. `frames` and the descriptions of a question change
    nothing.
    """

    def __init__(self, source: str = SOURCE, model=MODEL, *args, **kwargs):
        self.interventions = 0
        super().__init__(source, model, *args, **kwargs)

    def _load(self, model, device: str, dtype: str):
        text = import_module("lab.models.text")
        if isinstance(model, text.TextModel):
            return model
        known = isinstance(model, str) and (model in text.known() or "/" in model)
        return text.load_text_model(model if known else MODEL, device, dtype)

    def usual_question(self) -> Question:
        """The move question about the present board."""
        from lab.envs.snake_prompts import prompt

        return prompt(self.env.game, self.env.game.plan()).questions[0]

    def _make_step(self, question: Question) -> SnakeStep:
        from lab.steps.text import TextStep

        options = {"compile": True, "pad_to_multiple": 16, "cache_prompts": True} if "compiled" in self.kind else {}
        return SnakeStep(TextStep(self.model, **options), self.env, question)

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

    def remark(self) -> str:
        """What keeps the answers from meaning much: untrained weights; else empty."""
        if "random" in self.model.weights:
            return f"{self.model.name} is not trained ({self.model.weights}): its choices mean nothing."
        return ""


# ------------------------------------------------------------------------------------------------------ in a terminal


def watch(session: SnakeSession, moves: int, fps: float | None, show: bool, say: Callable[[str], None]) -> bool:
    """Play `moves` moves in the terminal, `fps` a second (None: as fast as it goes); with `show` the board is drawn, else a
    line is said per round. Ctrl-C ends it after the move. Whether it came to its end."""
    from rich.live import Live

    due, told = time.perf_counter(), 0
    live = Live(auto_refresh=False, transient=False) if show else nullcontext()
    try:
        with live:
            for _ in range(moves):
                moment = session.tick()
                if show:
                    live.update(_screen(session, moment), refresh=True)
                for episode in session.episodes[told:]:
                    told += 1
                    if not show:
                        how = "full board" if session.env.game.won else "cut" if not episode.ended else "over"
                        say(
                            f"round {told} (seed {episode.seed}): score {episode.score:g}, {episode.decisions} moves, {how}"
                        )
                if fps is not None:
                    due = max(due + 1 / fps, time.perf_counter() - 1 / fps)
                    time.sleep(max(0.0, due - time.perf_counter()))
    except KeyboardInterrupt:
        return False
    return True


def _screen(session: SnakeSession, moment):
    from rich.console import Group
    from rich.text import Text

    from lab.envs.snake_views import rich_board

    return Group(rich_board(session.env.game), *map(Text, _lines(session, moment)))


def _lines(session: SnakeSession, moment) -> Iterator[str]:
    decision = session.step.decision()
    yield (
        f"seed {session._running.seed}  move {moment.number}  score {moment.score:g}  "
        f"{moment.action} {moment.ranked[0][1]:.0%}  interventions {session.interventions}"
    )
    yield f"dead-end risk {decision.risk:.0%}  food reachable {decision.food:.0%}"
    rate = f"{session.rate:.0f} moves/s" if session.rate else ""
    yield f"{moment.decision_ms:.1f} ms a decision  {rate}  {session.step.name}"
