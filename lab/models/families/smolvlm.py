"""SmolVLM and Idefics3: one image per tower call, plain positions; tiny, or at SmolVLM-256M's real shape."""

import numpy as np
import torch
from torch import Tensor

from lab.caches import content_key
from lab.clocks import stage
from lab.models.checkpoints import load_model
from lab.models.families.base import Family, multiple_of, random_head, spread
from lab.models.states import TokenState
from lab.models.vision import DecisionModel
from lab.resume import Picture
from lab.tokens import FAKE, GLOBAL, IMAGE, cleaned, encode


class SmolVLM(Family):
    """`lab.load_model`'s backbone as a language model: its head is its embedding where that was trained, else random."""

    def __init__(self, model: DecisionModel, seed: int):
        self.model, self.tokenizer = model, model.tokenizer
        self.name, self.weights = "smolvlm", model.weights
        self.lead = tuple(encode(self.tokenizer, FAKE + GLOBAL))
        self.tail = tuple(encode(self.tokenizer, FAKE))
        table = model.encoder.text_model.get_input_embeddings().weight
        trained = not model.weights.startswith("random")
        head = table if trained else random_head(*table.shape, table, seed)
        super().__init__(model.encoder.text_model, model.encoder.vision_model, head, encode(self.tokenizer, IMAGE)[0])
        self.pixels = model.make_pixels()

    def text(self, text: str) -> list[int]:
        """Token ids of a text, the tokenizer's added tokens in it turned into spaces."""
        return encode(self.tokenizer, cleaned(self.tokenizer, text))

    def picture(self, frame: np.ndarray) -> Picture:
        multiple_of(frame, 1, self.name)
        config = self.model.encoder.config.vision_config
        return Picture(content_key(frame), self.model.image_tokens, (config.image_size // config.patch_size) ** 2)

    def rows(self, frames) -> list[Tensor]:
        with stage("resize"):
            pixels = self.pixels(np.stack(frames))
        with stage("vision"):
            return list(self.model.images(pixels))

    def hidden(self, ids: Tensor, embeds: Tensor, state: TokenState, tables: dict) -> Tensor:
        found = self.model.language(embeds, cache=state.cache)
        state.length += embeds.shape[1]
        return found[0]


def load(name: str, device: str, dtype: str, seed: int, preset: str = "tiny", weights: str = "default") -> SmolVLM:
    model = load_model(preset, device, dtype, seed, weights)
    if preset == "tiny":
        with torch.random.fork_rng(devices=[]):
            spread(model.encoder, seed)
    return SmolVLM(model, seed)
