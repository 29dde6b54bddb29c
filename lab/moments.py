"""Moments of play: one decision with what was seen and done; the recording of the last ones, and how they look as GIF."""

import base64
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lab.errors import InputError

GIF_MOST = 400  # pictures; a longer stretch is thinned
HEIGHT = 240
GIF_MS = 70  # about the pace of an Atari game whose actions are held for four frames
GROUND, TEXT, BAR, TAKEN = "#16181d", "#c8ccd2", "#0072b2", "#e69f00"


@dataclass(frozen=True)
class Moment:
    """One decision: what was seen, what was answered, what was done.

    `number` counts decisions from 0; `frame` uint8 [height, width, 3] is the newest frame that the step saw; `names` and
    `probabilities` fp32 [options] are the answer; `action` is what was done, empty where nothing was; `reward` came with
    it and `score` is the episode's after it; `over` says that the episode ended there. Times are in ms.
    """

    number: int
    episode: int
    frame: np.ndarray = field(repr=False)
    names: tuple[str, ...]
    probabilities: np.ndarray
    confidence: float
    p_act: float
    score: float
    decision_ms: float
    action: str = ""
    reward: float = 0.0
    emulator_ms: float = 0.0
    over: bool = False

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Options with their probabilities, the most probable first."""
        order = np.argsort(-self.probabilities, kind="stable")
        return [(self.names[i], float(self.probabilities[i])) for i in order]

    def to_line(self) -> dict:
        """The moment as JSON holds it, its picture as a data address; `from_line` reads it back."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"frame": data_address(self.frame)}

    @classmethod
    def from_line(cls, line: dict) -> "Moment":
        picture = Image.open(io.BytesIO(base64.b64decode(line["frame"].partition(",")[2])))
        kept = {f.name: line[f.name] for f in fields(cls)}
        kept |= {"frame": np.asarray(picture.convert("RGB")), "names": tuple(line["names"])}
        return cls(**kept | {"probabilities": np.array(line["probabilities"], np.float32)})


class Recording:
    """The last moments, as many as fit into `most_bytes`; frames are kept packed, without loss."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self._kept: deque[tuple[Moment, tuple[int, ...], bytes]] = deque()

    def add(self, moment: Moment) -> None:
        packed = zlib.compress(np.ascontiguousarray(moment.frame), 1)
        self._kept.append((replace(moment, frame=None), moment.frame.shape, packed))
        self.bytes += len(packed)
        while self.bytes > self.most_bytes and len(self._kept) > 1:
            self.bytes -= len(self._kept.popleft()[2])

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: int) -> Moment:
        moment, shape, packed = self._kept[place]
        return replace(moment, frame=np.frombuffer(zlib.decompress(packed), np.uint8).reshape(shape))

    def __iter__(self) -> Iterator[Moment]:
        return (self[place] for place in range(len(self)))

    def episodes(self) -> dict[int, range]:
        """The places of each kept episode's moments, by its number; the oldest may lack its beginning."""
        found: dict[int, range] = {}
        for place, (moment, _, _) in enumerate(self._kept):
            start = found[moment.episode].start if moment.episode in found else place
            found[moment.episode] = range(start, place + 1)
        return found

    def spread(self, count: int) -> list[Moment]:
        """`count` moments spread evenly over the recording, all of them where there are fewer."""
        places = (
            np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int)) if len(self) else []
        )
        return [self[int(place)] for place in places]

    def save_gif(self, path: Path | str, places: range | None = None) -> int:
        """Write the moments of `places` (all by default) as a moving picture, each with its answer beside the frame.

        More than 400 are thinned evenly. Returns the number of pictures. Raises InputError for a path that cannot be
        written or does not end in .gif, and where nothing was recorded.
        """
        path = check_gif_path(path)
        places = range(len(self)) if places is None else places
        if not len(places):
            raise InputError("Nothing was recorded yet; play first.")
        kept = [
            places[i]
            for i in np.unique(np.linspace(0, len(places) - 1, min(len(places), GIF_MOST)).round().astype(int))
        ]
        pictures = (gif_picture(self[place]) for place in kept)
        file = io.BytesIO()  # whole or not at all
        first = next(pictures)
        first.save(file, "GIF", save_all=True, append_images=pictures, duration=GIF_MS, loop=0, optimize=False)
        try:
            path.write_bytes(file.getvalue())
        except OSError as error:
            raise InputError(f"Cannot write {path} ({error.strerror}); choose another place.") from error
        return len(kept)


def check_gif_path(path: Path | str) -> Path:
    """`path`, if a GIF can be written there; InputError names what is in the way."""
    path = Path(path).expanduser()
    if path.suffix.lower() != ".gif":
        raise InputError(f"{path} is no name of a GIF; let it end in .gif.")
    if not path.parent.is_dir():
        raise InputError(f"The folder {path.parent} is not there; make it, or choose another.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written; choose another place.")
    return path


# ---------------------------------------------------------------------------------------------- pictures


def picture_format(frame: np.ndarray) -> str:
    """`png` for a frame of few colours (Atari), which it keeps small and sharp; `jpeg` for one of many (Doom)."""
    return "png" if len(encode(frame, "png")) < 16_000 else "jpeg"


def encode(frame: np.ndarray, kind: str) -> bytes:
    """The frame as a `png` or `jpeg` file."""
    file = io.BytesIO()
    how = {"compress_level": 1} if kind == "png" else {"quality": 88}
    Image.fromarray(frame).save(file, kind, **how)
    return file.getvalue()


def data_address(frame: np.ndarray) -> str:
    """The frame as an address that holds the picture itself, for a page that opens anywhere."""
    kind = picture_format(frame)
    return f"data:image/{kind};base64,{base64.b64encode(encode(frame, kind)).decode()}"


def gif_picture(moment: Moment) -> Image.Image:
    """One picture of a GIF, 256 colours: the frame, a small one enlarged, and beside it the answer, the action in orange."""
    frame = Image.fromarray(moment.frame)
    scale = max(1, round(HEIGHT / frame.height))  # whole: stretched rows and columns pack badly
    width, height = scale * frame.width, scale * frame.height
    whole = Image.new("RGB", (width + 190, max(height, HEIGHT)), GROUND)
    whole.paste(frame.resize((width, height), Image.Resampling.NEAREST))
    draw, small, left = ImageDraw.Draw(whole), ImageFont.load_default(11), width + 10
    for row, (name, share) in enumerate(moment.ranked[:10]):
        top, colour = 8 + 18 * row, TAKEN if name == moment.action else TEXT
        draw.text((left, top), name[:14], colour, small)
        bar = (left + 95, top + 2, left + 95 + round(48 * share), top + 11)
        draw.rectangle(bar, TAKEN if name == moment.action else BAR)
        draw.text((left + 148, top), f"{share:.0%}", colour, small)
    said = f"episode {moment.episode + 1}   score {moment.score:g}\n{moment.decision_ms:.1f} ms a decision"
    draw.text((left, HEIGHT - 34), said, TEXT, small)
    return whole.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
