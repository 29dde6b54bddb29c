"""What a loop keeps from one decision to the next: bounded, least recently used, keyed by content."""

import hashlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lab.errors import InputError
from lab.resume import Prompt, before_image, common_prefix

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
        keys = [content_key(frame) for frame in frames]
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
        return content_key(frame) in self._kept


def content_key(frame: np.ndarray) -> tuple:
    """What stands for a frame's content: its shape and a 128-bit BLAKE2b digest of its bytes."""
    return frame.shape, hashlib.blake2b(np.ascontiguousarray(frame), digest_size=DIGEST_BYTES).digest()


# --- kept states ------------------------------------------------------------------------------------------------------


class State(Protocol):
    """What a kept state must be able to do; `lab.models.states.TokenState` is one."""

    length: int

    @property
    def bytes(self) -> int: ...
    def copy(self) -> "State": ...
    def croppable(self, length: int | None = None) -> bool: ...
    def crop(self, length: int) -> None: ...
    def check(self, length: int) -> None: ...


@dataclass
class Loan:
    """A state to run on from: it holds the prompt's first `tokens`. `failed`: there was a kept one, but its restore
    failed, so that this one is empty."""

    state: Any
    tokens: int
    failed: bool = False


class KeptStates:
    """States of token prefixes with the images they hold, at most `max_bytes` of them, those needed last.

    The key is content: token ids and, where a picture stands, what it shows. Whatever else decides a state (weights,
    dtype) is not in the key, so a store belongs to one model, which claims it. A state is lent as a copy, so several
    conversations may go on from one prefix, and a turn that ends badly leaves nothing behind. A state that can be cut
    back serves every prefix of what it holds; one that cannot (recurrent, or past its sliding window) only the whole:
    keep such a snapshot at each turn's end.

    `hits` and `misses` count loans, `failures` restores that failed (they are misses too), `evictions` states dropped
    for want of room, `refused` states larger than `max_bytes`. Raises InputError for fewer than 1 byte.
    """

    def __init__(self, max_bytes: int):
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InputError(f"max_bytes is {max_bytes!r}; give the bytes that kept states may take, 1 or more.")
        self.max_bytes = max_bytes
        self.hits = self.misses = self.failures = self.evictions = self.refused = self.lent = 0
        self._kept: list[tuple[Prompt, State]] = []  # oldest use first
        self._owner: weakref.ref | None = None

    def claim(self, owner: object) -> None:
        """Make `owner` the one whose states these are; InputError where it has been another."""
        if self._owner is not None and self._owner() is not owner:
            raise InputError("This KeptStates belongs to another model, whose states differ; give each its own.")
        self._owner = weakref.ref(owner)

    def point(self, prompt: Prompt, whole_images: bool = True) -> int:
        """How many of the prompt's tokens the best kept state would restore now; nothing is restored or moved.

        The last token is always left to run: its logits are the answer. With `whole_images` no image is cut.
        """
        return self._best(prompt, whole_images)[0]

    @contextmanager
    def lend(self, prompt: Prompt, empty: Callable[[], State], whole_images: bool = True) -> Iterator[Loan]:
        """Lend a state that holds the longest usable prefix of `prompt`, else one made by `empty`, for one turn.

        A restore that raises, or that brings only a part, is given back at once, the kept state dropped, and the turn
        starts at 0. However the turn ends, what was lent is given back; what it computed is kept only by `keep`.
        """
        tokens, found = self._best(prompt, whole_images)
        loan = Loan(None, 0)
        self.lent += 1
        try:
            if found is not None:
                self._kept.remove(found)
                try:
                    loan.state = found[1].copy()
                    loan.state.check(found[1].length)
                    loan.state.crop(tokens)
                    loan.state.check(tokens)
                    loan.tokens = tokens
                    self._kept.append(found)
                except Exception as error:  # a device out of memory, a torn state: whatever it is, the turn can go on
                    loan.state, loan.failed = None, True
                    self.failures += 1
                    print(f"A kept state was not restored, the prompt starts anew: {error}", file=sys.stderr)
            self.hits, self.misses = self.hits + (loan.tokens > 0), self.misses + (loan.tokens == 0)
            if loan.state is None:
                loan.state = empty()
            yield loan
        finally:
            loan.state = None
            self.lent -= 1

    def keep(self, prompt: Prompt, state: State) -> bool:
        """Keep a copy of `state`, which holds the first `state.length` tokens of `prompt`; whether there was room.

        A kept state of a prefix that the new one serves as well is dropped, older ones as far as room is needed.
        """
        prompt = Prompt(prompt.ids[: state.length], prompt.pictures, prompt.placeholder)
        prompt = Prompt(prompt.ids, prompt.pictures[: len(prompt.gaps)], prompt.placeholder)
        if len(prompt) < state.length:
            raise InputError(f"The state holds {state.length} tokens, the prompt only {len(prompt)}; give all of them.")
        copied = state.copy()
        if copied.bytes > self.max_bytes:
            self.refused += 1
            return False
        whole = copied.croppable()
        self._kept = [
            (held, other)
            for held, other in self._kept
            if common_prefix(held, prompt) < len(held) or (len(held) < len(prompt) and not whole)
        ]
        self._kept.append((prompt, copied))
        while self.bytes > self.max_bytes:
            self._kept.pop(0)
            self.evictions += 1
        return True

    def evict(self) -> bool:
        """Drop the state that was needed longest ago; whether there was one."""
        if not self._kept:
            return False
        self._kept.pop(0)
        self.evictions += 1
        return True

    def clear(self) -> None:
        """Forget all states and set the counters to 0; the owner stays."""
        self._kept.clear()
        self.hits = self.misses = self.failures = self.evictions = self.refused = 0

    def counts(self) -> dict[str, int]:
        """Counters since the start, states kept and lent now, and the bytes the kept ones take: for `Arm(counts=...)`."""
        names = ("hits", "misses", "failures", "evictions", "refused", "lent")
        return {name: getattr(self, name) for name in names} | {"kept": len(self), "kept_bytes": self.bytes}

    @property
    def bytes(self) -> int:
        """Memory of the kept states, on the model's device; what is lent is not counted."""
        return sum(state.bytes for _, state in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _best(self, prompt: Prompt, whole_images: bool) -> tuple[int, tuple[Prompt, State] | None]:
        """The longest usable prefix and the state that holds it; of several the one that needs the least cutting."""
        found = [(_usable(held, state, prompt, whole_images), -len(held), held, state) for held, state in self._kept]
        tokens, _, held, state = max(found, key=lambda one: one[:2], default=(0, 0, None, None))
        return (tokens, (held, state)) if tokens else (0, None)


def _usable(held: Prompt, state: State, prompt: Prompt, whole_images: bool) -> int:
    point = min(common_prefix(held, prompt), len(prompt) - 1)
    if whole_images:
        point = before_image(prompt, point)
    return point if point == len(held) or state.croppable() else 0
