"""Scripted players that read the game's own state, never a picture: what a trained model imitates.

`expert(env)` makes the one for an environment's game. `boxes()` says where things are on the frame that was last shown, as
{name: (left, top, right, bottom)} in pixels, half-open, without what is not on it; `action()` is what to do about it, a
place in `env.actions`. Both are functions of the state alone, so any state can be labelled, whoever led the game there.

Addresses in the Atari's memory: AtariARI (Anand et al., "Unsupervised State Representation Learning in Atari", 2019);
their offsets to pixels were read off ALE's own frames.
"""

from collections.abc import Callable

from lab.envs import Env
from lab.errors import InputError

Box = tuple[int, int, int, int]


class Breakout:
    """Keep the paddle's middle under the ball, serve when there is none."""

    things = ("ball", "paddle")
    SLACK = 5  # pixels off the middle that are left alone; of 2 to 6 this and Pong's 6 score best

    def __init__(self, env: Env):
        self._env = env
        self._noop, self._fire, self._right, self._left = map(env.actions.index, ("NOOP", "FIRE", "RIGHT", "LEFT"))

    def boxes(self) -> dict[str, Box]:
        memory = self._env.memory()
        paddle = int(memory[72]) - 47
        found = {"paddle": (max(paddle, 8), 189, min(paddle + 16, 152), 193)}
        if memory[101]:
            left, top = int(memory[99]) - 49, int(memory[101]) + 9
            found["ball"] = (left, top, left + 2, top + 4)
        return found

    def action(self) -> int:
        boxes = self.boxes()
        if "ball" not in boxes:
            return self._fire
        off = _middle(boxes["ball"], 0) - _middle(boxes["paddle"], 0)
        return self._noop if abs(off) <= self.SLACK else self._right if off > 0 else self._left


class Pong:
    """Keep the right paddle's middle level with the ball; RIGHT is up."""

    things = ("ball", "paddle")
    SLACK = 6

    def __init__(self, env: Env):
        self._env = env
        self._noop, self._up, self._down = map(env.actions.index, ("NOOP", "RIGHT", "LEFT"))

    def boxes(self) -> dict[str, Box]:
        memory = self._env.memory()
        paddle = int(memory[51]) - 13
        found = {"paddle": (140, max(paddle, 34), 144, min(paddle + 16, 194))}
        if memory[54]:
            left, top = int(memory[49]) - 49, int(memory[54]) - 14
            found["ball"] = (left, top, left + 2, top + 4)
        return found

    def action(self) -> int:
        boxes = self.boxes()
        if "ball" not in boxes:
            return self._noop
        off = _middle(boxes["ball"], 1) - _middle(boxes["paddle"], 1)
        return self._noop if abs(off) <= self.SLACK else self._down if off > 0 else self._up


class DoomBasic:
    """Step sideways until the monster is in the middle of the view, then shoot."""

    things = ("monster",)
    MIDDLE = 160  # of the screen's 320 columns

    def __init__(self, env: Env):
        self._env = env
        self._left, self._right, self._attack = map(env.actions.index, ("MOVE_LEFT", "MOVE_RIGHT", "ATTACK"))

    def boxes(self) -> dict[str, Box]:
        return dict([("monster", box) for name, box in self._env.labels() if name == "Cacodemon"])

    def action(self) -> int:
        box = self.boxes().get("monster")
        if box is None:
            return self._attack
        off, reach = _middle(box, 0) - self.MIDDLE, (box[2] - box[0]) / 4
        return self._attack if abs(off) <= reach else self._right if off > 0 else self._left


EXPERTS: dict[str, Callable[[Env], object]] = {"atari:Breakout": Breakout, "atari:Pong": Pong, "doom:basic": DoomBasic}


def expert(env: Env):
    """The scripted player of `env`'s game; a Doom environment must have been made with `labels=True`.

    Raises InputError for a game without one.
    """
    if env.source not in EXPERTS:
        raise InputError(f"There is no scripted expert for {env.source}; there are some for {', '.join(EXPERTS)}.")
    return EXPERTS[env.source](env)


def _middle(box: Box, axis: int) -> float:
    return (box[axis] + box[axis + 2]) / 2
