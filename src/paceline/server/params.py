"""From a request's fields to SamplingParams, with the server's limits. Every refusal names its field."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from paceline.core import SamplingParams
from paceline.errors import PacelineError, UsageError
from paceline.media.reader import TooLong
from paceline.options import rows_of
from paceline.server.errors import ApiError
from paceline.server.schema import ChatRequest, CompletionRequest, Content, Sampling
from paceline.server.settings import ServerConfig
from paceline.text.tokenizer import Tokenizer

_PART = re.compile(r"(messages\.\d+(?:\.content\.\d+[\w.]*)?):? (.*)", re.DOTALL)
_MOST_TEXTS, _MOST_BIASED = 128, 256  # texts in logit_bias, and characters of each
_SETTLED = (
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "seed",
)  # in words of their own
_AS_THEY_ARE = [
    row.name
    for row in rows_of(SamplingParams, "request")
    if row.name in Sampling.model_fields and row.name not in _SETTLED
]
_FIELD = re.compile(r"(\w+)(\[|=| has| leaves)")


def refuse(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def refuse_prompt(error: Exception, where: str = "messages", code: str = "bad_prompt") -> ApiError:
    """A prompt that cannot be, by the part of the messages that is wrong where one is. `where`: the request's field."""
    match = _PART.match(str(error))
    param, message = (match[1], match[2]) if match else (where, str(error))
    return refuse(param, message, code="context_length_exceeded" if isinstance(error, TooLong) else code)


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def check_limits(body: Sampling, config: ServerConfig) -> None:
    """The caps that need the server's settings. Raises ApiError 400."""
    most = min(config.max_n, config.max_texts)
    if (body.n or 1) > most:
        raise refuse("n", f"at most {most}")
    stops = stop_strings(body)
    if len(stops) > config.max_stop:
        raise refuse("stop", f"at most {config.max_stop} strings")
    if any(len(s) > config.max_stop_length for s in stops):
        raise refuse("stop", f"each string may have up to {config.max_stop_length} characters")
    if len(body.logit_bias or {}) + len(body.biased_texts or []) > config.max_logit_bias:
        raise refuse("logit_bias", f"at most {config.max_logit_bias} tokens")
    if isinstance(body, ChatRequest):
        if (body.top_logprobs or 0) > config.max_logprobs:
            raise refuse("top_logprobs", f"at most {config.max_logprobs}")
        if body.top_logprobs is not None and not body.logprobs:
            raise refuse("top_logprobs", "needs logprobs: true")
        if len(body.tools or []) > config.max_tools:
            raise refuse("tools", f"at most {config.max_tools}")
    elif isinstance(body, CompletionRequest):
        if (body.logprobs or 0) > config.max_logprobs:
            raise refuse("logprobs", f"at most {config.max_logprobs}")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise refuse("best_of", "only as many as n: the server does not rank answers")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "only with stream: true")


def stop_strings(body: Sampling) -> list[str]:
    """Those that say something: front ends send empty ones for none."""
    return [stop for stop in ([body.stop] if isinstance(body.stop, str) else body.stop or []) if stop]


def settle_length(body: Sampling, prompt: int) -> None:
    """`max_length` counts the tokens of the prompt, too. Raises ApiError 400 if it leaves none."""
    if body.max_length is None or body.max_tokens is not None:
        return
    if body.max_length <= prompt:
        raise refuse("max_length", f"the prompt alone has {prompt} tokens: give more, or max_tokens")
    body.max_tokens = body.max_length - prompt


def bias_texts(body: Sampling, tokenizer: Tokenizer) -> None:
    """Put the tokens of texts that are biased beside the others, as llama.cpp does. Raises ApiError 400."""
    if len(body.biased_texts or []) > _MOST_TEXTS:
        raise refuse("logit_bias", f"at most {_MOST_TEXTS} texts")
    for text, bias in body.biased_texts or []:
        if not isinstance(text, str) or not 0 < len(text) <= _MOST_BIASED:
            raise refuse("logit_bias", f"a text has 1 to {_MOST_BIASED} characters")
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, int | float)):
            raise refuse("logit_bias", f"the value of {text[:40]!r} should be a number, or false")
        try:
            tokens = tokenizer.encode(text, add_bos=False)
        except PacelineError as error:
            raise refuse("logit_bias", str(error)) from error
        if bias is False:
            body.bad_token_ids = [*(body.bad_token_ids or []), *tokens]
        else:
            body.logit_bias = (body.logit_bias or {}) | dict.fromkeys(map(str, tokens), float(bias))
    body.biased_texts = None


def token_id(key: str) -> int:
    """The token that a key of logit_bias names. Raises ApiError 400."""
    if not key.isascii() or not key.isdecimal() or len(key) > 9:
        raise refuse("logit_bias", f"{key[:40]!r} is no token id")
    return int(key)


def _logit_bias(body: Sampling) -> dict[int, float]:
    out = {}
    for key, bias in (body.logit_bias or {}).items():
        if abs(bias) > 100:
            raise refuse("logit_bias", f"the bias of {key[:40]} has to be from -100 to 100")
        out[token_id(key)] = float(bias)
    return out


def _logprobs(body: Sampling) -> int | None:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionRequest) else None


def sampling_params(
    body: Sampling, room: int, extra: dict[str, Any], defaults: Mapping[str, Any], unasked: int = 0
) -> SamplingParams:
    """`room`: tokens that may follow the prompt; `extra`: fields that the caller has worked out itself; `defaults`: what
    server and the model's makers suggest; `unasked`: tokens of a chat's answer where nobody names a limit, 0 for all that
    fit. Where nobody says anything the answer is greedy, as that of `run`.
    """
    standard = dict(defaults)
    default = standard.pop("max_tokens", (unasked or room) if isinstance(body, ChatRequest) else 16)
    wanted = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        wanted = body.max_completion_tokens
    if wanted is None:
        wanted = default
    max_tokens = max(1, room if wanted == -1 else min(wanted, room))
    given: dict[str, Any] = {name: getattr(body, name) for name in _AS_THEY_ARE}
    given["min_tokens"] = None if body.min_tokens is None else min(body.min_tokens, max_tokens)
    given |= _speculation(body)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logit_bias=_logit_bias(body),
            stop=tuple(stop_strings(body)),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            logprobs=_logprobs(body),
            **(standard | {key: value for key, value in (given | extra).items() if value is not None}),
        )
    except UsageError as error:
        raise as_field_error(error) from error


def _speculation(body: Sampling) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if body.speculation is not None:
        out = body.speculation.model_dump(exclude={"trace"})
    if body.prediction is not None:
        out["reference"] = _predicted(text_of(body.prediction.content)) or None
    return out


def _predicted(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refuse("prediction", "has a lone surrogate, which is no character: remove it") from error
    return text


def as_field_error(error: UsageError) -> ApiError:
    """An engine's refusal names its field first: keep that name where it is one of ours."""
    match = _FIELD.match(str(error))
    name = match[1] if match else None
    known = name in ChatRequest.model_fields or name in CompletionRequest.model_fields
    return ApiError(400, str(error), param=name if known else None, code="invalid_value")
