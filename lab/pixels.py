"""Frames to pixel values: on the model's device with one fixed operator, or with the model's own image processor.

Both give one square view per frame, `size` x `size`, the aspect ratio not kept, no tiles, values (v - 127.5) / 127.5.
The processor resizes in two Lanczos hops (longest edge to 2048, then to the square), rounding to 8 bits in between; the
device path composes the two hops into one matrix per axis and so leaves the rounding in between out. On real frames the
two differ by less than 0.15 grey levels in the mean, with single pixels up to about 25 levels apart at hard edges.
"""

from typing import Any, Protocol

import numpy as np
import torch

from lab.errors import InputError

LONGEST_EDGE = 2048  # first hop of SmolVLM's processor ("size": {"longest_edge": 2048})
LINEAR = ("composed", "lanczos")  # applied as one matrix per axis
FILTERS = (*LINEAR, "bicubic", "bilinear", "nearest")
# What the published checkpoints call the paths and the filters.
PREPROCESS = {"gpu": "device", "processor": "processor"}
INTERPOLATIONS = {"processor": "composed"} | {name: name for name in FILTERS if name != "composed"}
PATHS = tuple(PREPROCESS.values())


def check_frames(frames: Any) -> np.ndarray:
    """Frames as one uint8 array [batch, frames, height, width, 3]; grey [..., 1] is repeated to three channels.

    Takes an array, a tensor, or nested lists of equally sized arrays. InputError for another dtype, rank or channel
    count, for an empty array, and for pictures of mixed sizes.
    """
    wanted = "give uint8 frames of shape [batch, frames, height, width, 3]"
    if isinstance(frames, torch.Tensor):
        if frames.dtype != torch.uint8:  # before numpy, which has no bfloat16
            raise InputError(
                f"frames have dtype {str(frames.dtype).removeprefix('torch.')}; {wanted}, with values 0 to 255"
            )
        frames = frames.detach().cpu().numpy()
    elif not isinstance(frames, np.ndarray):
        pictures = _pictures(frames)
        shapes = sorted({p.shape for p in pictures})
        if len(shapes) > 1:
            listed = " and ".join("x".join(map(str, s)) for s in shapes)
            raise InputError(f"frames have mixed sizes ({listed}); resize them to one size, or pass them separately")
        try:
            frames = np.asarray(frames)
        except ValueError:
            raise InputError(f"frames are a ragged list, with unequal numbers of pictures; {wanted}") from None
    if frames.dtype != np.uint8:
        raise InputError(f"frames have dtype {frames.dtype}; {wanted}, with values 0 to 255")
    if frames.ndim != 5:
        raise InputError(f"frames have {frames.ndim} dimensions {list(frames.shape)}; {wanted} (add axes with [None])")
    if 0 in frames.shape:
        raise InputError(f"frames have an empty dimension {list(frames.shape)}; {wanted}")
    if frames.shape[-1] == 1:
        return np.repeat(frames, 3, axis=-1)
    if frames.shape[-1] != 3:
        raise InputError(f"frames have {frames.shape[-1]} values in the last dimension {list(frames.shape)}; {wanted}")
    return frames


def _pictures(frames: Any) -> list[np.ndarray]:
    """The arrays at the leaves of nested lists, to name their sizes."""
    if isinstance(frames, list | tuple):
        return [p for part in frames for p in _pictures(part)]
    return [np.asarray(frames)]


class Pixels(Protocol):
    """What both paths offer: frames uint8 [N, H, W, 3] in, values [N, 3, size, size] on the model's device out."""

    path: str
    size: int

    def __call__(self, frames: Any) -> torch.Tensor: ...
    def uint8(self, frames: Any) -> torch.Tensor: ...


def make_pixels(
    path: str = "device",
    size: int = 512,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    filter: str = "composed",
) -> "DevicePixels | ProcessorPixels":
    """The preprocessing named `path` ("device" or "processor") for a model of `size` pixels; InputError otherwise. The
    processor has a filter of its own."""
    if path == "device":
        return DevicePixels(size, filter, device, dtype)
    if path == "processor":
        return ProcessorPixels(size, device, dtype)
    raise InputError(f"there is no pixel path {path!r}; take 'device' or 'processor'")


class DevicePixels:
    """Resizes and normalises on the device; takes uint8 [N, H, W, 3] (array or tensor), gives [N, 3, size, size].

    "composed" (the default) follows the model's processor: both Lanczos hops as one matrix per axis, composed in
    float64 and applied in float32, then rounded and clamped to 8 bits. "lanczos" is a single such hop straight to the
    square. "bicubic", "bilinear" (both antialiased) and "nearest" are single hops through torch's interpolate. The
    operators are kept here, one pair per frame size, so that a captured graph that reads them never sees them freed.
    Nothing in the call waits for the device. Do not allow TF32 for matrix products: its ten bits of mantissa move grey
    levels.
    """

    path = "device"

    def __init__(
        self,
        size: int = 512,
        filter: str = "composed",
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        _check_size(size)
        if filter not in FILTERS:
            raise InputError(f"there is no resize filter {filter!r}; take one of {', '.join(FILTERS)}")
        self.size, self.filter, self.device, self.dtype = size, filter, torch.device(device), dtype
        self._operators: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, frames: Any) -> torch.Tensor:
        """Pixel values (v - 127.5) / 127.5 of the resized frames, [N, 3, size, size] in `dtype` on `device`."""
        return self._levels(frames).to(self.dtype).sub_(127.5).div_(127.5)

    def uint8(self, frames: Any) -> torch.Tensor:
        """The resized frames before normalising, uint8 [N, 3, size, size] on `device`."""
        return self._levels(frames).to(torch.uint8)

    def operators(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices [size, height] and [size, width] (float32, rows sum to 1) that resize a frame of that size."""
        if (height, width) not in self._operators:
            hops = _first_hop(height, width) if self.filter == "composed" else (None, None)
            self._operators[height, width] = tuple(
                (_lanczos(middle, self.size) @ _lanczos(edge, middle) if middle else _lanczos(edge, self.size)).to(
                    self.device, torch.float32
                )
                for edge, middle in zip((height, width), hops, strict=True)
            )
        return self._operators[height, width]

    def _levels(self, frames: Any) -> torch.Tensor:
        """Grey levels as whole float32 numbers 0..255, [N, 3, size, size]."""
        if isinstance(frames, np.ndarray):
            frames = np.require(frames, requirements=["C", "W"])  # torch refuses negative strides and read-only memory
        frames = torch.as_tensor(frames, device=self.device)
        if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
            raise InputError(f"give uint8 frames [N, height, width, 3], not {frames.dtype} {list(frames.shape)}")
        levels = frames.float()
        if self.filter in LINEAR:
            rows, columns = self.operators(*frames.shape[1:3])
            levels = torch.einsum("sh,nhwc,tw->ncst", rows, levels, columns)
        else:
            mode = "nearest-exact" if self.filter == "nearest" else self.filter
            levels = torch.nn.functional.interpolate(
                levels.permute(0, 3, 1, 2), (self.size, self.size), mode=mode, antialias=self.filter != "nearest"
            )
        return levels.round_().clamp_(0, 255)


class ProcessorPixels:
    """The model's own processor (`SmolVLMImageProcessorPil`, no tiles) on the CPU, one frame after the other.

    Takes and gives the same as `DevicePixels`; the values are copied to `device` at the end.
    """

    path = "processor"
    filter = "processor"

    def __init__(self, size: int = 512, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        _check_size(size)
        self.size, self.device, self.dtype = size, torch.device(device), dtype
        self._processor = SmolVLMImageProcessorPil(
            size={"longest_edge": LONGEST_EDGE}, max_image_size={"longest_edge": size}, do_image_splitting=False
        )

    def __call__(self, frames: Any) -> torch.Tensor:
        """Pixel values of the resized frames, [N, 3, size, size] in `dtype` on `device`."""
        return self._run(frames).to(self.device, self.dtype)

    def uint8(self, frames: Any) -> torch.Tensor:
        """The resized frames before normalising, uint8 [N, 3, size, size] on `device`."""
        return self._run(frames, do_rescale=False, do_normalize=False).to(self.device, torch.uint8)

    def _run(self, frames: Any, **options: bool) -> torch.Tensor:
        frames = check_frames(np.asarray(torch.as_tensor(frames).cpu())[None])[0]
        batch = self._processor(list(frames), input_data_format="channels_last", return_tensors="pt", **options)
        return batch["pixel_values"].reshape(len(frames), 3, self.size, self.size)


def _check_size(size: int) -> None:
    if size < 64 or size % 64:
        raise InputError(f"image size {size} does not fit; it must be a multiple of 64 (patch 16, four by four merged)")


def _first_hop(height: int, width: int) -> tuple[int, int]:
    """Size after the processor's first hop: longest edge 2048, the other truncated, then made even by adding one."""
    ratio = width / height
    if width >= height:
        tall = int(LONGEST_EDGE / ratio)
        return tall + tall % 2, LONGEST_EDGE
    wide = int(LONGEST_EDGE * ratio)
    return LONGEST_EDGE, max(wide + wide % 2, 1)


def _lanczos(size: int, target: int) -> torch.Tensor:
    """The float64 matrix [target, size] of one antialiased Lanczos-3 resize along one axis, rows summing to 1.

    The rules are those of Pillow and torch: the filter, sinc(x) sinc(x/3) on |x| < 3, is stretched by size/target when
    shrinking, centred at (i + 0.5) size/target - 0.5, cut off at the border and renormalised.
    """
    scale = size / target
    stretch = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64)[:, None] + 0.5) * scale
    source = torch.arange(size, dtype=torch.float64)[None, :]
    low = (centre - 3 * stretch + 0.5).floor().clamp(min=0)
    high = (centre + 3 * stretch + 0.5).floor().clamp(max=size)
    x = (source - centre + 0.5) / stretch
    weights = torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)
    weights = torch.where((source >= low) & (source < high), weights, 0.0)
    return weights / weights.sum(dim=1, keepdim=True)
