"""What is asked for: prompts, every sampling parameter, and every way in which a text can end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.check.crash import Where, over
from paceline.check.scenes import Output, Scene, play
from paceline.check.subject import Subject
from paceline.core import SamplingParams

SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.15, "frequency_penalty": 0.1},
    {"temperature": 1.1, "logprobs": 2},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "presence_penalty": 0.3},
    {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.1, "n": 2},
)
SAMPLERS: tuple[dict[str, Any], ...] = (
    {
        "temperature": 0.8, "typical_p": 0.95, "top_n_sigma": 3.0, "xtc_probability": 0.5, "xtc_threshold": 0.1,
        "dynatemp_range": 0.3, "dry_multiplier": 0.8, "dry_allowed_length": 1, "penalty_last_n": 32,
        "repetition_penalty": 1.1,
    },
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0},
)  # fmt: skip
BIASED, CONSTRAINED = len(SHAPES), len(SHAPES) + 1  # two more, which depend on prompt and vocabulary
KINDS = len(SHAPES) + 2 + len(SAMPLERS)  # odd, so that each comes with and without log probabilities
ENDS = ("length", "stop string", "late stop token", "stop token")


@dataclass(frozen=True, slots=True)
class Case:
    """One text without a drafter. Others must equal it, however they were drafted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    output: Output

    @property
    def answer(self) -> list[int]:
        return self.output.tokens


class EveryThird:
    """A constraint that looks at where a token stands: the i-th may not have an id that leaves i % 3 modulo 3."""

    def __init__(self, vocab_size: int) -> None:
        self._place = np.arange(vocab_size) % 3
        self._done = 0

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        return [self._place != (self._done + j) % 3 for j in range(len(draft) + 1)]

    def commit(self, tokens: Seq[int]) -> None:
        self._done += len(tokens)


def params_of(subject: Subject, prompt: tuple[int, ...], number: int, length: int) -> SamplingParams:
    """The parameters of case `number`; they end nothing before `length`."""
    kind = number % KINDS
    room = subject.engine.max_len - len(prompt)
    vocab = subject.engine.state.target.vocab_size
    make: Callable[[], EveryThird] = lambda: EveryThird(vocab)  # noqa: E731
    extra: dict[str, Any] = {}
    if kind == BIASED:
        rare = sorted(set(prompt))
        extra = {
            "temperature": 0.6,
            "logit_bias": dict.fromkeys(rare[:6], 2.5),
            "bad_token_ids": tuple(rare[6:9]),
            **_unwritten(subject, prompt),
        }
    elif kind == CONSTRAINED:
        extra = {"temperature": 0.7, "constraint": make}
    else:
        extra = SHAPES[kind] if kind < len(SHAPES) else SAMPLERS[kind - len(SHAPES) - 2]
    if number % 2:  # log probabilities show a changed bit long before a token does
        extra = {"logprobs": 0, **extra}
    return SamplingParams(max_tokens=min(length - number % 5, room), seed=number, ignore_eos=True, **extra)


def _unwritten(subject: Subject, prompt: tuple[int, ...]) -> dict[str, Any]:
    """Texts that the prompt holds, as an answer would repeat them, are not written."""
    tokenizer = subject.engine.tokenizer
    if tokenizer is None:
        return {}
    pairs = [
        tokenizer.decode(prompt[at : at + 2], begins=False) for at in range(0, min(len(prompt) - 1, 16), 2)
    ]
    texts = [text for text in pairs if 0 < len(text) <= 40 and text.isprintable()]
    return {"bad_words": tuple(texts[:3]), "banned_strings": tuple(texts[3:6])}


def make_case(subject: Subject, number: int, length: int) -> Case:
    """Case `number` of an endless, fixed order: its text without a drafter, alone, with nothing shared."""
    prompt = _prompt(subject, number)
    alone = Scene("alone", salt=f"check-{number}")
    params = replace(params_of(subject, prompt, number, length), drafter="none")

    def where() -> Where:
        asked = {"drafter": "none", "batch": "1 text alone", "temperature": f"{params.temperature:g}"}
        return asked | {"seed": f"{params.seed}", "prompt": subject.excerpt(prompt)}

    def write(asked: SamplingParams) -> Output:
        with over(where):
            return play(subject, [(prompt, replace(asked, n=1))], alone)[0]

    output = write(params)
    ends = _ending(subject, output, params, ENDS[(number + number // len(ENDS)) % len(ENDS)])
    if ends is not params:
        output = write(ends)
    return Case(prompt, ends, output)


def _prompt(subject: Subject, number: int) -> tuple[int, ...]:
    """The prompts in turn. After two rounds, of which one finds them in the cache, each begins at another place: a
    greedy text that is asked for ever again shows nothing new.
    """
    turn, at = divmod(number, len(subject.prompts))
    prompt = subject.prompts[at]
    begin = 7 * (turn // 2) % len(prompt)
    return (*prompt[begin:], *prompt[:begin])


def _ending(subject: Subject, output: Output, params: SamplingParams, end: str) -> SamplingParams:
    """Let the text end at something that it says itself, late enough for whole blocks to come before."""
    at = 2 * len(output.tokens) // 3
    if end == "length" or at < 4:
        return params
    if end == "stop string":
        tokenizer = subject.engine.tokenizer
        stop = tokenizer.decode(output.tokens[at : at + 2], begins=False) if tokenizer else ""
        return replace(params, stop=(stop,)) if stop else params
    if end == "stop token":
        return replace(params, stop_token_ids=(output.tokens[at],))
    first = output.tokens.index(output.tokens[at])
    return replace(params, stop_token_ids=(output.tokens[at],), min_tokens=min(first + 2, params.max_tokens))
