"""One game, one player, one seed: every frame compared with the one before it and with all earlier ones.

Comparing costs far less than emulating: a 128-bit digest per frame (20 bytes a step with the count beside it, and no
frame but the previous one), bytes compared where two digests agree, pixels counted where they do not. What it costs is
measured in the same run: blocks of the scan alternate with the same actions on a second, bare emulator.
"""

import time
from array import array
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import xxhash

from lab.envs import make, play
from lab.experiments import players

BLOCK = 100  # decisions; also the block of the intervals
BARE_STEPS = 500  # so many decisions are played on the bare emulator too: five blocks, as many as an interval needs
DIGEST_BYTES = 16


def scan(cell: dict[str, Any]) -> dict[str, Any]:
    """Play the cell and compare its frames: a row without the cell's own columns.

    `cell` has `source` ("atari:Pong"), `policy` (a name in `players.PLAYERS`), `seed` and `steps` (decisions); it may
    have `bare_steps`, how many of them a bare emulator plays too (default 500; whole blocks of 100).

    The row tells of all frames that were seen, from the first: `pixels` of a frame; `changed`, how many of them differ
    from the frame before (0: identical, byte for byte; -1 for the first); `lag`, how many frames ago the same frame was
    seen last (0: never); `opens`, the places of the frames that open an episode; `shows_last`, whether the emulator shows
    an episode's last frame, so that no decision brings its successor. Then `environment`, and times: `scan_s` of all
    decisions, without what a model needs to decide (`decision_s`); `blocks`, [decisions, seconds scanned, seconds bare]
    of each block that was played twice; `replayed`, whether the bare emulator ended each of them on the same frame.
    InputError, before anything is played, for what `make` and `players.player` refuse.
    """
    source, seed, steps = cell["source"], cell["seed"], cell["steps"]
    bare_steps = min(cell.get("bare_steps", BARE_STEPS), steps)
    players.check(cell["policy"], source)
    with ExitStack() as stack:
        env = stack.enter_context(closing(make(source, seed)))
        player = players.player(cell["policy"], env, seed)
        bare = _Bare(stack.enter_context(closing(make(source, seed)))) if bare_steps else None
        actions: list = []

        def act(frame: np.ndarray):
            actions.append(player(frame))
            return actions[-1]

        frames = play(_Lean(env), act)
        seen = _Seen(next(frames)[0])
        scan_s, blocks, replayed = 0.0, [], True
        for first in range(0, steps, BLOCK):
            count = taken = min(BLOCK, steps - first)
            thought, began = getattr(player, "seconds", 0.0), time.perf_counter()
            while taken:
                frame, opens = next(frames)
                seen.add(frame, opens)
                taken -= not (opens and env.terminal_frame)
            spent = time.perf_counter() - began - (getattr(player, "seconds", 0.0) - thought)
            scan_s += spent
            if bare and first + count <= bare_steps:
                blocks.append([count, spent, bare.play(actions)])
                replayed &= bare.shows(seen.previous)
            actions.clear()
        row = {"environment": env.describe(), "shows_last": env.terminal_frame, **seen.results(), "scan_s": scan_s}
        row |= {"blocks": blocks, "replayed": replayed if blocks else None}
        return row | ({"decision_s": player.seconds} if hasattr(player, "seconds") else {})


class _Lean:
    """An environment for `play` without what gymnasium and our own class do at every step."""

    def __init__(self, env):
        self.reset, self.terminal_frame, self._step = env.reset, env.terminal_frame, env.bare()

    def step(self, action) -> tuple[np.ndarray | None, float, bool]:
        frame, ended = self._step(action)
        return frame, 0.0, ended


class _Bare:
    """The emulator alone, playing the same actions: what a step and a screen read cost without anyone looking."""

    def __init__(self, env):
        self.env, self.step, self.frame = env, env.bare(), env.reset()

    def play(self, actions: list) -> float:
        """Take the actions and return the seconds it took."""
        step, reset = self.step, self.env.reset
        began = time.perf_counter()
        for action in actions:
            frame, ended = step(action)
            if ended:
                opening = reset()
        spent = time.perf_counter() - began
        self.frame = opening if ended and not self.env.terminal_frame else frame
        return spent

    def shows(self, frame: np.ndarray) -> bool:
        return np.array_equal(self.frame, frame)


class _Seen:
    """What is kept of the frames seen: a digest and a count each, the places of openings, and the last frame."""

    def __init__(self, first: np.ndarray):
        self.pixels = first.shape[0] * first.shape[1]
        self.previous, self.last_digest = first, xxhash.xxh3_128_digest(first)
        self.digests, self.changed, self.opens = bytearray(self.last_digest), array("i", [-1]), array("i", [0])
        self.difference = Difference(first.size)

    def add(self, frame: np.ndarray, opens: bool) -> None:
        digest = xxhash.xxh3_128_digest(frame)
        if opens:
            self.opens.append(len(self.changed))
        same = digest == self.last_digest and np.array_equal(frame, self.previous)
        self.changed.append(0 if same else self.difference.pixels(self.previous, frame))
        self.digests += digest
        self.previous, self.last_digest = frame, digest

    def results(self) -> dict[str, Any]:
        return {
            "pixels": self.pixels,
            "changed": self.changed.tolist(),
            "lag": lags(self.digests).tolist(),
            "opens": self.opens.tolist(),
        }


class Difference:
    """Counts the pixels that differ between two frames of `size` bytes, in buffers made once.

    Bytes are compared, then each byte's mark is joined with those of the next two, and every third is a pixel's: four
    passes over contiguous memory, ten times as fast as asking for any channel of [H, W, 3].
    """

    def __init__(self, size: int):
        self._bytes, self._joined = np.zeros(size + 2, bool), np.empty(size, bool)
        self._firsts = np.zeros(size, bool)
        self._firsts[::3] = True

    def pixels(self, before: np.ndarray, after: np.ndarray) -> int:
        """How many pixels of two frames uint8 [H, W, 3] differ in any channel."""
        size, joined = len(self._joined), self._joined
        np.not_equal(before.reshape(-1), after.reshape(-1), out=self._bytes[:size])
        np.logical_or(self._bytes[:size], self._bytes[1 : size + 1], out=joined)
        np.logical_or(joined, self._bytes[2:], out=joined)
        np.logical_and(joined, self._firsts, out=joined)
        return int(np.count_nonzero(joined))


def lags(digests: bytes) -> np.ndarray:
    """How many places before each digest of 16 bytes the same one stood last, int32 [n]; 0 where it is new."""
    keys = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    order = np.lexsort(keys.T)  # stable: equal digests stay in the order in which they came
    again = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    found = np.zeros(len(keys), np.int32)
    found[order[1:][again]] = (order[1:] - order[:-1])[again]
    return found
