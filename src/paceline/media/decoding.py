"""A process that decodes pictures and sound for `Decoder`, with bounds: files of others are never decoded elsewhere.

It may take so much memory, write no file, and, once all its modules are loaded, open no file and no connection at all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from paceline.errors import PromptError
from paceline.media.pixels import Cut, read_pixels, size_of
from paceline.media.sound import read_samples


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    _load()
    _bound(hello["memory"])
    _answer({})
    try:
        for line in sys.stdin:
            _answer(_done(json.loads(line)))
    except MemoryError:
        os._exit(1)  # a new process has all its memory again


def _load() -> None:
    """Import all that decoding may need: afterwards nothing can be opened."""
    with contextlib.suppress(ImportError):
        from PIL import Image, ImageOps  # noqa: F401

        Image.init()
    with contextlib.suppress(ImportError, OSError):  # the library itself may be missing
        import soundfile  # type: ignore[import-untyped]  # noqa: F401


def _bound(memory: int) -> None:
    """`memory`: bytes of address space beside what is mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # standard input, output and errors


def _done(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        data = base64.b64decode(asked.pop("data"))
        if asked["what"] == "size":
            return {"size": size_of(data)}
        if asked["what"] == "sound":
            return {"samples": base64.b64encode(read_samples(data).tobytes()).decode()}
        pixels = read_pixels(data, Cut(asked["budget"], asked["patch"], asked["pooling"]))
        rgb = base64.b64encode(pixels.rgb).decode()
        return {"height": pixels.height, "width": pixels.width, "seen": pixels.seen, "rgb": rgb}
    except PromptError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  what a decoder raises is not ours to show: it may hold bytes or addresses
        return {"refused": "the file is broken: save it again"}


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
