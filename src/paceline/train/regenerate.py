"""Let the target write the answers: acceptance is measured against what it says, not against what a corpus
says.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from paceline.core import Completion, SamplingParams
from paceline.errors import UsageError
from paceline.train.windows import Text

GROUP = 64  # prompts handed to the engine at once, between two reports


class Writer(Protocol):
    """What is asked of an engine; `paceline.LLM` is one."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]: ...


def regenerate(
    texts: Seq[Text], writer: Writer, length: int, temperature: float, report: Callable[[int, int], None]
) -> list[Text]:
    """The texts with everything from their first counted token on written by the target, to `length` tokens
    at most.

    A text that counts from its beginning keeps a quarter as its prompt. The seed of text i is i, so the same
    data gives the same answers. `report(done, of)` is called after each group. Raises UsageError if nothing
    came back.
    """
    prompts = [_prompt(text, length) for text in texts]
    out: list[Text] = []
    for start in range(0, len(prompts), GROUP):
        group = prompts[start : start + GROUP]
        params = [
            SamplingParams(max_tokens=length - len(p), temperature=temperature, seed=start + i)
            for i, p in enumerate(group)
        ]
        for prompt, done in zip(group, writer.generate(group, params), strict=True):
            if done.finish_reason != "error" and len(done.token_ids) > 1:
                tokens = [*prompt, *done.token_ids]
                out.append(Text(tokens, ((len(prompt), len(tokens)),)))
        report(min(start + GROUP, len(prompts)), len(prompts))
    if not out:
        raise UsageError(
            "the target wrote no answer to any prompt: check the data, or leave out --regenerate"
        )
    return out


def _prompt(text: Text, length: int) -> list[int]:
    begin = text.counted[0][0] if text.counted else len(text.tokens)
    begin = begin or max(1, len(text.tokens) // 4)
    return list(text.tokens[: min(begin, length * 3 // 4)])
