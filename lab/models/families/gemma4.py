"""Gemma 4, tiny: one image per tower call; in its sliding layers an image's tokens see each other both ways.

So an image must be read in one pass, and a pass that continues a state must know the images of the whole prompt. The
masks are written out here: the library builds them from a token-type argument that, cut to the new tokens or left out,
is silently wrong.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lab.caches import content_key
from lab.models.families.base import Family, multiple_of, random_head, spread
from lab.models.states import TokenState
from lab.models.vision import CACHE_ARGUMENT, DTYPES
from lab.resume import Picture, Prompt

PATCH, POOL, WINDOW = 8, 2, 24
VOCABULARY, PLACEHOLDER, WIDTH = 256, 250, 32


class Gemma4(Family):
    """`model` is transformers' model without its head."""

    name = "gemma4"
    chunks_cut_images = False

    def __init__(self, model, head: Tensor):
        self.model, self.weights = model, "random"
        super().__init__(model.language_model, model.vision_tower, head, model.config.image_token_id)

    def picture(self, frame: np.ndarray) -> Picture:
        high, wide = multiple_of(frame, PATCH * POOL, self.name)
        return Picture(content_key(frame), high * wide, high * wide * POOL**2)

    def rows(self, frames: Sequence[np.ndarray]) -> list[Tensor]:
        (frame,) = frames  # one image per call
        high, wide = (side // PATCH for side in frame.shape[:2])
        cut = frame.astype(np.float32).reshape(high, PATCH, wide, PATCH, 3).transpose(0, 2, 1, 3, 4) / 255
        pixels = torch.as_tensor(cut.reshape(1, high * wide, -1), device=self.device)
        rows, columns = np.divmod(np.arange(high * wide), wide)
        places = torch.as_tensor(np.stack([columns, rows], axis=-1)[None], device=self.device)
        return list(self.model.get_image_features(pixels, places).pooler_output)

    def tables(self, prompt: Prompt) -> dict:
        """`image` int64 [n]: the number of the image that a token belongs to, -1 for text."""
        image = np.full(len(prompt), -1)
        for number, (start, stop) in enumerate(prompt.spans):
            image[start:stop] = number
        return {"image": torch.as_tensor(image, device=self.device)}

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(self._text_ids(ids))

    def hidden(self, ids: Tensor, embeds: Tensor, state: TokenState, tables: dict) -> Tensor:
        start, stop = state.length, state.length + embeds.shape[1]
        found = self.text_model(
            inputs_embeds=embeds,
            position_ids=torch.arange(start, stop, device=self.device)[None],
            attention_mask=self._masks(start, stop, tables["image"], embeds.dtype),
            per_layer_inputs=self.text_model.get_per_layer_inputs(self._text_ids(ids), None),
            use_cache=True,
            **{CACHE_ARGUMENT: state.cache},
        ).last_hidden_state
        state.length = stop
        return found[0]

    def _text_ids(self, ids: Tensor) -> Tensor:
        """Ids with the padding token at placeholders, as the library has it."""
        return ids.masked_fill(ids == self.placeholder, self.text_model.config.pad_token_id)

    def _masks(self, start: int, stop: int, image: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Additive masks [1, 1, queries, keys] by layer type. Full layers hold all keys, sliding ones the window's."""
        more = torch.full((max(stop - len(image), 0),), -1, device=self.device)
        image = torch.cat([image, more])
        query = torch.arange(start, stop, device=self.device)[:, None]
        masks = {}
        for kind, first in (("full_attention", 0), ("sliding_attention", max(start - WINDOW + 1, 0))):
            key = torch.arange(first, stop, device=self.device)[None, :]
            allowed = key <= query
            if kind == "sliding_attention":
                allowed |= (image[query] == image[key]) & (image[query] >= 0)
                allowed &= key > query - WINDOW
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
            masks[kind] = mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
        return masks


def load(name: str, device: str, dtype: str, seed: int) -> Gemma4:
    from transformers import Gemma4Config, Gemma4Model

    text = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    text |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    text |= {"use_bidirectional_attention": "vision", "tie_word_embeddings": False}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": POOL, "patch_size": PATCH}
    vision |= {"position_embedding_size": 32}
    special = {"image_token_id": PLACEHOLDER, "boi_token_id": 251, "eoi_token_id": 252, "video_token_id": 253}
    special |= {"audio_token_id": 254, "audio_config": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma4Model(Gemma4Config(text_config=text, vision_config=vision, **special))
        model = spread(model, seed).to(device, DTYPES[dtype])
    table = model.language_model.get_input_embeddings().weight
    return Gemma4(model, random_head(VOCABULARY, WIDTH, table, seed))
