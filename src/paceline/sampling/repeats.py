"""DRY: a penalty that grows with the length of the repetition that a token would go on with.

The definition is llama.cpp's (src/llama-sampler.cpp, after text-generation-webui's pull request 5677): where the end of
the text was written before, the token that followed there loses multiplier * base ** (length - allowed_length), the
longest match counting. No match reaches over a sequence breaker, and no breaker is penalised.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from paceline.core import SamplingParams

_LARGEST = 88.7228391  # log of the largest float32: where llama.cpp ends the growth
Breakers = Seq[tuple[int, ...]]  # each the tokens of one, first to last


def dry_penalties(
    text: np.ndarray, params: SamplingParams, breakers: Breakers
) -> tuple[np.ndarray, np.ndarray]:
    """(distinct tokens int64 [n], what each loses float32 [n]) after the last tokens of a text [T]."""
    longest = _lengths(text, params.dry_allowed_length, breakers)
    alone = {breaker[0] for breaker in breakers if len(breaker) == 1}
    tokens = [token for token in longest if token not in alone]
    grown = [_penalty(longest[token] - params.dry_allowed_length, params) for token in tokens]
    return np.array(tokens, dtype=np.int64), np.array(grown, dtype=np.float32)


def _lengths(text: np.ndarray, allowed: int, breakers: Breakers) -> dict[int, int]:
    """Token -> the longest repetition, of at least `allowed` tokens, that it would go on with."""
    size = len(text)
    if size <= allowed:
        return {}
    limit = _since_breaker(text, breakers)
    if limit < allowed:
        return {}
    lengths: dict[int, int] = {}
    if allowed == 0:
        lengths = dict.fromkeys(text[1:].tolist(), 0)
    ends = np.arange(size - 1)  # of earlier runs that match the text's last `length` tokens
    for length in range(1, limit + 1):
        ends = ends[ends >= length - 1]
        ends = ends[text[ends - (length - 1)] == text[size - length]]
        if not len(ends):
            break
        if length >= allowed:
            lengths |= dict.fromkeys(text[ends + 1].tolist(), length)
    return lengths


def _since_breaker(text: np.ndarray, breakers: Breakers) -> int:
    """How many tokens stand behind the last breaker; all of them where there is none."""
    size, best = len(text), len(text)
    last = text.tolist()
    heads: dict[int, list[tuple[int, ...]]] = {}
    for breaker in breakers:
        heads.setdefault(breaker[0], []).append(breaker)
    for back, token in enumerate(reversed(last)):
        whole = [
            b for b in heads.get(token, ()) if tuple(last[size - 1 - back : size - 1 - back + len(b)]) == b
        ]
        if whole:
            return back - max(map(len, whole)) + 1
    return best


def _penalty(beyond: int, params: SamplingParams) -> float:
    base = params.dry_base
    if base > 1.000001:
        beyond = min(beyond, int(_LARGEST / float(np.log(base))))
    return float(params.dry_multiplier * base**beyond)
