"""Every door to a chat, over an engine without a model: what reaches the engine, and what is made of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from families import FAMILIES, tokenizer_of
from paceline import LLM, AsyncLLM
from paceline.chat.road import Chats
from paceline.cli.conversation import Conversation
from paceline.cli.generate import _Own
from paceline.cli.lines import check_lines
from paceline.cli.run import _turn
from paceline.cli.writing import Painter
from paceline.core import Completion, Delta, SamplingParams
from paceline.errors import PacelineError, UsageError
from paceline.server.anthropic import Content, MessagesRequest, prepare_reply
from paceline.server.chat import Chat, prepare_chat
from paceline.server.errors import ApiError
from paceline.server.metrics import Metrics
from paceline.server.ollama import ChatAsked, _fitting
from paceline.server.ollama import Turn as OllamaTurn
from paceline.server.responses import Output, ResponsesRequest, prepare_response
from paceline.server.schema import ChatRequest
from paceline.server.service import Room, Service
from paceline.server.settings import ServerConfig
from paceline.server.tokens import TokenizeRequest, tokenize
from paceline.text.chat import ChatTemplate, TemplateRefused
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, _Text

Talk = dict[str, Any]  # messages, tools, thinking, as OpenAI's chat completions have them
Seen = tuple[str, Any]  # ("ids", the prompt) or ("refused", "")
LENGTH = 2**15


class LibraryEngine(FakeEngine):
    """The fake engine with what the library asks of one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, script="")
        self.max_len = LENGTH
        self.parts = SimpleNamespace(media=None)
        self.state = SimpleNamespace(
            target=SimpleNamespace(vocab_size=tokenizer.vocab_size, eos_token_ids=(1,))
        )

    @property
    def info(self) -> dict[str, Any]:
        return {"sampling": {}, "chat": True, "target": "x", "drafter": "none", "verify": "match"}

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Everything can run."""

    def has(self, request: str) -> bool:
        return any(text.request == request for text in self.running)

    def texts(self, request: str) -> list[Any]:
        return [_State(text) for text in self.running if text.request == request]

    def close(self) -> None:
        """There is nothing to give back."""


@dataclass
class _State:
    text: _Text

    def completion(self, reason: Any, error: str | None) -> Completion:
        t = self.text
        origins: list[Any] = ["target"] * len(t.out)
        return Completion(
            t.request, t.index, t.said, t.out, t.prompt, reason, t.stats, t.seed, origins, error=error
        )


@dataclass
class Doors:
    """One model behind all doors."""

    name: str  # of its template
    llm: LLM
    service: Service
    engine: LibraryEngine
    loop: asyncio.AbstractEventLoop

    @property
    def doors(self) -> dict[str, Callable[[Talk], list[int]]]:
        return {
            "LLM.chat": self.library, "AsyncLLM.chat": self.awaited, "LLM.stream": self.streamed, "run": self.run,
            "a conversation": self.conversation, "generate": self.generate, "a batch": self.batch,
            "chat completions": self.completions, "Responses": self.responses, "Ollama": self.ollama,
            "Anthropic": self.anthropic, "/tokenize": self.tokenized,
        }  # fmt: skip

    def prompt(self, door: str, talk: Talk) -> Seen | None:
        """What the door makes of a talk; None for one that it cannot say."""
        try:
            return "ids", self.doors[door](talk)
        except NotSayable:
            return None
        except (PacelineError, ApiError):
            return "refused", ""

    def library(self, talk: Talk) -> list[int]:
        (done,) = self.llm.chat(talk["messages"], max_tokens=1, **_wanted(talk))
        return done.prompt_token_ids

    def awaited(self, talk: Talk) -> list[int]:
        async def ask() -> list[int]:
            (done,) = await _async(self.llm).chat(talk["messages"], max_tokens=1, **_wanted(talk))
            return done.prompt_token_ids

        return self.loop.run_until_complete(ask())

    def streamed(self, talk: Talk) -> list[int]:
        list(self.llm.stream(talk["messages"], max_tokens=1, **_wanted(talk)))
        return self.engine.last_prompt

    def run(self, talk: Talk) -> list[int]:
        roles = [message["role"] for message in talk["messages"]]
        if roles not in (["user"], ["system", "user"]) or set(talk) != {"messages"}:
            raise NotSayable
        *system, user = (message["content"] for message in talk["messages"])
        return _turn(self.llm, user, system[0] if system else None, {}).prompt.ids

    def generate(self, talk: Talk) -> list[int]:
        return self._line({**talk, "max_tokens": 1})

    def batch(self, talk: Talk) -> list[int]:
        return self._line(
            {"custom_id": "a", "url": "/v1/chat/completions", "body": {**talk, "max_completion_tokens": 1}}
        )

    def _line(self, record: dict[str, Any]) -> list[int]:
        (line,) = check_lines(json.dumps(record).encode(), {})
        assert line.error is None, line.error
        (made,) = _Own(self.llm, "x").check([line])
        if isinstance(made, str):
            raise UsageError(made)
        return made

    def conversation(self, talk: Talk) -> list[int]:
        *earlier, last = talk["messages"]
        if last["role"] != "user" or set(talk) != {"messages"}:
            raise NotSayable
        conversation = Conversation(self.llm, {"max_tokens": 1}, chat=True)
        conversation.turns.replace(None, earlier)
        return conversation.turns.prompt(last["content"], 1).prompt.ids

    def completions(self, talk: Talk) -> list[int]:
        body = ChatRequest.model_validate({**talk, "max_tokens": 1})
        return self.loop.run_until_complete(prepare_chat(self.service, body, "")).ask.jobs[0][0]

    def responses(self, talk: Talk) -> list[int]:
        body = ResponsesRequest.model_validate(as_response(talk))
        return self.loop.run_until_complete(prepare_response(self.service, body, "")).chat.ask.jobs[0][0]

    def ollama(self, talk: Talk) -> list[int]:
        body = ChatAsked.model_validate(as_ollama(talk))
        return self.loop.run_until_complete(_fitting(self.service, body, ""))[0].ask.jobs[0][0]

    def anthropic(self, talk: Talk) -> list[int]:
        body = MessagesRequest.model_validate(as_anthropic(talk))
        return self.loop.run_until_complete(prepare_reply(self.service, body, "")).chat.ask.jobs[0][0]

    def tokenized(self, talk: Talk) -> list[int]:
        if set(talk) - {"messages", "tools"}:
            raise NotSayable
        answer = self.loop.run_until_complete(tokenize(self.service, TokenizeRequest.model_validate(talk)))
        out: list[int] = json.loads(answer)["tokens"]
        return out

    def answers(self, script: str, talk: Talk) -> dict[str, Told]:
        """What each door makes of the tokens of `script`."""
        self.engine.script = script
        wanted = {"max_tokens": 400, "seed": 1, **_wanted(talk)}
        (done,) = self.llm.chat(talk["messages"], **wanted)
        out = {"LLM.chat": Told(done.text, done.reasoning, _calls(done.tool_calls))}
        (done,) = self.loop.run_until_complete(_async(self.llm).chat(talk["messages"], **wanted))
        out["AsyncLLM.chat"] = Told(done.text, done.reasoning, _calls(done.tool_calls))
        deltas = list(self.llm.stream(talk["messages"], **wanted))
        calls = _joined([call for delta in deltas for call in delta.tool_calls])
        out["LLM.stream"] = Told("".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls)
        if "tools" not in talk:
            (turn,) = self.llm.turns([talk["messages"]], None, wanted)
            for drafts in (False, True):
                painter = Painter(self.llm, turn.params, turn, drafts=drafts)
                for delta in self.llm.stream(turn.prompt.ids, turn.params):
                    list(painter.push(delta))
                out[f"run, drafts {drafts}"] = Told(painter.answered, painter.thoughts, [])
        return out | self.loop.run_until_complete(self._served(talk))

    async def _served(self, talk: Talk) -> dict[str, Told]:
        chat = await prepare_chat(
            self.service, ChatRequest.model_validate({**talk, "max_tokens": 400, "seed": 1}), ""
        )
        pieces = [chat.choices[0].push(delta) for delta in self._deltas(chat)]
        message = chat.choices[0].message()
        calls = _calls(message.get("tool_calls", []))
        out = {
            "chat completions": Told(message["content"] or "", message.get("reasoning_content", ""), calls)
        }
        streamed = _joined([call for piece in pieces for call in piece.get("tool_calls", [])])
        text, thoughts = ("".join(p.get(n, "") for p in pieces) for n in ("content", "reasoning_content"))
        out["streamed"] = Told(text, thoughts, streamed)
        response, items, blocks = Output("x"), Told("", "", []), Content()
        for piece in pieces:
            list(response.push(piece))
            list(blocks.push(piece))
        for item in response.items:
            items.add(item["type"], item.get("content", [{}])[0].get("text", ""), item)
        out["Responses"] = items
        out["Anthropic"] = Told("", "", [])
        for block in blocks.whole():
            out["Anthropic"].add(block["type"], block.get("text") or block.get("thinking") or "", block)
        made = OllamaTurn(self.service, chat, ChatAsked.model_validate(as_ollama(talk)), "message")._calls()
        named = [(one["function"]["name"], one["function"]["arguments"]) for one in made]
        out["Ollama"] = Told(text, thoughts, named)
        return out

    def _deltas(self, chat: Chat) -> Iterator[Delta]:
        ((prompt, params),) = chat.ask.jobs
        self.engine.add("served", prompt, params)
        while self.engine.has("served"):
            yield from self.engine.step()


@dataclass
class Told:
    """What an answer says, thinks and calls."""

    text: str
    thoughts: str
    calls: list[tuple[str, Any]]

    def add(self, kind: str, text: str, whole: dict[str, Any]) -> None:
        if kind in ("function_call", "tool_use"):
            given = whole.get("input", whole.get("arguments"))
            self.calls.append((whole["name"], json.loads(given) if isinstance(given, str) else given))
        elif kind in ("reasoning", "thinking"):
            self.thoughts += text
        else:
            self.text += text


def _calls(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def _joined(pieces: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Calls of which a stream has told in pieces."""
    whole: dict[int, tuple[str, str]] = {}
    for piece in pieces:
        name, arguments = whole.get(piece["index"], ("", ""))
        made = piece["function"]
        whole[piece["index"]] = name + made.get("name", ""), arguments + made["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in whole.values()]


class NotSayable(Exception):
    """The door has no words for a talk."""


def _async(llm: LLM) -> AsyncLLM:
    made = AsyncLLM.__new__(AsyncLLM)
    made._llm = llm
    return made


def _wanted(talk: Talk) -> dict[str, Any]:
    return {name: value for name, value in talk.items() if name != "messages"}


def as_response(talk: Talk) -> dict[str, Any]:
    """The talk in the items of the Responses API."""
    if talk["messages"][-1]["role"] == "assistant":
        raise NotSayable  # this API begins a turn of its own
    items: list[dict[str, Any]] = []
    for message in talk["messages"]:
        calls = message.get("tool_calls") or []
        if message.get("reasoning_content"):
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "content": [thought], "summary": []})
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
        elif message["content"] or not calls:
            items.append({"role": message["role"], "content": message["content"] or ""})
        for call in calls:
            made = call["function"]
            items.append(
                {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": made["name"],
                    "arguments": made["arguments"],
                }
            )
    out: dict[str, Any] = {"input": items, "max_output_tokens": 1}
    if "tools" in talk:
        out["tools"] = [{"type": "function", **tool["function"]} for tool in talk["tools"]]
    if "reasoning_effort" in talk:
        out["reasoning"] = {"effort": talk["reasoning_effort"]}
    return out


def as_anthropic(talk: Talk) -> dict[str, Any]:
    """The talk in Anthropic's messages: calls and results are blocks."""
    said: list[dict[str, Any]] = []
    for message in talk["messages"]:
        content = message["content"]
        blocks = (
            content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        )
        if message.get("reasoning_content"):
            thought = {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
            blocks = [thought, *blocks]
        for call in message.get("tool_calls") or []:
            made = call["function"]
            given = json.loads(made["arguments"])
            blocks = [*blocks, {"type": "tool_use", "id": call["id"], "name": made["name"], "input": given}]
        if message["role"] == "developer":
            raise NotSayable
        role = "user" if message["role"] == "tool" else message["role"]
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        said.append({"role": role, "content": blocks or (content or "")})
    out: dict[str, Any] = {"messages": said, "max_tokens": 1}
    if "tools" in talk:
        names = {"parameters": "input_schema"}
        out["tools"] = [
            {names.get(name, name): value for name, value in tool["function"].items()}
            for tool in talk["tools"]
        ]
    if "reasoning_effort" in talk:
        out["thinking"] = {"type": "disabled" if talk["reasoning_effort"] == "none" else "enabled"}
    return out


def as_ollama(talk: Talk) -> dict[str, Any]:
    """The talk in Ollama's messages: calls have no ids, and arguments are objects."""
    said = []
    for message in talk["messages"]:
        content = message["content"]
        if isinstance(content, list):
            raise NotSayable  # its content is one text
        made: dict[str, Any] = {"role": message["role"], "content": content}
        if message.get("reasoning_content"):
            made["thinking"] = message["reasoning_content"]
        if message.get("tool_calls"):
            made["tool_calls"] = [
                {
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": json.loads(call["function"]["arguments"]),
                    }
                }
                for call in message["tool_calls"]
            ]
        if message["role"] == "tool":
            made["tool_name"] = message["name"]
        said.append(made)
    out: dict[str, Any] = {"messages": said, "options": {"num_predict": 1}}
    if "tools" in talk:
        out["tools"] = talk["tools"]
    if "reasoning_effort" in talk:
        out["think"] = talk["reasoning_effort"] != "none"
    return out


@contextmanager
def doors_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    """The model whose template is `name` in tests/families.py, behind every door."""
    tokenizer = tokenizer_of(name)
    engine = LibraryEngine(tokenizer)
    _remember_renderings(monkeypatch)
    monkeypatch.setattr("paceline.llm.build_engine", lambda config, say: engine)
    llm, loop = LLM("x"), asyncio.new_event_loop()
    worker: Any = SimpleNamespace(state="ready")
    service = Service("fake", ServerConfig(), worker, Metrics(worker))
    grammars: Any = None
    room = Room(Chats.of(tokenizer), grammars, LENGTH, tokenizer.vocab_size, ("none",), chat=True)
    service.loaded = room
    try:
        yield Doors(name, llm, service, engine, loop)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        ChatTemplate.of(tokenizer).close()


def _remember_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is asked once for the same messages: doors that agree ask it the same."""
    real, known = ChatTemplate.render, dict[str, str | TemplateRefused]()

    def render(self: ChatTemplate, messages: Any, **more: Any) -> str:
        key = json.dumps([self.source, messages, more])
        if key not in known:
            try:
                known[key] = real(self, messages, **more)
            except TemplateRefused as error:
                known[key] = error
        found = known[key]
        if isinstance(found, TemplateRefused):
            raise found
        return found

    monkeypatch.setattr(ChatTemplate, "render", render)


NAMES = list(FAMILIES)
