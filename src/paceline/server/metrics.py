"""Prometheus metrics, in a registry of their own. All values are of this process since its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.core import MAX_DRAFT_TOKENS, Delta, Stats
from paceline.engine.worker import Counters, Load, State
from paceline.server.usage import reason_code
from paceline.soft_tokens import MediaUse

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PATHS = (
    "/",
    "/health",
    "/healthz",
    "/metrics",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/completion",
    "/infill",
    "/props",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/tags",
)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Watched(Protocol):
    """What is told of: a worker, or all of several models."""

    @property
    def state(self) -> State: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def info(self) -> Mapping[str, Any]: ...

    def load(self) -> Load: ...


class Metrics:
    def __init__(self, worker: Watched) -> None:
        self.registry = r = CollectorRegistry()
        self._requests = Counter("paceline_requests", "Requests by outcome", ["outcome"], registry=r)
        self._answers = Counter("paceline_http_answers", "HTTP answers", ["path", "status"], registry=r)
        self._first = Histogram(
            "paceline_time_to_first_token_seconds",
            "From acceptance to the first token",
            buckets=_SECONDS,
            registry=r,
        )
        self._between = Histogram(
            "paceline_inter_token_seconds", "Between what was sent, per token", buckets=_SECONDS, registry=r
        )
        self._prompt = Histogram("paceline_prompt_tokens", "Prompt length", buckets=_TOKENS, registry=r)
        self._tokens = Counter("paceline_tokens", "Generated tokens by origin", ["origin"], registry=r)
        self._per_step = Histogram(
            "paceline_tokens_per_step",
            "Mean of each finished text",
            buckets=[1 + i / 4 for i in range(25)],
            registry=r,
        )
        length = Counter("paceline_draft_length", "Steps by drafted tokens", ["tokens"], registry=r)
        self._length = [
            length.labels(str(n)) for n in range(MAX_DRAFT_TOKENS + 1)
        ]  # looked up once: used per delta
        self._kept_tokens, self._own_tokens = self._tokens.labels("draft"), self._tokens.labels("target")
        self._drafted = Counter(
            "paceline_drafted_tokens", "Drafted tokens by position", ["position"], registry=r
        )
        self._kept = Counter(
            "paceline_accepted_tokens", "Accepted tokens by position", ["position"], registry=r
        )
        self._reasons = Counter("paceline_steps_without_draft", "By reason code", ["reason"], registry=r)
        self._drafters = Counter(
            "paceline_drafted_steps", "Steps with a draft, by drafter", ["drafter"], registry=r
        )
        self._cached = Counter("paceline_prefix_cache_tokens", "Prompt tokens found in the cache", registry=r)
        self._media = Counter("paceline_media", "Pictures and clips of prompts", ["kind"], registry=r)
        self._known = Counter("paceline_media_known", "Those whose soft tokens were kept", registry=r)
        self._media_seconds = Counter(
            "paceline_media_seconds", "Spent on pictures and sound", ["stage"], registry=r
        )
        self._gauges(worker)

    def _gauges(self, worker: Watched) -> None:
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "paceline_queue_requests": ("Requests without a first token", lambda: worker.load().waiting),
            "paceline_running_requests": ("Requests that have one", lambda: worker.load().running),
            "paceline_open_texts": ("Texts waiting or running", lambda: worker.load().texts),
            "paceline_ready": ("1 while requests are taken", lambda: worker.state == "ready"),
            "paceline_engine_steps": ("Engine steps so far", lambda: worker.counters.steps),
            "paceline_engine_step_errors": ("Steps that raised", lambda: worker.counters.step_errors),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)
        self._cache = Gauge(
            "paceline_cache_use", "Share of K/V pages in use, by kind", ["kind"], registry=self.registry
        )
        self._worker = worker

    def render(self) -> bytes:
        for kind, share in self._worker.info.get("cache_use", {}).items():
            self._cache.labels(kind).set(share)
        text: bytes = generate_latest(self.registry)
        return text

    def answered(self, path: str, status: int) -> None:
        """Paths of strangers' invention share one label."""
        known = path if path in _PATHS else "other"
        self._answers.labels(known, str(status)).inc()

    def request_ended(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def prompt(self, tokens: int) -> None:
        self._prompt.observe(tokens)

    def first_token(self, since_start: float) -> None:
        self._first.observe(since_start)

    def delta(self, delta: Delta, per_token: float | None) -> None:
        """`per_token`: seconds for each token since the text's last batch, None in its first."""
        if per_token is not None and delta.token_ids:
            self._between.observe(per_token)
        drafted = delta.origins.count("draft")
        self._kept_tokens.inc(drafted)
        self._own_tokens.inc(len(delta.origins) - drafted)
        self._length[min(len(delta.proposed), MAX_DRAFT_TOKENS)].inc()

    def text_finished(self, stats: Stats) -> None:
        if stats.steps:  # an embedding has none
            self._per_step.observe(stats.tokens_per_step)
        self._cached.inc(stats.cached_prompt_tokens)
        for counter, values in (
            (self._drafted, stats.drafted_by_position),
            (self._kept, stats.accepted_by_position),
        ):
            for position, count in enumerate(values):
                counter.labels(str(position)).inc(count)
        for name, count in stats.reasons.items():
            self._reasons.labels(reason_code(name)).inc(count)
        for name, count in stats.drafters.items():
            self._drafters.labels(name).inc(count)

    def media(self, used: MediaUse | None) -> None:
        """Of a prompt, whatever number of texts it has."""
        if used is None:
            return
        self._media.labels("image").inc(used.images)
        self._media.labels("audio").inc(used.clips)
        self._known.inc(used.known)
        self._media_seconds.labels("decoding").inc(used.decoding_seconds)
        self._media_seconds.labels("tower").inc(used.tower_seconds)
