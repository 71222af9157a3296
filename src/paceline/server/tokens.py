"""POST /tokenize and /detokenize, as vLLM and llama.cpp have them."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from paceline.errors import PacelineError
from paceline.server.chat import read
from paceline.server.foreign import settle
from paceline.server.media import has_media
from paceline.server.params import refuse
from paceline.server.schema import ChatRequest, Ids, Message, Part, TemplateOptions, Tool
from paceline.server.service import Service
from paceline.text.tokenizer import Tokenizer


class TokenizeRequest(Part):
    """A text or a conversation."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    content: str | None = Field(
        None, description="llama.cpp's name of prompt, without begin-of-text if left open"
    )
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: list[Tool] | None = None
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


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """The ids that a completion or a chat would begin with. Raises ApiError."""
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
        try:
            marks = body.parse_special is not False
            ids = await asyncio.to_thread(room.tokenizer.encode, text, None if special else False, marks)
        except PacelineError as error:
            raise refuse(given[0], str(error), code="bad_prompt") from error
    shown = [{"id": i, "piece": _piece(room.tokenizer, i)} for i in ids] if body.with_pieces else ids
    out: dict[str, Any] = {"count": len(ids), "max_model_len": room.max_len, "tokens": shown}
    if body.return_token_strs:
        out["token_strs"] = [room.tokenizer.token_text(token) for token in ids]
    return out


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The token's text, or its bytes where they are no whole characters."""
    piece = tokenizer.piece(token, skip_special=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens as they are spelled, under vLLM's name and llama.cpp's. Raises ApiError."""
    room = service.room
    service.unknown.model(body.model, service.names)
    if max(body.tokens, default=0) >= room.vocab_size:
        raise refuse("tokens", f"token {max(body.tokens)} is not in the vocabulary of {room.vocab_size}")
    text = room.tokenizer.decode(body.tokens, skip_special=False)
    return {"prompt": text, "content": text}
