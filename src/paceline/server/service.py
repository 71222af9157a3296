"""What all routes share: the model behind the worker, the limits, and the way from a body to an ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from paceline.chat import forms
from paceline.chat.asked import Form
from paceline.chat.constraint import Grammars, Make, held_source
from paceline.chat.road import Chats
from paceline.core import Pooling, SamplingParams
from paceline.engine.worker import NotReady, Worker
from paceline.errors import UsageError, unreadable
from paceline.media.reader import MediaReader
from paceline.server.errors import ApiError
from paceline.server.generation import Ask, Generation
from paceline.server.lora import settle_adapters
from paceline.server.media import MediaThreads
from paceline.server.metrics import Metrics
from paceline.server.params import bias_texts, check_limits, refuse, token_id
from paceline.server.predicted import Predicted
from paceline.server.progress import Watchers
from paceline.server.request_log import Told
from paceline.server.schema import Named, Sampling
from paceline.server.settings import ServerConfig
from paceline.server.unknown import Unknown
from paceline.soft_tokens import Kind
from paceline.text.banned import banned_of
from paceline.text.breakers import breakers_of
from paceline.text.chat import ChatTemplate
from paceline.text.formats.base import ChatFormat
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")

_TOKENS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids")


class Ready(Protocol):
    """A request of one of the endpoints, ready to run."""

    id: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Room:
    """The text side of a loaded model."""

    chats: Chats
    grammars: Grammars
    max_len: int
    vocab_size: int
    drafters: tuple[str, ...]
    sampling: Mapping[str, Any] = field(
        default_factory=dict
    )  # what requests leave out: the server's, the model's
    readable: int = 2**31  # tokens from here on are in no prompt, see `Target`
    chat: bool = False  # the model was taught to chat
    about: Mapping[str, Any] = field(default_factory=dict)  # format, family, bytes and dtype of its files
    pooling: Pooling = "last"  # of embeddings,
    hidden_size: int = 0  # which have as many numbers
    adapters: tuple[str, ...] = ()  # that requests may name, by number

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chats.tokenizer

    @property
    def format(self) -> ChatFormat:
        """How it writes thoughts and calls."""
        return self.chats.format

    @property
    def reader(self) -> MediaReader | None:
        """Of pictures and sound."""
        return self.chats.reader

    def close(self) -> None:
        """End the processes that render its templates and compile its grammars."""
        ChatTemplate.close_all(self.tokenizer)
        self.grammars.close()

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
    keeps: bool = False  # `keep_alive` means something
    loaded: Room | None = None
    media: MediaThreads = field(default_factory=MediaThreads)
    unknown: Unknown = field(init=False)
    watchers: Watchers = field(default_factory=Watchers)
    compiling: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "grammars"))

    def __post_init__(self) -> None:
        self.unknown = Unknown(self.config.strict, self.keeps)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, its own name first, then those of adapters."""
        return tuple(dict.fromkeys([self.model, *self.config.served_model_names, *self.adapters]))

    @property
    def adapters(self) -> tuple[str, ...]:
        return () if self.loaded is None else self.loaded.adapters

    def lora_of(self, asked: str | None) -> tuple[tuple[str, float], ...]:
        """The adapter that a request's model names, as of `SamplingParams`."""
        return ((asked, 1.0),) if asked is not None and asked in self.adapters else ()

    def called(self, asked: str | None) -> str:
        """What a request's model is called in its answer: an adapter by its name, all else as the model."""
        return asked if asked is not None and asked in self.adapters else self.model

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
        warning = self.unknown.model(body.model, self.names, choice=bool(self.adapters))
        return warning + self.unknown.warnings(body)

    def check(self, body: Sampling) -> Room:
        """The room, if the request is within the limits."""
        room = self.room
        check_limits(body, self.config)
        settle_adapters(body, room.adapters)
        wanted = body.speculation.drafter if body.speculation else None
        if wanted is not None and wanted not in room.drafters:
            raise refuse(
                "speculation.drafter", f"{wanted[:40]!r} is not loaded: use one of {', '.join(room.drafters)}"
            )
        bias_texts(body, room.tokenizer)
        biased = [token_id(key) for key in body.logit_bias or {}]
        named = [(name, getattr(body, name) or []) for name in _TOKENS]
        for name, tokens in (("logit_bias", biased), *named):
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
            raise self._too_long(str(len(prompt)), param)
        return min(room, self.config.max_output or room)

    def foresee(self, text: str, param: str) -> None:
        """Raise ApiError 400 for a text that is too long for certain, before the time is spent to encode it."""
        assert self.loaded is not None
        least = self.loaded.tokenizer.least(text)
        if least >= self.loaded.max_len:
            raise self._too_long(f"{least} or more", param)

    def _too_long(self, count: str, param: str) -> ApiError:
        assert self.loaded is not None
        return ApiError(
            400,
            f"the prompt has {count} tokens and the context holds {self.loaded.max_len}, of which one "
            "must be left to write: shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )

    def ask(self, jobs: list[Any], salt: str, arrived: float) -> Ask:
        config = self.config
        deadline = arrived + config.request_timeout
        return Ask(jobs, salt, deadline, config.stream_buffer, config.stream_interval)

    def tell(self, ready: Ready, told: Told) -> None:
        """Let the request log know of a request that is ready to run."""
        told.id, told.model = ready.id, self.model
        told.prompt = sum(len(prompt) for prompt, _ in ready.ask.jobs)
        ready.ask = replace(ready.ask, told=told)

    async def predicted(self, params: SamplingParams) -> tuple[SamplingParams, Predicted | None]:
        """The parameters with a prediction's tokens in place of its text, which the engine would encode between steps.

        And what counts what it brings, if a drafter reads it: only the n-gram drafter does. Raises ApiError 400.
        """
        if params.dry_multiplier > 0:  # looks at the whole vocabulary once: not between the engine's steps
            await asyncio.to_thread(breakers_of, self.room.tokenizer, params.dry_sequence_breakers)
        if params.banned_strings:  # so do these
            await asyncio.to_thread(banned_of, self.room.tokenizer, (), params.banned_strings)
        if not isinstance(params.reference, str):
            return params, None
        self.foresee(params.reference, "prediction")
        ids = await asyncio.to_thread(self._tokens_of, params.reference)
        params = replace(params, reference=tuple(ids))
        return params, Predicted(ids) if "ngram" in (params.drafter or "") else None

    def _tokens_of(self, text: str) -> list[int]:
        try:
            return self.room.tokenizer.encode(text, add_bos=False)
        except UsageError as error:
            raise refuse("prediction", str(error)) from error

    def generate(self, ask: Ask) -> Generation:
        return Generation(self.worker, ask, self.metrics, self.watchers)

    async def constraint(self, body: Sampling) -> Make | None:
        """What response_format asks of a text that is no chat, compiled. Raises ApiError 400 for what cannot be."""
        form = form_of(body, self.config)
        if form is None:
            return None
        grammars = self.room.grammars

        def compiled() -> Make:
            return grammars.compile(form.kind, held_source(grammars, form), "bare")

        try:
            return await self.aside(compiled)
        except UsageError as error:
            raise refuse(form_field(body), str(error), code="bad_grammar") from error

    async def aside(self, work: Callable[[], T]) -> T:
        """What compiling a grammar gives, in threads of its own: a slow one keeps no prompt from being read."""
        return await asyncio.get_running_loop().run_in_executor(self.compiling, work)


def form_field(body: Sampling, inner: str | None = None) -> str:
    """The field that says what the answer looks like, as the client has named it. `inner`: what of it is meant."""
    wanted = body.response_format
    if wanted is not None and wanted.said:
        return wanted.said
    if inner is None:
        kind = "" if wanted is None else wanted.type
        inner = {"json_object": "", "json_schema": "json_schema.schema"}.get(kind, kind)
    return ".".join(filter(None, ("response_format", inner)))


def form_of(body: Sampling, config: ServerConfig) -> Form | None:
    """What response_format asks for, within the limits. Raises ApiError 400."""
    wanted = body.response_format
    if wanted is None:
        return None
    try:
        return forms.form_of(wanted.model_dump(by_alias=True, exclude_none=True), limits_of(config))
    except forms.FormError as error:
        code = "invalid_value" if error.message.startswith("is missing") else "bad_grammar"
        raise refuse(form_field(body, error.field), error.message, code=code) from error


def check_schema(schema: dict[str, Any], param: str, config: ServerConfig) -> None:
    """Raise ApiError 400 for a JSON schema that is too deep or too large."""
    try:
        forms.checked_schema(schema, param, limits_of(config))
    except forms.FormError as error:
        raise refuse(param, error.message, code="bad_grammar") from error


def limits_of(config: ServerConfig) -> forms.Limits:
    return forms.Limits(config.max_schema_depth, config.max_schema)


def salt_of(key: str, body: Sampling) -> str:
    """Prefixes are shared under one API key only, and there under one cache_salt only."""
    return key if body.cache_salt is None else f"{key}/{body.cache_salt}"
