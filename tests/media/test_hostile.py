"""Files that are broken, lie about themselves, or are made to take all memory: one line each, and the next one works."""

from __future__ import annotations

import io
import re
import resource
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from media_models import file_of, picture, tone
from paceline.errors import PromptError
from paceline.media.decoder import Decoder
from paceline.media.pixels import Cut, read_pixels
from paceline.media.sound import resampled

CUT = Cut(70, 16, 3)
SMALL = picture(64, 48)
READ = ("png data", "png text", "gif no frame", "png palette", "tiff loop")  # odd, but pictures


def chunk(name: bytes, data: bytes, crc: int | None = None) -> bytes:
    body = name + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body) if crc is None else crc)


def png(width: int, height: int, *more: bytes, data: bytes = b"", kind: int = 2) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    idat = chunk(b"IDAT", zlib.compress(data)) if data else b""
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + idat + chunk(b"IEND", b"")


def sized(form: str, at: int, code: str, *values: int) -> bytes:
    """A whole file whose header says another size."""
    data = bytearray(file_of(SMALL, form))
    struct.pack_into(code, data, at, *values)
    return bytes(data)


def jpeg_of(width: int, height: int) -> bytes:
    data = file_of(SMALL, "JPEG")
    return data.replace(struct.pack(">HH", 48, 64), struct.pack(">HH", height, width), 1)


def tiff(width: int, height: int, *, loops: bool = False) -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
            (278, 4, 1, height), (279, 4, 1, 4)]  # fmt: skip
    directory = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + directory + struct.pack("<I", 8 if loops else 0)


def wav(form: bytes, data: bytes) -> bytes:
    return (
        b"RIFF\0\0\0\0WAVEfmt "
        + struct.pack("<I", len(form))
        + form
        + b"data"
        + struct.pack("<I", len(data))
        + data
    )


def form(kind: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16) -> bytes:
    return struct.pack("<HHIIHH", kind, channels, rate, 0, 0, bits)


def bombs() -> dict[str, bytes]:
    text = zlib.compress(b"x" * 20_000_000)
    return {
        "png 60000": png(60_000, 60_000), "png wide": png(16_385, 1), "png pixels": png(8_000, 8_000),
        "png 2^31": png(2**31 - 1, 2**31 - 1), "bmp": sized("BMP", 18, "<ii", 40_000, 40_000),
        "gif": sized("GIF", 6, "<HH", 65_535, 65_535), "jpeg": jpeg_of(65_500, 65_500),
        "tiff": tiff(2**31 - 1, 2**31 - 1),
        "tiff wide": tiff(100_000, 2), "webp": webp_of(16_383, 16_383),
        "png text": png(8, 8, chunk(b"zTXt", b"a\0\0" + text), chunk(b"iCCP", b"a\0\0" + text), data=b"\0" * 200),
        "png data": png(64, 64, data=b"\0" * 30_000_000),
    }  # fmt: skip


def webp_of(width: int, height: int) -> bytes:
    body = (
        b"VP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def broken() -> dict[str, bytes]:
    forms = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    cut = {f"half a {form}": file_of(SMALL, form)[: len(file_of(SMALL, form)) * 2 // 3] for form in forms}
    heads = {f"head of {form}": file_of(SMALL, form)[:16] for form in forms}
    flipped = bytearray(file_of(SMALL))
    flipped[60:90] = bytes(30)
    return cut | heads | {
        "empty": b"", "text": b"hello", "html": b"\n<!DOCTYPE html><p>log in", "svg": b"<svg xmlns='x'/>",
        "svg xml": b"<?xml version='1.0'?><svg/>", "pdf": b"%PDF-1.7", "heic": b"\0\0\0\x18ftypheic" + bytes(40),
        "zeros": bytes(4096), "ones": b"\xff" * 4096, "zip": b"PK\3\4" + bytes(100), "elf": b"\x7fELF" + bytes(100),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "ppm": b"P6 9 9 255\n" + bytes(243),
        "psd": b"8BPS\0\1" + bytes(60), "ico": b"\0\0\1\0\1\0" + bytes(30), "png no data": png(8, 8),
        "png no size": png(0, 8, data=b"\0"), "png short": png(64, 64, data=b"\0" * 9), "png crc": bytes(flipped),
        "png palette": png(8, 8, data=bytes(200), kind=3), "tiff loop": tiff(9, 9, loops=True),
        "tiff far": tiff(9, 9)[:40], "gif no frame": file_of(SMALL, "GIF")[:13] + b";",
    }  # fmt: skip


def sounds() -> dict[str, bytes]:
    short, nan = bytes(2000), np.full(500, np.nan, "<f4").tobytes()
    return {
        "no format": b"RIFF\0\0\0\0WAVE", "short format": wav(b"\1\0", short),
        "no channels": wav(form(channels=0), short),
        "many channels": wav(form(channels=65_535), short), "rate 0": wav(form(rate=0), short),
        "rate 2^32": wav(form(rate=2**32 - 1), short), "12 bits": wav(form(bits=12), short),
        "adpcm": wav(form(2), short),
        "nan": wav(form(3, bits=32), nan), "no samples": wav(form(), b""), "long": wav(form(rate=1000), bytes(70_000)),
        "endless chunk": b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\xff", "flac": b"fLaC" + bytes(100),
        "mp3": b"ID3" + bytes(100),
        "ogg": b"OggS" + bytes(100), "a picture": file_of(SMALL), "empty": b"", "text": b"hello",
    }  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def test_each_is_refused_in_one_line_and_the_next_one_works(decoder: Decoder) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pictures, count = bombs() | broken(), 0
    assert len(pictures) + len(sounds()) >= 60
    for name, data in pictures.items():
        for ask in (decoder.pixels, lambda data, cut: decoder.size(data)):
            try:
                ask(data, CUT)
            except PromptError as error:
                count += ask == decoder.pixels
                _one_line(str(error))
            else:
                assert ask != decoder.pixels or name in READ, name
    for name, data in sounds().items():
        try:
            decoder.samples(data)
            pytest.fail(name)
        except PromptError as error:
            _one_line(str(error))
    assert count >= 44
    assert decoder.pixels(file_of(SMALL), CUT) == read_pixels(file_of(SMALL), CUT)
    grown = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    assert (grown - before) * 1024 < 2**30


def _one_line(message: str) -> None:
    assert len(message) < 200
    assert "\n" not in message
    assert not re.search(r"0x[0-9a-f]{6}|<[a-z_.]+ object|Traceback|log in", message), message
    assert ":" in message  # what to do


def test_too_much_memory_or_time_ends_the_process_and_another_one_starts() -> None:
    large = file_of(Image.new("RGBA", (3000, 3600)), "PNG", compress_level=1)
    small = file_of(SMALL)
    tight = Decoder(memory=2**25)
    with pytest.raises(PromptError, match="32 MiB: send a smaller one"):
        tight.pixels(large, CUT)
    assert tight.pixels(small, CUT).seen == (48, 64)
    with pytest.raises(PromptError, match=r"0\.01 seconds"):
        Decoder(timeout=0.01).pixels(large, CUT)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_of_a_camera(decoder: Decoder, orientation: int) -> None:
    turned = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
              5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
              8: Image.Transpose.ROTATE_270}  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = SMALL.transpose(turned[orientation]) if orientation in turned else SMALL
    data = file_of(stored, exif=exif)
    assert decoder.pixels(data, CUT) == read_pixels(file_of(SMALL), CUT)
    assert decoder.size(data) == (48, 64)


def modes() -> list[tuple[str, Any, Any]]:
    """(name, picture as stored, the colour that its corner has)."""
    clear = Image.new("RGBA", (96, 96), (9, 9, 9, 0))
    palette = SMALL.quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    deep = Image.fromarray(np.full((96, 96), 0x80FF, np.uint16))
    animated = io.BytesIO()
    Image.new("RGB", (96, 96), (1, 2, 3)).save(
        animated, "GIF", save_all=True, append_images=[Image.new("RGB", (96, 96), (200, 2, 3))]
    )
    return [
        ("alpha", file_of(clear), (255, 255, 255)), ("gray and alpha", file_of(clear.convert("LA")), (255, 255, 255)),
        ("palette", file_of(palette, "PNG", transparency=palette.info["transparency"]), (255, 255, 255)),
        ("1 bit", file_of(Image.new("1", (96, 96), 1)), (255, 255, 255)), ("16 bit", file_of(deep), (128, 128, 128)),
        ("cmyk", file_of(Image.new("CMYK", (96, 96), (0, 0, 0, 255)), "JPEG"), (0, 0, 0)),
        ("gif", animated.getvalue(), (1, 2, 3)), ("gray", file_of(Image.new("L", (96, 96), 77)), (77, 77, 77)),
    ]  # fmt: skip


def test_every_kind_of_pixels(decoder: Decoder) -> None:
    for name, data, colour in modes():
        found = decoder.pixels(data, CUT)
        corner = np.frombuffer(found.rgb, np.uint8)[:3]
        assert np.abs(corner.astype(int) - colour).max() <= 1, name
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        assert decoder.pixels(file_of(SMALL, form), CUT).seen == (48, 64), form


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_every_kind_of_sound(decoder: Decoder, form: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    samples = tone(0.5, 44_100)
    soundfile.write(out, np.stack([samples, samples], axis=1), 44_100, format=form)
    found, plain = decoder.samples(out.getvalue()), resampled(samples, 44_100, 16_000)
    count = min(len(found), len(plain))
    assert count > 7_000
    lossy = 1e-3 if form == "FLAC" else 0.7  # coders delay and round; what is heard is the same
    assert (
        np.abs(np.abs(np.fft.rfft(found[:count])) - np.abs(np.fft.rfft(plain[:count]))).max()
        < lossy * count / 8
    )
