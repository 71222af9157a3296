"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.chat.answer import ChatAnswer
from paceline.chat.asked import Asked
from paceline.chat.constraint import Make
from paceline.chat.forms import FormError
from paceline.chat.road import Prompt
from paceline.core import Delta, SamplingParams, Stats, TokenLogprob
from paceline.errors import PacelineError, PromptError, UsageError
from paceline.server.asking import asked_of
from paceline.server.foreign import settle
from paceline.server.generation import Ask, joined
from paceline.server.logprobs import chat_logprobs
from paceline.server.media import has_media
from paceline.server.params import refuse, refuse_prompt, sampling_params, settle_length
from paceline.server.schema import ChatRequest
from paceline.server.service import Room, Service, form_field, salt_of
from paceline.server.sse import DONE, event
from paceline.server.trace import Trace
from paceline.server.usage import report, usage
from paceline.soft_tokens import media_of


@dataclass(slots=True)
class Chat:
    """One chat request, ready to run."""

    service: Service
    room: Room
    body: ChatRequest
    ask: Ask
    params: SamplingParams
    asked: Asked
    prompt: Prompt
    warnings: list[str]  # what of the request was ignored
    id: str = field(default_factory=lambda: "chatcmpl-" + uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    choices: list[ChatAnswer] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # with `reason`, once `pieces` have ended
    reason: str = ""

    def __post_init__(self) -> None:
        chats, most = self.room.chats, self.service.config.max_tools
        for index in range(self.params.n):
            name = self.id[-16:] if chats.format.needs.short_ids else f"{self.id[-16:]}_{index}"
            self.choices.append(chats.answer(self.asked, self.prompt.inside, self.params, name, most))

    async def answer(self) -> dict[str, Any]:
        """The whole answer, not streamed."""
        logprobs: list[list[TokenLogprob]] = [[] for _ in self.choices]
        reasons = [""] * len(self.choices)
        async with self.service.generate(self.ask) as generation:
            async for _, delta in generation.deltas():
                self.completion_tokens += len(delta.token_ids)
                self.choices[delta.index].push(delta)
                logprobs[delta.index] += delta.logprobs
                reasons[delta.index] = delta.finish_reason or ""
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": i,
                    "message": self._told(choice.message()),
                    "logprobs": self._logprobs(logprobs[i]),
                    "finish_reason": self._reason(choice, reasons[i]),
                }
                for i, choice in enumerate(self.choices)
            ],
            "usage": self.usage(generation.stats.values()),
            **report(generation.stats.values(), self.params.seed, self.warnings),
        }

    async def pieces(self, tail: deque[int] | None = None) -> AsyncIterator[dict[str, Any]]:
        """For other APIs: what each batch adds to the only text, any of content, reasoning_content and tool_calls.

        With `logprobs` there are the entries of all its tokens, too, and in `said` those that are no thoughts. `tail`
        gets the tokens.
        """
        async with self.service.generate(self.ask) as generation:
            async for batch in generation.batches():
                for _, delta in joined(batch):
                    self.completion_tokens += len(delta.token_ids)
                    if tail is not None:
                        tail.extend(delta.token_ids)
                    events = self.choices[0].events
                    thoughts = events.reasoning_tokens
                    piece = self.choices[0].push(delta)
                    if delta.logprobs:
                        thought = events.reasoning_tokens - thoughts
                        piece |= {"logprobs": delta.logprobs, "said": delta.logprobs[thought:]}
                    if delta.finish_reason is not None:
                        self.reason = self.choices[0].finish_reason(delta.finish_reason)
                        self.stats = list(generation.stats.values())
                    yield piece

    async def stream(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        include = bool(options and options.include_usage)
        continuous = include and bool(options and options.continuous_usage_stats)
        traces = [Trace(self.room.tokenizer) for _ in self.choices]
        wants_trace = bool(self.body.speculation and self.body.speculation.trace)
        opening = {"role": "assistant", "content": None if self.asked.choice.mode == "required" else ""}
        begun: set[int] = set()
        left = len(self.choices)
        async with self.service.generate(self.ask) as generation:
            async for batch in generation.batches():
                out = [
                    event(self._chunk(0, {}) | {"prompt_progress": read.fields()})
                    for _, read in generation.progress
                ]
                for _, delta in batch if wants_trace else joined(batch):
                    if delta.index not in begun:
                        begun.add(delta.index)
                        out.append(event(self._chunk(delta.index, opening)))
                    chunk = self._delta_chunk(delta)
                    if wants_trace:
                        chunk["paceline"] = traces[delta.index].of(delta)
                    if continuous:
                        chunk["usage"] = self.usage(generation.stats.values())
                    left -= delta.finish_reason is not None
                    if not left:
                        chunk |= report(generation.stats.values(), self.params.seed, self.warnings)
                    if delta.finish_reason or continuous or wants_trace or _says_something(chunk):
                        out.append(event(chunk))
                if out:
                    yield b"".join(out)
        if include:
            told = report(generation.stats.values(), self.params.seed, self.warnings)
            head = self._head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": self.usage(generation.stats.values()), **told})
        yield DONE

    def _delta_chunk(self, delta: Delta) -> dict[str, Any]:
        self.completion_tokens += len(delta.token_ids)
        choice = self.choices[delta.index]
        chunk = self._chunk(delta.index, self._told(choice.push(delta)))
        chunk["choices"][0]["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            chunk["choices"][0]["finish_reason"] = self._reason(choice, delta.finish_reason)
        return chunk

    def _told(self, made: dict[str, Any]) -> dict[str, Any]:
        """Calls in the older form where the request has it: an answer holds one."""
        if not self.body.functions or "tool_calls" not in made:
            return made
        (first, *_) = made["tool_calls"]
        return {name: value for name, value in made.items() if name != "tool_calls"} | {
            "function_call": first["function"]
        }

    def _reason(self, choice: ChatAnswer, reason: str) -> str:
        finish = choice.finish_reason(reason)
        return "function_call" if self.body.functions and finish == "tool_calls" else finish

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.called(self.body.model),
        }

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.room.tokenizer, entries) if self.body.logprobs else None

    def usage(self, stats: Iterable[Stats]) -> dict[str, Any]:
        prompt = self.ask.jobs[0][0]
        out = usage(
            len(prompt), self.completion_tokens, stats, predicted=self.ask.predicted, media=media_of(prompt)
        )
        thoughts = sum(choice.events.reasoning_tokens for choice in self.choices)
        out["completion_tokens_details"]["reasoning_tokens"] = thoughts
        return out


def _says_something(chunk: dict[str, Any]) -> bool:
    choice = chunk["choices"][0]
    return bool(choice["delta"]) or bool(choice["logprobs"])


async def prepare_chat(service: Service, body: ChatRequest, key: str) -> Chat:
    """Render, tokenise and check, all before anything is queued. Raises ApiError."""
    arrived = time.monotonic()
    warnings = service.warnings(body)
    settle(body)
    room, salt = service.check(body), salt_of(key, body)
    asked, prompt = await service.media.run(has_media(body.messages), read, service, room, body, salt)
    warnings += prompt.changes
    space = service.room_after(prompt.ids, "messages")
    settle_length(body, len(prompt.ids))
    extra: dict[str, Any] = {
        "constraint": await _constraint(service, room, body, asked, prompt),
        "stop_token_ids": (*(body.stop_token_ids or ()), *room.chats.stops(asked)),
    }
    if (
        body.prediction is not None
        and not (body.speculation and body.speculation.drafter)
        and "ngram" in room.drafters
    ):
        extra["drafter"] = "ngram"
    params = sampling_params(body, space, extra, room.sampling, service.config.default_output)
    params, predicted = await service.predicted(params)
    ask = replace(
        service.ask([(prompt.ids, params)], salt, arrived),
        warnings=warnings,
        predicted=predicted,
        progress=bool(body.stream and body.return_progress),
    )
    return Chat(service, room, body, ask, params, asked, prompt, warnings)


def read(
    service: Service, room: Room, body: ChatRequest, salt: str = "", *, measured: bool = False
) -> tuple[Asked, Prompt]:
    """What a body asks for, and the prompt of it. `measured`: to be counted, not to be run. Raises ApiError 400."""
    try:
        asked = asked_of(room, body, service.config)
        check = None if measured else partial(service.foresee, param="messages")
        return asked, room.chats.prompt(asked, salt, served=True, measured=measured, check=check)
    except PromptError as error:
        raise refuse_prompt(error) from error
    except UsageError as error:
        raise refuse_prompt(error, code="bad_template") from error


async def _constraint(
    service: Service, room: Room, body: ChatRequest, asked: Asked, prompt: Prompt
) -> Make | None:
    """What a grammar holds of the answer, compiled. Raises ApiError 400."""
    try:
        work = room.chats.constraint(room.grammars, asked, prompt)
    except UsageError as error:
        raise refuse("thinking_budget", str(error)) from error
    if work is None:
        return None
    try:
        return await service.aside(work)
    except FormError as error:
        raise refuse(form_field(body), error.message, code="bad_grammar") from error
    except PacelineError as error:
        raise refuse("tools", str(error), code="bad_grammar") from error
