"""Pictures and films from files: as a viewer shows them, or refused by name."""

import numpy as np
import pytest
from PIL import Image

from lab import cli
from lab.envs import frames_for, make
from lab.errors import InputError
from lab.workloads import Question, Workload

COLOURS = np.array(
    [[[200, 10, 10], [10, 200, 10], [10, 10, 200]], [[200, 200, 10], [10, 200, 200], [200, 10, 200]]], np.uint8
)


def seen(folder, image, name="a.png", **how):
    """The frame that a folder with this one picture gives."""
    folder.mkdir(exist_ok=True)
    image.save(folder / name, **how)
    return make(f"folder:{folder}").reset()


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp"])
@pytest.mark.parametrize(
    ("orientation", "shown"),
    [
        (1, COLOURS),
        (2, COLOURS[:, ::-1]),
        (3, COLOURS[::-1, ::-1]),
        (4, COLOURS[::-1]),
        (5, COLOURS.transpose(1, 0, 2)),
        (6, np.rot90(COLOURS, -1)),
        (7, np.rot90(COLOURS, 2).transpose(1, 0, 2)),
        (8, np.rot90(COLOURS)),
    ],
)
def test_a_picture_is_turned_as_its_exif_says(tmp_path, name, orientation, shown):
    how = {"lossless": True} if name.endswith("webp") else {}
    found = seen(tmp_path / "own", Image.fromarray(COLOURS), name, exif=turned(orientation), **how)
    np.testing.assert_array_equal(found, shown)


def test_a_phones_upright_photo_stands_upright(tmp_path):
    lying = Image.fromarray(np.repeat(np.repeat(COLOURS, 32, 0), 32, 1))
    found = seen(tmp_path / "own", lying, "photo.jpg", exif=turned(6), quality=95, subsampling=0)
    assert found.shape == (96, 64, 3)
    np.testing.assert_allclose(found[16::32, 16::32], np.rot90(COLOURS, -1), atol=12)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path, name):
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    image = Image.fromarray(values)
    if name.endswith("pgm"):
        image = image.convert("I")
    found = seen(tmp_path / "own", image, name)
    assert found[0, :, 0].tolist() == [0, 1, 128, 255] and (found == found[..., :1]).all()


def tiff(place, width, bits, photometric, data):
    """A TIFF of one row, as neither Pillow nor we would write it."""
    place.mkdir()
    entries = [(256, 3, width), (257, 3, 1), (258, 3, bits), (259, 3, 1), (262, 3, photometric), (273, 4, 110)]
    entries += [(278, 3, 1), (279, 4, len(data))]
    packed = b"".join(b"".join(n.to_bytes(k, "little") for n, k in zip((*e[:2], 1, e[2]), (2, 2, 4, 4), strict=True))
                      for e in entries)  # fmt: skip
    (place / "a.tif").write_bytes((b"II*\0\x08\0\0\0\x08\0" + packed + b"\0\0\0\0").ljust(110, b"\0") + data)
    return make(f"folder:{place}").reset()[0, :, 0].tolist()


def test_twelve_bits_zero_as_white_and_a_transparent_grey_are_minded(tmp_path):
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    assert tiff(tmp_path / "plain", 4, 16, 1, values.tobytes()) == [0, 1, 128, 255]
    assert tiff(tmp_path / "white", 4, 16, 0, values.tobytes()) == [255, 254, 127, 0]
    assert tiff(tmp_path / "twelve", 2, 12, 1, bytes([0x80, 0x0F, 0xFF])) == [128, 255]
    found = seen(tmp_path / "own", Image.fromarray(values), transparency=32768)
    assert found[0, :, 0].tolist() == [0, 1, 255, 255]


def test_what_is_transparent_lies_on_white(tmp_path):
    alpha = np.array([[255, 0, 128], [255, 255, 255]], np.uint8)
    found = seen(tmp_path / "rgba", Image.fromarray(np.dstack([COLOURS, alpha])))
    np.testing.assert_array_equal(found[1], COLOURS[1])
    assert found[0, 0].tolist() == [200, 10, 10] and found[0, 1].tolist() == [255] * 3
    np.testing.assert_allclose(found[0, 2], (COLOURS[0, 2].astype(int) + 255) / 2, atol=1.5)
    grey = np.array([[0, 100, 200]], np.uint8)
    for image, how in (
        (Image.fromarray(np.dstack([grey, np.array([[255, 0, 255]], np.uint8)]), "LA"), {}),
        (Image.fromarray(grey), {"transparency": 100}),
    ):
        assert seen(tmp_path / "grey", image, **how)[0, :, 0].tolist() == [0, 255, 200]
    palette = Image.fromarray(COLOURS).quantize(8)
    clear = palette.getpixel((1, 0))
    for name in ("a.png", "a.gif"):
        found = seen(tmp_path / name[2:], palette, name, transparency=clear)
        assert found[0, 1].tolist() == [255] * 3
        np.testing.assert_allclose(found[1], COLOURS[1], atol=4)


def test_palettes_and_cmyk_become_colours(tmp_path):
    palette = Image.fromarray(COLOURS).quantize(8)
    np.testing.assert_array_equal(seen(tmp_path / "p", palette), np.asarray(palette.convert("RGB")))
    inks = np.zeros((1, 3, 4), np.uint8)
    inks[0, 1] = 255, 0, 0, 0
    inks[0, 2] = 0, 0, 0, 255
    found = seen(tmp_path / "cmyk", Image.fromarray(inks, "CMYK"), "a.tif")
    assert found[0].tolist() == [[255] * 3, [0, 255, 255], [0] * 3]
    assert seen(tmp_path / "bits", Image.fromarray(np.array([[True, False]])))[0, :, 0].tolist() == [255, 0]


@pytest.mark.parametrize(
    ("name", "image", "how", "says"),
    [
        ("a.tif", Image.fromarray(np.full((2, 2), 0.5, np.float32)), {}, "no known range"),
        ("a.tif", Image.fromarray(np.full((2, 2), 70000, np.int32)), {}, "no known range"),
        *[
            (f"a.{kind}", Image.fromarray(COLOURS), {"save_all": True, "append_images": [Image.fromarray(255 - COLOURS)]},
             r"holds 2 pictures.*split it into single ones.*video:FILE")
            for kind in ("gif", "tif", "webp", "png")
        ],
    ],
)  # fmt: skip
def test_what_viewers_do_not_agree_on_is_refused_by_name(tmp_path, name, image, how, says, capsys):
    with pytest.raises(InputError, match=says) as told:
        seen(tmp_path / "own", image, name, **how)
    assert str(tmp_path / "own" / name) in str(told.value) and "\n" not in str(told.value)


def test_a_photo_with_a_preview_behind_it_is_one_picture(tmp_path):
    large = Image.fromarray(np.repeat(np.repeat(COLOURS, 16, 0), 16, 1))
    found = seen(tmp_path / "own", large, "a.mpo", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert found.shape == (32, 48, 3)


@pytest.mark.parametrize(("matrix", "quarters"), [((0, 1, -1, 0), -1), ((0, -1, 1, 0), 1), ((-1, 0, 0, -1), 2)])
def test_a_film_is_turned_as_its_file_says(tmp_path, matrix, quarters):
    av = pytest.importorskip("av")
    picture = np.repeat(np.repeat(COLOURS, 32, 0), 32, 1)
    with av.open(str(tmp_path / "clip.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    lying = make(f"video:{tmp_path / 'clip.mp4'}").reset()
    data = bytearray((tmp_path / "clip.mp4").read_bytes())
    place = data.index(b"tkhd") + 4 + 40  # the track's matrix: a, b, u, c, d, v, ...
    a, b, c, d = (int(number * 65536).to_bytes(4, "big", signed=True) for number in matrix)
    data[place : place + 8], data[place + 12 : place + 20] = a + b, c + d
    (tmp_path / "clip.mp4").write_bytes(data)
    np.testing.assert_array_equal(make(f"video:{tmp_path / 'clip.mp4'}").reset(), np.rot90(lying, quarters))


# --- a source that refills one buffer is one that gives fresh arrays ---------------------------------------------------

REFILLED = """import numpy as np
shown, buffer = np.random.default_rng({seed}).integers(0, 256, (12, {shape}), dtype=np.uint8), np.empty(({shape}), np.uint8)
def fresh(i): return shown[i % 12].copy()
def refilled(i):
    buffer[...] = shown[i % 12]
    return buffer
"""


def workload(source, frames):
    return Workload("own", "own", Question("choice", "Which?", ["a", "b"]), source, frames)


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", ["6, 5, 3", "6, 5", "6, 5, 1"])
def test_a_function_may_refill_one_array(tmp_path, frames, shape):
    from lab.envs import record_frames

    (tmp_path / "own.py").write_text(REFILLED.format(seed=frames, shape=shape))
    one, other = (f"python:{tmp_path / 'own.py'}:{name}" for name in ("fresh", "refilled"))
    wanted = frames_for(workload(one, frames), 9)
    assert len(np.unique(wanted[:, -1], axis=0)) == 9
    np.testing.assert_array_equal(frames_for(workload(other, frames), 9), wanted)
    np.testing.assert_array_equal(record_frames(other, 9), record_frames(one, 9))
    np.testing.assert_array_equal(
        frames_for(workload(f"{other} + {other}", 2 * frames), 9), frames_for(workload(f"{one} + {one}", 2 * frames), 9)
    )
    np.testing.assert_array_equal(record_frames(f"{other} + {other}", 9), record_frames(f"{one} + {one}", 9))


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("frames", [2, 3, 4])
def test_a_gymnasium_environment_may_refill_one_array(frames, drawn):
    gymnasium = pytest.importorskip("gymnasium")

    class Wheel(gymnasium.Env):
        """Shows as its observation, or draws, one array; ends every fifth step."""

        metadata = {"render_modes": ["rgb_array"]}
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode=None, refilled=True):
            self.render_mode, self.refilled, self.moment = render_mode, refilled, 0
            self.buffer = np.empty((6, 5, 3), np.uint8)
            self.observation_space = gymnasium.spaces.Box(0, 255, (6, 5, 3), np.uint8)

        def render(self):
            self.buffer[...] = 10 * self.moment + np.arange(5)[:, None]
            return self.buffer if self.refilled else self.buffer.copy()

        def _seen(self):
            self.moment += 1
            return np.zeros(1, np.float32) if drawn else self.render()

        def reset(self, *, seed=None, options=None):
            return self._seen(), {}

        def step(self, action):
            return self._seen(), 0.0, self.moment % 5 == 0, False, {}

    names = [f"{kind}{drawn}{frames}-v0" for kind in ("Refilled", "Fresh")]
    for name in names:
        gymnasium.register(name, Wheel, kwargs={"refilled": name.startswith("Refilled")})
    found, wanted = (frames_for(workload(f"gym:{name}", frames), 12) for name in names)
    assert len(np.unique(wanted[:, -1], axis=0)) == 12
    np.testing.assert_array_equal(found, wanted)


def test_atari_hands_on_frames_of_its_own(monkeypatch):
    pytest.importorskip("ale_py")
    game, screen = make("atari:Pong"), np.zeros((210, 160, 3), np.uint8)

    def shown(*_, **__):
        screen[...] += 1
        return screen

    monkeypatch.setattr(game._env, "reset", lambda **_: (shown(), {}))
    monkeypatch.setattr(game._env, "step", lambda _: (shown(), 0.0, False, False, {}))
    assert [int(frame.max()) for frame in [game.reset(), game.step(0)[0], game.step(0)[0]]] == [1, 2, 3]
    bare = make("atari:Pong")
    bare.reset()
    step = bare.bare()
    assert not np.shares_memory(step(0)[0], step(0)[0])


def test_doom_keeps_its_last_frame_to_itself():
    pytest.importorskip("vizdoom")
    from types import SimpleNamespace

    from lab.envs.doom import Doom

    screen, ended = np.zeros((240, 320, 3), np.uint8), []
    game = object.__new__(Doom)
    game.source, game.actions, game._tics = "doom:basic", ["ATTACK"], 4
    game._game = SimpleNamespace(
        new_episode=lambda: None,
        get_state=lambda: SimpleNamespace(screen_buffer=screen, labels=[]),
        make_action=lambda *_: screen.__iadd__(1) is None,
        is_episode_finished=lambda: bool(ended),
    )
    frames = [game.reset(), game.step(0)[0]]
    assert [int(frame.max()) for frame in frames] == [0, 1]
    frames[1][...] = 99  # whoever has a frame may draw on it
    ended.append(True)
    last, _, over = game.step(0)
    assert over and int(last.max()) == 1
    last[...] = 99
    assert int(game.step(0)[0].max()) == 1


# --- leaving is failing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit(0)", "cannot be loaded (SystemExit: 0)"),
        ("import sys\ndef frame(i): sys.exit()", "failed at frame 0 (SystemExit)"),
        ("def frame(i): return [[1], [1, 2]]", "frame 0 is no picture (ValueError"),
        ("class A:\n def __array__(self, *a, **k): raise SystemExit(0)\ndef frame(i): return A()", "(SystemExit: 0)"),
    ],
)
def test_a_source_that_leaves_is_a_failure(tmp_path, monkeypatch, capsys, code, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(InputError) as told:
        make("python:own.py:frame").reset()
    assert says in str(told.value)
    (tmp_path / "mine.toml").write_text(
        'source = "python:own.py:frame"\ninstructions = "Which?"\noptions = ["a", "b"]\n'
    )
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--profile", "smoke", "--workload", "mine.toml", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and says in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("where", ["__init__", "reset", "step", "render", "close"])
def test_a_gymnasium_environment_that_leaves_is_a_failure(where):
    gymnasium = pytest.importorskip("gymnasium")

    class Leaves(gymnasium.Env):
        metadata = {"render_modes": ["rgb_array"]}
        action_space, observation_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(0, 1, (1,))

        def _at(self, place):
            if place == where:
                raise SystemExit(0)

        def __init__(self, render_mode=None):
            self.render_mode = render_mode
            self._at("__init__")

        def reset(self, *, seed=None, options=None):
            self._at("reset")
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self._at("step")
            return np.zeros(1, np.float32), 0.0, False, False, {}

        def render(self):
            self._at("render")
            return np.zeros((4, 4, 3), np.uint8)

        def close(self):
            self._at("close")

    gymnasium.register(f"Leaves{where}-v0", Leaves)
    with pytest.raises(InputError, match=r"gym.*SystemExit: 0"):
        frames_for(workload(f"gym:Leaves{where}-v0", 1), 3)
