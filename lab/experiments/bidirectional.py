"""Part of notebook 03: why a model that reads both ways cannot keep the question, and what alone it could keep.

Where every token sees the image, the question's keys and values change with the frame from the first layer on. A causal
model that reads the question first keeps them exactly. Measured on small models of random weights: whether something
moves at all is a matter of what may see what, not of the weights; how far it moves is.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module

from lab import stats
from lab.envs import frames_for
from lab.errors import InputError
from lab.measure import Arm, compare
from lab.models.checkpoints import PRESETS, VOCABULARY, load_model
from lab.models.vision import DTYPES
from lab.pixels import check_frames, make_pixels
from lab.stats import Estimate
from lab.tokens import SMOLVLM_TOKENS, TEXT_VOCABULARY, build_row, image_tokens, load_tokenizer
from lab.workloads import get_workload

BOTH_WAYS, QUESTION_FIRST = "both ways, mask layout", "causal, question first"
SEGMENTS = ("question", "options")
GATHER, KEPT = "gather", "kept"
TITLE = "embedding gather"
LAYERS = 6


def load_both_ways(seed: int = 0) -> Module:
    """A small ModernVBERT of transformers (`ModernVBertModel`) with random weights from `seed`, in evaluation mode.

    Width 192, six text layers of which every third sees the whole row and the others 64 tokens to either side, as in
    the released model; 128 px, so 4 image tokens a frame; SmolVLM's vocabulary, in which `lab.tokens` lays rows out.
    """
    from transformers import ModernVBertConfig, ModernVBertModel

    tiny = PRESETS["tiny"]
    config = ModernVBertConfig(
        vision_config={
            **tiny["vision"],
            "model_type": "siglip_vision_model",
            "image_size": tiny["image_size"],
            "patch_size": 16,
        },
        text_config={
            "model_type": "modernbert",
            "hidden_size": 192,
            "intermediate_size": 256,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 3,
            "vocab_size": VOCABULARY,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2),
        },
        image_token_id=TEXT_VOCABULARY + SMOLVLM_TOKENS.index("<image>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ModernVBertModel(config).eval().requires_grad_(False)


def movement(workload: str = "pong", frames=None, *, segments: Sequence[str] = SEGMENTS, seed: int = 0) -> pd.DataFrame:
    """How far keys and values move at the tokens of `segments` when only the image changes, layer by layer.

    `frames` are two inputs of the workload, uint8 [2, frames, height, width, 3]; by default the first and the eighth of
    seeded play. Columns: model (`BOTH_WAYS`, a small ModernVBERT; `QUESTION_FIRST`, the preset tiny with the question
    ahead of the image), layer (0 reads the embeddings), and keys, values, hidden: ||new - old|| / ||old|| over those
    tokens, hidden being what keys and values are projected from. Keys are taken before the rotation by position, which
    changes no norm. Both models run on the CPU in fp32. Raises InputError for frames that are not two or do not differ.
    """
    asked = get_workload(workload)
    frames = check_frames(frames_for(asked, 8, seed)[[0, -1]] if frames is None else frames)
    if len(frames) != 2 or np.array_equal(*frames):
        raise InputError("Movement is measured between two inputs that differ; give frames [2, frames, H, W, 3].")
    size = PRESETS["tiny"]["image_size"]
    pixels = make_pixels("device", size, device="cpu", dtype=torch.float32)
    tables = []
    for name, layout, encoder in (
        (BOTH_WAYS, "mask", load_both_ways(seed)),
        (QUESTION_FIRST, "question_first", load_model("tiny", seed=seed).encoder),
    ):
        row = build_row(load_tokenizer(), asked.question, asked.frames, image_tokens(size), layout=layout)
        places = np.concatenate([np.arange(s.start, s.stop) for s in map(row.segment, segments)])
        old, new = (_projected(encoder, merged(encoder, row, pixels(image)), places) for image in frames)
        layers = [
            {part: _change(before[part], after[part]) for part in before}
            for before, after in zip(old, new, strict=True)
        ]
        tables.append(pd.DataFrame(layers).assign(model=name, layer=range(len(layers))))
    return pd.concat(tables, ignore_index=True)[["model", "layer", "keys", "values", "hidden"]]


@torch.inference_mode()
def merged(encoder: Module, row, pixels: Tensor) -> Tensor:
    """Input embeddings [1, length, width] of a row with the image rows of `pixels` [frames, 3, size, size] in place."""
    embeds = encoder.text_model.get_input_embeddings()(torch.from_numpy(row.ids)[None])
    rows = encoder.connector(encoder.vision_model(pixel_values=pixels).last_hidden_state)
    return embeds.index_copy(1, torch.from_numpy(row.image_positions), rows.reshape(1, -1, embeds.shape[-1]))


@torch.inference_mode()
def _projected(encoder: Module, embeds: Tensor, places: np.ndarray) -> list[dict[str, Tensor]]:
    """What goes into and comes out of each layer's key and value projections at `places`, in one run of the text model."""
    layers = [{} for _ in encoder.text_model.layers]

    def fused(kept: dict):  # one projection for queries, keys and values, in this order
        def hook(_, inputs, output):
            _, keys, values = output[0, places].chunk(3, dim=-1)
            kept.update(keys=keys, values=values, hidden=inputs[0][0, places])

        return hook

    def single(kept: dict, part: str):
        def hook(_, inputs, output):
            kept.update({part: output[0, places], "hidden": inputs[0][0, places]})

        return hook

    hooks = []
    for kept, layer in zip(layers, encoder.text_model.layers, strict=True):
        if hasattr(layer, "attn"):
            hooks.append(layer.attn.Wqkv.register_forward_hook(fused(kept)))
        else:
            hooks.append(layer.self_attn.k_proj.register_forward_hook(single(kept, "keys")))
            hooks.append(layer.self_attn.v_proj.register_forward_hook(single(kept, "values")))
    try:
        encoder.text_model(inputs_embeds=embeds)
    finally:
        for hook in hooks:
            hook.remove()
    return layers


def _change(old: Tensor, new: Tensor) -> float:
    return float((new - old).norm() / old.norm())


def answer(table: pd.DataFrame) -> str:
    """What `movement` found, in one sentence."""
    largest = table[["keys", "values"]].max(axis=1)
    said = {}
    for name in (BOTH_WAYS, QUESTION_FIRST):
        layers = largest[table["model"] == name].to_numpy()
        moved = np.flatnonzero(layers)
        said[name] = (
            f"by up to {layers.max():.1g} of their size, from layer {moved[0]} of 0 to {len(layers) - 1} on"
            if len(moved)
            else f"in none of its {len(layers)} layers, to the last bit"
        )
    return (
        f"When only the image changes, the question's keys and values move {said[BOTH_WAYS]} in a model that reads both "
        f"ways; in a causal one that reads the question first they move {said[QUESTION_FIRST]}."
    )


# ------------------------------------------------------------------------------------------------ what could be kept


def gather_rows(
    workload: str = "pong",
    *,
    blocks: int = 100,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "fp32",
    out: Path | str | None = None,
) -> pd.DataFrame:
    """Time what alone a model that reads both ways could keep: the embedded question and options of a row.

    Arms `gather` (the lookup of the row's question and option ids in a table of the real shape, 49,280 x 576) and `kept`
    (the rows looked up before, nothing recomputed). The ids are those of the `terminator` layout, which the published
    lookup was timed on. Rows as `lab.compare` gives them, title `TITLE`.
    """
    asked = get_workload(workload)
    row = build_row(load_tokenizer(), asked.question, asked.frames)
    ids = np.concatenate([row.ids[s.start : s.stop] for s in map(row.segment, SEGMENTS)])
    ids = torch.from_numpy(ids)[None].to(device)
    width = PRESETS["smolvlm-256m"]["text"]["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCABULARY, width, generator=generator).to(device, DTYPES[dtype])
    kept = torch.nn.functional.embedding(ids, table)
    said = {"table": list(table.shape), "tokens": ids.shape[1], "dtype": dtype}

    @torch.inference_mode()
    def gather() -> Tensor:
        return torch.nn.functional.embedding(ids, table)

    @torch.inference_mode()
    def keep() -> Tensor:
        return kept

    arms = [
        Arm(GATHER, gather, said | {"kept": False}, device=device),
        Arm(KEPT, keep, said | {"kept": True}, device=device),
    ]
    return compare(arms, blocks=blocks, warmup=10, seed=seed, out=out, title=TITLE, tags={"workload": workload})


def gather_ms(rows: pd.DataFrame) -> Estimate:
    """What keeping the embedded question and options saves a decision, in ms: `gather` minus `kept`, paired by block.

    Published for the lookup alone: 0.045 ms on an L4, 0.046 to 0.193 ms on a CPU (`published("stages")`).
    """
    return stats.paired_difference(rows[rows["title"] == TITLE], (GATHER, "total"), (KEPT, "total"))
