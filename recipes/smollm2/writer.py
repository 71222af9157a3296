"""A dense target writes questions and answers, thousands of texts side by side, with nothing decided on the host.

Each slot holds one text. A step feeds one token of each: those of its prompt first, then what it draws. When the question
is over the end of the turn is put behind it, then the answer follows. Every few steps the texts that are finished go to
the output, and prompts of a list take their slots. On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dense import DenseTarget

from paceline.train.windows import Text

TURNS = 8  # steps between two looks for finished texts
COLUMNS = 6  # of what is said of a text: where question and answer start and stop, which prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a text begins. `question`: how many tokens more of a user turn follow, 0: none, the answer follows at once."""

    tokens: Seq[int]
    temperature: float  # of the answer
    question: int
    answer: int  # tokens at most


@dataclass(frozen=True, slots=True)
class Manner:
    """What all texts have in common."""

    close: tuple[int, ...]  # put behind a question
    ends: frozenset[int]  # tokens that end an answer
    special: frozenset[int]  # tokens that end a question
    question: tuple[float, float]  # temperature and top_p of questions
    top_p: float  # of answers
    length: int  # tokens of a text at most


class BatchWriter:
    """`slots` texts at once, `room` finished ones at most."""

    def __init__(
        self, target: DenseTarget, prompts: Seq[Prompt], manner: Manner, sizes: tuple[int, int], seed: int
    ) -> None:
        """sizes: (slots, room). Memory: 2 * layers * kv_heads * head_dim * length * slots elements of its type."""
        slots, self.room = sizes
        self.target, self.manner, self.prompts, self.device = target, manner, prompts, target.device
        self._attention, self._choose = _arithmetic(self.device)
        shape = slots, target.kv_heads, manner.length, target.head_dim
        self.cache = [
            (torch.zeros(shape, dtype=target.dtype, device=self.device),
             torch.zeros(shape, dtype=target.dtype, device=self.device)) for _ in target.layers
        ]  # fmt: skip
        self._set_lists(prompts)
        self.shared = _common(prompts)
        self._set_slots(slots)
        self.seed = torch.full((1,), seed, dtype=torch.int64, device=self.device)
        self.out = torch.zeros(self.room + 1, manner.length, dtype=torch.int32, device=self.device)
        self.said = torch.zeros(self.room + 1, COLUMNS, dtype=torch.int64, device=self.device)
        self.finished = torch.zeros((), dtype=torch.int64, device=self.device)
        self.written = torch.zeros((), dtype=torch.int64, device=self.device)  # tokens
        self.next_prompt = torch.zeros((), dtype=torch.int64, device=self.device)
        self._replay: Callable[[], None] = self._step

    def _set_lists(self, prompts: Seq[Prompt]) -> None:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        texts = torch.zeros(len(prompts), self.manner.length, dtype=torch.int64)
        for row, prompt in zip(texts, prompts, strict=True):
            row[: len(prompt.tokens)] = torch.tensor(prompt.tokens)
        self.list_text = texts.to(self.device)
        self.list_fill = column([len(p.tokens) for p in prompts], torch.int64)
        self.list_temperature = column([p.temperature for p in prompts], torch.float32)
        self.list_question = column([p.question for p in prompts], torch.int64)
        self.list_answer = column([p.answer for p in prompts], torch.int64)
        vocab = self.target.head.shape[0]
        self.special = torch.zeros(vocab, dtype=torch.bool, device=self.device)
        self.special[sorted(self.manner.special)] = True
        self.ends = torch.zeros(vocab, dtype=torch.bool, device=self.device)
        self.ends[sorted(self.manner.ends)] = True
        self.close = column(list(self.manner.close), torch.int64)

    def _set_slots(self, slots: int) -> None:
        """Empty slots: all are `done`, so the first look fills them."""

        def zeros(dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(slots, dtype=dtype, device=self.device)

        self.text = torch.zeros(slots, self.manner.length, dtype=torch.int64, device=self.device)
        self.token, self.position, self.fill, self.prompt = zeros(), zeros(), zeros(), zeros()
        self.first, self.stop, self.answer_from, self.limit = zeros(), zeros(), zeros(), zeros()
        self.answering, self.done, self.empty = zeros(torch.bool), zeros(torch.bool), zeros(torch.bool)
        self.temperature = zeros(torch.float32)
        self.done.fill_(True)
        self.empty.fill_(True)

    # -- one step --------------------------------------------------------------------------------------------------

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.cache[layer]
        place = self.position[:, None, None, None].expand(-1, k.shape[1], 1, k.shape[2])
        keys.scatter_(2, place, k[:, :, None])
        values.scatter_(2, place, v[:, :, None])
        return self._attention(q.contiguous(), keys, values, self.position, self.target.scale).flatten(1)

    @torch.no_grad()
    def _step(self) -> None:
        """Feed a token of each slot, and decide the next one."""
        asked_at, asked_share = self.manner.question
        hidden, _ = self.target.forward(self.token, self.position, self._attend)
        logits = F.linear(hidden, self.target.head)
        temperature = torch.where(self.answering, self.temperature, asked_at)
        share = torch.where(self.answering, self.manner.top_p, torch.full_like(temperature, asked_share))
        self._take(self._choose(logits, temperature, share, self.seed))
        self.seed += 1

    def _take(self, drawn: torch.Tensor) -> None:
        """Put the drawn token where a slot has none yet, and see what that ends."""
        following = (self.position + 1).clamp_max(self.manner.length - 1)
        free = (following >= self.fill) & ~self.done
        self.text.scatter_(1, following[:, None], torch.where(free, drawn, self._at(following))[:, None])
        self.fill.copy_(torch.where(free, following + 1, self.fill))
        self.written += free.sum()
        full = following + 1 >= self.limit
        answered = free & self.answering & (self.ends[drawn] | full)
        ended = free & ~self.answering & self.special[drawn]
        turn = ended | (free & ~self.answering & full)
        self._close(turn, torch.where(ended, following, following + 1))
        self.position.copy_(torch.where(self.done, self.position, following))
        self.token.copy_(self._at(self.position))
        self.done |= answered

    def _at(self, position: torch.Tensor) -> torch.Tensor:
        return self.text.gather(1, position[:, None])[:, 0]

    def _close(self, turn: torch.Tensor, stop: torch.Tensor) -> None:
        """End the question of the slots `turn` before `stop`: the answer begins behind the turn's end."""
        length, count = self.manner.length, len(self.close)
        place = (stop[:, None] + torch.arange(count, device=self.device)).clamp_max(length - 1)
        self.text.scatter_(1, place, torch.where(turn[:, None], self.close, self.text.gather(1, place)))
        begin = (stop + count).clamp_max(length - 2)
        limit = (begin + self.list_answer[self.prompt]).clamp_max(length)
        for old, new in (
            (self.stop, stop),
            (self.fill, begin),
            (self.answer_from, begin),
            (self.limit, limit),
        ):
            old.copy_(torch.where(turn, new, old))
        self.answering |= turn

    # -- finished texts --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def turn_over(self) -> None:
        """Finished texts go to the output, the next prompts take their slots."""
        done, kept = self.done, self.done & ~self.empty
        rank = kept.long().cumsum(0) - 1
        place = torch.where(kept, self.finished + rank, self.room).clamp_max(self.room)
        self.out[place] = self.text.int()
        columns = (self.first, self.stop, self.answer_from, self.fill, self.prompt, self.position)
        self.said[place] = torch.stack(columns, 1)
        self.finished += kept.sum()
        at = (self.next_prompt + done.long().cumsum(0) - 1) % len(self.prompts)
        self.next_prompt += done.sum()
        self.text.copy_(torch.where(done[:, None], self.list_text[at], self.text))
        fill, asks = self.list_fill[at], self.list_question[at] > 0
        length = self.manner.length
        ask_until = torch.where(asks, fill + self.list_question[at], fill + self.list_answer[at]).clamp_max(
            length
        )
        begin = torch.full_like(fill, max(0, self.shared - 1))
        for old, new in (
            (self.fill, fill), (self.first, fill), (self.stop, fill), (self.answer_from, fill), (self.limit, ask_until),
            (self.position, begin), (self.prompt, at), (self.answering, ~asks),
            (self.temperature, self.list_temperature[at]),
        ):  # fmt: skip
            old.copy_(torch.where(done, new, old))
        self.token.copy_(self._at(self.position))
        self.done.zero_()
        self.empty.zero_()

    # -- running ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Fill the slots, compute what all prompts begin with, and on a GPU capture the step."""
        self.turn_over()
        for position in range(max(0, self.shared - 1)):
            self.position.fill_(position)
            self.token.copy_(self._at(self.position))
            self.target.forward(self.token, self.position, self._attend)
        self.position.fill_(max(0, self.shared - 1))
        self.token.copy_(self._at(self.position))
        if self.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._replay = graph.replay

    def run(self, turns: int) -> None:
        """So many times TURNS steps."""
        for _ in range(turns):
            for _ in range(TURNS):
                self._replay()
            self.turn_over()

    @property
    def counts(self) -> tuple[int, int]:
        """(finished texts that have room, tokens written)"""
        return min(int(self.finished), self.room), int(self.written)

    def texts(self) -> list[tuple[int, Text]]:
        """The finished texts, each with the number of its prompt; what the target wrote is counted."""
        count = self.counts[0]
        tokens, said = self.out[:count].cpu().numpy(), self.said[:count].cpu().tolist()
        out = []
        for row, (first, stop, answer, end, prompt, _) in zip(tokens, said, strict=True):
            spans = tuple((a, b) for a, b in ((first, stop), (answer, end)) if b > a)
            out.append((prompt, Text(row[:end], spans)))
        return out


def _arithmetic(device: torch.device) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Attention and choice: Triton's on a GPU."""
    if device.type != "cuda":
        return plain_attend, plain_choose
    import writing_kernels

    return writing_kernels.attend, writing_kernels.choose


def plain_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """As `writing_kernels.attend`."""
    texts, heads, size = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    seen = torch.arange(length, device=q.device) <= positions[:, None]  # [B, T]
    grouped = q.view(texts, kv_heads, heads // kv_heads, size)
    scores = (grouped @ k.mT).float() * scale
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).to(v.dtype)
    return (shares @ v).view(texts, heads, size)


def plain_choose(
    logits: torch.Tensor, temperatures: torch.Tensor, top_p: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """As `writing_kernels.choose`, with other noise."""
    generator = torch.Generator(logits.device).manual_seed(int(seed))
    greedy = temperatures <= 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    ordered, order = scaled.softmax(-1).sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p[:, None], 0.0)
    drawn = order.gather(1, ordered.multinomial(1, generator=generator))[:, 0]
    return torch.where(greedy, logits.argmax(-1), drawn)


def _common(prompts: Seq[Prompt]) -> int:
    """How many tokens all prompts begin with, at most all but one of the shortest."""
    first, last = min(list(p.tokens) for p in prompts), max(list(p.tokens) for p in prompts)
    same = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return min(same, *(len(p.tokens) for p in prompts))
