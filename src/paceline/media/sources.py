"""What a user may give as a picture in the library -> bytes of a file. A server takes data URLs only, see `of_url`."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from pathlib import Path
from typing import Any

from paceline.errors import PromptError

MOST_BYTES = 20 * 2**20  # of one file
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n]+")


def of_any(source: Any, where: str = "the picture") -> bytes:
    """Bytes of a path, bytes, a data URL, a PIL image or an array [height, width, 3] of uint8. Raises PromptError."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bounded(bytes(source), where)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return of_url(source, where)
    if isinstance(source, str) and re.match(r"[a-z]{2,}://", source, re.IGNORECASE):
        raise PromptError(
            f"{where} is a web address, which is not fetched: download it and give its path or bytes"
        )
    if isinstance(source, str | os.PathLike):
        return _of_path(Path(source), where)
    return _of_object(source, where)


def of_client(source: Any, where: str) -> bytes:
    """Bytes of what a client has sent: a data URL, or base64 alone. Nothing is fetched or opened. Raises PromptError."""
    if not isinstance(source, str):
        raise PromptError(f"{where} is no text: send a data URL, 'data:image/png;base64,...'")
    if re.match(r"[a-z][a-z0-9+.-]*:", source[:64], re.IGNORECASE):
        return of_url(source, where)
    return of_base64(source, where)


def of_url(url: str, where: str) -> bytes:
    """Bytes of a data URL. Nothing is fetched. Raises PromptError."""
    match = _DATA_URL.match(url)
    if match is None:
        raise PromptError(f"{where} is no data URL: nothing is fetched, send 'data:image/png;base64,...'")
    return of_base64(url[match.end() :], where)


def of_base64(text: str, where: str) -> bytes:
    """Strictly decoded, spaces allowed. Raises PromptError."""
    if len(text) > MOST_BYTES * 4 // 3 + MOST_BYTES // 16:
        raise PromptError(f"{where} has more than {MOST_BYTES // 2**20} MiB: send a smaller one")
    try:
        return bounded(base64.b64decode(_SPACE.sub("", text), validate=True), where)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{where} is no valid base64: encode the bytes of the file") from error


def bounded(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise PromptError(f"{where} has more than {MOST_BYTES // 2**20} MiB: send a smaller one")
    return data


def _of_path(path: Path, where: str) -> bytes:
    try:
        if not path.is_file():
            raise PromptError(f"{where}: there is no file {str(path)!r}: check the path")
        with path.open("rb") as file:
            return bounded(file.read(MOST_BYTES + 1), where)
    except (OSError, ValueError) as error:
        raise PromptError(f"{where}: cannot read {str(path)!r}: check the path and its rights") from error


def _of_object(source: Any, where: str) -> bytes:
    """A PIL image, or an array, as a PNG file, which loses nothing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PromptError("pictures need Pillow: pip install 'paceline[media]'") from error
    if not isinstance(source, Image.Image):
        try:
            source = Image.fromarray(source)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise PromptError(
                f"{where} is a {type(source).__name__}: give a path, bytes, a data URL, a PIL image or a uint8 array "
                "[height, width, 3]"
            ) from error
    out = io.BytesIO()
    try:
        (
            source if source.mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16") else source.convert("RGB")
        ).save(out, "PNG", compress_level=1)
    except (OSError, ValueError) as error:
        raise PromptError(f"{where} cannot be read as a picture: save it as PNG and give its path") from error
    return bounded(out.getvalue(), where) if len(out.getvalue()) <= MOST_BYTES else out.getvalue()
