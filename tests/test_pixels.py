import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.errors import InputError
from lab.pixels import DevicePixels, ProcessorPixels, _first_hop, _lanczos, check_frames, make_pixels

GOLDEN = Path(__file__).parent / "golden"
FRAMES = dict(np.load(GOLDEN / "frames.npz"))
EXPECTED = dict(np.load(GOLDEN / "pixels_all_frames.npz"))  # uint8 [3, 128, 128] per frame and path
FINGERPRINTS = json.loads((GOLDEN / "pixels.json").read_text())


def difference(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int))


@pytest.fixture(scope="module")
def processed() -> dict[tuple[str, int], torch.Tensor]:
    """The processor's grey levels of every golden frame, at two sizes."""
    by_size = {size: ProcessorPixels(size) for size in (256, 512)}
    return {(n, s): p.uint8(f[None])[0] for n, f in FRAMES.items() if "prev" not in n for s, p in by_size.items()}


@pytest.mark.parametrize("name", FRAMES)
def test_device_path_gives_the_golden_grey_levels(name):
    levels = DevicePixels(128).uint8(FRAMES[name][None])[0]
    off = difference(levels, EXPECTED[f"{name}_gpu"])
    # boxing_a_prev holds the one value that falls on the other side of a rounding tie between fp32 and fp64 operators
    assert (off > 0).sum() <= (1 if name == "boxing_a_prev" else 0)
    assert off.max() <= 1


@pytest.mark.parametrize("name", ["pong_a", "doom_a"])
@pytest.mark.parametrize("size", [512, 256, 128])
def test_device_path_is_bitwise_the_golden_one(name, size):
    values = DevicePixels(size)(FRAMES[name][None])[0]
    assert (
        hashlib.sha256(values.numpy().tobytes()).hexdigest()
        == FINGERPRINTS[f"{name}_gpu_{size}"]["sha256_of_float32_chw"]
    )


@pytest.mark.parametrize("name", FRAMES)
def test_processor_path_is_within_one_level_of_golden(name):
    assert difference(ProcessorPixels(128).uint8(FRAMES[name][None])[0], EXPECTED[f"{name}_processor"]).max() <= 1


@pytest.mark.parametrize("size", [512, 256])
def test_composed_operator_follows_the_processor_within_the_published_bounds(processed, size):
    pixels = DevicePixels(size)
    for (name, at), levels in processed.items():
        if at == size:
            off = difference(pixels.uint8(FRAMES[name][None])[0], levels)
            assert off.mean() < 0.15, name
            assert np.percentile(off, 99) < 6, name
            assert off.max() <= 25, name


# grey levels from the processor's picture, published for 50 Breakout frames: size, filter, largest, mean
@pytest.mark.parametrize(
    ("size", "filter", "largest", "mean"),
    [
        (512, "composed", 22, 0.049),
        (512, "bicubic", 24, 0.407),
        (512, "bilinear", 55, 0.793),
        (256, "composed", 19, 0.134),
        (256, "bicubic", 27, 0.610),
        (256, "bilinear", 55, 0.766),
    ],
)
def test_every_filter_is_as_far_from_the_processor_as_published(processed, size, filter, largest, mean):
    pixels = DevicePixels(size, filter)
    for name in ("breakout_a", "breakout_b"):
        off = difference(pixels.uint8(FRAMES[name][None])[0], processed[name, size])
        assert off.max() <= largest
        assert off.mean() == pytest.approx(mean, rel=0.06)


def test_lanczos_matrix_matches_pillow():
    from PIL import Image

    column = np.random.default_rng(0).integers(0, 256, (210, 1), dtype=np.uint8).astype(np.float32)
    for target in (512, 64):
        ours = _lanczos(210, target).numpy() @ column[:, 0]
        theirs = np.asarray(Image.fromarray(column).resize((1, target), Image.Resampling.LANCZOS))[:, 0]
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_operator_rows_sum_to_one():
    rows, columns = DevicePixels(512).operators(240, 320)
    assert rows.shape == (512, 240) and columns.shape == (512, 320)
    for operator in (rows, columns):
        torch.testing.assert_close(operator.sum(1), torch.ones(512), atol=1e-6, rtol=0)


def test_first_hop_sizes():
    assert _first_hop(210, 160) == (2048, 1560)
    assert _first_hop(240, 320) == (1536, 2048)
    assert _first_hop(100, 100) == (2048, 2048)


@pytest.mark.parametrize("path", ["device", "processor"])
def test_paths_share_one_call(path):
    frames = np.stack([FRAMES["pong_a"], FRAMES["pong_b"]])
    pixels = make_pixels(path, 128, "cpu", torch.bfloat16)
    values = pixels(frames)
    assert values.shape == (2, 3, 128, 128) and values.dtype == torch.bfloat16
    assert values.min() >= -1 and values.max() <= 1
    exact = (pixels.uint8(frames).float() - 127.5) / 127.5
    torch.testing.assert_close(values.float(), exact, atol=0.01, rtol=0)
    torch.testing.assert_close(pixels(torch.from_numpy(frames)), values)
    assert not torch.equal(values[0], values[1])


def test_nearest_only_repeats_pixels():
    frame = FRAMES["breakout_a"]
    resized = DevicePixels(512, "nearest").uint8(frame[None])[0].permute(1, 2, 0).reshape(-1, 3)
    colours = {tuple(c) for c in frame.reshape(-1, 3).tolist()}
    assert {tuple(c) for c in resized.tolist()} == colours


def test_one_object_serves_several_frame_sizes():
    pixels = DevicePixels(128)
    first = pixels(FRAMES["pong_a"][None])
    pixels(FRAMES["doom_a"][None])
    assert torch.equal(first, pixels(FRAMES["pong_a"][None]))


def test_flipped_and_read_only_views_are_taken():
    flipped = FRAMES["pong_a"][None][:, :, ::-1]
    copied = np.ascontiguousarray(flipped)
    copied.flags.writeable = False
    assert torch.equal(DevicePixels(128)(flipped), DevicePixels(128)(copied))


def test_check_frames_takes_arrays_tensors_lists_and_grey():
    frames = np.arange(2 * 1 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 1, 4, 5, 3)
    for given in (frames, torch.from_numpy(frames), [list(row) for row in frames]):
        np.testing.assert_array_equal(check_frames(given), frames)
    grey = check_frames(frames[..., :1])
    assert grey.shape == frames.shape
    np.testing.assert_array_equal(grey[..., 2], frames[..., 0])


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (np.zeros((1, 1, 4, 4, 3), np.float32), "float32"),
        (np.zeros((1, 1, 4, 4, 3), np.int64), "int64"),
        (torch.zeros((1, 1, 4, 4, 3), dtype=torch.bfloat16), "dtype bfloat16"),
        (np.zeros((4, 4, 3), np.uint8), "3 dimensions"),
        (np.zeros((1, 4, 4, 3), np.uint8), "4 dimensions"),
        (np.zeros((1, 1, 3, 4, 4), np.uint8), "4 values in the last dimension"),
        (np.zeros((0, 1, 4, 4, 3), np.uint8), "empty"),
        ([[np.zeros((4, 4, 3), np.uint8)], [np.zeros((6, 5, 3), np.uint8)]], "4x4x3 and 6x5x3"),
        ([[np.zeros((4, 4, 3), np.uint8)] * 2, [np.zeros((4, 4, 3), np.uint8)]], "unequal numbers"),
    ],
)
def test_check_frames_names_what_is_wrong(frames, says):
    with pytest.raises(InputError, match=says):
        check_frames(frames)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_pixels("gpu", 512),
        lambda: DevicePixels(500),
        lambda: DevicePixels(512, "lanczos5"),
        lambda: ProcessorPixels(0),
        lambda: DevicePixels(64)(np.zeros((1, 4, 4, 3), np.float32)),
    ],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(InputError):
        make()
