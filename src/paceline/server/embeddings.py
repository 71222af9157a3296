"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: vectors of texts, by the steps of answers."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import Field

from paceline.core import SamplingParams
from paceline.engine.pooling import normed
from paceline.errors import PacelineError, RequestFailed
from paceline.server.generation import Ask
from paceline.server.params import refuse
from paceline.server.schema import Ids, Many, Named
from paceline.server.service import Room, Service
from paceline.server.sse import until_disconnect

_AT_ONCE = 64  # texts that are handed to the engine together
Inputs = list[str | list[int]]


class EmbeddingRequest(Named):
    input: str | Many[str] | Ids | Many[Ids]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="only so many numbers of each, of length 1 again")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="vLLM's: the last tokens of each text; -1: as many as fit; 0: all",
    )
    user: Any = Field(None, description="accepted and ignored")


class EmbedAsked(Named):
    """Of Ollama's /api/embed."""

    input: str | Many[str] | None = None
    truncate: bool | None = Field(None, description="false: a text over the context is refused, not cut")
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None
    keep_alive: Any = Field(None, description="has no effect")


class EmbeddingAsked(Named):
    """Of Ollama's older /api/embeddings."""

    prompt: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] | None = None
    keep_alive: Any = Field(None, description="has no effect")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for, and the name that its inputs have there."""

    inputs: Inputs
    param: str = "input"
    dimensions: int | None = None
    keep: int = (
        0  # tokens of each: 0 = all, a number = the last ones, -1 = as many as fit, -2 = the first that fit
    )
    lora: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Embeddings:
    """A request that is ready to run."""

    service: Service
    ask: Ask
    dimensions: int | None
    id: str = field(default_factory=lambda: "embd-" + uuid.uuid4().hex[:24])
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.ask.jobs)

    async def vectors(self) -> list[np.ndarray]:
        """Float32 [dimensions], in the order of the inputs. Raises RequestFailed."""
        begin, out = time.monotonic(), list[np.ndarray]()
        most = max(1, min(_AT_ONCE, self.service.config.max_texts // 2))
        for first in range(0, len(self.ask.jobs), most):
            jobs = self.ask.jobs[first : first + most]
            made: dict[int, np.ndarray] = {}
            async with self.service.generate(replace(self.ask, jobs=jobs)) as generation:
                async for at, delta in generation.deltas():
                    if delta.embedding is not None:
                        made[at] = delta.embedding
            if len(made) < len(jobs):
                raise RequestFailed("an embedding was not computed in time: send fewer or shorter texts")
            out += [made[at] for at in range(len(jobs))]
        self.seconds = time.monotonic() - begin
        return out if self.dimensions is None else [normed(vector, self.dimensions) for vector in out]


def add_embeddings(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """A vector of length 1 for each text."""
        warnings = service.warnings(body)
        inputs = _listed(body.input)
        wanted = Wanted(inputs, dimensions=body.dimensions, keep=body.truncate_prompt_tokens or 0)
        wanted = replace(wanted, lora=service.lora_of(body.model))
        ready, vectors = await _run(service, wanted, request)
        return await _json(_openai, service, body.encoding_format, ready.tokens, vectors, warnings)

    @app.post("/api/embed", include_in_schema=False)
    async def embed(body: EmbedAsked, request: Request) -> Response:
        warnings = service.warnings(body)
        keep = 0 if body.truncate is False else -2
        inputs = _listed([] if body.input is None else body.input)
        if not inputs:
            return await _json(_ollama, service, None, [], warnings)
        wanted = Wanted(inputs, dimensions=body.dimensions, keep=keep, lora=service.lora_of(body.model))
        ready, vectors = await _run(service, wanted, request)
        return await _json(_ollama, service, ready, vectors, warnings)

    @app.post("/api/embeddings", include_in_schema=False)
    async def embedding(body: EmbeddingAsked, request: Request) -> Response:
        service.warnings(body)
        wanted = Wanted([body.prompt], "prompt", keep=-2, lora=service.lora_of(body.model))
        _, vectors = await _run(service, wanted, request)
        return await _json(lambda: {"embedding": vectors[0].tolist()})


def _listed(given: Any) -> Inputs:
    """Each of the inputs: of one text, or of one text's tokens, too."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


async def _run(service: Service, wanted: Wanted, request: Request) -> tuple[Embeddings, list[np.ndarray]]:
    ready = await until_disconnect(request.receive, _prepared(service, wanted, request.state.salt))
    service.tell(ready, request.state.told)
    return ready, await until_disconnect(request.receive, ready.vectors())


async def _prepared(service: Service, wanted: Wanted, salt: str) -> Embeddings:
    """Encode and check, all before anything is queued. Raises ApiError 400."""
    arrived, room = time.monotonic(), service.room
    count, most = len(wanted.inputs), service.config.max_inputs
    if not 1 <= count <= most:
        raise refuse(wanted.param, f"give 1 to {most} texts")
    if wanted.dimensions is not None and wanted.dimensions > room.hidden_size:
        raise refuse("dimensions", f"at most {room.hidden_size}, as many as this model's embeddings have")
    prompts = await asyncio.to_thread(_encoded, service, room, wanted)
    params = SamplingParams(max_tokens=1, pooling=room.pooling, lora=wanted.lora)
    ask = service.ask([(ids, params) for ids in prompts], salt, arrived)
    return Embeddings(service, ask, wanted.dimensions)


def _encoded(service: Service, room: Room, wanted: Wanted) -> list[list[int]]:
    out = []
    for given in wanted.inputs:
        if isinstance(given, str) and not wanted.keep:
            service.foresee(given, wanted.param)
        try:
            ids = room.tokenizer.encode_whole(given) if isinstance(given, str) else list(given)
        except PacelineError as error:
            raise refuse(wanted.param, str(error), code="bad_prompt") from error
        ids = _cut(ids, wanted.keep, room.max_len - 1)
        service.room_after(ids, wanted.param)
        out.append(ids)
    return out


def _cut(ids: list[int], keep: int, most: int) -> list[int]:
    if keep == 0:
        return ids
    if keep == -2:
        return ids[:most]
    return ids[-(most if keep < 0 else keep) :]


async def _json(make: Any, *arguments: Any) -> Response:
    """An answer, written in a thread: thousands of numbers would hold up every other request."""
    data = await asyncio.to_thread(lambda: json.dumps(make(*arguments), separators=(",", ":")).encode())
    return Response(data, media_type="application/json")


def _openai(
    service: Service, kind: str | None, tokens: int, vectors: list[np.ndarray], warnings: list[str]
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(v) if kind == "base64" else v.tolist()}
        for i, v in enumerate(vectors)
    ]
    return {
        "object": "list", "data": data, "model": service.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens}, **({"warnings": warnings} if warnings else {}),
    }  # fmt: skip


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _ollama(
    service: Service, ready: Embeddings | None, vectors: list[np.ndarray], warnings: list[str]
) -> dict[str, Any]:
    return {
        "model": service.model, "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": round((ready.seconds if ready else 0.0) * 1e9), "load_duration": 0,
        "prompt_eval_count": ready.tokens if ready else 0, **({"warnings": warnings} if warnings else {}),
    }  # fmt: skip
