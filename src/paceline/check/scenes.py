"""The circumstances in which a text must stay the same: beside others, among comings and goings, short of memory."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from paceline.check.subject import Subject
from paceline.core import Delta, SamplingParams, Stats, TokenLogprob
from paceline.kv.store import PAGE_SIZE
from paceline.soft_tokens import copied

Request = tuple[Seq[int], SamplingParams]


@dataclass(frozen=True, slots=True)
class Scene:
    """`apart`: steps between two requests. `churn`: unrelated requests with half a prompt in common come and go.

    `squeeze`: so few pages in the cache that texts are preempted. `salt` scopes shared prefixes; without `share` a page
    that a text gives back is another's at once.
    """

    name: str
    apart: int = 0
    churn: bool = False
    squeeze: bool = False
    salt: str = ""
    share: bool = True


TOGETHER = Scene("side by side")
CHURN = Scene("joining and leaving", apart=3, churn=True)
SQUEEZE = Scene("short of memory", squeeze=True)
UNSHARED = Scene("short of memory, nothing shared", squeeze=True, share=False)


@dataclass(slots=True)
class Output:
    """One text as its deltas brought it."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)  # (tokens written before, proposal)
    finish: str = ""
    error: str | None = None
    stats: Stats = field(default_factory=Stats)

    def add(self, delta: Delta) -> None:
        if delta.proposed:
            self.drafts.append((len(self.tokens), list(delta.proposed)))
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish, self.error = delta.finish_reason or self.finish, delta.error
        self.stats = delta.stats or self.stats


def play(subject: Subject, requests: Seq[Request], scene: Scene = TOGETHER) -> list[Output]:
    """Run requests in a scene; the first text of each."""
    state = subject.engine.state
    shares, state.share_prefixes = state.share_prefixes, state.share_prefixes and scene.share
    try:
        with _squeezed(subject, requests) if scene.squeeze else nullcontext():
            return _play(subject, requests, scene)
    finally:
        state.share_prefixes = shares


def _play(subject: Subject, requests: Seq[Request], scene: Scene) -> list[Output]:
    engine = subject.engine
    output = [Output() for _ in requests]
    names = {f"check-{i}": i for i in range(len(requests))}
    waiting, step, unrelated = list(names), 0, ""
    try:
        while waiting or engine.has_work:
            while waiting and (not scene.apart or step % scene.apart == 0 or not engine.has_work):
                name = waiting.pop(0)
                prompt, params = requests[names[name]]
                engine.add(name, copied(prompt), params, scene.salt)
                if scene.apart:
                    break
            if scene.churn and step % 5 == 1 and not all(request.finish for request in output):
                engine.cancel(unrelated)
                unrelated = f"unrelated-{step}"
                engine.add(unrelated, *_unrelated(*requests[step % len(requests)], step), scene.salt)
            elif all(request.finish for request in output):
                engine.cancel(unrelated)
            for delta in engine.step():
                if delta.request in names and delta.index == 0:
                    output[names[delta.request]].add(delta)
            step += 1
    finally:
        for name in (*names, unrelated):
            engine.cancel(name)
    return output


def _unrelated(prompt: Seq[int], params: SamplingParams, step: int) -> tuple[list[int], SamplingParams]:
    """A text that shares half a prompt, and then goes its own way."""
    half = len(prompt) // 2 + 1
    ends = replace(params, max_tokens=8 + step % 20, min_tokens=0, seed=step)
    return [*prompt[:half], *prompt[: half // 2 + 1]], ends


@contextmanager
def _squeezed(subject: Subject, requests: Seq[Request]) -> Iterator[None]:
    """Leave a quarter more than the pages that the longest of these texts needs alone."""
    cache = subject.engine.state.cache
    cache.prefix.clear()
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests) + PAGE_SIZE
    taken: dict[str, list[int]] = {}
    try:
        for kind, pool in cache.pools.items():
            alone = -(-longest // PAGE_SIZE)
            taken[kind] = pool.take(max(0, pool.free - alone - alone // 4))
        yield
    finally:
        for kind, pages in taken.items():
            for page in pages:
                cache.pools[kind].release(page)
