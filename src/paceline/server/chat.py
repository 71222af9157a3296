"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.core import Constraint, Delta, SamplingParams, Stats, TokenLogprob
from paceline.errors import PacelineError, PromptError, UsageError
from paceline.media.talk import opened, prompt_of
from paceline.server.conversation import rendered
from paceline.server.errors import ApiError
from paceline.server.foreign import settle
from paceline.server.generation import Ask, joined
from paceline.server.history import continues, history, unfinished
from paceline.server.logprobs import chat_logprobs
from paceline.server.media import has_media
from paceline.server.params import refuse, refuse_prompt, sampling_params, settle_length, text_of
from paceline.server.schema import ChatRequest, Function, NamedTool, Tool
from paceline.server.service import Room, Service, grammar_source, salt_of, schema_text
from paceline.server.settings import ServerConfig
from paceline.server.sse import DONE, event
from paceline.server.trace import Trace
from paceline.server.usage import report, usage
from paceline.server.visible import ChatText
from paceline.soft_tokens import media_of
from paceline.text.formats.base import SWITCHES
from paceline.text.formats.hermes import HERMES
from paceline.text.grammar import Lead
from paceline.text.marked import Answer
from paceline.text.schemas import held_arguments


@dataclass(slots=True)
class Chat:
    """One chat request, ready to run."""

    service: Service
    room: Room
    body: ChatRequest
    ask: Ask
    params: SamplingParams
    thinking: bool  # the prompt has opened a thinking part
    warnings: list[str]  # what of the request was ignored
    id: str = field(default_factory=lambda: "chatcmpl-" + uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    choices: list[ChatText] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # with `reason`, once `pieces` have ended
    reason: str = ""

    def __post_init__(self) -> None:
        room, older = self.room, bool(self.body.functions)
        known = {tool.function.name: tool.function.parameters or {} for tool in self.body.tools or []}
        tools = known if known and self.body.tool_choice != "none" else None
        most = 1 if self.body.parallel_tool_calls is False else self.service.config.max_tools
        chat = (
            room.format
            if room.format.calls is not None or tools is None
            else replace(room.format, calls=HERMES)
        )
        for index in range(self.params.n):
            answer = Answer(room.tokenizer, self.params, chat, self.thinking, tools)
            name = f"{self.id[-16:]}_{index}" if not room.format.needs.short_ids else self.id[-16:]
            self.choices.append(ChatText(answer, name, older, most, room.format.needs.short_ids))

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
                    "message": choice.message(),
                    "logprobs": self._logprobs(logprobs[i]),
                    "finish_reason": choice.finish_reason(reasons[i]),
                }
                for i, choice in enumerate(self.choices)
            ],
            "usage": self.usage(generation.stats.values()),
            **report(generation.stats.values(), self.params.seed, self.warnings),
        }

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """For other APIs: what each batch adds to the only text, any of content, reasoning_content and tool_calls."""
        async with self.service.generate(self.ask) as generation:
            async for batch in generation.batches():
                for _, delta in joined(batch):
                    self.completion_tokens += len(delta.token_ids)
                    piece = self.choices[0].push(delta)
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
        opening = {"role": "assistant", "content": None if _forced_calls(self.body) is not None else ""}
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
        chunk = self._chunk(delta.index, choice.push(delta))
        chunk["choices"][0]["logprobs"] = self._logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            chunk["choices"][0]["finish_reason"] = choice.finish_reason(delta.finish_reason)
        return chunk

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model}

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self.room.tokenizer, entries) if self.body.logprobs else None

    def usage(self, stats: Iterable[Stats]) -> dict[str, Any]:
        prompt = self.ask.jobs[0][0]
        out = usage(
            len(prompt), self.completion_tokens, stats, predicted=self.ask.predicted, media=media_of(prompt)
        )
        thoughts = sum(choice.answer.reasoning_tokens for choice in self.choices)
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
    room = service.check(body)
    text, prompt, changed = await service.media.run(
        has_media(body.messages), render_chat, service, room, body, salt_of(key, body)
    )
    warnings += changed
    if body.tools and body.tool_choice != "none" and not room.format.tools_shown:
        warnings.append("tools: the model's chat template does not show them: describe them in a message")
    space = service.room_after(prompt, "messages")
    settle_length(body, len(prompt))
    inside = room.format.opened_by(text, text_of(body.messages[-1].content) if continues(body) else None)
    constraint = await _constraint(service, room, body, _lead(room, body, text, inside))
    extra: dict[str, Any] = {"constraint": constraint, "stop_token_ids": _stops(room, body)}
    if (
        body.prediction is not None
        and not (body.speculation and body.speculation.drafter)
        and "ngram" in room.drafters
    ):
        extra["drafter"] = "ngram"
    params = sampling_params(body, space, extra, room.sampling)
    ask = replace(
        service.ask([(prompt, params)], salt_of(key, body), arrived),
        predicted=service.predicted(params),
        progress=bool(body.stream and body.return_progress),
    )
    return Chat(service, room, body, ask, params, inside, warnings)


def _stops(room: Room, body: ChatRequest) -> tuple[int, ...]:
    """Tokens that end the answer: the client's, the format's, and the end of a call where one is to be the only."""
    ends = list(room.format.ends)
    calls = room.format.calls
    if calls is not None and body.tools and body.tool_choice != "none" and body.parallel_tool_calls is False:
        ends += [calls.closing] if calls.joint is not None and calls.closing else []
    found = (room.tokenizer.token_id(end) for end in ends)
    return (*(body.stop_token_ids or ()), *(i for i in found if i is not None))


def _lead(room: Room, body: ChatRequest, prompt: str, inside: bool) -> Lead:
    """What comes before the part of an answer that a grammar holds."""
    if inside:
        return "open"
    asked = _thinking(body)
    may = room.format.thinks_unasked if asked is None else asked
    return "may" if may and not room.format.closed_by(prompt) else "none"


async def _constraint(
    service: Service, room: Room, body: ChatRequest, lead: Lead
) -> Callable[[], Constraint] | None:
    """What response_format asks for, forced calls, either of the two, or calls of strict tools as they begin."""
    answer, forced = await service.constraint(body, lead), _forced_calls(body)
    may_call = bool(body.tools) and body.tool_choice != "none"
    grammars, most = room.grammars, _most_calls(body)
    try:
        if forced is not None:
            return await asyncio.to_thread(grammars.compile_call, _held(forced), most, lead)
        if answer is not None and may_call:
            kind, source, _ = grammar_source(body, service.config)
            tools = _held(_strict_calls(body))
            return await asyncio.to_thread(grammars.compile_either, kind, source, tools, most, lead)
        if may_call and any(tool.function.strict for tool in body.tools or []):
            return await asyncio.to_thread(grammars.compile_strict, _held(_strict_calls(body)), lead)
    except PacelineError as error:
        raise refuse("tools", str(error), code="bad_grammar") from error
    return answer


def render_chat(
    service: Service, room: Room, body: ChatRequest, salt: str = "", *, measure: bool = False
) -> tuple[str, list[int], list[str]]:
    """The prompt of a conversation, as text and as ids, and what of the messages was changed. Raises ApiError 400."""
    tools = _tools(body, service.config)
    goes_on, options = continues(body), _options(body)
    if goes_on or body.add_generation_prompt is False:
        options["add_generation_prompt"] = False

    def render(messages: list[dict[str, Any]]) -> str:
        return room.render(messages, tools, options)

    try:
        talk = opened(
            history(body.messages, room.takes_parts, room.tokenizer.template), room.reader, served=True
        )
        talk.items = [replace(one, budget=one.budget or _budget(body)) for one in talk.items]
        messages = talk.messages
        where = f"messages.{len(messages) - 1}"
        whole = partial(unfinished, render, where=where) if goes_on else render
        text, changed = rendered(whole, messages, strict=service.config.strict)
        if measure and room.reader is not None:
            return text, room.reader.measured(text, talk, add_bos=None), changed
        return text, prompt_of(text, talk, room.tokenizer, room.reader, salt, add_bos=None), changed
    except PromptError as error:
        raise refuse_prompt(error) from error
    except ApiError:
        raise
    except PacelineError as error:
        raise refuse("messages", str(error), code="bad_template") from error


def _budget(body: ChatRequest) -> int | None:
    """Soft tokens of a picture that names none itself. Raises ApiError 400."""
    if body.image_tokens is not None:
        return body.image_tokens
    most = (body.mm_processor_kwargs or {}).get("max_soft_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise refuse("mm_processor_kwargs.max_soft_tokens", "give 70, 140, 280, 560 or 1120")
    return most


def _thinking(body: ChatRequest) -> bool | None:
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None:
        return body.chat_template_kwargs.enable_thinking
    return None if body.reasoning_effort is None else body.reasoning_effort != "none"


def _options(body: ChatRequest) -> dict[str, Any]:
    """Variables of the template that the client has set."""
    given = body.chat_template_kwargs
    options = dict(given.model_extra or {}) if given is not None else {}
    thinking = _thinking(body)
    if body.reasoning_effort in ("low", "medium", "high"):  # gpt-oss has such a switch
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if thinking is None:
        return options
    return {**dict.fromkeys(SWITCHES, thinking), **options, "enable_thinking": thinking}


def _tools(body: ChatRequest, config: ServerConfig) -> list[dict[str, Any]] | None:
    forced = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
    if forced and not body.tools:
        raise refuse("tool_choice", "needs tools")
    if not body.tools or body.tool_choice == "none":
        return None
    for i, tool in enumerate(body.tools):
        schema_text(tool.function.parameters or {}, f"tools.{i}.function.parameters", config)
    return [_declared(tool) for tool in body.tools]


def _declared(tool: Tool) -> dict[str, Any]:
    """A tool as templates print it, without what clients have put beside the known fields."""
    known = tool.function.model_dump(exclude_none=True, include=set(Function.model_fields))
    return {"type": tool.type, "function": known}


def _most_calls(body: ChatRequest) -> int:
    return 1 if isinstance(body.tool_choice, NamedTool) or body.parallel_tool_calls is False else 8


def _forced_calls(body: ChatRequest) -> dict[str, dict[str, Any]] | None:
    """The tools of which one has to be called (name -> parameters), None if the model may choose."""
    known = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in known:
            raise refuse("tool_choice", f"no tool is called {name[:80]!r}")
        return {name: known[name]}
    return known if body.tool_choice == "required" else None


def _held(tools: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Schemas in the words that a grammar holds. Raises UsageError, with the tool's name and the keyword."""
    out = {}
    for name, schema in tools.items():
        try:
            out[name] = held_arguments(schema)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    return out


def _strict_calls(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """Every tool that may be called; one that is not strict takes any arguments."""
    functions = [tool.function for tool in body.tools or []]
    return {f.name: (f.parameters or {}) if f.strict else {} for f in functions}
