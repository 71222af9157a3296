"""The `tokenizers` library behind a guard: what files bring is bounded before it runs, and its panics are errors of ours.

Its regular expressions backtrack. Where they give up it panics, which Python sees as a BaseException that no handler of
requests expects; it has written its own lines to standard error by then.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from paceline.errors import LoadError, PacelineError, PromptError, RequestFailed
from paceline.files import read_bytes, read_json

MOST_IDS = 2**24
MOST_BYTES = 128 * 2**20  # of tokenizer.json; the largest known has half of it
MOST_GROWTH = 16  # what normalizers may make of one character, all replacements together
MOST_PREFIX = 256  # characters that are put before a text, or that one entry of a normalizer's table writes
_LONG = 2048  # characters: what is longer is encoded without holding the interpreter
_SHOWN = 300  # characters of what the library says is wrong
_COMPOSED = 4  # characters of a text that NFC may make one of
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
_LARGE_NUMBER = re.compile(rb":\s*\d{8}")


@contextmanager
def guarded(kind: type[PacelineError], what: str, todo: str) -> Iterator[None]:
    """Raise `kind`, with what is wrong and what to do, where the library panics or fails."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, SystemExit, GeneratorExit, PacelineError):
        raise
    except BaseException as error:  # panics are no Exception
        raise kind(f"{what} ({' '.join(str(error).split())[:_SHOWN]}): {todo}") from error


def read_backend(path: Path) -> Backend:
    """tokenizer.json, ready to encode. Raises LoadError."""
    data = _bounded(path)
    with guarded(LoadError, f"{path} cannot be read as a tokenizer", "download it again"):
        backend = Backend.from_buffer(data)
        backend.no_padding()  # before anything is encoded: a file may ask for padding to 2**40 tokens
        backend.no_truncation()
        check_growth(backend, path)
        backend.encode("a")  # some mistakes show only here
    return backend


def encode(backend: Backend, text: str) -> list[int]:
    """Token ids without those that the tokenizer puts around a text. Raises PromptError."""
    todo = "send it without long runs of one kind of character"
    with guarded(PromptError, "the model's tokenizer gives up on this text", todo):
        if len(text) <= _LONG:
            return list(backend.encode(text, add_special_tokens=False).ids)
        # unlike `encode` this lets other threads run meanwhile
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def decode(backend: Backend, ids: Sequence[int], skip_special: bool) -> str:
    """The text of ids by the library's own decoder. Raises RequestFailed."""
    with guarded(RequestFailed, "the model's tokenizer cannot decode what was written", "download it again"):
        return str(backend.decode(list(ids), skip_special_tokens=skip_special))


def _bounded(path: Path) -> bytes:
    """The bytes of tokenizer.json, without a byte order mark.

    LoadError for what makes the library end the process or fill the memory: huge ids, a prefix of BPE's pieces.
    """
    data = (read_bytes(path, MOST_BYTES) or b"").removeprefix(codecs.BOM_UTF8)
    prefixed = _PREFIX.search(data) is not None
    if not prefixed and _LARGE_NUMBER.search(data) is None:
        return data  # spares reading 30 MB as JSON for nothing
    raw = read_json(path) or {}
    model, added = raw.get("model"), raw.get("added_tokens")
    if prefixed and not (isinstance(model, dict) and model.get("type") == "WordPiece"):
        raise LoadError(
            f"{path} has a continuing_subword_prefix, which no supported model has: download it again"
        )
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [*(vocab.values() if isinstance(vocab, dict) else ())]
    ids += [
        token.get("id") for token in (added if isinstance(added, list) else ()) if isinstance(token, dict)
    ]
    largest = max((i for i in ids if isinstance(i, int)), default=0)
    if largest >= MOST_IDS:
        raise LoadError(f"{path} has a token with the id {largest}, past {MOST_IDS - 1}: download it again")
    return data


def check_growth(backend: Backend, path: Path) -> None:
    """Raise LoadError if a normalizer or decoder makes a text many times longer: it would fill the memory."""
    for part in ("normalizer", "decoder"):
        growth = 1.0
        for step in steps(backend, part):
            written = step.get("prepend") or ""
            if step["type"] == "Replace":
                written = step.get("content") or ""
                growth *= max(
                    1.0, len(written) / max(1, len((step.get("pattern") or {}).get("String") or ""))
                )
            elif step["type"] == "Precompiled":
                table = base64.b64decode(step.get("precompiled_charsmap") or "")
                written = max(
                    table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"), key=len, default=b""
                )
            if growth > MOST_GROWTH or len(written) > MOST_PREFIX:
                raise LoadError(
                    f"{path}: its {part} makes a text more than {MOST_GROWTH} times longer, or puts more than "
                    f"{MOST_PREFIX} characters into it, which no supported model does: download it again"
                )


def steps(backend: Backend, part: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer's normalizer, pre_tokenizer or decoder in their order, as the file describes them."""
    made = getattr(backend, part)
    plain_steps: list[dict[str, Any]] = []
    waiting = [json.loads(made.__getstate__())] if made is not None else []
    while waiting:
        step = waiting.pop(0)
        inner = [step.get(name) for name in ("normalizers", "pretokenizers", "decoders")]
        waiting[:0] = next((nested for nested in inner if isinstance(nested, list)), [])
        plain_steps += [step] if not any(isinstance(nested, list) for nested in inner) else []
    return plain_steps


def most_characters(backend: Backend) -> int | None:
    """How many characters of a text one token stands for at most; None where that cannot be said.

    A text of n characters has n / this tokens or more, which is known before it is encoded.
    """
    model, composed = backend.model, 1
    if type(model).__name__ != "BPE" or any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
    ):
        return None
    for step in steps(backend, "normalizer"):
        pattern = (step.get("pattern") or {}).get("String")
        if step["type"] == "NFC":
            composed = _COMPOSED
        elif step["type"] == "Replace" and pattern is not None:
            if len(step.get("content") or "") < len(pattern):
                return None
        elif step["type"] not in ("Prepend", "Lowercase"):
            return None
    kinds = {step["type"] for step in steps(backend, "pre_tokenizer")}
    if not kinds <= {"ByteLevel", "Split", "Digits", "Metaspace"} or any(
        step.get("behavior") == "Removed" for step in steps(backend, "pre_tokenizer")
    ):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    letters = (
        pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in kinds else [f"<0x{i:02X}>" for i in range(256)]
    )
    if not all(letter in vocabulary for letter in letters) or (
        "ByteLevel" not in kinds and not model.byte_fallback
    ):
        return None  # what has no token could be left out, or be one unknown token for a whole run
    return composed * max(map(len, vocabulary))
