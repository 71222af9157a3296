"""Loads the model on the worker's thread and furnishes the service with its text side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.assembly import build_engine
from paceline.chat.road import Chats
from paceline.config import EngineConfig
from paceline.core import Delta, Pooling, SamplingParams, sampling_line
from paceline.engine.engine import Engine
from paceline.errors import UsageError
from paceline.media.reader import MediaReader
from paceline.server.progress import Watchers
from paceline.server.service import Room, Service
from paceline.server.settings import ServerConfig
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import Vocabulary

Say = Callable[[str], None]


class ServedEngine:
    """The engine as the worker sees it; `info` also says how full the cache is, `watchers` how far prompts are read."""

    def __init__(self, engine: Engine, watchers: Watchers | None = None) -> None:
        self._engine, self._watchers = engine, watchers or Watchers()

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def info(self) -> Mapping[str, Any]:
        state = self._engine.state
        return {**self._engine.info, "cache_use": state.cache.usage(), "preemptions": state.preemptions}

    def add(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "",
        written: Mapping[int, list[int]] | None = None,
    ) -> None:  # fmt: skip
        self._engine.add(request_id, prompt_ids, params, salt, written)

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def cut_off(self, request_id: str) -> list[Delta]:
        return self._engine.cut_off(request_id)

    def step(self) -> list[Delta]:
        watched = self._watchers.find(self._engine)
        deltas = self._engine.step()
        self._watchers.look(watched)
        return deltas

    def watch(self) -> None:
        self._engine.parts.watch()

    def close(self) -> None:
        """What was learnt is kept, and other processes of the target end."""
        self._engine.close()


def load(config: EngineConfig, service: Service, say: Say) -> ServedEngine:
    """Build the engine and set `service.loaded`. Raises PacelineError."""
    if clash := {name for name, _ in config.adapters} & set(service.names):
        raise UsageError(f"an adapter is named {clash.pop()}, as the model is: give it another name")
    engine = build_engine(config, say)
    assert engine.tokenizer is not None, "an assembled engine has a tokenizer"
    media = engine.parts.media
    reader = media if isinstance(media, MediaReader) else None
    room = service.loaded = furnish(engine.tokenizer, Facts.of(engine), service.config, reader)
    say(sampling_line(engine.info["sampling"], service.config.sampling))
    if room.format.note:
        say(f"chats are {room.format.described}; --chat-format names another format")
    return ServedEngine(engine, service.watchers)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the text side has to know of an engine, which may be on another machine."""

    max_len: int
    vocab_size: int
    readable: int
    eos_token_ids: tuple[int, ...]  # the model's; the tokenizer may have more
    drafters: tuple[str, ...]
    sampling: Mapping[str, float]  # what the model's makers suggest
    chat: bool
    about: Mapping[str, Any] = field(default_factory=dict)  # format, family, bytes and dtype of the files
    pooling: Pooling = "last"  # of embeddings
    hidden_size: int = 0
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> Facts:
        target, names = engine.state.target, tuple(engine.drafter_names)
        ends = tuple(target.eos_token_ids)
        sampling, chat = engine.info["sampling"], engine.info["chat"]
        return cls(
            engine.max_len,
            target.vocab_size,
            target.readable,
            ends,
            names,
            sampling,
            chat,
            engine.info["files"],
            engine.info["pooling"],
            target.hidden_size,
            engine.parts.adapters,
        )


def furnish(
    tokenizer: Tokenizer, facts: Facts, config: ServerConfig, reader: MediaReader | None = None
) -> Room:
    """The text side of a model. No weights are read."""
    end_ids = tuple(dict.fromkeys([*tokenizer.eos_ids, *facts.eos_token_ids]))
    chat = format_of(tokenizer)
    vocabulary = Vocabulary(tokenizer.to_json(), facts.vocab_size, end_ids)
    return Room(
        Chats.of(tokenizer, reader), Grammars.of(tokenizer, vocabulary, chat, config.grammar_timeout), facts.max_len,
        facts.vocab_size, facts.drafters, {**facts.sampling, **config.sampling}, facts.readable, facts.chat, facts.about,
        facts.pooling, facts.hidden_size,
        facts.adapters,
    )  # fmt: skip
