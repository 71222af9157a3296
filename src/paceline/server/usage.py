"""Token counts and what speculation did, as clients expect them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from paceline.control.reasons import NoDraftReason
from paceline.core import Stats
from paceline.server.predicted import Predicted
from paceline.soft_tokens import SoftTokens


def usage(
    prompt: int,
    completion: int,
    stats: Iterable[Stats] = (),
    *,
    predicted: Predicted | None = None,
    media: Iterable[SoftTokens] = (),
) -> dict[str, Any]:
    """The usage object; cached and prediction tokens are known once texts are finished."""
    done, soft = list(stats), {"image": 0, "audio": 0}
    for item in media:
        soft[item.kind] += item.end - item.start
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(s.cached_prompt_tokens for s in done),
            "audio_tokens": soft["audio"],
            "image_tokens": soft["image"],
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": predicted.accepted if predicted is not None else 0,
            "rejected_prediction_tokens": predicted.rejected if predicted is not None else 0,
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def reason_code(reason: str) -> str:
    """A reason without its particulars, which are for the server's log."""
    return reason.partition(":")[0]


def failure_of_drafter(stats: Stats) -> str | None:
    """What the text's drafter failed with, if it did."""
    return next(
        (reason for reason in stats.reasons if reason_code(reason) == NoDraftReason.DRAFTER_FAILED), None
    )


def speculation(stats: Iterable[Stats], seed: int | None) -> dict[str, Any]:
    """The sums over an answer's texts. `reason`: the most frequent one for steps without a draft, failures first.

    The times are the engine's: from the admission of the slowest text to its last token, and to the first token of any.
    """
    done = list(stats)
    steps, emitted = sum(s.steps for s in done), sum(s.emitted for s in done)
    reasons = _added({reason_code(name): count for name, count in s.reasons.items()} for s in done)
    reasons.pop(NoDraftReason.PREFILL, None)  # a text's first step never has a draft
    return {
        "steps": steps,
        "drafted": sum(s.drafted for s in done),
        "accepted": sum(s.accepted for s in done),
        "tokens_per_step": round(emitted / steps, 4) if steps else 0.0,
        "reason": max(
            reasons, key=lambda name: (name == NoDraftReason.DRAFTER_FAILED, reasons[name]), default=None
        ),
        "drafted_by_position": _by_position(s.drafted_by_position for s in done),
        "accepted_by_position": _by_position(s.accepted_by_position for s in done),
        "drafters": _added(s.drafters for s in done),
        "seconds": round(max((s.seconds for s in done), default=0.0), 6),
        "first_token_seconds": round(min((s.first_token_seconds for s in done), default=0.0), 6),
        "seed": seed,
        "lossy": any(s.lossy for s in done),
    }


def report(stats: Iterable[Stats], seed: int | None, warnings: list[str]) -> dict[str, Any]:
    """What an answer carries besides the standard fields; `warnings` only if there are any."""
    stats = list(stats)
    told: dict[str, Any] = {"speculation": speculation(stats, seed)}
    used = next((stat.media for stat in stats if stat.media is not None), None)
    if used is not None:
        told["media"] = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(used).items()
        }
    return told | {"warnings": warnings} if warnings else told


def _added(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            out[name] = out.get(name, 0) + count
    return out


def _by_position(rows: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
