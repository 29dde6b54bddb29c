"""The decision heads: from a text model's last hidden states to logits, probabilities and P(act).

Structure and parameter names are the published decision model's (8,462,659 added parameters at width 576); they stay
fp32 whatever the backbone's dtype.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lab.errors import NotFinite
from lab.workloads import QUESTION_TYPES, Question

HEAD_WIDTH = 64
FEATURES = 4
ABSENT = -1e4  # the logit of a slot that holds no option


class DecisionHeads(nn.Module):
    """Type embedding, bidirectional head layers, scorer and act head over hidden states of width `width`."""

    def __init__(self, width: int, head_layers: int = 2, n_act: int = 2):
        super().__init__()
        self.type_emb = nn.Embedding(len(QUESTION_TYPES), width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // HEAD_WIDTH), 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        # Its layers are called one by one: the encoder's own forward would add nothing but a fast path.
        self.head = nn.TransformerEncoder(layer, head_layers, enable_nested_tensor=False)
        self.scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self.act_head = nn.Sequential(nn.Linear(width + FEATURES, 256), nn.GELU(), nn.Linear(256, n_act))
        self.register_buffer("temperature", torch.ones(len(QUESTION_TYPES)))  # kept for its name; unused, as published

    def score(
        self,
        hidden: Tensor,
        type_id: int | Tensor,
        readouts: Tensor,
        pooled: Tensor,
        attention_mask: Tensor,
        present: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits fp32 [batch, options] and act logits fp32 [batch, 2] (entry 0 = act).

        hidden [batch, length, width] of any dtype; type_id one for all rows, or int64 [batch]; readouts int64
        [batch, options]; pooled int64 [batch], the position whose state stands for the row; attention_mask bool
        [batch, length], False on padding. Where rows have different numbers of options, `present` bool
        [batch, options] is False on the slots that a row has none for: their logits are -1e4.
        """
        hidden = hidden.float() + self.type_emb.weight[type_id].unsqueeze(-2)
        for layer in self.head.layers:
            hidden = layer(hidden, src_key_padding_mask=~attention_mask)
        places = torch.cat([readouts, pooled[:, None]], dim=1)
        read = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = self.scorer(read[:, :-1]).squeeze(-1)
        if present is not None:
            logits = logits.masked_fill(~present, ABSENT)
        return logits, self.act_head(torch.cat([read[:, -1], answer_features(logits, present)], dim=-1))


def answer_features(logits: Tensor, present: Tensor | None = None) -> Tensor:
    """fp32 [batch, 4]: top probability, its lead over the second, entropy / log k, k / 255, at temperature 1.

    logits fp32 [batch, k] with k >= 2; with `present` bool [batch, k], a row's k is the number of its options, 2 or
    more. Probabilities are clamped at 1e-9 inside the logarithm.
    """
    count = logits.shape[-1]
    p = logits.detach().softmax(-1)
    top = p.topk(2, dim=-1).values
    entropy = -(p * p.clamp_min(1e-9).log()).sum(-1)
    if present is not None:
        counts = present.sum(-1).clamp_min(2).float()
        return torch.stack([top[:, 0], top[:, 0] - top[:, 1], entropy / counts.log(), counts / 255], dim=-1)
    entropy = entropy / math.log(count)
    return pad(torch.stack([top[:, 0], top[:, 0] - top[:, 1], entropy], dim=-1), (0, 1), value=count / 255)


def temperature_for(
    question: Question,
    by_type: tuple[float, ...],
    by_options: Mapping[str, float],
    limits: tuple[float, float] = (1e-3, math.inf),
) -> float:
    """The softmax temperature: the bucket's (`choice:6-10`) if there is one, else the type's, within the limits."""
    type_id = QUESTION_TYPES.index(question.type)
    return min(max(float(by_options.get(bucket(question), by_type[type_id])), limits[0]), limits[1])


def bucket(question: Question) -> str:
    """The question's type and number of options as temperatures are kept by: `choice:6-10`."""
    count = len(question.options)
    size = next(name for most, name in ((2, "2"), (5, "3-5"), (10, "6-10"), (math.inf, "11+")) if count <= most)
    return f"{question.type}:{size}"


@dataclass(frozen=True)
class Decisions:
    """The answers to one question on a batch of inputs.

    logits and probabilities fp32 [batch, options]; p_act fp32 [batch]: copies of what is given, which nobody can write
    to, so that no later decision changes an earlier one. The rest is derived from them. Raises NotFinite where one of
    them is not a number or infinite.
    """

    question: Question
    logits: np.ndarray
    probabilities: np.ndarray
    p_act: np.ndarray
    names: list[str] = field(init=False)

    def __post_init__(self):
        for name in ("logits", "probabilities", "p_act"):
            value = np.array(getattr(self, name))
            if not np.isfinite(value).all():
                raise NotFinite(
                    f"The {name} of an answer hold NaN or infinity, so there is no decision; `lab check` says whether the "
                    "checkpoint's weights are sound, and another dtype may hold what this one cannot."
                )
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        object.__setattr__(self, "names", self.question.names)

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def choice(self) -> np.ndarray:
        """int64 [batch]: the most probable option's place."""
        return self.probabilities.argmax(-1)

    @property
    def confidence(self) -> np.ndarray:
        """fp32 [batch] in 0..1: 1 - entropy / log k; for a noul question max(p, 1 - p)."""
        p = self.probabilities
        if self.question.type == "noul":
            return p.max(-1)
        entropy = -(p * np.log(np.clip(p, 1e-12, None))).sum(-1)
        return np.clip(1 - entropy / np.log(p.shape[-1]), 0, 1)

    @property
    def value(self) -> list[str] | np.ndarray:
        """What the question asked for: a choice's option names, a score's expected level, a noul's p(true)."""
        if self.question.type == "choice":
            return [self.names[i] for i in self.choice]
        if self.question.type == "score":
            return self.probabilities @ np.array(self.question.levels)
        return self.probabilities[:, self.names.index("true")]
