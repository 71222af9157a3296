"""A picture's file -> the pixels that a tower reads: turned as EXIF says, 8-bit RGB, as large as the budget allows.

Pillow decodes and resizes, as in transformers, byte for byte. It is imported where a picture is, not before.
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import PromptError

if TYPE_CHECKING:
    from PIL import Image

VERSION = 1  # of what is done here: raised when the same file may give other pixels
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
MOST_PIXELS, MOST_SIDE = 50_000_000, 16_384
_MOST = f"at most {MOST_SIDE} a side and {MOST_PIXELS // 10**6} million pixels"
_OTHERS = {  # what is known by its beginning and not read
    b"<svg": "SVG, a drawing", b"%PDF": "a PDF file", b"<!do": "a web page", b"<htm": "a web page",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """How many soft tokens a picture may have, each of a square of `side` pixels, made of patches of `patch` pixels."""

    budget: int
    patch: int
    pooling: int

    @property
    def side(self) -> int:
        return self.patch * self.pooling


@dataclass(frozen=True, slots=True)
class Pixels:
    height: int
    width: int
    rgb: bytes  # [height, width, 3]
    seen: tuple[int, int]  # height and width of the picture itself


def resized(height: int, width: int, cut: Cut) -> tuple[int, int]:
    """(height, width) in pixels of a picture that fills the budget as far as whole squares allow. Raises PromptError.

    In the order of operations of transformers, so that exact multiples come out alike.
    """
    most, side = cut.budget * cut.pooling**2 * cut.patch**2, cut.side
    factor = math.sqrt(most / (height * width))
    tall = math.floor(factor * height / side) * side
    wide = math.floor(factor * width / side) * side
    if not tall and not wide:
        raise PromptError(
            f"a picture of {width} x {height} has no room in {cut.budget} soft tokens: raise the budget"
        )
    if not tall:
        tall, wide = side, min(math.floor(width / height) * side, cut.budget * side)
    elif not wide:
        tall, wide = min(math.floor(height / width) * side, cut.budget * side), side
    if tall * wide > most:
        raise PromptError(
            f"a picture of {width} x {height} does not fit into {cut.budget} soft tokens: cut it"
        )
    return tall, wide


def soft_tokens(size: tuple[int, int], cut: Cut) -> int:
    """How many a picture of (height, width) becomes."""
    tall, wide = resized(*size, cut)
    return (tall // cut.side) * (wide // cut.side)


def read_pixels(data: bytes, cut: Cut) -> Pixels:
    """Decode and resize a picture's file. Raises PromptError for what is no picture, or too large."""
    from PIL import Image

    picture = _open(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return fitted(as_rgb(picture), cut)
        except PromptError:
            raise
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, Warning) as error:
            raise PromptError(f"the {picture.format} picture is broken or cut off: send it again") from error


def size_of(data: bytes) -> tuple[int, int]:
    """(height, width) as shown, from the header alone. Raises PromptError."""
    picture = _open(data)
    turned = picture.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    return (picture.width, picture.height) if turned else (picture.height, picture.width)


def _open(data: bytes) -> Image.Image:
    """A picture whose header was read and whose pixels were not. Raises PromptError."""
    from PIL import Image

    if not data:
        raise PromptError("the picture is empty: send the bytes of a file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the size is looked at below
        try:
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:  # Pillow's own bound, far above ours
            raise PromptError(f"the picture is too large: {_MOST}") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise PromptError(f"{_what(data)}: send {', '.join(FORMATS)}") from error
    if max(picture.size) > MOST_SIDE or picture.width * picture.height > MOST_PIXELS:
        raise PromptError(f"a picture of {picture.width} x {picture.height} is too large: {_MOST}")
    return picture


def _what(data: bytes) -> str:
    head = data[:64].lstrip().lower()
    if data[4:12] in (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftyphevc"):
        return "a HEIC picture cannot be read"
    named = next((what for begin, what in _OTHERS.items() if head.startswith(begin.lower())), None)
    if head.startswith(b"<?xml") and b"<svg" in data[:1000]:
        named = "SVG, a drawing"
    return f"the file is {named}, not a picture" if named else "the file is no picture of a known kind"


def as_rgb(picture: Image.Image) -> Image.Image:
    """The first frame, turned as EXIF says, without transparency (on white), 8-bit RGB."""
    from PIL import Image, ImageOps

    picture.seek(0)
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits of gray, which Pillow alone would clip to white
        gray = np.asarray(picture) >> 8
        picture = Image.fromarray(gray.clip(0, 255).astype(np.uint8))
    if "transparency" in picture.info or picture.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        clear = picture.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, clear).convert("RGB")
    return picture.convert("RGB")


def fitted(picture: Image.Image, cut: Cut) -> Pixels:
    """An RGB picture in the size that fills the budget."""
    from PIL import Image

    tall, wide = resized(picture.height, picture.width, cut)
    seen = picture.height, picture.width
    if seen != (tall, wide):
        picture = picture.resize((wide, tall), Image.Resampling.BICUBIC)
    return Pixels(tall, wide, picture.tobytes(), seen)
