"""One decision with every shape fixed: all that does not depend on the pixels is computed at construction.

What is left has no step that depends on data, so on CUDA the whole of it, from resize to probabilities, is captured as
one graph and replayed. Three things of the stock path are lifted out: the vision tower's position ids, the merge of
image rows into the text, and the building of masks.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lab.errors import InputError
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel, block_mask, check_model_supports, type_id
from lab.pixels import check_frames, make_pixels
from lab.steps.replay import Replay, Watch
from lab.workloads import Question


class StaticStep:
    """A decision as fixed-shape device work between copy-in and copy-out, captured as one graph on CUDA.

    For `batch` inputs of `frames` frames each, oldest first; the first call fixes the frames' size. `capture` is on
    where the model is on CUDA; elsewhere, or with capture=False, the same code runs eagerly. With `reuse` the image
    rows of the previous decision stay on the device: where the earlier frames given are the frames seen last, byte for
    byte, only the newest frame is encoded; where they are not, all are. The answers equal EagerStep's to 2e-5 in fp32.

    Raises InputError for a model that reads out elsewhere or splits images, for capture without CUDA, for reuse of a
    single frame, and, from `decide`, where a weight or temperature changed since construction.
    """

    layout = "terminator"
    title: str | None = None  # in front of the name, where a subclass runs another language stage

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        batch: int = 1,
        option_attention: str = "block",
        pixels: str = "device",
        capture: bool | None = None,
        reuse: bool = False,
        filter: str = "composed",
        name: str | None = None,
    ):
        start = time.perf_counter()
        check_model_supports(model, option_attention, pixels)
        if not isinstance(batch, int) or batch < 1:
            raise InputError(f"batch is {batch!r}; give a whole number of 1 or more.")
        if reuse and frames == 1:
            raise InputError(
                "reuse keeps the image rows of earlier frames; with one frame per decision there are none."
            )
        self.model, self.question, self.frames, self.batch = model, question, frames, batch
        self.option_attention, self.pixels_path, self.reuse = option_attention, pixels, reuse
        self.device = model.device
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.name = name or self._name("captured" if self.capture else "static")
        self.pixels = make_pixels(pixels, model.config.image_size, device=self.device, dtype=model.dtype, filter=filter)
        self.filter = filter if pixels == "device" else "processor"
        self.row = model.row(question, frames, layout=self.layout)
        self.temperature = model.temperature_of(question)
        self.watch = Watch(model)
        with torch.no_grad():
            self._fix_text()
            self._fix_vision()
        # The newest frame's rows are written last; with reuse the older ones move up by one frame first.
        self.all_frames = Replay(lambda: self._decide(frames), self.device, self.capture)
        self.newest_frame = Replay(lambda: self._decide(1), self.device, self.capture) if reuse else None
        self.frames_in: Tensor | None = None  # on the device, made at the first call
        self.seen: np.ndarray | None = None  # the frames whose rows are kept
        self._build_seconds = time.perf_counter() - start

    # ------------------------------------------------------------------------------------------ at construction

    def _name(self, how: str) -> str:
        return ", ".join(filter(None, [self.title, how, "reusing frames" if self.reuse else None]))

    def _fix_text(self) -> None:
        text, device = self.model.encoder.text_model, self.device
        ids = torch.from_numpy(self.row.ids).to(device)
        self.embeds = text.get_input_embeddings()(ids).expand(self.batch, -1, -1).contiguous()
        self.rotary = text.rotary_emb(self.embeds, torch.arange(len(self.row), device=device)[None])
        blocked = self.option_attention == "block"
        self.mask = block_mask(self.row, self.model.dtype, device) if blocked else None  # None: plain causal
        self.positions = torch.from_numpy(self.row.image_positions).to(device)
        self.readouts = torch.from_numpy(self.row.readouts).to(device).expand(self.batch, -1)
        self.pooled = torch.full((self.batch,), len(self.row) - 1, device=device)
        self.present = torch.ones(self.batch, len(self.row), dtype=torch.bool, device=device)

    def _fix_vision(self) -> None:
        embeddings, size = self.model.encoder.vision_model.embeddings, self.model.config.image_size
        pixels = torch.ones(1, 3, size, size, device=self.device, dtype=self.model.dtype)
        whole = torch.ones(1, *[size // embeddings.patch_size] * 2, device=self.device, dtype=torch.bool)
        recorded: list[Tensor] = []
        hook = embeddings.position_embedding.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
        try:
            embeddings(pixel_values=pixels, patch_attention_mask=whole)
        finally:
            hook.remove()
        self.patch_positions = embeddings.position_embedding(recorded[0])
        rows = self.batch, self.frames, self.model.image_tokens, self.embeds.shape[-1]
        self.image_rows = torch.zeros(rows, device=self.device, dtype=self.model.dtype)

    def _fix_frames(self, shape: Sequence[int]) -> None:
        """Static input buffers for frames of one size: uint8 pictures, or pixel values where the processor makes them."""
        size = self.model.config.image_size
        given = self.pixels_path == "device"
        one = (*shape, 3) if given else (3, size, size)
        dtype = torch.uint8 if given else self.model.dtype
        self.frames_in = torch.zeros(self.batch, self.frames, *one, dtype=dtype, device=self.device)
        self.staging = torch.zeros_like(self.frames_in, device="cpu", pin_memory=self.device.type == "cuda")
        self.size = tuple(shape)
        if self.filter == "composed":
            self.pixels.operators(*shape)  # made now: neither a graph nor a compiler may meet their making

    # ------------------------------------------------------------------------------------------ at every call

    @torch.no_grad()
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3] of the size that the first call had."""
        frames = self._checked(frames)
        known = self.reuse and self.seen is not None and np.array_equal(frames[:, :-1], self.seen[:, 1:])
        with stage("copy_in"):
            self._copy_in(frames, slice(self.frames - 1, None) if known else slice(None))
        output = (self.newest_frame if known else self.all_frames)()
        with stage("readback"):
            output = output.cpu().numpy()
        self.seen = frames if self.reuse else None
        count = self.readouts.shape[1]
        logits, probabilities, p_act = np.split(output, [count, 2 * count], axis=1)
        return Decisions(self.question, logits, probabilities, p_act[:, 0])

    def _checked(self, frames) -> np.ndarray:
        self.watch.check()
        if self.model.temperature_of(self.question) != self.temperature:
            raise InputError("The model's temperature changed since this step was built; build a new step.")
        frames = check_frames(frames)
        if frames.shape[1] != self.frames:
            said = "lacks its earlier frames" if frames.shape[1] < self.frames else "has frames too many"
            raise InputError(f"The input {said}: {frames.shape[1]} per decision, this step takes {self.frames}.")
        if len(frames) != self.batch:
            raise InputError(f"{len(frames)} inputs were given, this step takes a batch of {self.batch}.")
        if self.frames_in is None:
            self._fix_frames(frames.shape[2:4])
        if frames.shape[2:4] != self.size:
            height, width = self.size
            raise InputError(
                f"The frames are {frames.shape[2]}x{frames.shape[3]}, this step was set up for {height}x{width}; "
                "build a new step for another size."
            )
        return frames

    def _copy_in(self, frames: np.ndarray, which: slice) -> None:
        if self.pixels_path == "device":
            self.staging[:, which].numpy()[...] = frames[:, which]
        else:
            part = frames[:, which]
            values = self.pixels(part.reshape(-1, *part.shape[2:]))
            self.staging[:, which].copy_(values.view(self.batch, -1, *values.shape[1:]))
        self.frames_in[:, which].copy_(self.staging[:, which], non_blocking=True)

    def _decide(self, count: int) -> Tensor:
        """The device work with the last `count` frames encoded; fp32 [batch, 2 * options + 1], overwritten in replays."""
        with stage("resize"):
            pixels = self.frames_in[:, self.frames - count :].flatten(0, 1)
            if self.pixels_path == "device":
                pixels = self.pixels(pixels)
        with stage("vision"):
            if count < self.frames:
                self.image_rows[:, :-count] = self.image_rows[:, count:].clone()
            rows = self._encode(pixels)
            self.image_rows[:, self.frames - count :] = rows.view(self.batch, count, *rows.shape[1:])
        hidden = self._language()
        with stage("heads"):
            logits, act = self.model.score(hidden, type_id(self.question), self.readouts, self.pooled, self.present)
            return torch.cat([logits, (logits / self.temperature).softmax(-1), act.softmax(-1)[:, :1]], dim=1)

    def _encode(self, pixels: Tensor) -> Tensor:
        return encode_images(self.model, pixels, self.patch_positions)

    def _language(self) -> Tensor:
        with stage("language"):
            return run_text(self.model, self._merged(), self.mask, self.rotary)

    def _merged(self) -> Tensor:
        return self.embeds.index_copy(1, self.positions, self.image_rows.flatten(1, 2))

    # ------------------------------------------------------------------------------------------ about it

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """A new episode begins in these rows: image rows kept for earlier frames are not used again."""
        self.seen = None

    def describe(self) -> dict:
        return {
            "step": type(self).__name__,
            **self.model.describe(),
            "tokens": len(self.row),
            "frames": self.frames,
            "batch": self.batch,
            "option_attention": self.option_attention,
            "pixels": self.pixels_path,
            "filter": self.filter,
            "captured": self.capture,
            "reuse": self.reuse,
        }

    def start_cost(self) -> dict:
        replays = [replay for replay in (self.all_frames, self.newest_frame) if replay]
        return {
            "build_s": self._build_seconds,
            "capture_s": sum(replay.seconds for replay in replays),
            "graph_bytes": sum(replay.bytes for replay in replays),
            "check_s": self.watch.seconds,  # spent again in every decision, to see that no weight changed
        }


def encode_images(model: DecisionModel, pixels: Tensor, patch_positions: Tensor) -> Tensor:
    """Image rows [images, image tokens, width] of pixels [images, 3, size, size], with position embeddings given.

    The stock tower works these out from a patch mask at every call, and builds an attention mask that hides nothing.
    """
    vision = model.encoder.vision_model
    hidden = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2) + patch_positions
    hidden = vision.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
    return model.encoder.connector(vision.post_layernorm(hidden))


def run_text(
    model: DecisionModel, embeds: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], **kwargs
) -> Tensor:
    """Last hidden states [batch, length, width], layer by layer: the stock loop without its building of masks.

    mask is additive [1, 1, queries, keys] or None for plain causal; rotary is the (cos, sin) of the tokens' positions.
    """
    text = model.encoder.text_model
    hidden = embeds
    for layer in text.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, **kwargs)
    return text.norm(hidden)
