"""Text to token ids and back, over the `tokenizers` library. Needs a folder in Hugging Face layout.

A token stands for bytes, not for text: `piece` gives them, so that a stream can be decoded token by token.
Known decoders are Gemma's (`▁` for the space, `<0xE2>` for a lone byte) and byte-level BPE; others are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import ConfigError, LoadError, PromptError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A vocabulary of `vocab_size` ids, which of them are special, and the chat template if there is one."""

    def __init__(
        self, backend: Backend, config: dict[str, Any], eos: Iterable[int] = (), template: str | None = None
    ) -> None:
        self._backend = backend
        self._decoder = _decoder_kind(json.loads(backend.to_str())["decoder"])
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = _special_tokens(config)  # e.g. bos_token -> "<bos>"
        self.bos_id = self._named("bos_token")
        self.pad_id = self._named("pad_token")
        self.adds_bos = bool(config.get("add_bos_token", self.bos_id is not None))
        named = self._named("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos, *([] if named is None else [named])]))
        self.template = template

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, the configs beside it. Raises LoadError."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise LoadError(f"{folder} has no tokenizer.json: copy it there from the model's repository")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise LoadError(f"{path} cannot be read as a tokenizer ({error}): download it again") from error
        config = _read_json(folder / "tokenizer_config.json")
        return cls(backend, config, _eos_ids(folder), _template(folder, config))

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids; special tokens written in `text` count as such. add_bos None = as the tokenizer says."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the text has a lone surrogate, which is no character: remove it") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(i, skip_special) for i in ids).decode("utf-8", errors="replace")

    def piece(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes that one token stands for; none for an id without an entry (vocabulary padding)."""
        found = self._pieces.get((token, skip_special))
        if found is None:
            found = self._pieces[token, skip_special] = self._piece(token, skip_special)
        return found

    def _piece(self, token: int, skip_special: bool) -> bytes:
        if token in self._added:
            return b"" if skip_special and token in self.special_ids else self._added[token].encode()
        text = self._backend.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._decoder == "byte_level":
            alphabet = self._alphabet
            return b"".join(alphabet.get(c) or c.encode() for c in text)
        lone = _BYTE.fullmatch(text)
        if lone:
            return bytes([int(lone[1], 16)])
        return text.replace("▁", " ").encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its entry, e.g. "<|turn>"; None if there is none."""
        return self._backend.token_to_id(token)

    def token_text(self, token: int) -> str:
        """How to show one token by itself."""
        return self.piece(token, skip_special=False).decode("utf-8", errors="replace")

    @cached_property
    def _alphabet(self) -> dict[str, bytes]:
        """The printable characters that byte-level BPE writes for bytes, as GPT-2 chose them."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in plain]
        return {chr(b): bytes([b]) for b in plain} | {chr(256 + i): bytes([b]) for i, b in enumerate(rest)}

    def _named(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _decoder_kind(decoder: dict[str, Any] | None) -> str:
    """Which of the known ways turns tokens into bytes. Raises ConfigError for an unknown one."""
    parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return "byte_level"
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse"}:
        return "gemma"
    raise ConfigError(
        f"the tokenizer's decoder {' + '.join(kinds)} is not supported: "
        "use a checkpoint with Gemma's tokenizer or byte-level BPE"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds no JSON object: download it again")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """All `*_token` entries, which older files write as objects and newer ones also nest."""
    out: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    model = config.get("model_specific_special_tokens")
    for source in (extra, model, config):
        for name, value in (source if isinstance(source, dict) else {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                out[name] = text
    return out


def _eos_ids(folder: Path) -> list[int]:
    """End ids by generation_config.json, else config.json (whose text part may hold them)."""
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    generation = _read_json(folder / "generation_config.json")
    for source in (generation, config, text if isinstance(text, dict) else {}):
        value = source.get("eos_token_id")
        if value is not None:
            return [int(i) for i in (value if isinstance(value, list) else [value])]
    return []


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
