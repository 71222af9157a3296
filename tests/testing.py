"""Small stand-ins that make the engine testable in milliseconds, and a harness that runs requests through it.

`TinyTarget` is a real two-layer attention model in float64 over the real paged cache, computed row by row, so that a
row's bits depend on nothing but its own text: wrong cache handling changes its output, the number of rows never does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from paceline.control.fixed import FixedPolicy
from paceline.core import MAX_DRAFT_TOKENS, Blend, Completion, Draft, ForwardBatch, SamplingParams
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.lookahead import LookaheadDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.states import StateDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.models.drafters.base import FINAL, HeadOutput
from paceline.text.tokenizer import Tokenizer
from paceline.tree import Shape

VOCAB, WIDTH, WINDOW = 24, 8, 8
LAYOUT = Layout(
    (LayerKV("sliding_attention", 1, WIDTH), LayerKV("full_attention", 1, WIDTH)),
    {"sliding_attention": WINDOW, "full_attention": None},
)
EOS = 1


class TinyTarget:
    """Implements `Target`. `poison`: a token whose presence in the text makes hidden states NaN."""

    layout = LAYOUT
    vocab_size = readable = VOCAB
    hidden_size = WIDTH
    max_len = 512
    device = torch.device("cpu")
    dtype = torch.float64
    tapped = (1,)

    def __init__(self, seed: int = 0, *, eos: tuple[int, ...] = (), poison: int | None = None) -> None:
        g = torch.Generator().manual_seed(seed)
        self.eos_token_ids = eos
        self.poison = poison
        self.embedding = torch.randn(VOCAB, WIDTH, generator=g, dtype=torch.float64)
        self.place = torch.randn(self.max_len, WIDTH, generator=g, dtype=torch.float64) * 0.3
        self.qkv = [
            torch.randn(3, WIDTH, WIDTH, generator=g, dtype=torch.float64) * 0.6 for _ in LAYOUT.layers
        ]
        self.head = torch.randn(WIDTH, VOCAB, generator=g, dtype=torch.float64) * 1.5
        # by number, what each adapter adds to q, k and v
        self.adapters = torch.randn(2, 3, WIDTH, WIDTH, generator=g, dtype=torch.float64) * 0.6
        self.forwards = 0

    def forward(self, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        return self.states(rows, cache)[0]

    def states(self, rows: ForwardBatch, cache: KVCache) -> tuple[torch.Tensor, ...]:
        self.forwards += 1
        out, between = [], []
        further, blends = branched(rows, cache), blends_of(rows)
        for row, (token, position, slot) in enumerate(
            zip(rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist(), strict=True)
        ):
            x = self.embedding[token] + self.place[position] + (torch.nan if token == self.poison else 0.0)
            for layer, spec in enumerate(LAYOUT.layers):
                added = sum(
                    (factor * self.adapters[number] for number, factor in blends[row]), torch.zeros(())
                )
                q, k, v = (x @ w for w in self.qkv[layer] + added)
                at = keys_of(cache, spec.kind, slot, position + 1)
                for other in (slot, *further.get(row, ())):
                    place = keys_of(cache, spec.kind, other, position + 1)[-1]
                    cache.k[layer][place, 0], cache.v[layer][place, 0] = k, v
                x = torch.tanh(x + attend(q, cache, layer, at))
                if layer == 0:
                    between.append(x)
            out.append(x)
        return torch.stack(out), torch.stack(between)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([row @ self.head for row in hidden])


def blends_of(rows: ForwardBatch) -> list[Blend]:
    """The adapters of each row."""
    if rows.adapters is None:
        return [()] * rows.count
    spans = zip(pairwise(rows.adapters.starts), rows.adapters.texts, strict=True)
    return [blend for (start, end), blend in spans for _ in range(start, end)]


def branched(rows: ForwardBatch, cache: KVCache) -> dict[int, list[int]]:
    """For which further slots rows are stored, once pages are copied as trees want it."""
    further: dict[int, list[int]] = {}
    if rows.branches is not None:
        cache.copy_pages(rows.branches.copies)
        for row, slot in rows.branches.further:
            further.setdefault(row, []).append(slot)
    return further


def keys_of(cache: KVCache, kind: str, slot: int, end: int, reach: int = 0) -> list[int]:
    """Storage indices of the keys that a row ending at `end` may read."""
    window = LAYOUT.windows[kind]
    start = 0 if window is None else max(0, end - window - reach)
    size, table = cache.page_size, cache.tables[kind][slot].tolist()
    return [table[j // size] * size + j % size for j in range(start, end)]


def attend(q: torch.Tensor, cache: KVCache, layer: int, at: list[int]) -> torch.Tensor:
    weights = torch.softmax(cache.k[layer][at, 0] @ q, 0)
    return weights @ cache.v[layer][at, 0]


class TinyAssistant:
    """Implements `AssistantNet`: reads the target's K/V, hidden state and constant position, and is often right."""

    def __init__(self, target: TinyTarget, error: float = 0.5) -> None:
        self.target = target
        g = torch.Generator().manual_seed(99)
        self.noise = torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) * error
        self.calls: list[list[int]] = []

    def step(self, rows: ForwardBatch, hidden: torch.Tensor, cache: KVCache) -> HeadOutput:
        t = self.target
        out = []
        self.calls.append(rows.positions.tolist())
        for i, (token, position, slot) in enumerate(
            zip(rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist(), strict=True)
        ):
            x = t.embedding[token] + t.place[position] + 0.1 * hidden[i] @ self.noise
            for layer, spec in enumerate(LAYOUT.layers):
                at = keys_of(cache, spec.kind, slot, position, 1)
                own = torch.cat([cache.k[layer][at, 0], (x @ t.qkv[layer][1])[None]])
                values = torch.cat([cache.v[layer][at, 0], (x @ t.qkv[layer][2])[None]])
                x = torch.tanh(x + torch.softmax(own @ (x @ t.qkv[layer][0]), 0) @ values)
            out.append(x)
        state = torch.stack(out)
        return HeadOutput(t.logits(state).float(), None, state)

    def draft_round(self, *_: Any) -> None:
        """Step by step only."""


class TinyNet:
    """Implements `StateNet`: the target's layers over a cache of its own, and a little of the states that it is given."""

    taps = (1, FINAL)
    ids = None
    shift = 1
    device = torch.device("cpu")

    def __init__(self, target: TinyTarget, error: float = 0.3) -> None:
        self.target = target
        g = torch.Generator().manual_seed(98)
        self.mix = torch.randn(2 * WIDTH, WIDTH, generator=g, dtype=torch.float64) * error

    def absorb(
        self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, t, further = [], self.target, branched(rows, cache)
        for row, (token, position, slot, state) in enumerate(
            zip(rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist(), states, strict=True)
        ):
            x = t.embedding[token] + t.place[position + 1] + state @ self.mix
            for layer, spec in enumerate(LAYOUT.layers):
                q, k, v = (x @ w for w in t.qkv[layer])
                at = keys_of(cache, spec.kind, slot, position + 1)
                for other in (slot, *further.get(row, ())):
                    place = keys_of(cache, spec.kind, other, position + 1)[-1]
                    cache.k[layer][place, 0], cache.v[layer][place, 0] = k, v
                x = torch.tanh(x + attend(q, cache, layer, at))
            out.append(x)
        return torch.stack(out), torch.stack(out)

    def feed(self, rows: ForwardBatch, states: torch.Tensor, cache: KVCache) -> None:
        self.absorb(rows, states, cache)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.logits(hidden).float()

    def step(
        self, rows: ForwardBatch, hidden: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, _ = self.absorb(rows, torch.cat((hidden, hidden), 1), cache)
        return self.logits(out), out

    def lead(self, *_: Any) -> None:
        """Nothing that a round could begin with is recorded."""

    def draft_round(self, *_: Any) -> None:
        """Step by step only."""


class RandomDrafter(Drafter):
    """Random tokens, random lengths, and the distribution they came from: mostly wrong, which is what finds bugs."""

    name = "random"
    needs_hidden = False

    def __init__(self, max_tokens: int = 8, seed: int = 3) -> None:
        self.max_tokens, self._rng = max_tokens, random.Random(seed)

    def draft(self, context: DraftContext) -> Draft:
        tokens = [
            [self._rng.randrange(VOCAB) for _ in range(self._rng.randrange(k + 1))] for k in context.limits
        ]
        distribution = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
        return Draft(
            tokens,
            [[0.5] * len(t) for t in tokens],
            [[distribution] * len(t) for t in tokens],
            ["no proposal"] * len(tokens),
            [self.name] * len(tokens),
        )

    def forget(self, sequence_id: int) -> None:
        pass


class ScriptedDrafter(Drafter):
    """Knows the right texts, by prompt, and damages them as `wrong(position in the draft)` says."""

    name = "scripted"
    needs_hidden = False

    def __init__(self, texts: Seq[Seq[int]], wrong: Callable[[int], bool], max_tokens: int = 8) -> None:
        self.texts, self.wrong, self.max_tokens = [list(t) for t in texts], wrong, max_tokens

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.sequences), "no proposal")
        for row, (sequence, limit) in enumerate(zip(context.sequences, context.limits, strict=True)):
            done = len(sequence.tokens)
            text = next((t for t in self.texts if t[:done] == sequence.tokens), [])
            right = text[done : done + limit]
            out.tokens[row] = [(t + 1) % VOCAB if self.wrong(j) else t for j, t in enumerate(right)]
            out.confidence[row] = [0.5] * len(right)
            out.drafter[row] = self.name
        return out

    def forget(self, sequence_id: int) -> None:
        pass


class OracleDrafter(ScriptedDrafter):
    """Always right."""

    name = "oracle"

    def __init__(self, texts: Seq[Seq[int]], max_tokens: int = 8) -> None:
        super().__init__(texts, lambda j: False, max_tokens)


class TreeDrafter(ScriptedDrafter):
    """Grows random trees: the right text runs through them up to a token that `wrong`s it, as any of its neighbours."""

    name = "trees"
    branches = True

    def __init__(
        self, texts: Seq[Seq[int]], shape: tuple[int, int], wrong: Callable[[int], bool] = lambda j: j == 3
    ) -> None:
        super().__init__(texts, wrong, 16)
        self.shape, self._rng = shape, random.Random(4)

    def draft(self, context: DraftContext) -> Draft:
        main = super().draft(context)
        out = Draft.empty(len(context.sequences), "no proposal")
        out.parents = [None] * len(context.sequences)
        for row, (right, limit) in enumerate(zip(main.tokens, context.limits, strict=True)):
            out.tokens[row], out.parents[row] = self._tree(right, limit, context.picker.width(row))
            out.confidence[row] = [self._rng.random() for _ in out.tokens[row]]
            out.drafter[row] = self.name
        return out

    def _tree(self, right: list[int], limit: int, width: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        level, after = [-1], -1  # `after`: where the right text goes on
        for j in range(min(self.shape[0], len(right))):
            size = min(width, limit - len(tokens))
            if not size:
                break
            new = [(after, right[j])] if after is not None else []
            while len(new) < size:
                one = self._rng.choice(level), self._rng.randrange(VOCAB)
                new += [one] if one not in new else []
            self._rng.shuffle(new)
            level = list(range(len(tokens), len(tokens) + size))
            after = next((level[i] for i, one in enumerate(new) if one == (after, right[j])), None)
            tokens += [token for _, token in new]
            parents += [parent for parent, _ in new]
        return tokens, parents


@dataclass
class Setup:
    """How to build an engine for a test."""

    seed: int = 0
    drafter: str = "none"
    k: int = 4
    pages: int = 64
    max_batch: int = 8
    prefill_chunk: int = 5
    step_tokens: int = 7
    prefix_cache: bool = False
    verify: Any = "match"
    eos: tuple[int, ...] = ()
    texts: list[list[int]] = field(default_factory=list)
    poison: int | None = None
    max_tokens: int = 512
    tree: tuple[int, int] | None = None


def make_cache(pages: int = 64, sequences: int = 8, max_tokens: int = 512) -> KVCache:
    return KVCache(
        LAYOUT,
        dict.fromkeys(LAYOUT.kinds, pages),
        max_sequences=sequences,
        max_tokens=max_tokens,
        dtype=torch.float64,
    )


def make_drafter(setup: Setup, target: TinyTarget) -> Drafter | None:
    match setup.drafter:
        case "none":
            return None
        case "ngram":
            return NgramDrafter()
        case "lookahead":
            return LookaheadDrafter()
        case "mtp":
            return MTPDrafter(TinyAssistant(target))
        case "states":
            return StateDrafter("states", TinyNet(target), make_cache(200))
        case "model":
            other = TinyTarget(setup.seed)
            other.head = other.head + 0.4 * torch.randn(
                other.head.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
            )
            return ModelDrafter(other, make_cache(200), VOCAB)
        case "random":
            return RandomDrafter()
        case "scripted":
            return ScriptedDrafter(setup.texts, lambda j: j % 3 == 2)
        case "oracle":
            return OracleDrafter(setup.texts)
        case "trees":
            assert setup.tree is not None
            return TreeDrafter(setup.texts, setup.tree)
    raise ValueError(setup.drafter)


def make_engine(setup: Setup, drafter: Drafter | None = None, **changes: Any) -> Engine:
    target = TinyTarget(setup.seed, eos=setup.eos, poison=setup.poison)
    drafter = drafter or make_drafter(setup, target)
    parts: dict[str, Any] = {
        "target": target,
        "cache": make_cache(setup.pages, setup.max_batch, setup.max_tokens),
        "drafters": {drafter.name: drafter} if drafter else {},
        "default_drafter": drafter.name if drafter else "none",
        "policy": FixedPolicy(setup.k),
        "verify": setup.verify,
        "draft_tokens": setup.k,
        "max_batch": setup.max_batch,
        "prefill_chunk": setup.prefill_chunk,
        "step_tokens": setup.step_tokens,
        "prefix_cache": setup.prefix_cache,
    }
    parts |= changes
    if setup.tree is not None:
        parts["draft_tree"] = Shape(*setup.tree)
        parts["cache"].grow_branches(setup.max_batch * MAX_DRAFT_TOKENS)
        if isinstance(drafter, StateDrafter):
            drafter.cache.grow_branches(setup.max_batch * MAX_DRAFT_TOKENS)
    return Engine(EngineParts(**parts))


def tiny_tokenizer() -> Tokenizer:
    """One letter for each of the VOCAB tokens; no special ones."""
    letters = {chr(ord("a") + i): i for i in range(VOCAB)}
    return Tokenizer(Backend(WordLevel(letters, unk_token="a")), {})


def prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    """Prompts of unequal length, some shorter and some longer than the window."""
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run(
    engine: Engine, texts: Seq[list[int]], params: SamplingParams | Seq[SamplingParams]
) -> list[Completion]:
    """First text of each request, in order."""
    each = [params] * len(texts) if isinstance(params, SamplingParams) else list(params)
    done = engine.run({str(i): (list(t), p) for i, (t, p) in enumerate(zip(texts, each, strict=True))})
    return [done[str(i)][0] for i in range(len(texts))]


def totals(completions: Seq[Completion]) -> tuple[int, int]:
    """(drafted, accepted) over all texts."""
    return sum(c.stats.drafted for c in completions), sum(c.stats.accepted for c in completions)
