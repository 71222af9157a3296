"""Grammars as constraints, through llguidance: JSON schemas, Lark, regular expressions, tool calls in a model's notation.

A user's grammar is first compiled in a process of its own, which is killed when it takes too long; only what
passed there is compiled here. Compiled grammars are kept in memory, the least recently used one goes first.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal

import llguidance
import numpy as np

from paceline.core import Constraint
from paceline.errors import RequestFailed, UsageError
from paceline.text.compiler_process import CompilerProcess
from paceline.text.exact import constants_exact
from paceline.text.formats.base import Calls, ChatFormat
from paceline.text.formats.gemma import GEMMA
from paceline.text.formats.hermes import HERMES
from paceline.text.formats.lark import SPACES, Lark, escaped
from paceline.text.phases import AfterThinking, InsideCalls
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import Vocabulary

Lead = Literal[
    "bare", "none", "may", "open"
]  # before what a grammar holds: no chat, no thought, perhaps one, its rest
_KEPT = 64
_STUCK = "NoExtensionBias"  # llguidance: no token goes on
_UNWRITABLE = "the model's vocabulary cannot write what the grammar asks for: ask for something else"
_MOST = 8  # calls in one section
_ANSWER = "answer"
_SHOWN = 300  # characters of what llguidance says is wrong


class GrammarFailed(RequestFailed):
    """A request's grammar became too complex on the way."""


class Grammars:
    """Thread-safe. `marks`: ids of the format's marks that are one token; `gap`: tokens of line breaks alone."""

    def __init__(
        self, vocabulary: Vocabulary, marks: dict[str, int], timeout: float, chat: ChatFormat = GEMMA,
        gap: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._vocabulary, self._marks, self._chat, self._gap = vocabulary, marks, chat, gap
        self._process = CompilerProcess(vocabulary, timeout)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocabulary: Vocabulary, chat: ChatFormat, timeout: float) -> Grammars:
        ids = {mark: tokenizer.token_id(mark) for mark in chat.marks}
        breaks = [tokenizer.encode(text, add_bos=False) for text in ("\n", "\n\n")]
        gap = frozenset(piece[0] for piece in breaks if len(piece) == 1)
        return cls(vocabulary, {mark: i for mark, i in ids.items() if i is not None}, timeout, chat, gap)

    def hold(self, schemas: dict[str, Any], arguments: bool = False) -> dict[str, Any]:
        """JSON schemas by name, in the words that a grammar holds (schemas.py), made in the compiler's process.

        `arguments`: each is of a tool's arguments. Raises UsageError, with the name and the keyword.
        """
        return self._process.hold(schemas, arguments)

    def compile(self, kind: str, source: str, lead: Lead = "bare") -> Callable[[], Constraint]:
        """A maker of constraints for `source`, which is json (a schema), lark, gbnf or regex. Raises UsageError."""
        kind, source = self._in_lark(kind, source)
        lark = Lark(self._marks)
        before = f"{self._lead(lead, lark)} {self._said(lead, lark)}".strip()
        if not before:
            return self._behind_thought(self._maker(to_grammar(kind, source)), lead)
        start = lark.text(f"start: {before} @{_ANSWER}")
        return self._behind_thought(self._maker(_beside(start, kind, source)), lead)

    def compile_call(
        self, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none"
    ) -> Callable[[], Constraint]:
        """One to `most` calls of `tools` (name -> JSON schema of the arguments) and nothing else."""
        lark = Lark(self._marks)
        start = lark.text(f"start: {self._lead(lead, lark)} {self._units(lark, tools, most)}")
        return self._behind_thought(self._maker(_lark(start)), lead)

    def compile_either(
        self, kind: str, source: str, tools: dict[str, dict[str, Any]], most: int, lead: Lead = "none"
    ) -> Callable[[], Constraint]:
        """One to `most` calls of `tools`, or else what `source` describes: the first token decides."""
        kind, source = self._in_lark(kind, source)
        lark = Lark(self._marks)
        calls = lark.rule(self._units(lark, tools, most))
        start = lark.text(f"start: {self._lead(lead, lark)} ({calls} | {self._said(lead, lark)} @{_ANSWER})")
        return self._behind_thought(self._maker(_beside(start, kind, source)), lead)

    def compile_strict(
        self, tools: dict[str, dict[str, Any]], lead: Lead = "none"
    ) -> Callable[[], Constraint]:
        """Free text in which every call is one of `tools` and fits its schema."""
        calls, lark = self._calls, Lark(self._marks)
        if self._said(lead, lark):
            return self.compile_either("regex", "(?s:.*)", tools, _MOST, lead)
        inside = f"{calls.unit(lark, tools, _MOST)} {lark.spelled(calls.closing)}"
        opening, closing = self._marks.get(calls.opening), self._marks.get(calls.closing)
        if opening is not None and closing is not None:
            make = self._maker(_lark(lark.text(f"start: {inside}")))
            return lambda: InsideCalls(make, opening, closing)
        if not calls.opening:
            free = lark.rule(r"/\s*[^\s{](?s:.*)/", "FREE")
            return self._behind_thought(self._maker(_lark(lark.text(f"start: {inside} | {free}"))), lead)
        unit, mark = lark.rule(inside), escaped(calls.opening)
        token = next((candidate for candidate in self._marks if candidate in calls.opening), "")
        free = lark.rule(f"/(?s:.+)/ & ~/(?s:.*){mark}(?s:.*)/", "FREE")
        if token:
            before, _, behind = calls.opening.partition(token)
            some = lark.rule(f"/(?s:.*){escaped(before)}/", "BEFORE") if before else f"{free}?"
            start = f"start: ({some} {lark.mark(token)} {lark.spelled(behind)} {unit})* {free}?"
        else:
            before = lark.rule(f"/(?s:.*){mark}/", "before[lazy]")
            start = f"start: ({before} {unit})* {free}?"
        return self._behind_thought(self._maker(_lark(lark.text(start))), lead)

    @property
    def _calls(self) -> Calls:
        """The notation to write calls in; JSON between `<tool_call>` marks where the model has none of its own."""
        return self._chat.calls if self._chat.calls is not None else HERMES

    def _in_lark(self, kind: str, source: str) -> tuple[str, str]:
        return ("lark", self._process.lark_of(source)) if kind == "gbnf" else (kind, source)

    def _units(self, lark: Lark, tools: dict[str, dict[str, Any]], most: int) -> str:
        calls = self._calls
        inside = calls.unit(lark, tools, most)
        unit = lark.rule(f"{lark.spelled(calls.opening)} {inside} {lark.spelled(calls.closing)}")
        if calls.joint is None or most == 1:
            return unit
        return f"{unit} ({lark.spelled(calls.joint)} {unit}){{0,{most - 1}}}"

    def _lead(self, lead: Lead, lark: Lark) -> str:
        """Lark for the thought before an answer, where its marks are no single tokens; else `_behind_thought` does it."""
        thoughts = self._chat.thoughts
        if thoughts is None or lead in ("bare", "none") or self._by_tokens:
            return ""
        rest = f"{lark.until(thoughts.closing)} {lark.spelled(thoughts.next)}"
        rest += " " + lark.rule(r"/\n{1,2}/", "GAP") + "?" if thoughts.gap else ""
        return rest if lead == "open" else f"({lark.spelled(thoughts.opening)} {rest})?"

    def _said(self, lead: Lead, lark: Lark) -> str:
        """Lark for what has to stand before an answer."""
        thoughts = self._chat.thoughts
        return (
            lark.spelled(thoughts.said) if thoughts is not None and thoughts.said and lead != "bare" else ""
        )

    @property
    def _by_tokens(self) -> bool:
        """Whether thoughts stand between two tokens, so that they can be left alone."""
        thoughts = self._chat.thoughts
        return thoughts is not None and thoughts.opening in self._marks and thoughts.closing in self._marks

    def _behind_thought(self, make: Callable[[], Constraint], lead: Lead) -> Callable[[], Constraint]:
        thoughts = self._chat.thoughts
        if thoughts is None or lead in ("bare", "none") or not self._by_tokens:
            return make
        opening, closing = self._marks[thoughts.opening], self._marks[thoughts.closing]
        gap = self._gap if thoughts.gap else frozenset()
        return lambda: AfterThinking(make(), (opening, closing), lead == "open", gap)

    def close(self) -> None:
        self._process.close()

    def _maker(self, grammar: str) -> Callable[[], Constraint]:
        matcher = self._matcher(grammar)
        size, end_ids = self._vocabulary.size, self._vocabulary.end_ids
        return lambda: GrammarConstraint(matcher.deep_copy(), size, end_ids)

    def _matcher(self, grammar: str) -> Any:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        self._process.check(grammar)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary.load()
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise UsageError(f"the grammar cannot be compiled: {_error(matcher)}")
            self._check_looking_ahead(matcher.deep_copy())
            self._kept[grammar] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return matcher

    def _check_looking_ahead(self, matcher: Any) -> None:
        """Raise UsageError for what the vocabulary cannot begin, and for a grammar that cannot take a token back:
        drafts are looked at before they are kept."""
        allowed = np.flatnonzero(_unpacked(matcher))
        token = next((int(i) for i in allowed if i not in self._vocabulary.end_ids), None)
        if _STUCK in str(matcher.get_error()) or (token is not None and not matcher.consume_token(token)):
            raise UsageError(_UNWRITABLE)
        if token is not None and not matcher.rollback(1):
            raise UsageError(f"the grammar cannot be used: {_error(matcher)}")


def _lark(source: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_lark(source))


def _beside(start: str, kind: str, source: str) -> str:
    """A grammar in Lark beside the one of an answer, which it calls by its name. Raises UsageError."""
    return json.dumps({"grammars": [{"lark_grammar": start}, _named(_ANSWER, kind, source)]})


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


def _unpacked(matcher: Any) -> np.ndarray:
    """Which tokens may come next, as far as the tokenizer knows them."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")


def _error(matcher: Any) -> str:
    """What is wrong, without the dump of the matcher's state."""
    text = str(matcher.get_error()).partition("\n<state>")[0]
    return _one_line(f"$ref: {text}" if text.startswith("Resource ") else text)


def to_grammar(kind: str, source: str) -> str:
    """llguidance's form of a grammar, not yet checked. Raises UsageError."""
    kind, source = _settled(kind, source)
    matcher: Any = llguidance.LLMatcher
    try:
        if kind == "json":
            return str(matcher.grammar_from_json_schema(source, overrides=SPACES))
        return str({"lark": matcher.grammar_from_lark, "regex": matcher.grammar_from_regex}[kind](source))
    except ValueError as error:
        raise UsageError(f"the grammar cannot be read: {_one_line(str(error))}") from error


def _settled(kind: str, source: str) -> tuple[str, str]:
    """Kind and source; a schema with integers that llguidance would not keep exactly becomes Lark. Raises UsageError."""
    if kind != "json":
        return kind, source
    schema = json.loads(source)
    if constants_exact(schema):
        return kind, source
    lark = Lark({})
    name = lark.json(schema)
    return "lark", lark.text(f"start: {name}")


def _named(name: str, kind: str, source: str) -> dict[str, Any]:
    """A grammar as llguidance wants it beside others. Raises UsageError."""
    kind, source = _settled(kind, source)
    grammar = to_grammar(kind, source)
    inner = {"lark_grammar": grammar} if kind == "lark" else json.loads(grammar)["grammars"][0]
    return {**inner, "name": name}


class GrammarConstraint:
    """core.Constraint over one matcher. Looking ahead along a draft leaves the state as it was.

    A draft is asked about once for each token that is drawn, and again when it is verified. So masks are remembered until
    the next commit, and each is computed once: a mask costs far more than going over tokens whose masks are known.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._ended = False
        self._ahead: dict[tuple[int, ...], np.ndarray] = {}  # by the draft tokens before it

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = []
        taken = 0  # draft tokens that the matcher has gone over
        after: np.ndarray | None = None  # what may follow the place where looking ahead ends
        for place in range(len(draft) + 1):
            if place:
                token, mask = draft[place - 1], out[-1]
                if mask is not None and token in self._end_ids and mask[token]:
                    after = self._only_end()  # a request may ignore the end: then plain decoding repeats it
                    break
                if mask is None or not mask[token]:
                    break
            before = tuple(draft[:place])
            if before not in self._ahead:
                while taken < place and self._matcher.consume_token(draft[taken]):
                    taken += 1
                if taken < place:
                    break
                self._ahead[before] = self._mask()
            out.append(self._ahead[before])
        if taken and not self._matcher.rollback(taken):
            raise GrammarFailed(f"the grammar failed: {_error(self._matcher)}")
        return out + [after] * (len(draft) + 1 - len(out))

    def commit(self, tokens: Seq[int]) -> None:
        self._ahead.clear()
        for token in tokens:
            if token in self._end_ids:
                self._ended = True
            if self._ended:
                return
            if not self._matcher.consume_token(token):
                raise GrammarFailed(f"the grammar does not take token {token}: {_error(self._matcher)}")

    def _mask(self) -> np.ndarray:
        if self._ended or (self._matcher.is_stopped() and not self._matcher.is_error()):
            return self._only_end()
        known = _unpacked(self._matcher)[: self._vocab_size]
        if self._matcher.is_error():
            if _STUCK in str(self._matcher.get_error()):
                raise GrammarFailed(_UNWRITABLE)
            raise GrammarFailed(f"the grammar became too complex: {_error(self._matcher)}")
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[: len(known)] = known
        return mask if known.any() else self._only_end()

    def _only_end(self) -> np.ndarray:
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[list(self._end_ids)] = True
        return mask
