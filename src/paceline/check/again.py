"""One start of many: a process that loads a target anew and says what it computed, as digests of bits.

`paceline check --processes` starts it (`check/processes.py`), with an order as JSON on its standard input. It says a
line once the target is loaded, and one at its end.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.check import loading, pictures
from paceline.check.scenes import SQUEEZE, TOGETHER, Output, play
from paceline.check.subject import Subject
from paceline.core import SamplingParams
from paceline.errors import PacelineError

CUTS = (16, 3)  # rows that a text is computed by
LENGTH, DRAFT = 24, 4  # tokens of an answer, and drafted at each step
ROOM = 96  # tokens that a picture's prompt may have


@dataclass(frozen=True, slots=True)
class Order:
    """What is loaded, and what is asked of it. `first`: "", "pictures" or "preemption", which is gone through before."""

    target: str
    drafters: Seq[str]
    options: Mapping[str, Any]
    prompts: Seq[Seq[int]]
    first: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def observe(subject: Subject, first: str) -> dict[str, str]:
    """What was computed -> the digest of its bits: logits, soft tokens, drafts and texts.

    What plain torch computes of pictures and sound keeps its bits for a number of threads, which stands in its name.
    """
    if first == "preemption":
        play(subject, _asked(subject), SQUEEZE)
    soft = _soft_tokens(subject) if first == "pictures" else None
    logits = [subject.logits(rows) for rows in subject.hidden(subject.prompts, CUTS)]
    written = play(subject, _asked(subject), TOGETHER)
    return {
        "logits": digest(logits),
        **(_soft_tokens(subject) if soft is None else soft),
        "drafts": digest([_flat(output.drafts) for output in written]),
        "texts": digest([value for output in written for value in _of(output)]),
    }


def _asked(subject: Subject) -> list[tuple[Seq[int], SamplingParams]]:
    """Each prompt with each drafter, greedy and not."""
    return [
        (prompt, SamplingParams(max_tokens=LENGTH, seed=i, temperature=0.8 * (i % 2), ignore_eos=True, logprobs=0,
                                drafter=name, draft_tokens=DRAFT))
        for name in ("none", *subject.drafters)
        for i, prompt in enumerate(subject.prompts)
    ]  # fmt: skip


def _flat(drafts: Seq[tuple[int, Seq[int]]]) -> torch.Tensor:
    return torch.tensor([value for at, draft in drafts for value in (at, *draft)], dtype=torch.int64)


def _of(output: Output) -> list[torch.Tensor]:
    """Tokens and the bits of their chances."""
    return [
        torch.tensor(output.tokens, dtype=torch.int64),
        torch.tensor([entry.raw for entry in output.logprobs], dtype=torch.float64),
    ]


def _soft_tokens(subject: Subject) -> dict[str, str]:
    """Of pictures and sound made from a seed; none where the model takes text only."""
    reader = pictures.reader_of(subject)
    if isinstance(reader, str):
        return {}
    kernels = getattr(reader.vision(), "encoder", None) is not None
    threads = f" by {torch.get_num_threads()} threads"
    seen: list[torch.Tensor] = []
    heard: list[torch.Tensor] = []
    for name, prompt in pictures.prompts(reader, min(ROOM, subject.engine.max_len)):
        (heard if name == "sound" else seen).extend(item.vectors for item in prompt.media)
    out = {"soft tokens" + ("" if kernels else threads): digest(seen)}
    return out | ({f"soft tokens of sound{threads}": digest(heard)} if heard else {})


def digest(values: Seq[torch.Tensor]) -> str:
    """SHA-256 over shapes and bytes."""
    out = hashlib.sha256()
    for value in values:
        out.update(repr((tuple(value.shape), value.dtype)).encode())
        out.update(value.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def follow(order: Order) -> dict[str, str]:
    """Load, compute, and end. Raises PacelineError."""
    with loading.joined(order.target, order.drafters, lambda line: None, order.options) as llm:
        _say({"loaded": str(llm.info["arithmetic"])})
        subject = Subject(llm.engine, tuple(tuple(prompt) for prompt in order.prompts))
        return observe(subject, order.first)


def _say(line: Mapping[str, str]) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    try:
        _say(follow(Order(**json.loads(sys.stdin.read()))))
    except PacelineError as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
