"""What a loop keeps from one decision to the next: bounded, least recently used, keyed by content."""

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lab.errors import InputError

DIGEST_BYTES = 16


class FrameFeatures:
    """Frame features, an image's rows after the connector, of the `capacity` frames that were needed last.

    The key is the frame's content: its size and a 128-bit BLAKE2b digest of its bytes. No copy of the frame is kept to
    compare with: among four thousand million different frames, two share a digest with a probability of 3e-20. Whatever
    else decides the rows (weights, resize, dtype) is not in the key, so a cache belongs to one step, which claims it.

    A frame met again becomes the newest, so that a screen which stands still is encoded once, however long it stands.
    `hits` and `misses` count frames, `misses` those that were encoded: the second of two equal frames in one call is a
    hit. `evictions` counts the features dropped for want of room. A loop over B episodes with F frames per decision
    needs room for B * F frames to find the earlier ones again. Raises InputError for a capacity below 1.
    """

    def __init__(self, capacity: int):
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise InputError(f"The capacity is {capacity!r}; give the number of frames to keep, 1 or more.")
        self.capacity = capacity
        self.hits = self.misses = self.evictions = 0
        self._kept: OrderedDict[tuple, Tensor] = OrderedDict()  # oldest use first
        self._owner: weakref.ref | None = None

    def claim(self, owner: object) -> None:
        """Make `owner` the one that uses this cache; InputError where it has had another owner."""
        if self._owner is not None and self._owner() is not owner:
            raise InputError(
                "This FrameFeatures belongs to another step, whose weights or resize may differ; give each its own."
            )
        self._owner = weakref.ref(owner)

    def rows(self, frames: np.ndarray, encode: Callable[[np.ndarray], Tensor]) -> Tensor:
        """Features [N, image tokens, width] of frames uint8 [N, height, width, 3], encoding only those not kept.

        `encode` takes the missing frames, each once, and returns their features [missing, image tokens, width]. What is
        kept, and what is returned, are copies: a later call overwrites neither. A call may bring more frames than the
        capacity; the last of them are kept. Where `encode` raises, cache and counters stay as they were.
        """
        keys = [_key(frame) for frame in frames]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        missing: dict[tuple, int] = {}
        for place, key in enumerate(keys):
            if key not in found:
                missing.setdefault(key, place)
        if missing:
            encoded = encode(frames[list(missing.values())])
            found |= {key: rows.clone() for key, rows in zip(missing, encoded, strict=True)}
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        for key in keys:
            self._kept[key] = found[key]
            self._kept.move_to_end(key)
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)
            self.evictions += 1
        return torch.stack([found[key] for key in keys])

    def clear(self) -> None:
        """Forget all features and set the counters to 0; the owner stays."""
        self._kept.clear()
        self.hits = self.misses = self.evictions = 0

    def counts(self) -> dict[str, int]:
        """Counters since the start, frames kept now, and the bytes their features take: for `Arm(counts=...)`."""
        return {
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
            "kept": len(self._kept),
            "kept_bytes": self.bytes,
        }

    @property
    def bytes(self) -> int:
        """Memory of the kept features, on the model's device."""
        return sum(rows.nbytes for rows in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, frame: np.ndarray) -> bool:
        return _key(frame) in self._kept


def _key(frame: np.ndarray) -> tuple:
    return frame.shape, hashlib.blake2b(np.ascontiguousarray(frame), digest_size=DIGEST_BYTES).digest()
