"""The key/value caches that steps keep, and how each goes back to the tokens it keeps for good.

`static` is transformers' StaticCache: one preallocated pair of tensors per layer, the next place to write counted on the
device. `slots` is the same with the count kept in Python, which a captured graph holds fixed anyway: fewer small
launches, and attention sees only what is filled. `dynamic` is DynamicCache, which makes new tensors as it grows.
"""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from lab.errors import InputError
from lab.models.vision import CACHE_ARGUMENT, DecisionModel
from lab.steps.static import run_text

CACHES = ("static", "slots", "dynamic")


class Slots(StaticLayer):
    """A static layer that counts in Python; `update` returns the filled part, as views."""

    filled = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.filled + key_states.shape[-2]
        self.keys[:, :, self.filled : stop] = key_states
        self.values[:, :, self.filled : stop] = value_states
        self.filled = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_seq_length(self) -> int:
        return self.filled


def make_cache(kind: str, model: DecisionModel, batch: int, length: int) -> Cache:
    """An empty cache of one of `CACHES` for `batch` rows of `length` tokens; raises InputError for another kind.

    What is preallocated is so at once: neither a graph nor a compiler may meet the making of its tensors.
    """
    config = model.encoder.text_model.config
    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "static":
        cache = StaticCache(config=config, max_cache_len=length)
    elif kind == "slots":
        cache = Cache(layers=[Slots(max_cache_len=length) for _ in range(config.num_hidden_layers)])
    else:
        raise InputError(f"cache is {kind!r}; choose one of {', '.join(CACHES)}.")
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    return cache


def check_capturable(kind: str | None, capture: bool) -> None:
    """Raise InputError where a graph is asked for over a cache whose tensors are new ones at every decision."""
    if kind == "dynamic" and capture:
        raise InputError(
            "A dynamic cache grows by new tensors, which a graph cannot hold; use cache='static' or capture=False."
        )


def restore(cache: Cache, kept: int) -> None:
    """Forget all but the first `kept` tokens. No key or value is moved or copied: the next pass overwrites their places.

    The same lines serve transformers 5.17 and 5.24: StaticCache has no `crop` in the first, and one in the second that
    goes below zero without a word; so its count is set in place. Setting, not subtracting, also mends a cache that an
    interrupted pass left with layers of unequal length.
    """
    for layer in cache.layers:
        if isinstance(layer, Slots):
            layer.filled = kept
        elif isinstance(layer, StaticLayer):
            layer.cumulative_length.fill_(kept)
        elif (beyond := layer.get_seq_length() - kept) > 0:
            layer.crop(-beyond)


def continue_text(
    model: DecisionModel, embeds: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache, start: int
) -> Tensor:
    """Last hidden states [batch, length, width] of tokens that begin at `start`, on what the cache holds before them.

    mask additive [1, 1, row, row] and rotary (cos, sin) [1, row, ..] are those of the whole row; the keys and values of
    the tokens are added to the cache.
    """
    stop = start + embeds.shape[1]
    seen = mask.shape[-1] if isinstance(cache, StaticCache) else stop  # a static cache shows all its places
    turned = tuple(part[:, start:stop] for part in rotary)
    return run_text(model, embeds, mask[:, :, start:stop, :seen], turned, **{CACHE_ARGUMENT: cache})


def cache_bytes(cache: Cache) -> int:
    """Bytes of keys and values now held."""
    return sum(
        tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values) if torch.is_tensor(tensor)
    )
