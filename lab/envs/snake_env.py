"""Snake as the other games are: frames, actions by number, rewards. What its moves mean is in `lab.envs.snake`."""

import re
from typing import Any

import numpy as np

from lab.envs.snake import HEIGHT, NAMES, WIDTH, Snake
from lab.errors import InputError


class SnakeEnv:
    """The environment "snake:24x16", or any other board; a reward of 1 for each piece of food, and no shield: an illegal
    move ends the game. `game` is what a text step is asked about."""

    terminal_frame = True

    def __init__(self, name: str = f"{WIDTH}x{HEIGHT}", seed: int = 0):
        size = re.fullmatch(r"(\d+)x(\d+)", name)
        if size is None:
            raise InputError(f"A Snake board is given as WIDTHxHEIGHT, such as snake:24x16, not snake:{name}.")
        self.source, self.actions = f"snake:{name}", list(NAMES)
        self._size, self._seed = tuple(map(int, size.groups())), seed
        self.game = Snake(*self._size, seed=seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new game: of `seed`, else of the seed after the last one's; the first of the one given at the start."""
        if seed is not None:
            self._seed = seed
        self.game = Snake(*self._size, seed=self._seed)
        self._seed += 1
        return self.game.frame()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        move = self.game.step(NAMES[action])
        return self.game.frame(), float(move.eats and move.legal), self.game.over

    def describe(self) -> dict[str, Any]:
        return {"source": self.source, "width": self._size[0], "height": self._size[1], "length": 6}

    def close(self) -> None:
        """There is nothing to free."""
