"""Paths that are not there: which there are, and what the ones of other servers are called here."""

from __future__ import annotations

import re

from paceline.server.errors import ApiError

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/models",
    "/tokenize", "/detokenize", "/completion", "/infill", "/props", "/health", "/version", "/metrics", "/docs",
    "/openapi.json",
)  # fmt: skip
_CHAT = "use POST /v1/chat/completions"
_OLLAMA = (
    "of Ollama's API there are POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show, "
    "GET /api/tags, /api/ps and /api/version"
)
_WRITES = "this server only writes text"
_ELSEWHERE = {
    "/v1/embeddings": "use POST /v1/embeddings",
    "/embeddings": "use POST /v1/embeddings",
    "/embedding": "use POST /v1/embeddings",
    "/v1/rerank": f"ranking is not what this server does: {_WRITES}",
    "/v1/score": f"ranking is not what this server does: {_WRITES}",
    "/v1/moderations": f"moderation is not what this server does: {_WRITES}",
    "/v1/audio": f"audio is not what this server does: {_WRITES}",
    "/v1/images": f"images are not what this server does: {_WRITES}",
    "/v1/responses": "answers are not stored: use POST /v1/responses, with the whole conversation as input",
    "/v1/messages": "of Anthropic's API there are POST /v1/messages and /v1/messages/count_tokens",
    "/v1/assistants": f"the Assistants API is not supported: {_CHAT}",
    "/v1/threads": f"the Assistants API is not supported: {_CHAT}",
    "/chat/completions": f"{_CHAT}: the base URL ends in /v1",
    "/completions": "use POST /v1/completions: the base URL ends in /v1",
    "/completion": "use POST /completion",
    "/props": "use GET /props: nothing is changed there",
    "/infill": "use POST /infill",
    "/api": _OLLAMA,
}


_AGAIN = re.compile(r"^(?:/v1)+(?=/(?:v1|api)/)")


def usual(path: str) -> str:
    """A path as the routes have it: base addresses end in a slash, or in /v1 where the client adds one itself."""
    path_here = _AGAIN.sub("", re.sub("/{2,}", "/", path)).rstrip("/")
    return path_here if path_here.startswith(("/v1/", "/api/")) else path


def below(path: str, root: str) -> str:
    """A path without the one that a proxy shows the server at, which some leave in and some take away."""
    return path[len(root) :] if root and (path == root or path.startswith(f"{root}/")) else path


def no_such_path(path: str) -> ApiError:
    """404 that says what to use instead. A path below a known one counts as that one."""
    clean = "/" + "/".join(part for part in path.split("/") if part)
    elsewhere = next((t for p, t in _ELSEWHERE.items() if clean == p or clean.startswith(p + "/")), None)
    message = elsewhere or "there is no such path"
    return ApiError(404, f"{message}. The paths here: {', '.join(PATHS)}", code="no_such_path")
