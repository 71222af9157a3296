"""The nouns that every room shares. Host-side values only: this module imports neither torch nor numpy.

A step is: append tokens, look, keep a prefix. Prefill keeps all of it, plain decoding keeps one token, a
speculation keeps n. So there is one kind of row, and plain decoding is a row with an empty draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from paceline.errors import UsageError, shown
from paceline.options import (
    ENVIRONMENT,
    FILE,
    INFINITE,
    LIBRARY,
    MODEL,
    PAGE,
    REQUEST,
    SAMPLING,
    SPECULATION,
    Blended,
    Choice,
    Flag,
    Length,
    Look,
    Number,
    Other,
    Several,
    Text,
    Whole,
    option,
    settle,
)
from paceline.soft_tokens import MediaRows, MediaUse, SoftTokens
from paceline.tree import Branches, renumbered, trunk

if TYPE_CHECKING:
    import numpy as np
    import torch

VerifyRule = Literal["match", "reject", "block", "typical"]  # typical is lossy
OWN_NOISE = ("match", "typical")  # rules whose drafts are drawn with the noise of the target's own token
Pooling = Literal["last", "mean"]
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


RULE = Choice(get_args(VerifyRule), "use match, reject or block (or typical, which is lossy)")
DRAFT_LENGTH = Length(MAX_DRAFT_TOKENS)
DRY_BREAKERS = ("\n", ":", '"', "*")
MOST_WORDS, MOST_LETTERS = 64, 40  # texts of a list that is looked for in the vocabulary
_IDS = "give a list of token ids"
_ID_LIST = Several(int, _IDS, alone=False)
_DRAWN = ("temperature", "top_k", "top_p", "min_p")
_DRAFTING = LIBRARY | REQUEST  # in commands these are options of the engine
_SERVED = frozenset({"run", "generate", "serve"}) | LIBRARY | FILE | ENVIRONMENT | REQUEST
_WRITTEN = _SERVED - {"serve"} - FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field holds at every position inside a drafted block; each is a row: options.py.

    Order of shaping: constraint, allowed/bad tokens and words, min_tokens, logit_bias, repetition, presence and frequency
    penalties, DRY, temperature, top-n-sigma, top_k, typical, top_p, min_p, XTC (each filter sees what the one before it
    left). With `temperature_last` or a dynamic temperature the filters go before it. Mirostat takes the place of all
    filters, after the temperature. Greedy texts take no filter.
    """

    max_tokens: int = option(
        128, Whole(1, INFINITE), "Tokens to write at most.", SAMPLING, aliases=("n_predict", "max_new_tokens"),
        doors=_SERVED | PAGE, look=Look("-n", default="128; a chat: what fits"),
    )  # fmt: skip
    temperature: float = option(
        0.0, Number(0, 100), "0 is greedy.", SAMPLING, doors=_SERVED | PAGE,
        look=Look("-t", default="the model's own, else 0"),
    )  # fmt: skip
    top_k: int = option(
        0, Whole(-1, INFINITE), "Sample from the K most likely tokens; 0 and -1: off.", SAMPLING, doors=_SERVED | PAGE,
        look=Look(default="the model's own"),
    )  # fmt: skip
    top_p: float = option(
        1.0, Number(0, 1), "Sample from the most likely tokens of mass P; 0: from the most likely one.", SAMPLING,
        doors=_SERVED | PAGE, look=Look(default="the model's own"),
    )  # fmt: skip
    min_p: float = option(
        0.0, Number(0, 1), "Drop tokens below P times the most likely one.", SAMPLING, doors=_SERVED | PAGE,
        look=Look(default="the model's own"),
    )  # fmt: skip
    typical_p: float = option(
        1.0, Number(0, 1), "Locally typical: sample from tokens of about average surprise, of mass P.", SAMPLING,
        doors=_SERVED,
    )  # fmt: skip
    top_n_sigma: float = option(
        0.0, Number(-1, 1000), "Drop tokens whose logit is N standard deviations below the largest; 0 and -1: off.",
        SAMPLING, aliases=("nsigma",), doors=_SERVED,
    )  # fmt: skip
    xtc_probability: float = option(
        0.0, Number(0, 1), "XTC: how often all likely tokens but the least likely of them are dropped.", SAMPLING,
        doors=_SERVED,
    )  # fmt: skip
    xtc_threshold: float = option(
        0.1, Number(0, 1), "XTC: from this chance on a token is likely; above 0.5: off.", SAMPLING, doors=_SERVED
    )  # fmt: skip
    dynatemp_range: float = option(
        0.0, Number(0, 100), "Temperature by entropy: this much colder or warmer at most.", SAMPLING, doors=_SERVED
    )  # fmt: skip
    dynatemp_exponent: float = option(
        1.0, Number(0, 100), "Temperature by entropy: the power of its share of the largest one.", SAMPLING,
        doors=_SERVED,
    )  # fmt: skip
    mirostat: Literal[0, 2] = option(
        0, Choice((0, 2), "use 0 or 2: the first version of mirostat is not supported"),
        "2: Mirostat 2 in place of all filters: keep the surprise of tokens near a target.", SAMPLING,
        aliases=("mirostat_mode",), doors=_SERVED,
    )  # fmt: skip
    mirostat_tau: float = option(
        5.0, Number(0, 100), "Mirostat: the surprise to aim at, in bits.", SAMPLING, doors=_SERVED
    )
    mirostat_eta: float = option(
        0.1, Number(0, 1), "Mirostat: how fast its threshold follows.", SAMPLING, doors=_SERVED
    )
    temperature_last: bool = option(
        False, Flag(), "Temperature after the filters, as in llama.cpp, not before them.", SAMPLING, doors=_SERVED
    )  # fmt: skip
    dry_multiplier: float = option(
        0.0, Number(0, 1000), "DRY: a token that goes on with a repetition loses N * base ** (its length - allowed).",
        SAMPLING, doors=_SERVED,
    )  # fmt: skip
    dry_base: float = option(1.75, Number(1, 100), "DRY: its base.", SAMPLING, doors=_SERVED)
    dry_allowed_length: int = option(
        2, Whole(0, INFINITE), "DRY: a repetition that is shorter is free.", SAMPLING, doors=_SERVED
    )
    dry_penalty_last_n: int = option(
        -1, Whole(-1, INFINITE), "DRY: look at the last N tokens; -1: at all.", SAMPLING,
        aliases=("dry_range",), doors=_SERVED,
    )  # fmt: skip
    dry_sequence_breakers: tuple[str, ...] = option(
        DRY_BREAKERS, Several(str, "give a text or a list of texts"),
        "DRY: no repetition reaches over one of these texts.", SAMPLING, doors=_DRAFTING,
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, Number(1e-3, 1e3), "Above 1: avoid what prompt and answer hold.", SAMPLING, aliases=("repeat_penalty",),
        doors=_SERVED | PAGE, look=Look(default="the model's own"),
    )  # fmt: skip
    penalty_last_n: int = option(
        -1, Whole(-1, INFINITE), "Penalties look at the last N tokens; -1: at all, 0: at none.", SAMPLING,
        aliases=("repeat_last_n", "repetition_penalty_range"), doors=_SERVED,
    )  # fmt: skip
    presence_penalty: float = option(
        0.0, Number(-100, 100), "Avoid what the answer holds.", SAMPLING, doors=_SERVED
    )
    frequency_penalty: float = option(
        0.0, Number(-100, 100), "Avoid what the answer holds often.", SAMPLING, doors=_SERVED
    )
    seed: int | None = option(
        None, Whole(-(2**63), 2**64 - 1), "Same seed, same text.", SAMPLING, doors=_WRITTEN | PAGE,
        look=Look(default="a fresh one, shown with the answer's statistics"),
    )  # fmt: skip
    stop: tuple[str, ...] = option(
        (), Several(str, "give a text or a list of texts"),
        "End the text before this string; may be given several times.", SAMPLING, doors=_WRITTEN | PAGE,
    )  # fmt: skip
    min_tokens: int = option(
        0,
        Whole(0, INFINITE),
        "No end before that many tokens.",
        SAMPLING,
        aliases=("min_new_tokens",),
        doors=_WRITTEN,
    )
    ignore_eos: bool = option(
        False, Flag(), "Write on after the model's end token.", SAMPLING, doors=_WRITTEN
    )
    typical_epsilon: float = option(
        0.09, Number(1e-3, 1), "Of --verify typical: keep drafts likelier than this, ...", SPECULATION,
        doors=_SERVED | {"check"},
    )  # fmt: skip
    typical_delta: float = option(
        0.3, Number(1e-3, 1), "... or than this times exp(-entropy).", SPECULATION,
        doors=_SERVED | {"check"},
    )  # fmt: skip
    logit_bias: Mapping[int, float] = option(
        dict, Other(lambda value: isinstance(value, Mapping), "give a mapping of token ids to numbers"),
        "Added to the logits of these tokens.", SAMPLING, doors=_DRAFTING,
    )  # fmt: skip
    bad_token_ids: tuple[int, ...] = option(
        (),
        Several(int, _IDS),
        "Tokens that are never written.",
        SAMPLING,
        aliases=("suppress_tokens", "banned_tokens"),
        doors=_DRAFTING,
    )
    allowed_token_ids: tuple[int, ...] | None = option(
        None, _ID_LIST, "Nothing but these tokens is written.", SAMPLING, doors=_DRAFTING
    )  # fmt: skip
    bad_words: tuple[str, ...] = option(
        (), Several(str, "give a text or a list of texts"),
        "Texts that are never written as the tokens which they are by themselves or after a space.", SAMPLING,
        doors=_DRAFTING,
    )  # fmt: skip
    banned_strings: tuple[str, ...] = option(
        (), Several(str, "give a text or a list of texts"), "Texts that never stand in the answer, whatever the tokens.",
        SAMPLING, doors=_DRAFTING,
    )  # fmt: skip
    include_stop_str_in_output: bool = option(
        False, Flag(), "Show the stop string that ended a text.", SAMPLING, doors=_DRAFTING
    )
    stop_token_ids: tuple[int, ...] = option(
        (), Several(int, _IDS), "End the text with one of these tokens.", SAMPLING, doors=_DRAFTING
    )
    n: int = option(1, Whole(1, 1024), "Texts of one prompt.", SAMPLING, doors=_DRAFTING)
    logprobs: int | None = option(
        None, Whole(0, 1024), "Log-probabilities: 0 of the written token, N also of the N most likely.", SAMPLING,
        doors=_DRAFTING,
    )  # fmt: skip
    draft_tokens: int | Literal["auto"] | None = option(
        None, DRAFT_LENGTH, "Tokens to draft per step; 0: never. None: the engine's setting.", SPECULATION,
        doors=_DRAFTING | PAGE,
    )  # fmt: skip
    drafter: str | None = option(
        None, Text("give a name"), "none, or one of the loaded kinds. None: the engine's.", SPECULATION,
        doors=_DRAFTING | PAGE,
    )  # fmt: skip
    verify: VerifyRule | None = option(
        None, RULE, "How drafts are verified. None: the engine's rule.", SPECULATION, doors=_DRAFTING
    )
    reference: str | tuple[int, ...] | None = option(
        None, Other(lambda value: isinstance(value, str) or _ID_LIST.accepts(value), f"give a text or {_IDS[5:]}"),
        "Text that the n-gram drafter may copy from.", SPECULATION, doors=LIBRARY,
    )  # fmt: skip
    constraint: Callable[[], Constraint] | None = option(
        None, Other(callable, "give a function that makes one"), "Makes a fresh constraint for each sequence.", SAMPLING,
        doors=LIBRARY,
    )  # fmt: skip
    pooling: Pooling | None = option(
        None, Choice(get_args(Pooling)), "No text but an embedding of the prompt: of its last token, or the mean of all.",
        SAMPLING, doors=LIBRARY,
    )  # fmt: skip
    lora: tuple[tuple[str, float], ...] = option(
        (), Blended(16, 100), "An adapter that was loaded with a name (--adapters), or several with a factor each.",
        MODEL, aliases=("adapter",), doors=_WRITTEN, look=Look(metavar="NAME"),
    )  # fmt: skip
    edits: bool = field(
        init=False, repr=False
    )  # whether single logits change, constraint and min_tokens apart
    truncates: bool = field(init=False, repr=False)  # whether a sampler of sampling/truncation.py shapes

    def __post_init__(self) -> None:
        settle(self)
        if self.top_k < 0:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.reference, list):
            object.__setattr__(self, "reference", tuple(self.reference))
        _check_together(self)
        if self.pooling is not None:  # nothing is written
            object.__setattr__(self, "drafter", "none")
        edits = (self.bad_token_ids, self.logit_bias, self.presence_penalty, self.frequency_penalty)
        narrow = self.allowed_token_ids is not None or self.repetition_penalty != 1
        banned = bool(self.bad_words or self.banned_strings)
        object.__setattr__(self, "edits", narrow or banned or any(edits) or self.dry_multiplier > 0)
        rare = (
            self.typical_p < 1,
            self.top_n_sigma > 0,
            self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            self.mirostat == 2,
        )
        object.__setattr__(self, "truncates", any(rare) or self.dynatemp_range > 0 or self.temperature_last)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.init]


def sampling_line(suggested: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """One line on how texts are sampled that say nothing of it: as chosen, as the model suggests, or greedy."""
    values = {"temperature": 0.0, **suggested, **chosen}
    greedy = values["temperature"] == 0
    names = (*(() if greedy else _DRAWN), "repetition_penalty", "presence_penalty", "frequency_penalty")
    named = [f"{name} {values[name]:g}" for name in names if name in values]
    why = ["as chosen"] if set(chosen) & {*_DRAWN, *names} else []
    why += ["as the model suggests"] if suggested else []
    how = " and ".join(why) or "the model suggests nothing"
    return f"sampling: {', '.join(['greedy'] * greedy + named)} ({how})"


def _check_together(p: SamplingParams) -> None:
    """Raise UsageError for values that cannot work beside each other, or of which a part is wrong."""
    listed = {
        "dry_sequence_breakers": p.dry_sequence_breakers, "bad_words": p.bad_words, "banned_strings": p.banned_strings,
    }  # fmt: skip
    named = {"stop": p.stop, **listed}
    for name, texts in {**named, "reference": (p.reference,)}.items():
        try:
            "".join(text for text in texts if isinstance(text, str)).encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{name} has a lone surrogate, which is no character: remove it") from error
    if p.min_tokens > p.max_tokens:
        both = f"min_tokens={shown(p.min_tokens)} is more than max_tokens={shown(p.max_tokens)}"
        raise UsageError(f"{both}: lower one")
    for name, texts in listed.items():
        if any(not s or len(s) > MOST_LETTERS for s in texts) or len(texts) > MOST_WORDS:
            most = f"give up to {MOST_WORDS} of 1 to {MOST_LETTERS} characters"
            raise UsageError(f"{name} has an empty or a long text, or too many: {most}")
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
    adapters: Blend = ()  # in the order of their numbers

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.committed :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


Numbers = tuple[list[int], list[int], list[int]]
Blend = tuple[tuple[int, float], ...]  # adapters by their number, each with a factor
Tensors = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which adapters the rows of a forward are computed with; an empty blend: with none."""

    starts: list[int]  # [B + 1] offsets of the texts' rows
    texts: list[Blend]  # [B]


class ForwardBatch:
    """What one target forward computes: for each of B sequences a run of new tokens, flattened without padding.

    `numbers` (tokens, positions, slots) hold until a tensor is asked for: a few rows are cheaper as lists. See `of`.
    """

    __slots__ = ("_make", "_tensors", "adapters", "branches", "media", "numbers", "starts")

    def __init__(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, starts: list[int]
    ) -> None:
        self.numbers: Numbers | None = None
        self.branches: Branches | None = None  # of trees
        self.media: MediaRows | None = None
        self.adapters: AdapterRows | None = None  # None: no row has one
        self.starts = starts  # [B + 1] host offsets into N
        self._tensors: Tensors | None = (tokens, positions, slots)
        self._make: Callable[[Numbers], Tensors] | None = None

    @classmethod
    def of(cls, numbers: Numbers, starts: list[int], make: Callable[[Numbers], Tensors]) -> ForwardBatch:
        rows = cls.__new__(cls)
        rows.numbers, rows.starts, rows._tensors, rows._make = numbers, starts, None, make
        rows.branches = rows.media = rows.adapters = None
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
                places = [-1]
                for j, parent in enumerate(self.tree(i) or range(-1, len(tokens) - 1)):
                    places += [j] if tokens[j] < readable and parent in places else []
                self.select(i, places[1:])

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
    embedding: np.ndarray | None = None  # [hidden_size] float32 of length 1, where `pooling` asks for one


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
    embedding: np.ndarray | None = None  # [hidden_size] float32 of length 1, where `pooling` asks for one
