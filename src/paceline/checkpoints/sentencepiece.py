"""SentencePiece's tokenizer.model -> what a GGUF file would say of it, from which our tokenizer is built.

The file is one protobuf message (sentencepiece_model.proto), of which a few fields count. Only what says the same as a
tokenizer.json is taken: BPE, without another normalization than the space before a text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.reader import Metadata
from paceline.errors import ConfigError, LoadError
from paceline.files import MOST_BYTES, check_content, check_regular

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the model
TEXT, SCORE, TYPE = 1, 2, 3  # of a piece; types are those of `tokenizer.ggml.token_type`
MODEL_TYPE, BPE = 3, 2  # of the trainer
IDS = {
    "unknown": (40, 0),
    "bos": (41, 1),
    "eos": (42, 2),
    "padding": (43, -1),
}  # field, and what it is unsaid
CHARS_MAP, PREFIX, SQUEEZES = 2, 3, 4  # of the normalizer


class Vocabulary(dict[str, Any], Metadata):
    """Metadata by GGUF's keys, of the file `path`."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path = path


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.model. LoadError for a file that is none, ConfigError for another kind."""
    size = check_regular(path)
    if size is None or size > MOST_BYTES:
        raise LoadError(f"{path} is no vocabulary of SentencePiece ({size} bytes): download it again")
    data = path.read_bytes()
    check_content(path, data[:256])
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == PIECES:
                piece = dict(_fields(value))
                tokens.append(piece[TEXT].decode())
                scores.append(struct.unpack("<f", piece.get(SCORE, b"\0\0\0\0"))[0])
                types.append(piece.get(TYPE, 1))
            elif field == TRAINER:
                trainer = dict(_fields(value))
            elif field == NORMALIZER:
                normalizer = dict(_fields(value))
    except (ValueError, KeyError, IndexError, AttributeError, TypeError, struct.error) as error:
        raise LoadError(f"{path} cannot be read as SentencePiece's ({error!r}): download it again") from error
    if not tokens:
        raise LoadError(f"{path} holds no tokens: download it again")
    other = (
        "is no BPE" if trainer.get(MODEL_TYPE, 1) != BPE
        else "normalizes texts" if normalizer.get(CHARS_MAP) or normalizer.get(SQUEEZES, 1)
        else None
    )  # fmt: skip
    if other is not None:
        raise ConfigError(
            f"{path} {other}, which is not converted: give the folder the tokenizer.json of its makers instead"
        )
    ids = {name: _signed(trainer.get(field, unsaid)) for name, (field, unsaid) in IDS.items()}
    return Vocabulary(path, {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.add_space_prefix": bool(normalizer.get(PREFIX, 1)),
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i >= 0},
    })  # fmt: skip


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: a whole number, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _number(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at + length > len(data):
            raise ValueError("it ends inside a field")
        yield key >> 3, data[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
