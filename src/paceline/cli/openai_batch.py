"""Lines of OpenAI's batch files: a request with a `custom_id` in, its response out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, shown

if TYPE_CHECKING:
    from paceline.core import Completion

Record = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FIELDS = {"id", "custom_id", "response", "error"}  # of an answer
_LINE = {"custom_id", "method", "url", "body"}
_RENAMED = {"max_completion_tokens": "max_tokens", "stop_sequences": "stop"}
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "stream", "logprobs", "top_logprobs"}


def is_batch(record: Record) -> bool:
    return "custom_id" in record and "body" in record


def request_of(record: Record) -> Record:
    """The line as one of ours: id, messages or prompt, and what is said of them. Raises UsageError."""
    if unknown := sorted(set(record) - _LINE):
        raise UsageError(
            f"unknown field {unknown[0]!r}: a line of a batch has custom_id, method, url and body"
        )
    body, url = record["body"], record.get("url", CHAT)
    if not isinstance(body, dict):
        raise UsageError("body has to be an object: give the request")
    if url not in (CHAT, TEXT) or record.get("method", "POST") != "POST":
        raise UsageError(f"url={shown(url)} is not possible: give POST {CHAT} or {TEXT}")
    if body.get("stream"):
        raise UsageError("stream: a file has whole answers: leave it out")
    if body.get("logprobs"):
        raise UsageError("logprobs: lines of a batch have none here: use lines with prompt, or leave it out")
    made: Record = {
        _RENAMED.get(str(name), str(name)): value for name, value in body.items() if name not in _IGNORED
    }
    wanted = "messages" if url == CHAT else "prompt"
    if wanted not in made:
        raise UsageError(f"body has no {wanted}: {url} needs it")
    return {"id": record["custom_id"]} | {name: value for name, value in made.items() if value is not None}


def refused(name: str | int, line: int, error: str | None) -> Record:
    """What is written for a line that cannot be used."""
    told = {"code": "invalid_line", "message": error, "line": line}
    return {"id": f"batch_req_{line}", "custom_id": name, "response": None, "error": told}


def answered(name: str | int, line: int, done: Completion, model: str, chat: bool) -> Record:
    """The response to a line, as OpenAI's API writes it into a file."""
    texts = [done, *done.siblings]
    if done.error is not None:
        return refused(name, line, done.error)
    prompt, written = len(done.prompt_token_ids), sum(len(text.token_ids) for text in texts)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line}", "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()), "model": model, "choices": [_choice(i, text, chat) for i, text in enumerate(texts)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written},
    }  # fmt: skip
    response = {"status_code": 200, "request_id": f"line-{line}", "body": body}
    return {"id": f"batch_req_{line}", "custom_id": name, "response": response, "error": None}


def _choice(index: int, done: Completion, chat: bool) -> Record:
    reason = "tool_calls" if done.tool_calls and done.finish_reason == "stop" else done.finish_reason
    head: Record = {"index": index, "finish_reason": reason, "logprobs": None}
    if not chat:
        return head | {"text": done.text}
    message: Record = {"role": "assistant", "content": done.text or (None if done.tool_calls else "")}
    if done.reasoning:
        message["reasoning_content"] = done.reasoning
    if done.tool_calls:
        message["tool_calls"] = done.tool_calls
    return head | {"message": message}


def is_answer(record: Mapping[str, Any]) -> bool:
    """Whether a record of an output is such a response."""
    error = record.get("error")
    told = isinstance(record.get("response"), dict) or (
        isinstance(error, dict) and isinstance(error.get("line"), int)
    )
    return set(record) == FIELDS and told
