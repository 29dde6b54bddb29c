"""Atari games through gymnasium's ALE v5 environments at their defaults: frameskip 4, sticky actions 0.25."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from lab.envs import EmulatorMissing, unknown
from lab.errors import InputError


def games() -> list[str]:
    """Names of all Atari games there are, as in `atari:NAME`. EmulatorMissing where ale-py does not load."""
    gymnasium, ale_py = _emulator()
    gymnasium.register_envs(ale_py)
    return sorted(k.removeprefix("ALE/").removesuffix("-v5") for k in gymnasium.registry if k.startswith("ALE/"))


def several_players() -> list[str]:
    """Names of the games whose ROM ale-py ships but for which there is no environment: they need two players or more."""
    from ale_py.roms import get_all_rom_ids

    known = {game.lower() for game in games()}
    others = [rom for rom in get_all_rom_ids() if rom.replace("_", "") not in known]
    return sorted("".join(word.capitalize() for word in rom.split("_")) for rom in others)


def _emulator() -> tuple[Any, Any]:
    try:
        import ale_py
        import gymnasium
    except ImportError as error:
        raise EmulatorMissing(
            f"Atari needs ale-py and gymnasium ({error}); install them with `pip install ale-py gymnasium`."
        ) from None
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner on every start
    return gymnasium, ale_py


class Atari:
    """One Atari game, `ALE/<game>-v5`; frames uint8 [height, width, 3], mostly 210 x 160, each an array of its own.

    `full_actions` offers all 18 joystick positions instead of the game's own set.
    """

    terminal_frame = True

    def __init__(self, game: str, seed: int = 0, full_actions: bool = False):
        known = games()
        if game in several_players():
            raise InputError(f"The game {game} is for several players; take another, such as {known[0]}.")
        if game not in known:
            raise unknown("Atari game", game, known)
        gymnasium, ale_py = _emulator()
        try:
            self._env = gymnasium.make(f"ALE/{game}-v5", full_action_space=full_actions, disable_env_checker=True)
        except (OSError, gymnasium.error.Error, RuntimeError) as error:
            raise InputError(
                f"The ROM of {game} cannot be loaded ({error}); reinstall ale-py, which brings it."
            ) from None
        self.source = f"atari:{game}"
        self.actions: list[str] = self._env.unwrapped.get_action_meanings()
        self._seed: int | None = seed
        self._full_actions = full_actions

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Begin an episode and return its first frame. A seed starts the game's random numbers over; without one the
        first reset takes the seed given at the start, and later ones go on."""
        seed, self._seed = self._seed if seed is None else seed, None
        return self._env.reset(seed=seed)[0].copy()

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Take one of `actions` by number: the new frame, the reward, and whether the episode ended with it."""
        if not 0 <= action < len(self.actions):
            raise InputError(f"{self.source} has no action {action!r}; it has 0 to {len(self.actions) - 1}.")
        frame, reward, terminated, truncated, _ = self._env.step(action)
        return frame.copy(), float(reward), terminated or truncated

    def bare(self) -> Callable[[int], tuple[np.ndarray, bool]]:
        """The emulator's own step and screen read, past gymnasium and this class: action -> (frame, ended)."""
        inner = self._env.unwrapped
        ale, codes, held = inner.ale, inner._action_set, range(self._env.spec.kwargs["frameskip"])

        def step(action: int) -> tuple[np.ndarray, bool]:
            for _ in held:
                ale.act(codes[action])
            return ale.getScreenRGB(), ale.game_over()

        return step

    @property
    def lives(self) -> int:
        """Lives left; always 0 in games that do not count any, as Pong."""
        return self._env.unwrapped.ale.lives()

    def memory(self) -> np.ndarray:
        """The console's 128 bytes of memory, uint8 [128]."""
        return self._env.unwrapped.ale.getRAM()

    def describe(self) -> dict[str, Any]:
        """What decides how the game runs, as it is in effect: for the environment record."""
        settings = self._env.spec.kwargs
        return {
            "source": self.source,
            "emulator": f"ale-py {version('ale-py')}, gymnasium {version('gymnasium')}",
            "frameskip": settings["frameskip"],
            "repeat_probability": self._env.unwrapped.ale.getFloat("repeat_action_probability"),
            "screen": list(self._env.observation_space.shape),
            "actions": len(self.actions),
            "full_actions": self._full_actions,
        }

    def close(self) -> None:
        self._env.close()
