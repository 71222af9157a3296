"""llama.cpp's own API: POST /completion and GET /props, and the answers of /infill, in its field names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from paceline import __version__
from paceline.core import Delta, SamplingParams, Stats
from paceline.errors import PacelineError
from paceline.server.completions import Completion, prepare_completion
from paceline.server.generation import joined
from paceline.server.logprobs import token_entry
from paceline.server.params import refuse
from paceline.server.schema import CompletionRequest, Many, Sampling, Token
from paceline.server.service import Room, Service
from paceline.server.sse import EventStream, event, until_disconnect

_SAME = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "mirostat", "mirostat_tau",
    "mirostat_eta", "ignore_eos",
)  # fmt: skip
_SETTINGS = {
    **{name: name for name in _SAME},
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
}  # fmt: skip  llama.cpp's name -> ours
_MOST_OF_STOP = 1024  # tokens that a stop string can have
Mixed = Annotated[Many[Token | str], Field(min_length=1)]


class LlamaRequest(Sampling):
    """What /completion and /infill have beside the fields of all."""

    n_probs: int | None = Field(None, ge=0, description="how many likely tokens to show at each place")
    post_sampling_probs: bool | None = Field(None, description="not supported: must be false")
    return_tokens: bool | None = None
    response_fields: Many[str] | None = Field(
        None, max_length=64, description="only these fields of an answer; `a/b` is b of a"
    )


class PlainRequest(LlamaRequest):
    prompt: str | Mixed | Annotated[Many[str | Mixed], Field(min_length=1)]


def add_llama(app: FastAPI, service: Service) -> None:
    @app.post("/completion", include_in_schema=False)
    async def completion(body: PlainRequest, request: Request) -> Response:
        ready = await until_disconnect(request.receive, _prepared(service, body, request.state.salt))
        return await respond(service, body, ready, request)

    @app.get("/props", include_in_schema=False)
    async def props() -> JSONResponse:
        return JSONResponse(_props(service, service.room))


async def respond(service: Service, body: LlamaRequest, ready: Completion, request: Request) -> Response:
    service.tell(ready, request.state.told)
    answer = Said(service, body, ready)
    if body.stream:
        return EventStream(answer.stream())
    return JSONResponse(await until_disconnect(request.receive, answer.whole()))


def as_completion(service: Service, body: LlamaRequest, **more: Any) -> CompletionRequest:
    """The same in the fields of a completion. Raises ApiError 400."""
    if body.post_sampling_probs:
        raise refuse("post_sampling_probs", "is not supported: leave it out, n_probs shows the model's own")
    if (body.n_probs or 0) > service.config.max_logprobs:
        raise refuse("n_probs", f"at most {service.config.max_logprobs}")
    given = (
        {name: getattr(body, name) for name in Sampling.model_fields}
        | {"model": service.called(body.model)}
        | more
    )
    if all(getattr(body, name) is None for name in ("max_tokens", "n_predict", "max_new_tokens")):
        given["max_tokens"] = -1
    given["logprobs"] = body.n_probs or None
    return CompletionRequest.model_validate(given)


async def _prepared(service: Service, body: PlainRequest, salt: str) -> Completion:
    warnings = service.warnings(body)
    prompt = await asyncio.to_thread(_prompt, service, service.room, body)
    ready = await prepare_completion(service, as_completion(service, body, prompt=prompt), salt)
    ready.warnings += warnings
    ready.texts = await asyncio.to_thread(_shown, ready)
    return ready


def _shown(ready: Completion) -> list[str]:
    """The prompts as texts."""
    decode = ready.room.tokenizer.decode
    return [text or decode(ids) for text, (ids, _) in zip(ready.texts, ready.ask.jobs, strict=True)]


def _prompt(service: Service, room: Room, body: PlainRequest) -> Any:
    """Texts as they are; what mixes texts and tokens as tokens. Raises ApiError 400."""
    given = body.prompt
    if isinstance(given, str) or all(isinstance(part, str) for part in given):
        return given
    if any(isinstance(part, int) for part in given):
        return _tokens(service, room, given)
    return [_tokens(service, room, part) for part in given]


def _tokens(service: Service, room: Room, prompt: Any) -> list[int]:
    out: list[int] = []
    for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, int):
            out.append(part)
            continue
        service.foresee(part, "prompt")
        try:
            out += room.tokenizer.encode(part, add_bos=False if i else None)
        except PacelineError as error:
            raise refuse("prompt", str(error), code="bad_prompt") from error
    return out


@dataclass(slots=True)
class _Text:
    """One of the texts of a request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)  # with their likely tokens
    reason: str = ""
    stats: Stats = field(default_factory=Stats)


class Said:
    """An answer in llama.cpp's fields: an object for one text, a list for several."""

    def __init__(self, service: Service, body: LlamaRequest, ready: Completion) -> None:
        self._service, self._body, self._ready = service, body, ready
        self._texts = [_Text() for _ in range(len(ready.ask.jobs) * ready.params.n)]

    async def whole(self) -> Any:
        async for _ in self._pieces():
            pass
        out = [self._fitted(self._last(i, text)) for i, text in enumerate(self._texts)]
        return out if len(out) > 1 else out[0]

    async def stream(self) -> AsyncIterator[bytes]:
        async for chunks in self._pieces():
            yield b"".join(event(self._fitted(chunk)) for chunk in chunks)

    async def _pieces(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The chunks of a stream that are ready together."""
        async with self._service.generate(self._ready.ask) as generation:
            async for batch in generation.batches():
                out = [
                    self._chunk(prompt * self._ready.params.n, "", [], [])
                    | {"prompt_progress": read.fields()}
                    for prompt, read in generation.progress
                ]
                for prompt, delta in joined(batch):
                    out += self._push(prompt * self._ready.params.n + delta.index, delta)
                if out:
                    yield out

    def _push(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        text, tokenizer = self._texts[index], self._ready.room.tokenizer
        text.text += delta.text
        text.tokens += delta.token_ids
        self._ready.completion_tokens += len(delta.token_ids)
        places = [token_entry(tokenizer, entry) for entry in delta.logprobs]
        text.places += places
        out = [self._chunk(index, delta.text, delta.token_ids, places)] if delta.text or places else []
        if delta.finish_reason is not None:
            text.reason, text.stats = delta.finish_reason, delta.stats or Stats()
            if self._body.stream:
                out.append(self._last(index, text) | {"content": "", "tokens": []})
        return out

    def _chunk(
        self, index: int, content: str, tokens: list[int], places: list[dict[str, Any]]
    ) -> dict[str, Any]:
        text = self._texts[index]
        return {
            "index": index, "content": content, "tokens": tokens, "stop": False, "id_slot": -1,
            "tokens_predicted": len(text.tokens), "tokens_evaluated": len(self._prompt(index)),
            **({"completion_probabilities": places} if places else {}),
        }  # fmt: skip

    def _prompt(self, index: int) -> list[int]:
        return self._ready.ask.jobs[index // self._ready.params.n][0]

    def _last(self, index: int, text: _Text) -> dict[str, Any]:
        """The whole answer of a text that has ended."""
        ready, prompt, stats = self._ready, self._prompt(index), text.stats
        word = self._stopping_word(text)
        kind = "limit" if text.reason == "length" else "word" if word else "eos"
        shown = ready.texts[index // ready.params.n]
        return {
            "index": index, "content": text.text, "tokens": text.tokens if self._body.return_tokens else [],
            "id_slot": -1, "stop": True, "model": ready.body.model, "tokens_predicted": len(text.tokens),
            "tokens_evaluated": len(prompt), "generation_settings": settings_of(ready.params), "prompt": shown,
            "has_new_line": "\n" in text.text, "truncated": False, "stop_type": kind, "stopping_word": word,
            "tokens_cached": stats.cached_prompt_tokens, "timings": timings(stats, len(prompt)),
            **({"completion_probabilities": text.places} if text.places and not self._body.stream else {}),
            **({"warnings": ready.warnings} if ready.warnings else {}),
        }  # fmt: skip

    def _stopping_word(self, text: _Text) -> str:
        """The stop string that ended a text, empty where none did."""
        stops = self._ready.params.stop
        if text.reason != "stop" or not stops:
            return ""
        whole = self._ready.room.tokenizer.decode(text.tokens[-_MOST_OF_STOP:], skip_special=False)
        ends = [(at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
        return min(ends)[1] if ends else ""

    def _fitted(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Only the fields that are asked for, if some are; those that are not there are left out."""
        wanted = self._body.response_fields
        if not wanted or not answer["stop"]:
            return answer
        out: dict[str, Any] = {}
        for name in wanted:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                out[name.rpartition("/")[2]] = value
        return out


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """How a text is sampled, in llama.cpp's names."""
    return {name: getattr(params, own) for name, own in _SETTINGS.items()} | {
        "seed": params.seed, "stop": list(params.stop), "n_probs": params.logprobs or 0, "min_keep": 0, "n_keep": 0,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
    }  # fmt: skip


def timings(stats: Stats, prompt: int) -> dict[str, Any]:
    """Tokens and milliseconds of prompt and answer, and what was drafted of it."""
    first = min(stats.first_token_seconds, stats.seconds)
    read, written = max(0, prompt - stats.cached_prompt_tokens), stats.emitted
    rest = stats.seconds - first
    return {
        "cache_n": stats.cached_prompt_tokens, **_speed("prompt", read, first), **_speed("predicted", written, rest),
        "draft_n": stats.drafted, "draft_n_accepted": stats.accepted,
    }  # fmt: skip


def _speed(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count, f"{name}_ms": round(seconds * 1e3, 3),
        f"{name}_per_token_ms": round(seconds * 1e3 / count, 3) if count else 0.0,
        f"{name}_per_second": round(count / seconds, 3) if seconds > 0 else 0.0,
    }  # fmt: skip


def _props(service: Service, room: Room) -> dict[str, Any]:
    tokenizer, reads = room.tokenizer, room.reads
    params = settings_of(SamplingParams(**room.sampling)) | {"n_predict": -1, "seed": 2**32 - 1}
    drafts = len(room.drafters) > 1
    return {
        "default_generation_settings": {
            "id": 0, "id_task": -1, "n_ctx": room.max_len, "speculative": drafts, "is_processing": False,
            "params": params,
        },
        "total_slots": service.config.max_texts, "model_alias": service.model,
        "model_path": service.model, "chat_template": tokenizer.template or "",
        "modalities": {"vision": "image" in reads, "audio": "audio" in reads},
        "bos_token": _name(room, tokenizer.bos_id), "eos_token": _name(room, next(iter(tokenizer.eos_ids), None)),
        "build_info": f"paceline {__version__}", "is_sleeping": False,
    }  # fmt: skip


def _name(room: Room, token: int | None) -> str:
    return "" if token is None else room.tokenizer.token_text(token)
