"""Games as frame sources: one small interface over Atari, Doom and Snake, seeded random policies, recorded frames.

An environment has `source`, `actions` (their names, in order), `reset(seed=None) -> frame`, `step(action) ->
(frame, reward, ended)`, `describe()` and `close()`. A frame is uint8 [height, width, 3]. `terminal_frame` says whether
the frame that comes with `ended` is a new one (Atari) or the last one seen, repeated (Doom shows none).
"""

import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from difflib import get_close_matches
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lab.errors import InputError
from lab.workloads import CAMERAS, DATA, Workload

RECORDED_SOURCES = ("atari:Pong", "atari:Breakout", "atari:Boxing", "doom:basic", "doom:deadly_corridor")

RECORDING = DATA / "frames.npz"

OPTIONS = {"atari": {"full_actions"}, "doom": {"tics", "labels"}, "snake": set()}
OPTIONS |= {"folder": set(), "gym": set(), "python": set(), "video": set()}

Action = int | list[int]
Policy = Callable[[np.ndarray], Action]


class EmulatorMissing(InputError):
    """The emulator behind a frame source is not installed, or does not load."""


class Env(Protocol):
    """What every environment offers; see the module's first lines."""

    source: str
    actions: list[str]
    terminal_frame: bool

    def reset(self, seed: int | None = None) -> np.ndarray: ...
    def step(self, action: Action) -> tuple[np.ndarray, float, bool]: ...
    def describe(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def make(source: str, seed: int = 0, **options: Any) -> Env:
    """The environment named "atari:Game", "doom:scenario" or "snake:24x16"; its first reset starts from `seed`.

    Sources of a reader's own are in `lab.envs.own`: "folder:PATH", "gym:ID", "python:MODULE:FUNCTION", "video:FILE", and
    several of any kind joined with " + " as cameras.

    Options: `full_actions` (bool) for Atari, `tics` (int, how long an action is held) and `labels`
    (bool, whether it says what is on the screen) for Doom. InputError for an unknown
    source or option, with the nearest known names, and where the emulator, ROM or scenario file is missing.
    """
    if CAMERAS in source:
        return import_module("lab.envs.own").cameras(source, seed, make)
    kind, _, name = source.partition(":")
    if kind not in OPTIONS or not name:
        raise InputError(
            f"Unknown frame source {source!r}; write atari:GAME (atari:Pong), doom:SCENARIO (doom:basic), snake:24x16, "
            "folder:PATH, gym:ID, python:FILE.py:FUNCTION or video:FILE."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**31:
        raise InputError(f"The seed is {seed!r}; give a whole number from 0 to {2**31 - 1}.")
    if kind == "atari":
        from lab.envs.atari import Atari as Kind
    elif kind == "doom":
        from lab.envs.doom import Doom as Kind
    elif kind != "snake":
        Kind = import_module("lab.envs.own").KINDS[kind]
    else:
        from lab.envs.snake_env import SnakeEnv as Kind
    if strange := set(options) - OPTIONS[kind]:
        raise InputError(
            f"{source} has no option {', '.join(sorted(strange))}; it has {', '.join(OPTIONS[kind]) or 'none'}."
        )
    return Kind(name, int(seed), **options)


def unknown(what: str, name: str, known: list[str]) -> InputError:
    """The error for a name that is not among `known`: it suggests the nearest ones, whatever their case."""
    by_lower = {k.lower(): k for k in known}
    near = [by_lower[k] for k in get_close_matches(name.lower(), by_lower, n=1 if name.lower() in by_lower else 3)]
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(sorted(known))}."
    return InputError(f"Unknown {what} {name!r}. {hint}")


def one_hot(env: Env, seed: int = 0) -> Policy:
    """A random policy: one action, drawn uniformly per decision from `numpy.random.default_rng(seed)`."""
    generator, count = np.random.default_rng(seed), len(env.actions)
    return lambda frame: int(generator.integers(count))


def per_button(env: Env, seed: int = 0) -> Policy:
    """The random policy of the published Doom figures: one draw per button, not one per decision.

    For each button in turn a number below the number of buttons is drawn, and the button is pressed where the draw is its
    own index: so no button at all is common, and so are two at once. Kept to reproduce the published rates; InputError
    for Atari, where only one action is taken at a time.
    """
    if not env.source.startswith("doom:"):
        raise InputError(f"The policy per_button presses Doom's buttons one by one; for {env.source} take one_hot.")
    generator, count = np.random.default_rng(seed), len(env.actions)
    return lambda frame: [int(generator.integers(count) == button) for button in range(count)]


POLICIES: dict[str, Callable[[Env, int], Policy]] = {"one_hot": one_hot, "per_button": per_button}


def play(env: Env, policy: Policy, seed: int | None = None) -> Iterator[tuple[np.ndarray, bool]]:
    """Frames as a player sees them, without end: pairs (frame, whether it opens an episode).

    Every frame but the opening ones comes from one decision of `policy`. The first reset takes `seed`; the later ones go
    on from it. A repeated last frame of Doom is left out.
    """
    frame, opens = env.reset(seed), True
    while True:
        yield frame, opens
        frame, _, ended = env.step(policy(frame))
        opens = False
        if ended:
            if env.terminal_frame:
                yield frame, False
            frame, opens = env.reset(), True


def record_frames(source: str, n: int, seed: int = 0) -> np.ndarray:
    """The first `n` frames of seeded random play (`one_hot`), uint8 [n, height, width, 3]."""
    with closing(make(source, seed)) as env:
        return np.stack([frame for frame, _ in islice(play(env, one_hot(env, seed)), n)])


def frames_for(workload: Workload, n: int, seed: int = 0) -> np.ndarray:
    """Inputs for `n` decisions of a workload: uint8 [n, frames, height, width, 3], oldest frame first.

    Consecutive decisions of seeded random play. Where an episode opens, its first frame stands for the earlier ones.
    Without the emulator the recorded frames are taken, over and over where `n` exceeds them, and a warning says so.
    """
    if n < 1:
        raise InputError(f"{n} decisions were asked for; give one or more.")
    try:
        env = make(workload.source, seed)
    except EmulatorMissing as missing:
        warnings.warn(f"{missing} Taking the recorded frames of {workload.source}.", stacklevel=2)
        recorded = recorded_frames(workload.source)
        return _windows(((recorded[i % len(recorded)], i % len(recorded) == 0) for i in range(n)), workload.frames)
    with closing(env):
        return _windows(islice(play(env, one_hot(env, seed)), n), workload.frames)


def _windows(stream: Iterator[tuple[np.ndarray, bool]], length: int) -> np.ndarray:
    window: deque[np.ndarray] = deque(maxlen=length)
    inputs = []
    for frame, opens in stream:
        views = frame if frame.ndim == 4 else frame[None]  # of several cameras
        if length % len(views):
            raise InputError(f"{len(views)} cameras do not fit {length} frames per decision; give a multiple of them.")
        window.extend([*views] * (length // len(views) if opens else 1))
        inputs.append(np.stack(window))
    return np.stack(inputs)


def recorded_frames(source: str) -> np.ndarray:
    """The shipped recording of a source, uint8 [n, height, width, 3]: `record_frames(source, n, 0)`, kept as palettes."""
    with np.load(RECORDING) as file:
        if source not in file:
            known = [key for key in file.files if not key.endswith(".palette")]
            raise InputError(f"There are no recorded frames of {source}; there are some of {', '.join(known)}.")
        return file[f"{source}.palette"][file[source]]


def save_recording(path: str | Path = RECORDING, n: int = 12) -> None:
    """Record the shipped sources anew: an .npz file of palettes (up to 256 colours) and one byte per pixel.

    Members are packed with LZMA, which finds a frame's repetition in the next one; numpy's own deflate does not reach
    that far back, and the file would be three times as large. `numpy.load` reads it all the same.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for source in RECORDED_SOURCES:
            frames = record_frames(source, n)
            palette, index = np.unique(frames.reshape(-1, 3), axis=0, return_inverse=True)
            pixels = index.reshape(frames.shape[:3]).astype(np.uint8)
            for name, array in ((source, pixels), (f"{source}.palette", palette)):
                with file.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, array)
