"""Doom scenarios through ViZDoom: 320 x 240 RGB24, every action held 4 tics, the window hidden."""

import ctypes
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lab.envs import EmulatorMissing, unknown
from lab.errors import InputError

CLONE_FS = 0x200  # a thread gives up sharing the working folder; <sched.h>
SEVERAL_PLAYERS = ("cig", "multi", "multi_duel")  # these wait for a host
FIRST_MAP = {"doom": "E1M1", "freedoom1": "E1M1"}  # named by episode; ViZDoom's own map01 would never open an episode


def scenarios() -> list[str]:
    """Names of the scenarios ViZDoom ships for one player, as in `doom:NAME`. EmulatorMissing where it does not load."""
    shipped = {path.stem for path in Path(_emulator().scenarios_path).glob("*.cfg")}
    return sorted(shipped.difference(SEVERAL_PLAYERS))


_starting = threading.Lock()  # one engine at a time: it is told from other children by being new


def _start(game: Any, folder: str) -> list[psutil.Process]:
    """Start the game's engine, a process, and return it. To be called in a thread that ends afterwards: the engine inherits
    from it that it works in `folder`, and that it is deaf to SIGINT. Ctrl-C and Jupyter's stop button send that to the whole
    group, and the play should stop, not the engine. The folder is that thread's own on Linux, where a container allows it;
    elsewhere the whole program works there for the moment that a start takes."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).unshare(CLONE_FS)
    others = psutil.Process().children()
    with chdir(folder):
        game.init()
    return [child for child in psutil.Process().children() if child not in others]


def _emulator() -> Any:
    try:
        import vizdoom
    except ImportError as error:
        raise EmulatorMissing(f"Doom needs ViZDoom ({error}); install it with `pip install vizdoom`.") from None
    return vizdoom


class Doom:
    """One Doom scenario as shipped; frames uint8 [240, 320, 3], each an array of its own.

    An action is a button's number or a 0/1 list. `labels` has the engine say what is on the screen, for scripted
    experts; the frames are the same.
    """

    terminal_frame = False

    def __init__(self, scenario: str, seed: int = 0, tics: int = 4, labels: bool = False):
        known = scenarios()
        if scenario in SEVERAL_PLAYERS:
            raise InputError(f"The scenario {scenario} is for several players; take one of {', '.join(known)}.")
        if scenario not in known:
            raise unknown("Doom scenario", scenario, known)
        if not isinstance(tics, int) or tics < 1:
            raise InputError(f"An action is held {tics!r} tics; give a whole number from 1.")
        vizdoom = _emulator()
        self.source, self._tics = f"doom:{scenario}", tics
        self._folder = tempfile.TemporaryDirectory(prefix="refrain-doom-", ignore_cleanup_errors=True)
        self._game = game = vizdoom.DoomGame()
        try:
            game.load_config(str(Path(vizdoom.scenarios_path) / f"{scenario}.cfg"))
            if scenario in FIRST_MAP:
                game.set_doom_map(FIRST_MAP[scenario])
            game.set_window_visible(False)
            game.set_screen_format(vizdoom.ScreenFormat.RGB24)
            game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
            game.set_mode(vizdoom.Mode.PLAYER)  # waits for every action
            game.set_labels_buffer_enabled(labels)
            game.set_seed(seed)
            # the engine, its own process, writes an .ini file and a folder where it starts: keep the user's folder clean
            game.set_doom_config_path(str(Path(self._folder.name) / "engine.ini"))
            with _starting, ThreadPoolExecutor(1) as thread:
                self._engine = thread.submit(_start, game, self._folder.name).result()
        except vizdoom.FileDoesNotExistException as error:
            lost = re.search(r'"(.+)"', str(error))
            name = Path(lost[1]).name if lost else str(error)
            raise InputError(f"The scenario {scenario} lacks a file, {name}; take another scenario.") from None
        except vizdoom.ViZDoomErrorException as error:
            raise InputError(f"ViZDoom does not start with the scenario {scenario}: {error}") from None
        except KeyboardInterrupt:
            game.close()
            raise
        self.actions = [button.name for button in game.get_available_buttons()]
        self._last: np.ndarray | None = None

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Begin an episode and return its first frame. A seed starts the game's random numbers over; without one they
        go on from the seed given at the start."""
        if seed is not None:
            self._game.set_seed(seed)
        self._game.new_episode()
        return self._frame()

    def step(self, action: int | list[int]) -> tuple[np.ndarray, float, bool]:
        """Hold an action for the tics: the new frame, the reward, and whether the episode ended.

        The end shows no frame: the last one seen is returned again.
        """
        count = len(self.actions)
        if isinstance(action, int | np.integer):
            if not 0 <= action < count:
                raise InputError(f"{self.source} has no button {action!r}; it has 0 to {count - 1}.")
            action = [int(button == action) for button in range(count)]
        elif len(action) != count:
            raise InputError(f"{self.source} has {count} buttons, the action has {len(action)} numbers.")
        reward = self._game.make_action(action, self._tics)
        ended = self._game.is_episode_finished()
        return (self._last.copy() if ended else self._frame()), float(reward), ended

    def labels(self) -> list[tuple[str, tuple[int, int, int, int]]]:
        """What is on the last frame shown: (the engine's name, (left, top, right, bottom)), in pixels, half-open."""
        return self._labels

    def bare(self) -> Callable[[int | list[int]], tuple[np.ndarray | None, bool]]:
        """The engine's own step and screen read, past this class: action -> (frame, or None at the end; ended)."""
        game, tics, count = self._game, self._tics, len(self.actions)
        alone = [[int(button == one) for button in range(count)] for one in range(count)]

        def step(action: int | list[int]) -> tuple[np.ndarray | None, bool]:
            game.make_action(action if isinstance(action, list) else alone[action], tics)
            if game.is_episode_finished():
                return None, True
            return game.get_state().screen_buffer.copy(), False  # the next step draws into the same buffer

        return step

    def _frame(self) -> np.ndarray:
        state = self._game.get_state()
        self._last = state.screen_buffer.copy()  # the buffer belongs to the engine
        self._labels = [(o.object_name, (o.x, o.y, o.x + o.width, o.y + o.height)) for o in state.labels or []]
        return self._last.copy()  # the caller's own, to keep or to draw on

    def describe(self) -> dict[str, Any]:
        """What decides how the game runs, as it is in effect: for the environment record."""
        game = self._game
        return {
            "source": self.source,
            "emulator": f"vizdoom {version('vizdoom')}",
            "frameskip": self._tics,
            "repeat_probability": 0.0,
            "screen": [game.get_screen_height(), game.get_screen_width(), game.get_screen_channels()],
            "actions": len(self.actions),
            "skill": game.get_doom_skill(),
            "episode_timeout_tics": game.get_episode_timeout(),
        }

    def close(self) -> None:
        """Stop the engine and remove its folder, once the engine has written its settings there."""
        self._game.close()
        psutil.wait_procs(self._engine, timeout=5)
        self._folder.cleanup()
