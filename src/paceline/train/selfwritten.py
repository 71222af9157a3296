"""The target writes all of its training data: given the opening of a user turn, the rest of it, then the answer.

A model without a chat template goes on from the opening alone, as from the beginning of a text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.train.encoding import TargetEncoder
from paceline.train.openings import opening
from paceline.train.windows import Text
from paceline.train.written import Done, Writer

QUESTION, ANSWER = 96, 256  # tokens at most
QUESTIONS_AT = 0.85, 0.95  # temperature and top_p of questions
TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 0.8)  # of answers, by lot
PLAIN = 0.8  # temperature of texts without a turn
LEAST = 4  # tokens of an answer that is worth keeping
PLACE = "OPENING-STANDS-HERE"


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """How a target writes for itself; texts have `length` tokens at most."""

    encoder: TargetEncoder
    before: str | None  # of a user turn, as the template renders it; None: there is no template
    after: str  # the end of the turn, and what an answer begins with
    length: int
    seed: int

    @classmethod
    def of(cls, encoder: TargetEncoder, length: int, seed: int) -> OwnTexts:
        """Raises UsageError for a template that does not show what the user says."""
        if not encoder.chats:
            return cls(encoder, None, "", length, seed)
        shown = encoder.render([{"role": "user", "content": PLACE}], generation_prompt=True)
        before, place, after = shown.partition(PLACE)
        if not place:
            raise UsageError(
                "the chat template does not show what the user says, so the target cannot write questions: give --data"
            )
        own = cls(encoder, before, after, length, seed)
        if own.room < 2 * LEAST:
            raise UsageError(
                f"--length {length} leaves no room for a chat of this template: give at least 128"
            )
        return own

    @property
    def room(self) -> int:
        """Tokens of question and answer, at least."""
        frame = self.encoder.tokenizer.encode(f"{self.before or ''}{self.after}", add_bos=False)
        return self.length - len(frame) - 16

    def write(self, writer: Writer, numbers: Seq[int], done: Done) -> list[Text]:
        """The texts of these numbers; those without an answer are left out."""
        draws = [random.Random(f"{self.seed} {i}") for i in numbers]
        begun = [opening(draw)[1] for draw in draws]
        if self.before is None:
            return self._plain(writer, draws, begun, done)
        encode = self.encoder.tokenizer.encode
        prompts = [encode(self.before + text, add_bos=False) for text in begun]
        asked, close = self._questions(writer, draws, prompts), encode(self.after, add_bos=False)
        turns = [[*p, *q, *close] for p, q in zip(prompts, asked, strict=True)]
        params = [
            SamplingParams(max_tokens=max(1, min(ANSWER, self.length - len(turn))),
                           temperature=draw.choice(TEMPERATURES), seed=draw.getrandbits(60))
            for draw, turn in zip(draws, turns, strict=True)
        ]  # fmt: skip
        out, answers = [], writer.generate(turns, params, on_done=done)
        for prompt, turn, answer in zip(prompts, turns, answers, strict=True):
            if answer.finish_reason != "error" and len(answer.token_ids) >= LEAST:
                tokens = [*turn, *answer.token_ids]
                spans = (len(prompt), len(turn) - len(close)), (len(turn), len(tokens))
                out.append(Text(tokens, tuple((a, b) for a, b in spans if b > a)))
        return out

    def _questions(
        self, writer: Writer, draws: Seq[random.Random], prompts: list[list[int]]
    ) -> list[list[int]]:
        """The rest of each user turn, up to the first special token."""
        temperature, top_p = QUESTIONS_AT
        most = max(2, min(QUESTION, self.room // 3))
        params = [
            SamplingParams(max_tokens=most, min_tokens=2, temperature=temperature, top_p=top_p, seed=d.getrandbits(60))
            for d in draws
        ]  # fmt: skip
        special = self.encoder.tokenizer.special_ids | {*self.encoder.tokenizer.eos_ids}
        out = []
        for question in writer.generate(prompts, params):
            ends = [i for i, token in enumerate(question.token_ids) if token in special]
            out.append(question.token_ids[: ends[0]] if ends else list(question.token_ids))
        return out

    def _plain(self, writer: Writer, draws: Seq[random.Random], begun: Seq[str], done: Done) -> list[Text]:
        prompts = [self.encoder.encode(text or "The")[: self.length // 2] for text in begun]
        params = [
            SamplingParams(max_tokens=min(ANSWER, self.length - len(p)), temperature=PLAIN, seed=d.getrandbits(60))
            for p, d in zip(prompts, draws, strict=True)
        ]  # fmt: skip
        out = []
        for prompt, text in zip(prompts, writer.generate(prompts, params, on_done=done), strict=True):
            if text.finish_reason != "error" and len(text.token_ids) >= LEAST:
                tokens = [*prompt, *text.token_ids]
                out.append(Text(tokens, ((len(prompt), len(tokens)),)))
        return out


def regenerate(
    texts: Seq[Text], writer: Writer, length: int, temperature: float, numbers: Seq[int], done: Done
) -> list[Text]:
    """The texts of `numbers` with everything from their first counted token on written by the target, to `length` tokens
    at most.

    A text that counts from its beginning keeps a quarter as its prompt. The seed of text i is i, so the same
    data gives the same answers.
    """
    prompts = [_prompt(texts[i], length) for i in numbers]
    params = [
        SamplingParams(max_tokens=length - len(p), temperature=temperature, seed=i)
        for i, p in zip(numbers, prompts, strict=True)
    ]
    out: list[Text] = []
    for prompt, answer in zip(prompts, writer.generate(prompts, params, on_done=done), strict=True):
        if answer.finish_reason != "error" and len(answer.token_ids) > 1:
            tokens = [*prompt, *answer.token_ids]
            out.append(Text(tokens, ((len(prompt), len(tokens)),)))
    return out


def _prompt(text: Text, length: int) -> list[int]:
    begin = text.counted[0][0] if text.counted else len(text.tokens)
    begin = begin or max(1, len(text.tokens) // 4)
    return list(text.tokens[: min(begin, length * 3 // 4)])
