"""Notebook 05's explorer: pick a game and who plays, scrub its frames, see what changed from the one before."""

from contextlib import closing
from functools import lru_cache
from itertools import islice

import ipywidgets
import numpy as np

from lab import figures
from lab.envs import RECORDED_SOURCES, EmulatorMissing, make, play, recorded_frames
from lab.errors import InputError
from lab.experiments.duplicates import changed_pixels, every_source
from lab.experiments.players import player
from lab.widgets.explorers import Explorer

PLAYERS = ("one_hot", "no_op", "repeat")
FRAMES = 120


def pairs(source: str = "atari:Pong", frames: int = FRAMES, seed: int = 0) -> Explorer:
    """Pick one of all games and a player, and move through its first `frames` frames: each beside the one before it, the
    pixels that changed marked, and how long ago the same frame was seen.

    Where the emulators are missing the shipped recordings are shown. InputError for an unknown source and fewer than two
    frames.
    """
    if frames < 2:
        raise InputError(f"{frames} frames were asked for; give at least 2, to have a pair.")
    try:
        sources = every_source()
    except EmulatorMissing:
        sources = list(RECORDED_SOURCES)
    if source not in sources:
        raise InputError(f"Unknown frame source {source!r}; it is one of {', '.join(sources[:5])}, ...")

    def show(game, policy, frame):
        pictures, opens = played(game, policy, frames, seed)
        frame = min(frame, len(pictures) - 1)
        before, after = pictures[frame - 1], pictures[frame]
        changed = changed_pixels(before, after)
        name = game.partition(":")[2]
        pair = {
            "title": f"{name}, frames {frame - 1} and {frame}",
            "before": before,
            "after": after,
            "changed": changed,
        }
        ago = next((k for k in range(1, frame + 1) if np.array_equal(pictures[frame - k], after)), 0)
        seen = {0: "was not seen before", 1: "is the one before again"}.get(ago, f"was last seen {ago} frames ago")
        said = f"Frame {frame} {seen}; {changed.sum()} of {changed.size} pixels changed."
        return figures.frame_pairs([pair]), said + (" It opens an episode." if opens[frame] else "")

    controls = {
        "game": ipywidgets.Dropdown(options=sources, value=source, description="game"),
        "policy": ipywidgets.Dropdown(options=PLAYERS, description="who plays"),
        "frame": ipywidgets.IntSlider(1, 1, frames - 1, description="frame"),
    }
    return Explorer("pairs", show, controls)


@lru_cache(maxsize=2)  # 120 frames of Doom take 28 MB
def played(source: str, policy: str, frames: int, seed: int) -> tuple[np.ndarray, list[bool]]:
    """The first frames of a game, uint8 [n, H, W, 3], and whether each opens an episode; recorded ones (fewer) where the
    emulator is missing."""
    try:
        env = make(source, seed)
    except EmulatorMissing:
        recorded = recorded_frames(source)
        return recorded, [place == 0 for place in range(len(recorded))]
    with closing(env):
        shown = list(islice(play(env, player(policy, env, seed)), frames))
    return np.stack([frame for frame, _ in shown]), [opens for _, opens in shown]
