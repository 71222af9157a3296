"""The nouns that every room shares. Host-side values only: this module imports neither torch nor numpy.

A step is: append tokens, look, keep a prefix. Prefill keeps all of it, plain decoding keeps one token, a
speculation keeps n. So there is one kind of row, and plain decoding is a row with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from paceline.errors import UsageError, shown
from paceline.soft_tokens import MediaRows, MediaUse, SoftTokens
from paceline.tree import Branches, renumbered, trunk

if TYPE_CHECKING:
    import numpy as np
    import torch

VerifyRule = Literal["match", "reject", "block", "typical"]  # typical is lossy
OWN_NOISE = ("match", "typical")  # rules whose drafts are drawn with the noise of the target's own token
FinishReason = Literal["stop", "length", "abort", "error"]
MAX_DRAFT_TOKENS = 16


class Constraint(Protocol):
    """What may come next, e.g. a grammar. One object per sequence; only `commit` changes its state."""

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        """Allowed tokens (bool [V], None = all) before and after each token of `draft`: len(draft) + 1 entries.

        After a draft token that is not allowed, or once the grammar has ended, entries may be anything:
        verification never gets past that token, or only a stop token is allowed.
        """
        ...

    def commit(self, tokens: Seq[int]) -> None:
        """Advance over tokens that were kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field holds at every position inside a drafted block.

    Order of shaping: constraint, allowed/bad tokens, min_tokens, logit_bias, repetition, presence and frequency
    penalties, temperature, top_k, top_p, min_p (each filter sees what the one before it left).
    """

    max_tokens: int = 128
    min_tokens: int = 0  # no end or stop token before that many
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: a fresh one per request, reported in the result
    n: int = 1
    logprobs: int | None = None  # None = off, 0 = the chosen token, N = also the N most likely
    draft_tokens: int | Literal["auto"] | None = None  # None = the engine's setting, 0 = never draft
    drafter: str | None = None  # None = the engine's; "none" or one of the loaded kinds
    verify: VerifyRule | None = None  # None = the engine's
    typical_epsilon: float = 0.09  # of verify="typical": see sampling/verify.py
    typical_delta: float = 0.3
    reference: str | tuple[int, ...] | None = None  # text the n-gram drafter may copy from
    constraint: Callable[[], Constraint] | None = None  # makes a fresh constraint per sequence
    edits: bool = field(
        init=False, repr=False
    )  # whether single logits change, constraint and min_tokens apart

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("stop", "stop_token_ids", "bad_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int)) else tuple(value))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if isinstance(self.reference, list):
            object.__setattr__(self, "reference", tuple(self.reference))
        _check_params(self)
        edits = (self.bad_token_ids, self.logit_bias, self.presence_penalty, self.frequency_penalty)
        narrow = self.allowed_token_ids is not None or self.repetition_penalty != 1
        object.__setattr__(self, "edits", narrow or any(edits))

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.init]


def _check_kinds(p: SamplingParams) -> None:
    """Raise UsageError for the first value of a kind that its field cannot have."""
    ids = "a list of token ids"
    kinds: dict[str, tuple[str, bool]] = {
        "stop": ("a text or a list of texts", isinstance(p.stop, str) or _all(p.stop, str)),
        "stop_token_ids": (ids, _is_int(p.stop_token_ids) or _all(p.stop_token_ids, int)),
        "bad_token_ids": (ids, _is_int(p.bad_token_ids) or _all(p.bad_token_ids, int)),
        "allowed_token_ids": (ids, p.allowed_token_ids is None or _all(p.allowed_token_ids, int)),
        "logit_bias": ("a mapping of token ids to numbers", isinstance(p.logit_bias, Mapping)),
        "ignore_eos": ("True or False", isinstance(p.ignore_eos, bool)),
        "constraint": ("a function that makes one", p.constraint is None or callable(p.constraint)),
        "drafter": ("a name", isinstance(p.drafter, str | None)),
        "reference": (f"a text or {ids}", isinstance(p.reference, str | None) or _all(p.reference, int)),
        "verify": ("the name of a rule", isinstance(p.verify, str | None)),
        "draft_tokens": ("a number or 'auto'", _is_int(p.draft_tokens) or isinstance(p.draft_tokens, str | None)),
    }  # fmt: skip
    for name, (what, right) in kinds.items():
        if not right:
            raise UsageError(f"{name}={shown(getattr(p, name))} is not possible: give {what}")
    texts = [p.stop] if isinstance(p.stop, str) else list(p.stop)
    for text in [*texts, *([p.reference] if isinstance(p.reference, str) else [])]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "stop or reference has a lone surrogate, which is no character: remove it"
            ) from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(values: object, kind: type) -> bool:
    """Whether `values` is a collection of nothing but `kind`."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable) or isinstance(values, Iterator):
        return False
    return all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


def _check_params(p: SamplingParams) -> None:
    """Raise UsageError for the first value that cannot work, naming the field and what it may be."""
    inf = float("inf")
    ranges: dict[str, tuple[float, float, type]] = {
        "max_tokens": (1, inf, int), "min_tokens": (0, inf, int), "temperature": (0, 100, float),
        "top_k": (0, inf, int), "top_p": (0, 1, float), "min_p": (0, 1, float),
        "repetition_penalty": (1e-3, 1e3, float), "presence_penalty": (-100, 100, float),
        "frequency_penalty": (-100, 100, float), "n": (1, 1024, int), "seed": (-(2**63), 2**64 - 1, int),
        "logprobs": (0, 1024, int), "typical_epsilon": (1e-3, 1, float), "typical_delta": (1e-3, 1, float),
    }  # fmt: skip
    for name, (low, high, kind) in ranges.items():
        value = getattr(p, name)
        if value is None and name in ("seed", "logprobs"):
            continue
        number = isinstance(value, int) or (kind is float and isinstance(value, float))
        if isinstance(value, bool) or not number or not low <= value <= high:  # NaN fails the comparison
            what = "a whole number" if kind is int else "a number"
            most = "" if high == inf else f" to {high:g}"
            raise UsageError(f"{name}={shown(value)} is not possible: give {what} from {low:g}{most}")
    if p.top_p == 0:
        raise UsageError("top_p=0 would leave no token: use temperature=0 for greedy, or top_p in (0, 1]")
    if p.min_tokens > p.max_tokens:
        both = f"min_tokens={shown(p.min_tokens)} is more than max_tokens={shown(p.max_tokens)}"
        raise UsageError(f"{both}: lower one")
    if not (p.draft_tokens is None or p.draft_tokens == "auto"):
        check_draft_tokens(p.draft_tokens)
    if p.verify is not None:
        check_rule(p.verify)
    if any(not s for s in p.stop):
        raise UsageError("stop has an empty string, which would end every text at once: remove it")
    if p.allowed_token_ids is not None and not set(p.allowed_token_ids) - set(p.bad_token_ids):
        raise UsageError(
            "allowed_token_ids leaves no token that bad_token_ids does not forbid: allow at least one"
        )
    for token, bias in p.logit_bias.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or bias != bias or abs(bias) > 1e4:
            raise UsageError(
                f"logit_bias[{shown(token)}]={shown(bias)} is not possible: give a number from -10000 to 10000"
            )


def check_rule(value: object) -> None:
    """Raise UsageError for what is no VerifyRule."""
    if value not in get_args(VerifyRule):
        known = "use match, reject or block (or typical, which is lossy)"
        raise UsageError(f"verify={shown(value)} is unknown: {known}")


def check_draft_tokens(value: object) -> int:
    """Return `value` if it is a possible draft length (0..16), else raise UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DRAFT_TOKENS:
        raise UsageError(f"draft_tokens={shown(value)} is not possible: give 0..{MAX_DRAFT_TOKENS} or 'auto'")
    return value


@dataclass(slots=True, eq=False)
class Sequence:
    """One text in the making. `tokens[:committed]` have their K/V in the cache; the rest is `pending`.

    `pending` is never empty while the sequence lives: committing too little is then only slow, never wrong.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int  # 64 bits; with the absolute position it addresses all randomness of this text
    committed: int = 0
    reference: tuple[int, ...] = ()  # tokens of params.reference
    salt: str = ""  # prefix-cache scope: only sequences with the same salt share pages
    constraint: Constraint | None = None
    shown: Any = None  # what a third party's drafter is shown of it, see drafters/guard.py
    media: tuple[SoftTokens, ...] = ()  # of the prompt

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.committed :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


Numbers = tuple[list[int], list[int], list[int]]
Tensors = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


class ForwardBatch:
    """What one target forward computes: for each of B sequences a run of new tokens, flattened without padding.

    `numbers` (tokens, positions, slots) hold until a tensor is asked for: a few rows are cheaper as lists. See `of`.
    """

    __slots__ = ("_make", "_tensors", "branches", "media", "numbers", "starts")

    def __init__(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, starts: list[int]
    ) -> None:
        self.numbers: Numbers | None = None
        self.branches: Branches | None = None  # of trees
        self.media: MediaRows | None = None
        self.starts = starts  # [B + 1] host offsets into N
        self._tensors: Tensors | None = (tokens, positions, slots)
        self._make: Callable[[Numbers], Tensors] | None = None

    @classmethod
    def of(cls, numbers: Numbers, starts: list[int], make: Callable[[Numbers], Tensors]) -> ForwardBatch:
        rows = cls.__new__(cls)
        rows.numbers, rows.starts, rows._tensors, rows._make = numbers, starts, None, make
        rows.branches = rows.media = None
        return rows

    def _made(self) -> Tensors:
        if self._tensors is None:
            assert self.numbers is not None
            assert self._make is not None
            self._tensors, self.numbers = self._make(self.numbers), None
        return self._tensors

    @property
    def tokens(self) -> torch.Tensor:
        """[N] int64"""
        return self._made()[0]

    @property
    def positions(self) -> torch.Tensor:
        """[N] int32, absolute"""
        return self._made()[1]

    @property
    def slots(self) -> torch.Tensor:
        """[N] int32, the sequence's row in the cache's page tables"""
        return self._made()[2]

    @property
    def count(self) -> int:
        return self.starts[-1]


@dataclass(slots=True)
class Draft:
    """What a drafter proposes for B sequences. Ragged and empty rows are ordinary."""

    tokens: list[list[int]]  # [B][<= K]
    confidence: list[list[float]]  # same shape: the drafter's own probability of each token, 1.0 if none
    q: list[list[torch.Tensor | None] | None] | None = None  # [V] it was drawn from; None = one-hot
    reasons: list[str | None] = field(default_factory=list)  # why a row is empty, if it is
    drafter: list[str] = field(default_factory=list)  # which kind proposed each row
    parents: list[list[int] | None] | None = None  # see tree.py; None = each after the one before

    def tree(self, row: int) -> list[int] | None:
        return None if self.parents is None else self.parents[row]

    def select(self, row: int, places: Seq[int]) -> None:
        """Leave only these tokens of a row, in this order."""
        if self.parents is not None and (parents := self.parents[row]) is not None:
            own = renumbered(parents, places)
            self.parents[row] = own if trunk(own) < len(own) else None
        self.tokens[row] = [self.tokens[row][j] for j in places]
        self.confidence[row] = [self.confidence[row][j] for j in places]
        if self.q is not None and (q := self.q[row]):
            self.q[row] = [q[j] for j in places]

    def cut(self, readable: int) -> None:
        """End each row before the first token from `readable` on: the target cannot take it in, nor write it."""
        for i, tokens in enumerate(self.tokens):
            if tokens and max(tokens) >= readable:
                kept = [-1]
                for j, parent in enumerate(self.tree(i) or range(-1, len(tokens) - 1)):
                    kept += [j] if tokens[j] < readable and parent in kept else []
                self.select(i, kept[1:])

    @classmethod
    def empty(cls, rows: int, reason: str) -> Draft:
        return cls(
            [[] for _ in range(rows)], [[] for _ in range(rows)], None, [reason] * rows, ["none"] * rows
        )


@dataclass(slots=True)
class Verdict:
    """What verification says of one row: how many draft tokens are kept, and the token that follows them."""

    accepted: int
    next_token: int  # correction or bonus: always exactly one
    path: list[int] | None = None  # of a tree: places of the kept tokens in the draft; None: its beginning

    @property
    def places(self) -> Seq[int]:
        return range(self.accepted) if self.path is None else self.path


@dataclass(slots=True)
class TokenLogprob:
    """Natural-log probabilities at one position. `raw` is the model's distribution, `shaped` the one sampled from."""

    token: int
    raw: float
    shaped: float
    top: list[tuple[int, float]]  # most likely first, of the raw distribution


@dataclass(slots=True)
class Stats:
    """What speculation did for one text. Positions count from 0 = the first drafted token of a step."""

    steps: int = 0  # target forwards that emitted a token for it
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)  # steps without a draft, by reason code
    drafters: dict[str, int] = field(default_factory=dict)  # drafted steps, by drafter kind
    seconds: float = 0.0  # from admission to the last token
    first_token_seconds: float = 0.0  # from submission to the first token
    cached_prompt_tokens: int = 0  # prompt tokens found in the prefix cache
    media: MediaUse | None = None  # pictures and sound of the prompt
    lossy: bool = False  # verify="typical": it need not be a text that the model would have written

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class Delta:
    """What one step added to one text. `text` holds whole characters only; stop strings never appear in it."""

    request: str
    index: int  # which of the request's n texts
    text: str
    token_ids: list[int]
    origins: list[Literal["draft", "target"]]  # per token: drafted and kept, or the target's own
    proposed: list[int] = field(default_factory=list)  # the whole draft of this step, kept or not
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: Stats | None = None  # with the last delta
    error: str | None = None
    reasoning: str = ""  # of a chat: what is thought, which is not in `text`
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # pieces of calls, as OpenAI streams them


@dataclass(slots=True)
class Completion:
    """A finished text."""

    request: str
    index: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    seed: int
    origins: list[Literal["draft", "target"]]
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    siblings: list[Completion] = field(default_factory=list)  # the other n - 1 texts of the same request
    reasoning: str = ""  # of a chat: what was thought, which is not in `text`
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # of a chat, in OpenAI's form
    warnings: list[str] = field(default_factory=list)  # of a chat: what was changed for its template
