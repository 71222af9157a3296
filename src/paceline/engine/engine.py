"""The engine: requests in, deltas out, one `step` at a time. Not thread-safe: one thread owns it (engine/worker.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.config import StepOptions
from paceline.control.base import DraftPolicy
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason
from paceline.core import Blend, Completion, Delta, SamplingParams, Sequence, Stats
from paceline.drafters.base import Drafter
from paceline.engine.emit import cut_off
from paceline.engine.forced import ForcedAcceptance
from paceline.engine.pace import Pace
from paceline.engine.pooling import Pool
from paceline.engine.request import RequestState
from paceline.engine.scheduler import Scheduler
from paceline.engine.state import EngineState
from paceline.engine.step import step
from paceline.errors import PromptError, UsageError, shown, unreadable
from paceline.kv.cache import KVCache
from paceline.models.base import Target
from paceline.sampling import noise
from paceline.sampling.shape import Counts, check_token_ids, is_greedy
from paceline.soft_tokens import media_of, use_of
from paceline.text.banned import Banned, banned_of
from paceline.text.breakers import breakers_of
from paceline.text.stream import TextStream, stop_ids_of
from paceline.text.tokenizer import Tokenizer
from paceline.tree import Shape
from paceline.turns import TakesTurns, Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(StepOptions):
    """Everything an engine is made of, and how its steps are made. Requests use `default_drafter` unless they say
    otherwise.

    `NAME+ngram` are two drafters: each row takes what promises more.
    """

    target: Target
    cache: KVCache
    drafters: Mapping[str, Drafter]
    default_drafter: str
    policy: DraftPolicy
    tokenizer: Tokenizer | None = None
    media: TakesTurns | None = None  # a MediaReader, for who makes prompts
    draft_tree: Shape | None = None  # then the cache must have room for branches: see `KVCache.grow_branches`
    forced: ForcedAcceptance | None = None  # benchmarks only: verdicts by given chances
    info: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()  # that the target has beside its weights, by number
    own_threads: bool = False  # what computes has threads of its own: torch's would compete with them
    watch: Callable[[], None] = lambda: None  # raises EngineLost once another process of the target has ended
    close: Callable[[], None] = lambda: None  # ends those processes


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Meanwhile torch computes in the calling thread alone. Its other threads go on looking for work for a while after
    each operation, on processors that others need.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Engine:
    def __init__(self, parts: EngineParts, ids: Iterator[int] | None = None) -> None:
        """`ids`: where the numbers of sequences come from, for engines that share a cache."""
        self._parts = parts
        self._threads = one_torch_thread if parts.own_threads else nullcontext
        self._turns = Turns() if parts.media is None else parts.media.turns
        self._ids = itertools.count() if ids is None else ids
        target = parts.target
        self.max_len = min(target.max_len, parts.cache.max_tokens)
        self.state = EngineState(
            target,
            parts.cache,
            dict(parts.drafters),
            parts.policy,
            Scheduler(
                max_batch=parts.max_batch,
                step_tokens=parts.step_tokens,
                prefill_chunk=parts.prefill_chunk,
                pace=Pace() if parts.own_threads else None,
            ),
            self.max_len,
            parts.draft_tokens,
            parts.prefix_cache,
            forced=parts.forced,
            tree=parts.draft_tree,
        )
        if any(drafter.needs_hidden for drafter in parts.drafters.values()):
            shape = (parts.cache.max_sequences, target.hidden_size)
            self.state.hidden = torch.zeros(shape, dtype=target.dtype, device=target.device)
        # names of two drafters at once that a request may give, beside each of them alone
        self.combined = [parts.default_drafter] if "+" in parts.default_drafter else []
        self._requests: dict[str, set[int]] = {}  # request -> its living sequence ids

    def twin(self) -> Engine:
        """An engine over the same weights and the same cache that never drafts. Take turns: no two steps at once."""
        parts = replace(
            self._parts, drafters={}, default_drafter="none", policy=FixedPolicy(0), draft_tree=None
        )
        return Engine(parts, self._ids)

    @property
    def ids(self) -> Iterator[int]:
        """Where the numbers of its sequences come from: for another engine that shares its cache."""
        return self._ids

    def close(self) -> None:
        """End the other processes that compute the target, if there are any. No step can follow."""
        self._parts.close()

    @property
    def parts(self) -> EngineParts:
        """What it is made of, for one that is made of nearly the same."""
        return self._parts

    @property
    def info(self) -> Mapping[str, Any]:
        """What was loaded and chosen, and why."""
        return self._parts.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._parts.tokenizer

    @property
    def has_work(self) -> bool:
        return self.state.scheduler.has_work or bool(self.state.failures)

    @property
    def drafter_names(self) -> list[str]:
        """What a request may name as its drafter."""
        return list(dict.fromkeys(["none", *self.state.drafters, *self.combined]))

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise PromptError or UsageError for a request that cannot run."""
        vocab, readable = self._parts.target.vocab_size, self._parts.target.readable
        if not prompt_ids:
            raise PromptError(
                "the prompt is empty: give at least one token (for instance the begin-of-text token)"
            )
        for token in prompt_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise PromptError(f"the prompt has token id {shown(token)}: give ids from 0 to {vocab - 1}")
            if token >= readable:
                raise unreadable(token, readable)
        if len(prompt_ids) >= self.max_len:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.max_len}, of which one must be "
                "left to write: shorten the prompt or raise max_model_len"
            )
        check_token_ids(params, vocab)
        if params.allowed_token_ids is not None and min(params.allowed_token_ids, default=0) >= readable:
            raise unreadable(min(params.allowed_token_ids), readable)
        if params.drafter is not None and params.drafter not in self.drafter_names:
            raise UsageError(
                f"drafter {shown(params.drafter)} is not loaded: use one of {', '.join(self.drafter_names)}"
            )
        for name, _ in params.lora:
            if name not in self._parts.adapters:
                known = ", ".join(self._parts.adapters) or "none"
                raise UsageError(f"lora: no adapter {shown(name)} is loaded: there is {known}")
        if self._parts.tokenizer is None:
            if params.stop:
                raise UsageError("stop strings need a tokenizer: use stop_token_ids, or load one")
            if params.bad_words or params.banned_strings:
                raise UsageError(
                    "bad_words and banned_strings need a tokenizer: use bad_token_ids, or load one"
                )

    def add(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "",
        written: Mapping[int, list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Queue a request of `params.n` texts. `salt` scopes the prefix cache: only equal salts share pages.

        `written`: texts that another engine has begun, by index, are gone on with after the tokens it wrote; no others.
        """
        begun = {i: list[int]() for i in range(params.n)} if written is None else written
        for answer in begun.values():
            self.check([*prompt_ids, *answer], params)
        if params.mirostat and any(begun.values()):
            raise UsageError("mirostat cannot go on with a text of another engine: ask again")
        if request_id in self._requests:
            raise UsageError(f"a request {request_id!r} is already running: give each its own id")
        seed = noise.fresh_seed() if params.seed is None else params.seed
        # whatever a request's own code raises, it does so before anything is queued
        constraints = {i: params.constraint() for i in begun} if params.constraint is not None else {}
        for index, constraint in constraints.items():
            constraint.commit(begun[index])
        reference, blend = self._reference(params), self._blend(params)
        salt = f"{salt}\0adapters {blend}" if blend else salt
        leader: Sequence | None = None
        self._requests[request_id] = set()
        for index, answer in begun.items():
            sequence = Sequence(
                id=next(self._ids),
                tokens=[*prompt_ids, *answer],
                prompt_len=len(prompt_ids),
                params=params,
                seed=noise.sibling_seed(seed, index),
                reference=reference,
                salt=salt,
                constraint=constraints.get(index),
                media=media_of(prompt_ids),
                adapters=blend,
            )
            self._requests[request_id].add(sequence.id)
            self.state.requests[sequence.id] = self._state_of(request_id, index, sequence)
            self.state.scheduler.add(sequence, leader)
            leader = leader or sequence

    def _state_of(self, request_id: str, index: int, sequence: Sequence) -> RequestState:
        parts, params = self._parts, sequence.params
        rule = params.verify or parts.verify
        ends = set(params.stop_token_ids)
        if params.stop and parts.tokenizer is not None:
            ends |= stop_ids_of(parts.tokenizer, params.stop)
        if not params.ignore_eos:
            ends |= set(parts.target.eos_token_ids) | set(parts.tokenizer.eos_ids if parts.tokenizer else ())
        prompt, answer = sequence.tokens[: sequence.prompt_len], sequence.tokens[sequence.prompt_len :]
        stream = TextStream(parts.tokenizer, params) if parts.tokenizer is not None else None
        text = stream.push(answer).text if stream is not None else ""
        blind = [name for name, drafter in parts.drafters.items() if sequence.media and drafter.blind]
        return RequestState(
            sequence, request_id, index, rule, params.drafter or parts.default_drafter, Counts(prompt, answer), stream,
            frozenset(ends), Stats(media=use_of(sequence.media), lossy=rule == "typical" and not is_greedy(sequence)),
            breakers=self._breakers(params), banned=self._banned(params), text=text,
            pool=Pool(params.pooling) if params.pooling else None, parked=dict.fromkeys(blind, NoDraftReason.BLIND.value),
        )  # fmt: skip

    def _breakers(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if params.dry_multiplier == 0 or self._parts.tokenizer is None:
            return ()
        return breakers_of(self._parts.tokenizer, params.dry_sequence_breakers)

    def _banned(self, params: SamplingParams) -> Banned | None:
        tokenizer = self._parts.tokenizer
        return None if tokenizer is None else banned_of(tokenizer, params.bad_words, params.banned_strings)

    def _blend(self, params: SamplingParams) -> Blend:
        numbers = {name: i for i, name in enumerate(self._parts.adapters)}
        return tuple(sorted((numbers[name], factor) for name, factor in params.lora if factor))

    def _reference(self, params: SamplingParams) -> tuple[int, ...]:
        if params.reference is None or not isinstance(params.reference, str):
            return params.reference or ()
        if self._parts.tokenizer is None:
            raise UsageError("a reference text needs a tokenizer: give it as token ids")
        return tuple(self._parts.tokenizer.encode(params.reference, add_bos=False))

    def has(self, request_id: str) -> bool:
        """Whether a request is queued or running."""
        return request_id in self._requests

    def texts(self, request_id: str) -> list[RequestState]:
        """The living texts of a request, in order."""
        return [self.state.requests[i] for i in sorted(self._requests[request_id])]

    def cancel(self, request_id: str) -> None:
        """Forget a request at any moment; all it held is free at once. Unknown ids are ignored."""
        for sequence_id in self._requests.pop(request_id, set()):
            if sequence_id in self.state.requests:
                self.state.end(self.state.requests[sequence_id])

    def cut_off(self, request_id: str) -> list[Delta]:
        """End a request's texts where they are: the last delta of each. Unknown ids are ignored."""
        ids = self._requests.pop(request_id, set())
        return [cut_off(self.state, self.state.requests[i]) for i in sorted(ids) if i in self.state.requests]

    def step(self) -> list[Delta]:
        """Advance everything by one step; what was written, a finished text's last delta with its stats."""
        with self._turns.step(), self._threads():
            deltas = step(self.state) if self.state.scheduler.has_work else self.state.take_failures()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._forget(delta)
        return deltas

    def _forget(self, delta: Delta) -> None:
        if (ids := self._requests.get(delta.request)) is not None:
            ids.intersection_update(self.state.requests)
            if not ids:
                del self._requests[delta.request]

    def run(
        self,
        requests: Mapping[str, tuple[list[int], SamplingParams]],
        on_done: Callable[[str, list[Completion]], None] | None = None,
    ) -> dict[str, list[Completion]]:
        """Run requests to their ends and return the texts of each, in order. The engine must be idle before.

        An exception, a Ctrl-C too, cancels what is left and leaves the engine idle.
        """
        states: dict[str, list[RequestState]] = {}
        done: dict[str, dict[int, Completion]] = {name: {} for name in requests}
        try:
            for name, (prompt, params) in requests.items():
                self.add(name, prompt, params)
                states[name] = self.texts(name)
            while self.has_work:
                for delta in self.step():
                    if delta.finish_reason is None:
                        continue
                    texts = done[delta.request]
                    state = states[delta.request][delta.index]
                    texts[delta.index] = state.completion(delta.finish_reason, delta.error)
                    if on_done is not None and len(texts) == len(states[delta.request]):
                        on_done(delta.request, [texts[i] for i in sorted(texts)])
        finally:
            for name in requests:
                self.cancel(name)
        return {name: [texts[i] for i in sorted(texts)] for name, texts in done.items()}
