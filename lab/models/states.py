"""The state of a token prefix as transformers' caches hold it: copied whole, cut back where that is possible, counted.

Not every state can be cut back. A linear-attention layer holds one recurrent state, which no longer knows its past; a
sliding-window layer has let go of all but its window. transformers refuses the second and, with past recording on,
cuts the first wrongly without a word; so it is decided here. These lines serve transformers 5.17 and 5.24.
"""

import copy
from collections.abc import Iterator

import torch
from transformers import Cache


class TokenState:
    """A cache and how many tokens it holds."""

    def __init__(self, cache: Cache, length: int = 0):
        self.cache, self.length = cache, length

    def copy(self) -> "TokenState":
        """A state of its own memory: neither this one's later passes nor the copy's reach the other.

        Only what is in use is copied: the parts that a cut has left behind are not.
        """
        memo = {id(tensor): tensor.clone() for tensor in self._tensors()}
        return TokenState(copy.deepcopy(self.cache, memo), self.length)

    @property
    def bytes(self) -> int:
        """Memory of keys, values, convolution and recurrent states."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def croppable(self, length: int | None = None) -> bool:
        """Whether a state of `length` tokens (by default the present ones) can be cut back."""
        length = self.length if length is None else length
        return not any(
            hasattr(layer, "recurrent_states")
            or (getattr(layer, "is_sliding", False) and length >= layer.sliding_window)
            for layer in self.cache.layers
        )

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; RuntimeError where the state cannot be cut back."""
        if length == self.length:
            return
        if length > self.length or not self.croppable():
            raise RuntimeError(f"A state of {self.length} tokens cannot be cut back to {length}.")
        self.cache.crop(length - self.length)
        self.length = length

    def check(self, length: int) -> None:
        """Raise RuntimeError unless every layer holds `length` tokens: a restore must not be taken in half."""
        for number, layer in enumerate(self.cache.layers):
            if hasattr(layer, "recurrent_states"):
                whole = length == 0 or all(layer.is_recurrent_states_initialized.values())
            else:
                window = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else length
                held = layer.keys.shape[-2] if layer.is_initialized else 0
                whole = layer.get_seq_length() == length and held == min(length, window)
            if not whole or self.length != length:
                raise RuntimeError(f"Layer {number} does not hold the {length} tokens of this state.")

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.cache.layers:
            for value in vars(layer).values():
                for tensor in value.values() if isinstance(value, dict) else (value,):
                    if torch.is_tensor(tensor):
                        yield tensor
