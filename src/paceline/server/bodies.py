"""A request's body, from bytes to a route's fields: bounded before anything in it is looked at, read off the event loop.

What cannot be is refused for its size alone: lists and objects are counted in the bytes, before JSON is made of them. Of
the errors of a list one is enough (`schema.Many`).
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from paceline.server.errors import ApiError

MOST_NESTED = 2**15  # lists and objects; a conversation of 4,096 messages has three or four for each
MOST_VALUES = 2**20  # separated by commas: token ids, above all
SHORT = 2**14  # bytes: reading them takes less time than handing them to another thread
_MEMBERS = 64  # parts of a gzip file


class BodyRoute(APIRoute):
    """Reads its body in a thread: FastAPI itself would on the event loop, and gather an error for each item."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handle

        async def handler(request: Request) -> Response:
            raw = await request.body()
            if raw:  # FastAPI says what is missing
                short = len(raw) <= SHORT
                request._json = read(model, raw) if short else await asyncio.to_thread(read, model, raw)
            return await handle(request)

        return handler


def read(model: type[BaseModel], raw: bytes) -> BaseModel:
    """The fields of a body. Raises ApiError and RequestValidationError, both 400."""
    check_counts(raw)
    try:
        value = json.loads(raw)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep: make it flatter", code="bad_json") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ApiError(400, "the body is not valid JSON", code="bad_json") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(
            [{**entry, "loc": ("body", *entry["loc"])} for entry in errors]
        ) from error


def check_counts(raw: bytes) -> None:
    """Raise ApiError 400 for JSON with more lists, objects or values than a request can need."""
    nested, values = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    if nested <= MOST_NESTED and values <= MOST_VALUES:
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # now a quote begins or ends a text
    data = np.frombuffer(plain, np.uint8)
    outside = ~np.bitwise_xor.accumulate(data == ord('"'))
    nested = sum(int(np.count_nonzero(outside & (data == ord(sign)))) for sign in "{[")
    values = int(np.count_nonzero(outside & (data == ord(","))))
    if nested > MOST_NESTED:
        raise ApiError(
            400, f"the body has {nested} lists and objects, at most {MOST_NESTED} are read: send fewer",
            code="too_many_items",
        )  # fmt: skip
    if values > MOST_VALUES:
        raise ApiError(
            400,
            f"the body has {values} values, at most {MOST_VALUES} are read: send fewer",
            code="too_many_items",
        )


def unpacked(encoding: str, body: bytes, limit: int) -> bytes:
    """A body without its Content-Encoding, of `limit` bytes at most. Raises ApiError 413, 415 and 400."""
    kind = encoding.strip().lower()
    if kind in ("", "identity"):
        return body
    if kind not in ("gzip", "x-gzip", "deflate"):
        raise ApiError(
            415, f"a body with Content-Encoding {kind[:40]!r} is not read: send it plain, or as gzip",
            code="bad_encoding", headers={"Accept-Encoding": "gzip, deflate, identity"},
        )  # fmt: skip
    out = bytearray()
    try:
        for _ in range(_MEMBERS):
            reader = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either kind
            out += reader.decompress(body, limit + 1 - len(out))
            if len(out) > limit:
                raise ApiError(413, f"the body is over {limit} bytes when unpacked", code="too_large")
            if not reader.eof:
                break
            body = reader.unused_data
            if not body:
                return bytes(out)
    except zlib.error as error:
        raise ApiError(400, f"the body is not valid {kind}: send it again", code="bad_encoding") from error
    raise ApiError(400, f"the body is cut off: send the whole {kind} file", code="bad_encoding")
