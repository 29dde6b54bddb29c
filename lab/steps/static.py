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

from lab.errors import InputError, whole
from lab.measure import stage
from lab.models.heads import Decisions
from lab.models.vision import DecisionModel, block_mask, type_id
from lab.pixels import LINEAR, check_frames
from lab.steps.one_thread import one_thread
from lab.steps.replay import Replay, Watch
from lab.steps.setting import Setting, check_rows
from lab.workloads import Question


class StaticStep:
    """A decision as fixed-shape device work between copy-in and copy-out, captured as one graph on CUDA.

    For `batch` inputs of `frames` frames each, oldest first; the first call fixes the frames' size. `option_attention`,
    `pixels`, `filter` and `layout` are the checkpoint's unless given, see `lab.steps.setting`. `capture` is on where the
    model is on CUDA; elsewhere, or with capture=False, the same code runs eagerly. With `reuse` each row's image rows stay
    on the device: a frame that its row was shown in the call before, byte for byte, is not encoded again. Where no more
    frames are new than there are rows, as many as there are rows are encoded, else all; `reuse_counts` says how many
    were spared. The answers equal EagerStep's to 2e-5 in fp32.

    Raises InputError for a model that reads out at masks or splits images, for capture without CUDA, for reuse of a
    single frame, and, from `decide`, where a weight or temperature changed since construction.
    """

    title: str | None = None  # in front of the name, where a subclass runs another language stage

    def __init__(
        self,
        model: DecisionModel,
        question: Question,
        frames: int = 1,
        batch: int = 1,
        option_attention: str | None = None,
        pixels: str | None = None,
        capture: bool | None = None,
        reuse: bool = False,
        filter: str | None = None,
        layout: str | None = None,
        name: str | None = None,
    ):
        start = time.perf_counter()
        self.setting = Setting.of(model, option_attention, pixels, filter, layout)
        if self.setting.layout == "mask":
            raise InputError("This checkpoint reads out at masks, which a static step does not; use EagerStep.")
        whole("batch", batch, 1)
        if reuse and frames == 1:
            raise InputError(
                "reuse keeps the image rows of earlier frames; with one frame per decision there are none."
            )
        self.model, self.question, self.frames, self.batch, self.reuse = model, question, frames, batch, reuse
        self.device = model.device
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.name = name or self._name("captured" if self.capture else "static")
        self.pixels = model.make_pixels(self.setting.pixels, self.setting.filter)
        self.row = model.row(question, frames, layout=self.setting.layout)
        self.temperature = model.temperature_of(question)
        self.watch = Watch(model)
        with torch.no_grad():
            self._fix_text()
            self._fix_vision()
        self.all_frames = Replay(lambda: self._decide(frames), self.device, self.capture)
        self.newest_frame = Replay(lambda: self._decide(1), self.device, self.capture) if reuse else None
        self.frames_in: Tensor | None = None  # on the device, made at the first call
        self.seen: np.ndarray | None = None  # the frames whose rows are kept, uint8 [batch, frames, H, W, 3]
        self.known = np.zeros(batch, bool)  # whether anything is kept of a row
        self.encoded = self.spared = 0
        self._build_seconds = time.perf_counter() - start

    # ------------------------------------------------------------------------------------------ at construction

    def _name(self, how: str) -> str:
        return ", ".join(filter(None, [self.title, how, "reusing frames" if self.reuse else None]))

    def _fix_text(self) -> None:
        text, device = self.model.encoder.text_model, self.device
        ids = torch.from_numpy(self.row.ids).to(device)
        self.embeds = text.get_input_embeddings()(ids).expand(self.batch, -1, -1).contiguous()
        self.rotary = text.rotary_emb(self.embeds, torch.arange(len(self.row), device=device)[None])
        blocked = self.setting.option_attention == "block"
        self.mask = block_mask(self.row, self.model.dtype, device) if blocked else None  # None: plain causal
        self.positions = torch.from_numpy(self.row.image_positions).to(device)
        # the heads see the tokens from here on, and count places from it
        self.start = self.row.start
        length = len(self.row) - self.start
        self.readouts = torch.from_numpy(self.row.readouts - self.start).to(device).expand(self.batch, -1)
        self.pooled = torch.full((self.batch,), length - 1, device=device)
        self.present = torch.ones(self.batch, length, dtype=torch.bool, device=device)

    def _fix_vision(self) -> None:
        embeddings, size = self.model.encoder.vision_model.embeddings, self.model.config.image_size
        pixels = torch.ones(1, 3, size, size, device=self.device, dtype=self.model.dtype)
        every = torch.ones(1, *[size // embeddings.patch_size] * 2, device=self.device, dtype=torch.bool)
        recorded: list[Tensor] = []
        hook = embeddings.position_embedding.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
        try:
            embeddings(pixel_values=pixels, patch_attention_mask=every)
        finally:
            hook.remove()
        # not those of another thread's decision at this moment, on the same tower
        own = next(one for one in recorded if one.numel() == every.numel())
        self.patch_positions = embeddings.position_embedding(own)
        rows = self.batch, self.frames, self.model.image_tokens, self.embeds.shape[-1]
        self.image_rows = torch.zeros(rows, device=self.device, dtype=self.model.dtype)
        # with reuse: where each image's rows come from, counted over those kept and, behind them, those newly encoded
        self.sources = torch.arange(self.batch * self.frames, device=self.device)

    def _fix_frames(self, shape: Sequence[int]) -> None:
        """Static input buffers for frames of one size: uint8 pictures, or pixel values where the processor makes them."""
        size = self.model.config.image_size
        given = self.setting.pixels == "device"
        one = (*shape, 3) if given else (3, size, size)
        dtype = torch.uint8 if given else self.model.dtype
        self.frames_in = torch.zeros(self.batch, self.frames, *one, dtype=dtype, device=self.device)
        self.staging = torch.zeros_like(self.frames_in, device="cpu", pin_memory=self.device.type == "cuda")
        self.size = tuple(shape)
        if self.setting.filter in LINEAR:
            self.pixels.operators(*shape)  # made now: neither a graph nor a compiler may meet their making
        try:  # both graphs now, before any state is kept that their warm-up runs would overwrite
            for replay in filter(None, (self.all_frames, self.newest_frame)):
                replay.prepare()
        except BaseException:
            self.frames_in = None  # so that the next call begins here again
            raise
        self.image_rows.zero_()

    # ------------------------------------------------------------------------------------------ at every call

    @one_thread
    @torch.no_grad()
    def decide(self, frames) -> Decisions:
        """Answer on frames uint8 [batch, frames, height, width, 3] of the size that the first call had."""
        frames = self._checked(frames)
        with stage("copy_in"):
            new = self._new_frames(frames) if self.reuse else None
            some = new is not None and len(new) <= self.batch
            self.known[:] = False  # until this decision is through
            if some:
                self._copy_in(np.stack([frames[place] for place in new]) if new else frames[:0, 0], len(new))
            else:
                self._copy_in(frames.reshape(-1, *frames.shape[2:]))
        output = (self.newest_frame if some else self.all_frames)()
        with stage("readback"):
            output = output.cpu().numpy()
        if self.reuse:
            self.seen = np.empty_like(frames) if self.seen is None else self.seen
            self.seen[...], self.known[:] = frames, True
        images = self.batch * self.frames
        self.encoded += self.batch if some else images
        self.spared += images - self.batch if some else 0
        count = self.readouts.shape[1]
        logits, probabilities, p_act = np.split(output, [count, 2 * count], axis=1)
        return Decisions(self.question, logits, probabilities, p_act[:, 0])

    def _new_frames(self, frames: np.ndarray) -> list[tuple[int, int]]:
        """The (row, frame) places whose pictures their row has not kept, each picture once; says in `sources` whence every
        image's rows come. A row is never given another row's, nor those from before its reset."""
        new, sources = [], np.empty((self.batch, self.frames), np.int64)
        for row in range(self.batch):
            # the row's kept pictures, then its new ones; most likely the one that came after in the call before
            held = [(row * self.frames + i, self.seen[row, i]) for i in range(self.frames)] if self.known[row] else []
            for place, frame in enumerate(frames[row]):
                near = [*held[place + 1 : place + 2], *held]
                found = next((source for source, other in near if np.array_equal(frame, other)), None)
                if found is None:
                    found = sources.size + len(new)
                    new.append((row, place))
                    held.append((found, frame))
                sources[row, place] = found
        if len(new) <= self.batch:
            self.sources.copy_(torch.from_numpy(sources.ravel()))
        return new

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

    def _copy_in(self, pictures: np.ndarray, count: int | None = None) -> None:
        """Put all pictures, or the `count` new ones, where the device work reads them; uint8 [pictures, H, W, 3]."""
        which = (slice(None),) if count is None else (slice(count), slice(self.frames - 1, None))
        staging, there = self.staging[which], self.frames_in[which]
        if self.setting.pixels == "device":
            staging.numpy()[...] = pictures.reshape(staging.shape)
        elif len(pictures):
            staging.copy_(self.pixels(pictures).view(staging.shape))
        there.copy_(staging, non_blocking=True)

    def _decide(self, count: int) -> Tensor:
        """The device work with `count` images a row encoded, all or one; fp32 [batch, 2 * options + 1], overwritten in
        replays."""
        with stage("resize"):
            pixels = self.frames_in[:, self.frames - count :].flatten(0, 1)
            if self.setting.pixels == "device":
                pixels = self.pixels(pixels)
        with stage("vision"):
            rows = self._encode(pixels)
            if count < self.frames:
                rows = torch.cat([self.image_rows.flatten(0, 1), rows]).index_select(0, self.sources)
            self.image_rows.copy_(rows.view(self.image_rows.shape))
        hidden = self._language()
        with stage("heads"):
            logits, act = self.model.score(hidden, type_id(self.question), self.readouts, self.pooled, self.present)
            return torch.cat([logits, (logits / self.temperature).softmax(-1), act.softmax(-1)[:, :1]], dim=1)

    def _encode(self, pixels: Tensor) -> Tensor:
        return encode_images(self.model, pixels, self.patch_positions)

    def _language(self) -> Tensor:
        with stage("language"):
            return run_text(self.model, self._merged(), self.mask, self.rotary)[:, self.start :]

    def _merged(self) -> Tensor:
        return self.embeds.index_copy(1, self.positions, self.image_rows.flatten(1, 2))

    # ------------------------------------------------------------------------------------------ about it

    @one_thread
    def reset(self, rows: Sequence[int] | None = None) -> None:
        """A new episode begins in these rows: what was kept for their earlier frames, and no others, is not used again.
        Raises InputError for a row that the batch has not."""
        self.known[slice(None) if rows is None else check_rows(rows, self.batch)] = False
        if not self.known.any():
            self.seen = None

    def reuse_counts(self) -> dict[str, int]:
        """Images encoded so far, and those that `reuse` spared: for `Arm(counts=...)`."""
        return {"encoded": self.encoded, "spared": self.spared}

    def describe(self) -> dict:
        return {
            "step": type(self).__name__,
            **self.model.describe(),
            "tokens": len(self.row),
            "frames": self.frames,
            "batch": self.batch,
            **self.setting.describe(),
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
