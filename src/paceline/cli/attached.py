"""Pictures and sound in a conversation of the terminal: paths that are pasted or dragged into a line, and what waits."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.media.reader import MediaReader
    from paceline.soft_tokens import Kind

_PICTURES = ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff", "avif")
_SOUNDS = ("wav", "mp3", "flac", "ogg")
_ENDING = rf"\.(?:{'|'.join((*_PICTURES, *_SOUNDS))})"
_PATH = re.compile(  # "in quotes", 'in quotes', or up to a space that no \ stands before
    rf"""(?:(?<=\s)|^)(?:"([^"\n]+{_ENDING})"|'([^'\n]+{_ENDING})'|((?:\\.|[^\s"'\\])+{_ENDING}))(?=$|[\s,;:.!?)])""",
    re.IGNORECASE,
)
_DRIVE = re.compile(r"/?[A-Za-z]:[\\/]")


@dataclass(frozen=True, slots=True)
class Attachment:
    kind: Kind
    name: str
    data: bytes
    tokens: int

    @property
    def part(self) -> dict[str, Any]:
        """Of a message; a data URL, so that it can be saved."""
        return {
            "type": self.kind,
            self.kind: f"data:application/octet-stream;base64,{base64.b64encode(self.data).decode()}",
        }

    def __str__(self) -> str:
        return f"attached {self.name}: {len(self.data) / 1000:,.0f} kB, {self.tokens} tokens"


def attach(reader: MediaReader | None, path: str, kind: Kind | None = None) -> Attachment:
    """Read a file, decode its header, and count its tokens. Raises UsageError for what cannot be read."""
    from paceline.media.sources import of_any
    from paceline.media.talk import MediaItem

    place = Path(os.path.expanduser(path))
    kind = kind or ("audio" if place.suffix[1:].lower() in _SOUNDS else "image")
    if reader is None or (why := reader.why_not(kind)) is not None:
        why = "this model reads text only" if reader is None else why
        raise UsageError(f"{place.name} cannot be attached: {why}")
    data = of_any(place, place.name)
    return Attachment(kind, place.name, data, reader.count(MediaItem(kind, data, place.name)))


def files_in(text: str) -> tuple[str, list[str], list[str]]:
    """(the text without the paths of existing files, these, paths of files that do not exist). Web addresses are text."""
    files, missing = list[str](), list[str]()

    def take(match: re.Match[str]) -> str:
        typed = match[1] or match[2] or match[3]
        if "://" in typed and not typed.lower().startswith("file://"):
            return match[0]
        path = next(
            (spelling for spelling in _spelled(typed, bare=match[3] is not None) if Path(spelling).is_file()),
            None,
        )
        (missing if path is None else files).append(typed if path is None else path)
        return match[0] if path is None else ""

    rest = _PATH.sub(take, text)
    return (re.sub(r"[ \t]{2,}", " ", rest).strip() if files else text), files, missing


def typed_path(text: str, command: str) -> str:
    """The path behind a command, as it may be quoted or dragged. Raises UsageError without one."""
    quoted = text[:1] in "\"'" and text[:1] == text[-1:]
    bare = text[1:-1] if quoted else text
    if not bare:
        raise UsageError(f"{command} needs the name of a file: {command} cat.jpg")
    return next((spelling for spelling in _spelled(bare, bare=not quoted) if Path(spelling).is_file()), bare)


def _spelled(typed: str, *, bare: bool) -> list[str]:
    """What a typed path may mean, the likeliest first."""
    if typed.lower().startswith("file://"):
        path = unquote(typed[len("file://") :]).removeprefix("localhost")
        return [path[1:] if _DRIVE.match(path) and path.startswith("/") else path]
    plain = re.sub(r"\\(.)", r"\1", typed) if bare and not _DRIVE.match(typed) else typed
    return [os.path.expanduser(spelling) for spelling in dict.fromkeys((plain, typed))]


def content(text: str, attached: Seq[Attachment]) -> str | list[dict[str, Any]]:
    """A message: what is attached stands before its text."""
    if not attached:
        return text
    return [
        *(attachment.part for attachment in attached),
        *([{"type": "text", "text": text}] if text else []),
    ]
