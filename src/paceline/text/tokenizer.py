"""Text to token ids and back, over the `tokenizers` library. From a folder in Hugging Face layout or a GGUF file.

A token stands for bytes, not for text: `piece` gives them, so that a stream can be decoded token by token. What a decoder
does is in `decoding.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.checkpoints.gguf.reader import Gguf, Metadata, is_gguf
from paceline.checkpoints.gguf.tokenizer import build_tokenizer
from paceline.checkpoints.sentencepiece import read_vocabulary
from paceline.errors import LoadError, PromptError
from paceline.files import check_file, read_json, read_text
from paceline.text.backend import decode, encode, most_characters, read_backend
from paceline.text.decoding import Characters, Window, chain_of
from paceline.text.known_templates import spelled_out
from paceline.text.llama_layout import LLAMA_CLASSES, add_tokens, rebuild_llama, rebuilt_as_llama

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACED = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_FALLBACK = {"type": "Sequence", "decoders": [_SPACED, {"type": "ByteFallback"}, {"type": "Fuse"}]}


class Tokenizer:
    """A vocabulary of `vocab_size` ids, which of them are special, and the chat template if there is one."""

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any],
        eos: Iterable[int] = (),
        template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: the one for requests with tools, of models that have two."""
        backend.no_truncation()  # files saved after training may hold both, which would change prompts in silence
        backend.no_padding()
        self._backend = backend
        decoder = backend.decoder
        self._chain = chain_of(None if decoder is None else json.loads(decoder.__getstate__()))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._twins: dict[int, str] = {}  # entries of ids that no text is encoded with
        self.breakers: dict[str, tuple[tuple[int, ...], ...]] = {}  # texts that were asked for (breakers.py)
        self.banned: dict[str, Any] = {}  # texts that may not be written, and
        self.sorted_pieces: Any = None  # the bytes of all tokens, to find them (banned.py)
        self._pieces: dict[tuple[int, bool, bool], bytes] = {}
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = _special_tokens(config)  # e.g. bos_token -> "<bos>"
        self.bos_id = self._named("bos_token")
        self.pad_id = self._named("pad_token")
        self.adds_bos = self._begins_with_bos(config)
        self._adds_eos = config.get("add_eos_token") is True
        named = self._named("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos, *([] if named is None else [named])]))
        self.template, self.tool_template = spelled_out(template), spelled_out(tool_template)
        self.chat: Any = None  # the template at work, once it was used (chat.py)
        self.tool_chat: Any = None  # that of `tool_template`
        self.chat_format = "auto"  # the name of a format (formats/), auto = as the template writes
        self.format: Any = None  # what that is, once it was asked for (formats/choose.py)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, the configs beside it. Raises LoadError."""
        folder = Path(folder)
        if is_gguf(folder):
            return cls.from_gguf(Gguf(folder))
        path = folder / "tokenizer.json"
        check_file(path)
        if not path.exists():
            if (folder / "tokenizer.model").exists():
                return cls.from_sentencepiece(folder)
            raise LoadError(f"{folder} has no tokenizer.json: copy it there from the model's repository")
        backend = read_backend(path)
        config = read_json(folder / "tokenizer_config.json") or {}
        if rebuilt_as_llama(config, read_json(folder / "config.json") or {}):
            rebuild_llama(backend, config)
        return cls(backend, config, _eos_ids(folder), *_templates(folder, config))

    @classmethod
    def from_gguf(cls, model: Metadata) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata describes. Raises ConfigError."""
        parts = build_tokenizer(model)
        made = cls(parts.backend, parts.config, parts.eos_ids, parts.template, parts.tool_template)
        made._twins = parts.twins
        return made

    @classmethod
    def from_sentencepiece(cls, folder: Path) -> Tokenizer:
        """That of a folder with tokenizer.model alone, as transformers reads it. Raises ConfigError and LoadError."""
        config = read_json(folder / "tokenizer_config.json") or {}
        vocabulary = read_vocabulary(folder / "tokenizer.model")
        parts = build_tokenizer(vocabulary)
        if vocabulary["tokenizer.ggml.add_space_prefix"] or config.get("tokenizer_class") in LLAMA_CLASSES:
            rebuild_llama(parts.backend, config)
        add_tokens(parts.backend, config, folder)
        ends = _eos_ids(folder) or list(parts.eos_ids)
        return cls(parts.backend, parts.config | config, ends, *_templates(folder, config))

    @classmethod
    def entries(cls, folder: Path) -> dict[str, int] | None:
        """The id of each token of a model; None where the model has no tokenizer of its own. Raises LoadError."""
        if is_gguf(folder):
            tokens = Gguf(folder).get("tokenizer.ggml.tokens")
            return {token: i for i, token in enumerate(tokens)} if isinstance(tokens, list) else None
        if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            return None
        entries: dict[str, int] = cls.load(folder)._backend.get_vocab(with_added_tokens=True)
        return entries

    def encode(self, text: str, add_bos: bool | None = None, marks: bool = True) -> list[int]:
        """Token ids; special tokens written in `text` count as such, with `marks` False as text.

        add_bos None = as the tokenizer says.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the text has a lone surrogate, which is no character: remove it") from error
        backend = self._backend if marks else self._without_marks
        ids = encode(backend, text)
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_whole(self, text: str) -> list[int]:
        """As `encode`, with what the tokenizer itself puts behind a text: so embedding models were taught."""
        return self.encode(text) + self._behind

    @cached_property
    def _behind(self) -> list[int]:
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a").ids
        ends = [i + len(plain) for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        behind = whole[ends[0] :] if ends else []
        end = self._named("eos_token") if self._adds_eos else None
        return behind or ([] if end is None else [end])

    def least(self, text: str) -> int:
        """How many tokens a text has at least, without encoding it; 0 where nothing can be said."""
        most = self._most_characters
        return 0 if most is None else -(-len(text) // most)

    @cached_property
    def _most_characters(self) -> int | None:
        return most_characters(self._backend)

    @cached_property
    def _without_marks(self) -> Backend:
        """Encodes special tokens as the text that they are spelled by."""
        made = Backend.from_str(self._backend.to_str())
        made.encode_special_tokens = True
        return made

    def decode(self, ids: Seq[int], skip_special: bool = True, begins: bool = True) -> str:
        """Text of `ids`, as transformers decodes them; bytes that are no UTF-8 become U+FFFD.

        `begins` False: they go on a text, so a space at their beginning is one of the text.
        """
        if self._chain is None and begins:
            return decode(self._backend, [i for i in ids if i >= 0], skip_special)
        stream = self.stream(skip_special, begins)
        return stream(tuple(ids)) + stream(None)

    def stream(self, skip_special: bool, begins: bool) -> Callable[[Seq[int] | None], str]:
        """What decodes a text while its tokens come: called with the next ones, at last with None."""
        if self._chain is None:
            return self._windowed(Window(self._backend, skip_special, None if begins else self._anchor))
        chain = self._chain
        characters = Characters(chain, begins)
        waits = begins and chain.drops_first  # for the first token that is written at all

        def push(tokens: Seq[int] | None) -> str:
            nonlocal waits
            if tokens is None:
                return characters.push(b"", final=True)
            data = b""
            while waits and tokens:
                waits = not self._is_written(tokens[0], skip_special)
                data += self.piece(tokens[0], skip_special, first=True)
                tokens = tokens[1:]
            return characters.push(data + b"".join([self.piece(token, skip_special) for token in tokens]))

        return push

    def _windowed(self, window: Window) -> Callable[[Seq[int] | None], str]:
        def push(tokens: Seq[int] | None) -> str:
            return window.finish() if tokens is None else "".join(window.push(i) for i in tokens if i >= 0)

        return push

    def piece(self, token: int, skip_special: bool = True, first: bool = False) -> bytes:
        """The bytes that one token stands for; none for an id without an entry (vocabulary padding).

        `first`: at the beginning of a text, where some decoders drop the space.
        """
        piece = self._pieces.get((token, skip_special, first))
        if piece is None:
            piece = self._pieces[token, skip_special, first] = self._piece(token, skip_special, first)
        return piece

    def _piece(self, token: int, skip_special: bool, first: bool) -> bytes:
        if not self._is_written(token, skip_special):
            return b""
        if self._chain is not None:
            return self._chain.piece(self._entry(token) or "", first)
        before = [] if first or self._anchor is None else [self._anchor]
        text = decode(self._backend, [*before, token], skip_special=False)
        return text[len(decode(self._backend, before, skip_special=False)) :].encode()

    def _entry(self, token: int) -> str | None:
        entry = self._added.get(token) or self._twins.get(token)
        return entry or (self._backend.id_to_token(token) if token >= 0 else None)

    def _is_written(self, token: int, skip_special: bool) -> bool:
        return not (skip_special and token in self.special_ids) and self._entry(token) is not None

    @cached_property
    def _anchor(self) -> int | None:
        """An ordinary token, before which others stand as within a text."""
        ids: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        return next((i for i in ids if i not in self.special_ids), None)

    def to_json(self) -> str:
        """tokenizer.json for readers that know two decoders only, and that take added tokens as text.

        Every chain with U+2581 for the space gets Gemma's decoder; lone bytes among added tokens are the model's own.
        """
        text: str = self._backend.to_str()
        if self._chain is None or self._chain.last == "byte_level":
            return text
        raw = json.loads(text)
        raw["decoder"] = _FALLBACK
        lone = {i: content for i, content in self._added.items() if _BYTE.fullmatch(content)}
        raw["added_tokens"] = [token for token in raw["added_tokens"] if token["id"] not in lone]
        if isinstance(raw["model"]["vocab"], dict):
            raw["model"]["vocab"] |= {content: i for i, content in lone.items()}
        return json.dumps(raw, ensure_ascii=False)

    @cached_property
    def splits(self) -> bool:
        """Whether pieces of a text can be encoded one by one: nothing is put before them."""
        return self._chain is not None and all(
            self.decode(self.encode(text, add_bos=False), begins=False) == text for text in ("a", " a")
        )

    def token_id(self, token: str) -> int | None:
        """The id of a token by its entry, e.g. "<|turn>"; None if there is none."""
        return self._backend.token_to_id(token)

    def token_text(self, token: int) -> str:
        """How to show one token by itself."""
        return self.piece(token, skip_special=False).decode("utf-8", errors="replace")

    def _begins_with_bos(self, config: dict[str, Any]) -> bool:
        """Whether a text begins with BOS. Byte-level vocabularies and Llama's: as tokenizer.json says, which transformers
        puts above the config, and where it says nothing as the config does. Others have one unless the config denies it:
        Gemma 4, whose tokenizer.json leaves BOS to the template, is lost without.
        """
        if self.bos_id is None:
            return False
        if self._backend.encode("a").ids[:1] == [self.bos_id]:
            return True
        wanted, silent = config.get("add_bos_token"), self._backend.post_processor is None
        if self._chain is not None and self._chain.last == "byte_level":
            return silent and bool(wanted)
        if config.get("tokenizer_class") in LLAMA_CLASSES and not silent:
            return bool(wanted)
        return wanted is not False

    def _named(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


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
    config = read_json(folder / "config.json") or {}
    text = config.get("text_config")
    generation = read_json(folder / "generation_config.json") or {}
    for source in (generation, config, text if isinstance(text, dict) else {}):
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
    return []


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The chat template and the one for tools: files of their own, else as older files hold them.

    Raises LoadError for a file that is no text.
    """
    text, more = read_text(folder / "chat_template.jinja"), folder / "additional_chat_templates"
    tools = read_text(more / "tool_use.jinja")
    places = (
        config,
        *(read_json(folder / name) or {} for name in ("chat_template.json", "processor_config.json")),
    )
    held = [_named_templates(place.get("chat_template")) for place in places]
    default = next((template["default"] for template in held if "default" in template), None)
    if text is None and default is None:
        text = read_text(more / "default.jinja")
    if tools is None:
        tools = next((template["tool_use"] for template in held if "tool_use" in template), None)
    return (default if text is None else text), tools


def _named_templates(template: object) -> dict[str, str]:
    """Name -> template; one without a name is the default, and so is the only one of a list."""
    named: dict[object, object] = {}
    if isinstance(template, str):
        named = {"default": template}
    elif isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    elif isinstance(template, dict):
        named = dict(template)
    templates = {
        name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)
    }
    return {"default": next(iter(templates.values()))} | templates if len(templates) == 1 else templates


_WORD = re.compile(r" ?\w+")
_GOES_ON = re.compile(r"\w")


class Words:
    """Implements `Words` of drafters/alignment.py."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def respaced(self, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        """The same word without the space before it, or with one if it has none; None if it is no word."""
        text = self._tokenizer.decode(tokens, skip_special=False, begins=False)
        if _WORD.fullmatch(text) is None:
            return None
        return tuple(self._tokenizer.encode(text[1:] if text[0] == " " else f" {text}", add_bos=False))

    def goes_on(self, token: int) -> bool:
        """Whether `token` begins in the middle of a word."""
        return _GOES_ON.match(self._tokenizer.token_text(token)) is not None
