"""Let the target write the answers: acceptance is measured against what it says, not against what a corpus
says.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core import SamplingParams
from paceline.train.windows import Text
from paceline.train.written import Done, Writer


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
