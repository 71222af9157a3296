"""One side of an audit: an OpenAI-compatible completions endpoint, asked one request at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from paceline.errors import UsageError

TOP = 5  # most likely tokens asked for at each position


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token: its text, its natural-log probability, and the most likely ones with theirs."""

    text: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `status` is the HTTP status; `tokens` is empty where the server gives no logprobs."""

    status: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(slots=True)
class Endpoint:
    """`url` as users know it, with or without /v1. `body` is merged into every request, e.g. to switch speculation."""

    url: str
    model: str | None = None
    key: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 120.0
    transport: httpx2.BaseTransport | None = None  # tests put a fake server here
    asked: int = 0

    def __post_init__(self) -> None:
        base = self.url.rstrip("/")
        if not base.startswith(("http://", "https://")):
            raise UsageError(
                f"{self.url!r} is no URL: give the server's address, for instance http://localhost:8000"
            )
        self.url = base if base.endswith("/v1") else base + "/v1"
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        here = (urlsplit(base).hostname or "") in ("localhost", "127.0.0.1", "::1")  # no proxy would reach it
        try:
            self._http = httpx2.Client(
                timeout=self.timeout, headers=headers, transport=self.transport, trust_env=not here
            )
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"the proxy in the environment cannot be used ({error}): for SOCKS `pip install socksio`, else correct it"
            ) from error

    _http: httpx2.Client = field(init=False, repr=False)

    def close(self) -> None:
        self._http.close()

    def find_model(self) -> str:
        """The model to ask for: the one given, else the first that the server lists. Raises UsageError."""
        if self.model is None:
            reply = self._send("GET", "/models", None)
            listed = reply.get("data") if isinstance(reply, dict) else None
            if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
                raise UsageError(f"{self.url}/models lists no model: name it with --model or --against-model")
            self.model = str(listed[0].get("id"))
        return self.model

    def complete(self, prompt: str, params: Mapping[str, Any]) -> Answer:
        """One completion. A refusal (4xx, 5xx) is an answer too; an unreachable server raises UsageError."""
        answer, choice = self._answer("/completions", {"prompt": prompt, **params})
        return answer or Answer(200, str(choice.get("text") or ""), tokens_of(choice.get("logprobs")))

    def see(self, question: str, url: str | None, params: Mapping[str, Any]) -> Answer:
        """One chat completion about the picture of a data URL, else about none. As `complete`."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if url is not None:
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        asked = {"messages": [{"role": "user", "content": parts}], **params}
        asked |= {"logprobs": True, "top_logprobs": params["logprobs"]} if "logprobs" in params else {}
        answer, choice = self._answer("/chat/completions", asked)
        message = choice.get("message")
        text = str(message.get("content") or "") if isinstance(message, dict) else ""
        return answer or Answer(200, text, tokens_of(choice.get("logprobs")))

    def _answer(self, path: str, asked: Mapping[str, Any]) -> tuple[Answer | None, dict[str, Any]]:
        """(a refusal, {}) or (None, the first choice)."""
        self.asked += 1
        reply = self._request("POST", path, {"model": self.find_model(), **asked, **self.body})
        if reply.status_code != 200:
            return Answer(reply.status_code, error=reply.text[:300]), {}
        choices = self._json(reply).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise UsageError(f"{self.url}{path} answered without choices: it is not OpenAI-compatible")
        return None, choices[0]

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        reply = self._request(method, path, body)
        if reply.status_code in (401, 403):
            raise UsageError(f"{self.url} wants a key: name the variable that holds it with --key-env")
        if reply.status_code != 200:
            raise UsageError(f"{self.url}{path} answered {reply.status_code}: is it the server's address?")
        return self._json(reply)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        try:
            return self._http.request(method, self.url + path, json=body)
        except httpx2.TimeoutException as error:
            raise UsageError(f"{self.url} did not answer in {self.timeout:g} s: raise --timeout") from error
        except httpx2.HTTPError as error:
            raise UsageError(
                f"{self.url} cannot be reached ({error}): is the server running there?"
            ) from error

    def _json(self, reply: httpx2.Response) -> Any:
        try:
            return reply.json()
        except ValueError as error:
            raise UsageError(
                f"{self.url} answered something that is no JSON: is it an API server?"
            ) from error


def tokens_of(logprobs: Any) -> tuple[Token, ...]:
    """Tokens from either layout: completions' parallel lists, or chat's list of `content` (llama-server)."""
    if not isinstance(logprobs, dict):
        return ()
    content = logprobs.get("content")
    if isinstance(content, list):
        return tuple(
            Token(
                str(entry.get("token", "")),
                _number(entry.get("logprob")),
                {str(t.get("token", "")): _number(t.get("logprob")) for t in entry.get("top_logprobs") or ()},
            )
            for entry in content
        )
    texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [{}] * len(texts)
    return tuple(
        Token(str(text), _number(value), {str(k): _number(v) for k, v in (top or {}).items()})
        for text, value, top in zip(texts, values, tops, strict=False)
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
