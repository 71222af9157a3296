"""Errors on the wire: OpenAI's envelope with the right status."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from paceline.engine.worker import DeadlinePassed, NotReady, QueueFull
from paceline.errors import CapacityError, PacelineError, PromptError, UsageError
from paceline.text.grammar import GrammarFailed

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than success. `param` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def envelope(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.envelope(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """The answer to an error that the engine, the worker or the text rooms raised."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case NotReady():
            return ApiError(503, str(error), code="not_ready", headers={"Retry-After": "5"})
        case DeadlinePassed():
            return ApiError(504, str(error), code="deadline_passed")
        case PromptError():
            return ApiError(400, str(error), param="prompt", code="bad_prompt")
        case UsageError():
            return ApiError(400, str(error))
        case CapacityError():
            return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "5"})
        case GrammarFailed():
            return ApiError(400, str(error), code="bad_grammar")
        case PacelineError():
            return ApiError(500, str(error), code="request_failed")
        case _:
            return ApiError(500, "the server made a mistake: see its log", code="internal_error")
