"""One picture from a file, as a viewer shows it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lab.errors import InputError, foreign

BACKGROUND = "white"  # what a transparent picture is laid on
WHOLE_FIRST = ("MPO", "PSD")  # previews and layers come after the picture that a viewer shows
SIXTEEN_BIT = ("PNG", "PPM")  # of these, a picture of whole numbers (mode "I") holds 16-bit grey


def read_picture(path: Path | str) -> np.ndarray:
    """The picture in a file as a viewer shows it: uint8 [height, width, 3], an array of its own.

    Turned as its EXIF orientation says. A palette, grey and CMYK become colours (colour profiles are not applied), 16-bit
    grey from 0 to 65535 becomes 0 to 255, and what is transparent is laid on white. InputError, naming the file and what
    to do: for one that holds several pictures (an animation, pages), for numbers of no known range (floating point,
    32-bit), and for what cannot be read.
    """
    from PIL import Image, ImageOps

    with foreign(f"{path} cannot be read as a picture"), Image.open(path) as file:
        count = getattr(file, "n_frames", 1)
        if count > 1 and file.format not in WHOLE_FIRST:
            raise InputError(
                f"{path} holds {count} pictures; split it into single ones, or give an animation as video:FILE."
            )
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I;16") or (image.mode == "I" and file.format in SIXTEEN_BIT):
            return _eight_bits(np.asarray(image), getattr(file, "tag_v2", {}), image.info.get("transparency"))
        if image.mode in ("I", "F"):
            raise InputError(f"{path} holds numbers of no known range; save it as an 8-bit picture, such as .png.")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
        return np.array(image.convert("RGB"))


def _eight_bits(grey: np.ndarray, tags: Mapping, transparent: int | None) -> np.ndarray:
    """16-bit grey [height, width] as uint8 [height, width, 3]; the grey that counts as `transparent` is white.

    A TIFF's `tags` may say that only 12 of the bits are used (258), and that 0 is white (262).
    """
    most = 2 ** tags.get(258, (16,))[0] - 1
    levels = ((grey.astype(np.uint32) * 255 + most // 2) // most).astype(np.uint8)
    levels = 255 - levels if tags.get(262) == 0 else levels
    if transparent is not None:
        levels[grey == transparent] = 255
    return np.repeat(levels[..., None], 3, axis=-1)
