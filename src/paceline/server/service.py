"""What all routes share: the model behind the worker, the limits, and the way from a body to an ask."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.core import Constraint, SamplingParams
from paceline.engine.worker import NotReady, Worker
from paceline.errors import UsageError, unreadable
from paceline.media.reader import MediaReader
from paceline.server.errors import ApiError
from paceline.server.generation import Ask, Generation
from paceline.server.media import MediaThreads
from paceline.server.metrics import Metrics
from paceline.server.params import check_limits, refuse, token_id
from paceline.server.predicted import Predicted
from paceline.server.progress import Watchers
from paceline.server.request_log import Told
from paceline.server.schema import Named, Sampling
from paceline.server.settings import ServerConfig
from paceline.server.unknown import Unknown
from paceline.soft_tokens import Kind
from paceline.text.formats.base import ChatFormat
from paceline.text.formats.probe import PLAIN
from paceline.text.grammar import Lead, check_depth
from paceline.text.schemas import held
from paceline.text.tokenizer import Tokenizer

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # a rule of llama.cpp's grammars


class Grammars(Protocol):
    """Compiles a grammar, in bounded time, to a maker of constraints (text/grammar.py)."""

    def compile(self, kind: str, source: str, lead: Lead = "bare") -> Callable[[], Constraint]: ...

    def compile_call(
        self, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none"
    ) -> Callable[[], Constraint]: ...

    def compile_either(
        self, kind: str, source: str, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none"
    ) -> Callable[[], Constraint]: ...

    def compile_strict(
        self, tools: dict[str, dict[str, Any]], lead: Lead = "none"
    ) -> Callable[[], Constraint]: ...

    def close(self) -> None: ...


class Asked(Protocol):
    """A request of one of the endpoints, ready to run."""

    id: str
    ask: Ask


Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Room:
    """The text side of a loaded model. `render`: (messages, tools, the template's variables, of which
    `add_generation_prompt` is true if it is not there) -> prompt."""

    tokenizer: Tokenizer
    render: Render
    grammars: Grammars
    max_len: int
    vocab_size: int
    drafters: tuple[str, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)  # what the model's makers suggest
    takes_parts: bool = False  # the template goes through content in parts
    readable: int = 2**31  # tokens from here on are in no prompt, see `Target`
    chat: bool = False  # the model was taught to chat
    format: ChatFormat = PLAIN  # how it writes thoughts and calls
    reader: MediaReader | None = None  # of pictures and sound
    about: Mapping[str, Any] = field(default_factory=dict)  # format, family, bytes and dtype of its files

    @property
    def reads(self) -> list[Kind]:
        """What it reads beside text."""
        kinds: tuple[Kind, ...] = ("image", "audio")
        return [kind for kind in kinds if self.reader is not None and self.reader.why_not(kind) is None]


@dataclass(slots=True)
class Service:
    model: str
    config: ServerConfig
    worker: Worker
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Room | None = None
    media: MediaThreads = field(default_factory=MediaThreads)
    unknown: Unknown = field(init=False)
    watchers: Watchers = field(default_factory=Watchers)

    def __post_init__(self) -> None:
        self.unknown = Unknown(self.config.strict)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, its own name first."""
        return tuple(dict.fromkeys([self.model, *self.config.served_model_names]))

    def most_bytes(self) -> int:
        """Of a request's body: more where pictures are read."""
        reads = self.loaded is not None and self.loaded.reads
        return max(self.config.max_body, self.config.max_media_body) if reads else self.config.max_body

    @property
    def room(self) -> Room:
        if self.loaded is None or self.worker.state != "ready":
            raise NotReady(f"the server is {self.worker.state}: try again later")
        return self.loaded

    def warnings(self, body: Named) -> list[str]:
        """What of the request is ignored: readiness first, then the model's name and unknown fields. ApiError."""
        _ = self.room
        return self.unknown.model(body.model, self.names) + self.unknown.warnings(body)

    def check(self, body: Sampling) -> Room:
        """The room, if the request is within the limits."""
        room = self.room
        check_limits(body, self.config)
        wanted = body.speculation.drafter if body.speculation else None
        if wanted is not None and wanted not in room.drafters:
            raise refuse(
                "speculation.drafter", f"{wanted[:40]!r} is not loaded: use one of {', '.join(room.drafters)}"
            )
        biased = [token_id(key) for key in body.logit_bias or {}]
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", body.stop_token_ids or [])):
            if max(tokens, default=0) >= room.vocab_size:
                raise refuse(name, f"token {max(tokens)} is not in the vocabulary of {room.vocab_size}")
        return room

    def room_after(self, prompt: list[int], param: str) -> int:
        """Tokens that may follow a prompt. Raises ApiError 400 for one that is empty or too long."""
        assert self.loaded is not None
        if not prompt:
            raise refuse(param, "the prompt is empty: give at least one token")
        if max(prompt) >= self.loaded.vocab_size:
            raise refuse(
                param, f"token id {max(prompt)} is not in the vocabulary of {self.loaded.vocab_size}"
            )
        if max(prompt) >= self.loaded.readable:
            raise refuse(param, str(unreadable(max(prompt), self.loaded.readable)))
        room = self.loaded.max_len - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and the context holds {self.loaded.max_len}, of which one "
                "must be left to write: shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        return min(room, self.config.max_output or room)

    def ask(self, jobs: list[Any], salt: str, arrived: float) -> Ask:
        config = self.config
        deadline = arrived + config.request_timeout
        return Ask(jobs, salt, deadline, config.stream_buffer, config.stream_interval)

    def tell(self, ready: Asked, told: Told) -> None:
        """Let the request log know of a request that is ready to run."""
        told.id, told.model = ready.id, self.model
        told.prompt = sum(len(prompt) for prompt, _ in ready.ask.jobs)
        ready.ask = replace(ready.ask, told=told)

    def predicted(self, params: SamplingParams) -> Predicted | None:
        """Counts what a request's prediction brings, if a drafter reads it: only the n-gram drafter does."""
        if not isinstance(params.reference, str) or "ngram" not in (params.drafter or ""):
            return None
        return Predicted(self.room.tokenizer.encode(params.reference, add_bos=False))

    def generate(self, ask: Ask) -> Generation:
        return Generation(self.worker, ask, self.metrics, self.watchers)

    async def constraint(self, body: Sampling, lead: Lead = "bare") -> Callable[[], Constraint] | None:
        """What response_format asks for, compiled. Raises ApiError 400 for what cannot be."""
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        kind, source, param = grammar_source(body, self.config)
        try:
            return await asyncio.to_thread(self.room.grammars.compile, kind, source, lead)
        except UsageError as error:
            raise refuse(param, str(error), code="bad_grammar") from error


def grammar_source(body: Sampling, config: ServerConfig) -> tuple[str, str, str]:
    """(kind, source, name of the field) of a response_format that constrains."""
    wanted = body.response_format
    assert wanted is not None
    if wanted.type == "json_object":
        param = wanted.said or "response_format"
        return "json", schema_text({"type": "object"}, param, config, hold=True), param
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise refuse("response_format.json_schema", "is missing")
        param = wanted.said or "response_format.json_schema.schema"
        return "json", schema_text(wanted.json_schema.schema_ or {}, param, config, hold=True), param
    source = wanted.grammar if wanted.type == "grammar" else wanted.regex
    param = wanted.said or f"response_format.{wanted.type}"
    if not source:
        raise refuse(param, "is missing")
    if len(source) > config.max_schema:
        raise refuse(param, f"over {config.max_schema} characters", code="bad_grammar")
    if wanted.type == "grammar" and _GBNF.search(source):
        raise refuse(param, "this is GBNF: write the grammar in Lark, as llguidance reads it", "bad_grammar")
    return ("lark" if wanted.type == "grammar" else "regex"), source, param


def schema_text(schema: dict[str, Any], param: str, config: ServerConfig, hold: bool = False) -> str:
    """A client's JSON schema as text, within the limits of depth and size. Raises ApiError 400.

    `hold`: in the words that a grammar holds (text/schemas.py).
    """
    try:
        check_depth(schema, config.max_schema_depth)
    except UsageError as error:
        raise refuse(param, str(error), code="bad_grammar") from error
    text = json.dumps(schema)
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refuse(param, "has a lone surrogate, which is no character: remove it") from error
    if len(text) > config.max_schema:
        raise refuse(param, f"over {config.max_schema} characters", code="bad_grammar")
    try:
        return json.dumps(held(schema)) if hold else text
    except UsageError as error:
        raise refuse(param, str(error), code="bad_grammar") from error


def salt_of(key: str, body: Sampling) -> str:
    """Prefixes are shared under one API key only, and there under one cache_salt only."""
    return key if body.cache_salt is None else f"{key}/{body.cache_salt}"
