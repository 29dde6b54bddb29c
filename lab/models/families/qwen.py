"""Qwen2.5-VL and Qwen3.5, tiny: positions in three dimensions (M-RoPE) that depend on every picture of the prompt.

Qwen2.5-VL takes one image per tower call. Qwen3.5 takes runs, and is a hybrid: its linear-attention layers hold a
recurrent state. The library keeps the M-RoPE delta as a property of the module; here positions are passed at every
step, so that two conversations on one model cannot mix them up.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lab.caches import content_key
from lab.models.families.base import Family, multiple_of, random_head, spread
from lab.models.states import TokenState
from lab.models.vision import CACHE_ARGUMENT, DTYPES
from lab.resume import Picture, Prompt

PATCH, MERGE, FRAMES_PER_PATCH = 8, 2, 2
VOCABULARY, PLACEHOLDER, WIDTH = 256, 250, 32
SPECIAL = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 253,
    "vision_start_token_id": 251,
    "vision_end_token_id": 252,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH}
VISION |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES_PER_PATCH}


class Qwen(Family):
    """Either of the two; `model` is transformers' model without its head."""

    def __init__(self, name: str, model, head: Tensor):
        self.name, self.model, self.weights = name, model, "random"
        self.merge = model.config.vision_config.spatial_merge_size
        super().__init__(model.language_model, model.visual, head, model.config.image_token_id)

    def picture(self, frame: np.ndarray) -> Picture:
        high, wide = multiple_of(frame, PATCH * self.merge, self.name)
        grid = (1, high * self.merge, wide * self.merge)
        return Picture(content_key(frame), high * wide, grid[1] * grid[2], grid)

    def pixels(self, frame: np.ndarray) -> np.ndarray:
        """Patches float32 [patches, 3 * 2 * 8 * 8], the four of a row of the prompt one after the other, each picture
        twice in time, as the library's processor orders them; values (v - 127.5) / 127.5."""
        high, wide = multiple_of(frame, PATCH * self.merge, self.name)
        cut = (frame.astype(np.float32) - 127.5) / 127.5
        cut = cut.reshape(high, self.merge, PATCH, wide, self.merge, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = np.repeat(cut[:, :, :, :, :, None], FRAMES_PER_PATCH, axis=5)
        return cut.reshape(high * wide * self.merge**2, -1)

    def rows(self, frames: Sequence[np.ndarray]) -> list[Tensor]:
        pixels = torch.as_tensor(np.concatenate([self.pixels(frame) for frame in frames]), device=self.device)
        grids = torch.tensor([self.picture(frame).grid for frame in frames], device=self.device)
        return list(self.model.get_image_features(pixels, grids).pooler_output)

    def tables(self, prompt: Prompt) -> dict:
        """`positions` int64 [3, 1, n] of the whole prompt and the `delta` that later text adds, from all pictures."""
        ids = torch.as_tensor(prompt.array, device=self.device)[None]
        grids = torch.tensor([picture.grid for picture in prompt.pictures], device=self.device)
        kinds = (ids == self.placeholder).int()
        positions, delta = self.model.get_rope_index(ids, kinds, image_grid_thw=grids if len(grids) else None)
        return {"positions": positions, "delta": int(delta)}

    def hidden(self, ids: Tensor, embeds: Tensor, state: TokenState, tables: dict) -> Tensor:
        start, stop, known = state.length, state.length + embeds.shape[1], tables["positions"].shape[-1]
        after = torch.arange(max(start, known), max(stop, known), device=self.device) + tables["delta"]
        positions = torch.cat([tables["positions"][:, :, start:stop], after.expand(3, 1, -1)], dim=-1)
        kept = {"use_cache": True, CACHE_ARGUMENT: state.cache}
        found = self.text_model(inputs_embeds=embeds, position_ids=positions, **kept).last_hidden_state
        state.length = stop
        return found[0]


class Qwen3_5(Qwen):
    """In runs: a tower call holds whole images of up to 48 patches together (four of 32 by 24 pixels)."""

    whole_images = False
    patch_budget = 48


def load(name: str, device: str, dtype: str, seed: int) -> Qwen:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3_5Config, Qwen3_5Model

    if name == "qwen3_5":
        # The plain implementation of its linear attention is wanted here; the library would call it slow, every time.
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
        text = {**TEXT, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8}
        text |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"rope_parameters": {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}}
        config = Qwen3_5Config(text_config=text, vision_config={**VISION, "num_position_embeddings": 64}, **SPECIAL)
        kind, wrapper = Qwen3_5Model, Qwen3_5
    else:
        vision = {**VISION, "window_size": 32, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, **SPECIAL)
        kind, wrapper = Qwen2_5_VLModel, Qwen
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = spread(kind(config), seed).to(device, DTYPES[dtype])
    table = model.language_model.get_input_embeddings().weight
    return wrapper(name, model, random_head(VOCABULARY, WIDTH, table, seed))
