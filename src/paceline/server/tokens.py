"""POST /tokenize and /detokenize, as vLLM and llama.cpp have them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import Field

from paceline.errors import PacelineError
from paceline.server.chat import read
from paceline.server.foreign import settle
from paceline.server.media import has_media
from paceline.server.params import refuse
from paceline.server.schema import ChatRequest, Ids, Many, Message, Part, TemplateOptions, Tool
from paceline.server.service import Room, Service
from paceline.text.tokenizer import Tokenizer

MOST_TOKENS = 2**18  # in one answer
_PART = 2**12  # tokens written as JSON at a time


class TokenizeRequest(Part):
    """A text or a conversation."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    content: str | None = Field(
        None, description="llama.cpp's name of prompt, without begin-of-text if left open"
    )
    messages: Many[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="begin-of-text, if the model has one")
    add_special: bool | None = Field(None, description="the same as add_special_tokens")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    return_token_strs: bool | None = None
    parse_special: bool | None = Field(None, description="false: special tokens in the text are text")
    with_pieces: bool | None = Field(None, description="tokens as {id, piece}, as llama.cpp has them")


class DetokenizeRequest(Part):
    model: str | None = Field(None, max_length=256)
    tokens: Ids


async def tokenize(service: Service, body: TokenizeRequest) -> bytes:
    """The ids that a completion or a chat would begin with, as JSON. Raises ApiError."""
    room = service.room
    service.unknown.model(body.model, service.names)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise refuse(given[1] if given else "prompt", "give one of prompt, content and messages")
    if body.messages is not None:
        names = (
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        )
        chat = ChatRequest.model_construct(**{name: getattr(body, name) for name in names})
        settle(chat)
        seen = has_media(chat.messages)
        _, prompt = await service.media.run(seen, read, service, room, chat, measured=True)
        ids = prompt.ids
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if special is None:
            special = body.content is None
        _check(room.tokenizer.least(text), given[0])
        try:
            marks = body.parse_special is not False
            ids = await asyncio.to_thread(room.tokenizer.encode, text, None if special else False, marks)
        except PacelineError as error:
            raise refuse(given[0], str(error), code="bad_prompt") from error
    _check(len(ids), given[0])
    return await asyncio.to_thread(_told, room, body, ids)


def _check(count: int, param: str) -> None:
    if count > MOST_TOKENS:
        raise refuse(param, f"{count} tokens are over the {MOST_TOKENS} of one request: send it in parts")


def _told(room: Room, body: TokenizeRequest, ids: list[int]) -> bytes:
    """The answer, made in parts: one call of `json.dumps` for all of it would hold up every other request."""
    out: dict[str, Any] = {"count": len(ids), "max_model_len": room.max_len, "tokens": []}
    if body.return_token_strs:
        out["token_strs"] = [room.tokenizer.token_text(token) for token in ids]
    parts = (ids[i : i + _PART] for i in range(0, len(ids), _PART))
    if body.with_pieces:
        told = [json.dumps([{"id": i, "piece": _piece(room.tokenizer, i)} for i in part]) for part in parts]
    else:
        told = [json.dumps(part) for part in parts]
    whole = ", ".join(part[1:-1] for part in told)
    return json.dumps(out, ensure_ascii=False).replace('"tokens": []', f'"tokens": [{whole}]', 1).encode()


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The token's text, or its bytes where they are no whole characters."""
    piece = tokenizer.piece(token, skip_special=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens as they are spelled, under vLLM's name and llama.cpp's. Raises ApiError."""
    room = service.room
    service.unknown.model(body.model, service.names)
    if max(body.tokens, default=0) >= room.vocab_size:
        raise refuse("tokens", f"token {max(body.tokens)} is not in the vocabulary of {room.vocab_size}")
    _check(len(body.tokens), "tokens")
    text = await asyncio.to_thread(room.tokenizer.decode, body.tokens, skip_special=False)
    return {"prompt": text, "content": text}
