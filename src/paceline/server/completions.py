"""POST /v1/completions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.core import Delta, SamplingParams, Stats
from paceline.errors import PacelineError, PromptError
from paceline.media.sources import of_client
from paceline.media.talk import Talk
from paceline.server.foreign import settle
from paceline.server.generation import Ask, Generation, joined
from paceline.server.logprobs import Entries, Entry, completion_logprobs
from paceline.server.params import refuse, sampling_params, settle_length
from paceline.server.schema import CompletionRequest
from paceline.server.scoring import scoring_jobs
from paceline.server.service import Room, Service, salt_of
from paceline.server.sse import DONE, event
from paceline.server.trace import Trace
from paceline.server.usage import report, usage
from paceline.soft_tokens import Kind, media_of
from paceline.text.infill import Infill

_SHORT = 2048  # characters
_MEDIA = re.compile(r"((?:images?|audio)(?:\[\d+\])?)[:. ]")  # which part an error is about


@dataclass(slots=True)
class _Choice:
    text: str
    shown: list[tuple[Entry, int]]  # with where in the text they begin
    entries: Entries
    reason: str = ""


@dataclass(slots=True)
class Completion:
    """One completion request, ready to run. Choice p * n + i is text i of prompt p."""

    service: Service
    room: Room
    body: CompletionRequest
    ask: Ask
    params: SamplingParams
    texts: list[str]  # of the prompts
    warnings: list[str]  # what of the request was ignored
    id: str = field(default_factory=lambda: "cmpl-" + uuid.uuid4().hex[:24])
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    scores: list[list[Entry]] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)  # with `reason`, once `pieces` have ended
    reason: str = ""

    @property
    def _prompts(self) -> list[list[int]]:
        return [prompt for prompt, _ in self.ask.jobs]

    async def answer(self) -> dict[str, Any]:
        """The whole answer, not streamed."""
        await self._score()
        choices = [self._echo(i // self.params.n) for i in range(len(self.texts) * self.params.n)]
        stats: Any = ()
        if self.body.max_tokens != 0:
            async with self.service.generate(self.ask) as generation:
                async for prompt, delta in generation.deltas():
                    choice = choices[prompt * self.params.n + delta.index]
                    self.completion_tokens += len(delta.token_ids)
                    choice.text += delta.text
                    choice.shown += choice.entries.push(delta.logprobs, delta.text, delta.finish_reason)
                    choice.reason = delta.finish_reason or ""
            stats = generation.stats.values()
        return {
            **self._head(),
            "choices": [
                {
                    "index": i,
                    "text": choice.text,
                    "logprobs": self._logprobs(choice.shown),
                    "finish_reason": choice.reason or "length",
                }
                for i, choice in enumerate(choices)
            ],
            "usage": self._usage(stats),
            **report(stats, self.params.seed, self.warnings),
        }

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """For other APIs: what each batch adds to the only text, as `content` and, if asked for, `logprobs`."""
        async with self.service.generate(self.ask) as generation:
            async for batch in generation.batches():
                for _, delta in joined(batch):
                    self.completion_tokens += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        self.reason, self.stats = delta.finish_reason, list(generation.stats.values())
                    piece: dict[str, Any] = {"content": delta.text} if delta.text else {}
                    yield piece | ({"logprobs": delta.logprobs} if delta.logprobs else {})

    async def stream(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        include = bool(options and options.include_usage)
        await self._score()
        stats: Any = ()
        choices = [self._echo(i // self.params.n) for i in range(len(self.texts) * self.params.n)]
        if self.body.echo or self.body.max_tokens == 0:
            for i, choice in enumerate(choices):
                last = "length" if self.body.max_tokens == 0 else None
                yield event(self._chunk(i, choice.text, self._logprobs(choice.shown), last))
        if self.body.max_tokens != 0:
            async with self.service.generate(self.ask) as generation:
                async for chunks in self._chunks(generation, choices):
                    yield chunks
            stats = generation.stats.values()
        if include:
            told = report(stats, self.params.seed, self.warnings)
            yield event({**self._head(), "choices": [], "usage": self._usage(stats), **told})
        yield DONE

    async def _chunks(self, generation: Generation, choices: list[_Choice]) -> AsyncIterator[bytes]:
        """The events of what is ready at the same time, as one piece."""
        options, n = self.body.stream_options, self.params.n
        continuous = bool(options and options.include_usage and options.continuous_usage_stats)
        wants_trace = bool(self.body.speculation and self.body.speculation.trace)
        traces = [Trace(self.room.tokenizer) for _ in range(len(self.texts) * n)]
        left = len(self.texts) * n
        async for batch in generation.batches():
            out = [
                event(self._chunk(prompt * n, "", None, None) | {"prompt_progress": read.fields()})
                for prompt, read in generation.progress
            ]
            for prompt, delta in batch if wants_trace else joined(batch):
                i = prompt * n + delta.index
                chunk = self._delta_chunk(i, delta, choices[i].entries)
                if wants_trace:
                    chunk["paceline"] = traces[i].of(delta)
                if continuous:
                    chunk["usage"] = self._usage(generation.stats.values())
                left -= delta.finish_reason is not None
                if not left:
                    chunk |= report(generation.stats.values(), self.params.seed, self.warnings)
                shown = chunk["choices"][0]["logprobs"]
                if (
                    delta.text
                    or delta.finish_reason
                    or continuous
                    or wants_trace
                    or (shown and shown["tokens"])
                ):
                    out.append(event(chunk))
            if out:
                yield b"".join(out)

    def _delta_chunk(self, index: int, delta: Delta, entries: Entries) -> dict[str, Any]:
        self.completion_tokens += len(delta.token_ids)
        logprobs = self._logprobs(entries.push(delta.logprobs, delta.text, delta.finish_reason))
        return self._chunk(index, delta.text, logprobs, delta.finish_reason)

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(), "choices": [choice]}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.called(self.body.model),
        }

    def _logprobs(self, entries: list[tuple[Entry, int]]) -> dict[str, Any] | None:
        return None if self.body.logprobs is None else completion_logprobs(self.room.tokenizer, entries)

    def _usage(self, stats: Any) -> dict[str, Any]:
        prompt = sum(len(p) for p in self._prompts)
        return usage(
            prompt,
            self.completion_tokens,
            stats,
            predicted=self.ask.predicted,
            media=[item for ids in self._prompts for item in media_of(ids)],
        )

    def _echo(self, prompt: int) -> _Choice:
        """A choice as it begins: with the prompt, where that is asked for."""
        text = self.texts[prompt] if self.body.echo else ""
        entries = Entries(self.room.tokenizer)
        return _Choice(
            text, entries.echo(self.scores[prompt] if self.scores and self.body.echo else [], text), entries
        )

    async def _score(self) -> None:
        """Log probabilities of the prompts' own tokens, for echo with logprobs."""
        if not self.body.echo or self.body.logprobs is None:
            return
        self.scores = [[prompt[0]] for prompt in self._prompts]
        jobs, owners = scoring_jobs(self._prompts, self.body.logprobs, self.room)
        ask = replace(self.ask, jobs=jobs, predicted=None, told=None)
        async with self.service.generate(ask) as generation:
            async for job, delta in generation.deltas():
                self.scores[owners[job]] += delta.logprobs


async def prepare_completion(
    service: Service, body: CompletionRequest, key: str, files: Mapping[str, str] | None = None
) -> Completion:
    """Tokenise and check, all before anything is queued. `files`: shown before a text with a suffix. Raises ApiError."""
    arrived = time.monotonic()
    warnings = service.warnings(body)
    settle(body)
    room = service.check(body)
    salt, between = salt_of(key, body), Infill.of(room.tokenizer) if body.suffix else None
    if body.suffix:
        work = partial(_between, between, body, files)
    else:
        work = partial(_prompts, room, body, service, salt)
    seen = bool(body.images or body.audio)
    texts, prompts = work() if _is_short(body) else await service.media.run(seen, work)
    if len(prompts) * (body.n or 1) > service.config.max_texts:
        raise refuse(
            "n", f"{len(prompts)} prompts with n={body.n or 1} are over {service.config.max_texts} texts"
        )
    space = min(service.room_after(prompt, "prompt") for prompt in prompts)
    settle_length(body, max(map(len, prompts)))
    extra: dict[str, Any] = {"constraint": await service.constraint(body)}
    extra["stop_token_ids"] = (*(body.stop_token_ids or ()), *(() if between is None else between.ends))
    if (
        body.prediction is not None
        and not (body.speculation and body.speculation.drafter)
        and "ngram" in room.drafters
    ):
        extra["drafter"] = "ngram"
    params = sampling_params(body, space, extra, room.sampling)
    params, predicted = await service.predicted(params)
    ask = service.ask([(prompt, params) for prompt in prompts], salt, arrived)
    ask = replace(
        ask,
        warnings=warnings,
        predicted=predicted,
        progress=bool(body.stream and body.return_progress),
    )
    return Completion(service, room, body, ask, params, texts, warnings)


def _between(
    infill: Infill | None, body: CompletionRequest, files: Mapping[str, str] | None
) -> tuple[list[str], list[list[int]]]:
    """The prompt for what stands before `suffix`. Raises ApiError 400."""
    if infill is None:
        raise refuse("suffix", "this model has no tokens for a text between two others: leave it out")
    if not isinstance(body.prompt, str) or body.images or body.audio or body.echo:
        raise refuse("suffix", "needs one prompt that is a text, without echo, images and audio")
    try:
        ids = infill.prompt(body.prompt, body.suffix or "", files)
    except PacelineError as error:
        raise refuse("prompt", str(error), code="bad_prompt") from error
    return [body.prompt], [ids]


def _is_short(body: CompletionRequest) -> bool:
    """Whether reading the prompt takes less time than handing it to another thread."""
    return isinstance(body.prompt, str) and len(body.prompt) <= _SHORT and not (body.images or body.audio)


def _prompts(
    room: Room, body: CompletionRequest, service: Service, salt: str
) -> tuple[list[str], list[list[int]]]:
    given: list[Any]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        given = [body.prompt]
    else:
        given = list(body.prompt)
    if not given or len(given) > service.config.max_prompts:
        raise refuse("prompt", f"give 1 to {service.config.max_prompts} prompts")
    texts, prompts = [], []
    for prompt in given:
        if isinstance(prompt, str) and not body.truncate_prompt_tokens:
            service.foresee(prompt, "prompt")
        try:
            ids = _cut(_ids(room, body, prompt, salt), body.truncate_prompt_tokens or 0, room.max_len - 1)
        except PacelineError as error:
            where = _MEDIA.match(str(error))
            raise refuse(where[1] if where else "prompt", str(error), code="bad_prompt") from error
        prompts.append(ids)
        texts.append(prompt if isinstance(prompt, str) else "")
        service.room_after(ids, "prompt")
        if body.echo and (body.truncate_prompt_tokens or not isinstance(prompt, str)):
            texts[-1] = room.tokenizer.decode(ids)
    return texts, prompts


def _cut(ids: list[int], count: int, most: int) -> list[int]:
    """The last `count` tokens of a prompt; 0: all of it, -1: as many as fit."""
    if count == 0 or len(ids) <= (most if count < 0 else count):
        return ids
    if media_of(ids):
        raise refuse("truncate_prompt_tokens", "would cut a prompt with pictures or sound: shorten its text")
    return ids[-(most if count < 0 else count) :]


def _ids(room: Room, body: CompletionRequest, prompt: str | list[int], salt: str) -> list[int]:
    """Of one prompt, whose placeholders stand for what the body holds. Raises PromptError."""
    given: Mapping[Kind, list[str]] = {"image": body.images or [], "audio": body.audio or []}
    if not any(given.values()):
        return room.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(body.prompt, str):
        raise PromptError("images: they belong to one prompt that is a text: send one request for each")
    if room.reader is None:
        raise PromptError(f"{next(kind for kind, sent in given.items() if sent)}: this model reads text only")
    items = [
        replace(item, source=of_client(item.source, item.where))
        for item in room.reader.in_order(body.prompt, given)
    ]
    return room.reader.prompt(body.prompt, Talk([], items), salt, add_bos=None)
