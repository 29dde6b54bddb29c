"""What the families share: prompts with pictures, a counter on the vision tower, one pass over a part of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lab.errors import InputError
from lab.models.states import TokenState
from lab.resume import Picture, Prompt


@dataclass(frozen=True)
class Request:
    """A prompt and the frames of its pictures, uint8 [H, W, 3] each."""

    prompt: Prompt
    frames: tuple[np.ndarray, ...] = ()


class Family:
    """A model as a resumed prompt needs it. `tower_calls` counts the real vision tower's calls.

    A family says how a frame becomes rows (`picture`, `pixels`, `rows`), where tokens stand (`tables`), and how the text
    model continues a state (`hidden`). `whole_images`: a resume point never cuts an image. `patch_budget`: the patches
    that one tower call holds, where it takes several images; None for one call per image. `chunks_cut_images`: whether
    a pass may be cut inside an image at all (it may not where an image's tokens see each other both ways).
    """

    name = ""
    whole_images = True
    patch_budget: int | None = None
    chunks_cut_images = True
    lead: tuple[int, ...] = (251,)
    tail: tuple[int, ...] = (252,)
    text_ids = (3, 240)  # ordinary token ids, from and below; a tiny vocabulary has no words

    def __init__(self, text_model: nn.Module, tower: nn.Module, head: Tensor, placeholder: int):
        self.text_model, self.tower, self.head, self.placeholder = text_model, tower, head, placeholder
        self.tower_calls = 0
        tower.register_forward_hook(self._count)
        self.never = torch.tensor([*self.lead, placeholder, *self.tail], device=head.device)

    def _count(self, *_) -> None:
        self.tower_calls += 1

    @property
    def device(self) -> torch.device:
        return self.head.device

    # --- prompts

    def request(self, parts: Sequence, before: Request | None = None, reply: Sequence[int] = ()) -> Request:
        """A request of `parts`, each a frame uint8 [H, W, 3] or a list of token ids; behind an earlier request and the
        reply to it, where they are given."""
        prompt = before.prompt.then(reply) if before else Prompt((), (), self.placeholder)
        frames = before.frames if before else ()
        for part in parts:
            if isinstance(part, np.ndarray):
                picture = self.picture(part)
                ids = (*self.lead, *[self.placeholder] * picture.rows, *self.tail)
                # a copy: the prompt holds the key of what the picture shows now
                prompt, frames = prompt.then(ids, [picture]), (*frames, part.copy())
            else:
                prompt = prompt.then(part)
        return Request(prompt, frames)

    def picture(self, frame: np.ndarray) -> Picture:
        """What the prompt must know of a frame; InputError for a size that the tower cannot take."""
        raise NotImplementedError

    # --- the model

    def rows(self, frames: Sequence[np.ndarray]) -> list[Tensor]:
        """One tower call: the rows [rows, width] of each frame."""
        raise NotImplementedError

    def tables(self, prompt: Prompt) -> dict:
        """What depends on the whole prompt and every part of a pass needs: positions, which tokens are images."""
        return {}

    def empty(self) -> TokenState:
        return TokenState(DynamicCache(config=self.text_model.config))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [1, length, width] of ids [1, length]; what stands for a placeholder is of no account."""
        return self.text_model.get_input_embeddings()(ids)

    def hidden(self, ids: Tensor, embeds: Tensor, state: TokenState, tables: dict) -> Tensor:
        """The text model's last hidden states [length, width] of tokens that continue `state`, whose keys and values are
        added to it (its count of tokens too)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits fp32 [..., vocabulary] of hidden states; tokens that open, fill or close an image are never chosen."""
        found = (hidden @ self.head.T).float()
        return found.index_fill(-1, self.never, float("-inf"))


def multiple_of(frame: np.ndarray, unit: int, family: str) -> tuple[int, int]:
    """Rows and columns of `unit`-pixel squares in a frame; InputError where they do not fill it."""
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
        raise InputError(f"A frame is uint8 [height, width, 3], not {frame.dtype} {list(frame.shape)}.")
    if frame.shape[0] % unit or frame.shape[1] % unit or 0 in frame.shape:
        raise InputError(
            f"A {family} picture's sides are multiples of {unit} pixels, not {frame.shape[0]} x {frame.shape[1]}; "
            "resize it first."
        )
    return frame.shape[0] // unit, frame.shape[1] // unit


def spread(model: nn.Module, seed: int) -> nn.Module:
    """Give every matrix seeded random weights of the size that keeps activations level, and return the model for use.

    transformers' own start is so small that a random tiny model hardly looks at its pictures, and nothing that goes
    wrong with them would show in its tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                values = torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5
                parameter.copy_(values)
    return model.eval().requires_grad_(False)


def random_head(vocabulary: int, width: int, like: Tensor, seed: int) -> Tensor:
    """A seeded output matrix [vocabulary, width]. A random model whose head is its embedding repeats its last token.

    Sixteen tokens are likelier than the others, so that replies repeat themselves, as text does, and drafts are found.
    """
    values = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(seed + 1)) / width**0.5
    values[100:116] *= 3
    return values.to(like.device, like.dtype)
