"""Grammars as constraints, through llguidance: JSON schemas, Lark, regular expressions, Gemma 4's tool calls.

A stranger's grammar is first compiled in a process of its own, which is killed when it takes too long; only what
passed there is compiled here. Compiled grammars are kept in memory, the least recently used one goes first.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np

from paceline.core import Constraint
from paceline.errors import RequestFailed, UsageError
from paceline.text.arguments import CLOSE
from paceline.text.call_grammar import call_grammar, mixed_grammar, opened_call_grammar
from paceline.text.compiler_process import CompilerProcess
from paceline.text.phases import InsideCalls
from paceline.text.tools import OPEN

_KEPT = 64
_ANSWER = "answer"
_SHOWN = 300  # characters of what llguidance says is wrong
_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\t\r]{0,16}",
}  # bounded: no endless blanks


class GrammarFailed(RequestFailed):
    """A request's grammar became too complex on the way."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What llguidance has to know: the text of tokenizer.json, the model's width, and what ends a text."""

    tokenizer_json: str
    size: int
    end_ids: tuple[int, ...]

    def load(self) -> Any:
        return llguidance.LLTokenizer(self.tokenizer_json, n_vocab=self.size, eos_token=list(self.end_ids))


class Grammars:
    """Thread-safe. `marks`: ids of Gemma 4's structural marks, where the vocabulary has them."""

    def __init__(self, vocabulary: Vocabulary, marks: dict[str, int], timeout: float) -> None:
        self._vocabulary, self._marks = vocabulary, marks
        self._process = CompilerProcess(vocabulary, timeout)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def compile(self, kind: str, source: str) -> Callable[[], Constraint]:
        """A maker of constraints for `source`, which is json (a schema), lark or regex. Raises UsageError."""
        return self._maker(to_grammar(kind, source))

    def compile_call(self, tools: dict[str, dict[str, Any]], most: int) -> Callable[[], Constraint]:
        """One to `most` calls of `tools` (name -> JSON schema of the arguments) and nothing else."""
        return self._maker(llguidance.LLMatcher.grammar_from_lark(call_grammar(tools, self._marks, most)))

    def compile_either(
        self, kind: str, source: str, tools: dict[str, dict[str, Any]], most: int
    ) -> Callable[[], Constraint]:
        """One to `most` calls of `tools`, or else what `source` describes: the first token decides."""
        calls = call_grammar(tools, self._marks, most, _ANSWER)
        return self._maker(json.dumps({"grammars": [{"lark_grammar": calls}, _named(_ANSWER, kind, source)]}))

    def compile_strict(self, tools: dict[str, dict[str, Any]]) -> Callable[[], Constraint]:
        """Free text in which every call is one of `tools` and fits its schema."""
        opening, closing = self._marks.get(OPEN), self._marks.get(CLOSE)
        grammar_from: Any = llguidance.LLMatcher.grammar_from_lark
        if opening is None or closing is None:
            return self._maker(grammar_from(mixed_grammar(tools, self._marks)))
        make = self._maker(grammar_from(opened_call_grammar(tools, self._marks)))
        return lambda: InsideCalls(make, opening, closing)

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
        """Raise UsageError for a grammar that cannot take a token back: drafts are looked at before they are kept."""
        allowed = np.flatnonzero(_unpacked(matcher))
        token = next((int(i) for i in allowed if i not in self._vocabulary.end_ids), None)
        if token is not None and matcher.consume_token(token) and not matcher.rollback(1):
            raise UsageError(f"the grammar cannot be used: {_error(matcher)}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]


def _unpacked(matcher: Any) -> np.ndarray:
    """Which tokens may come next, as far as the tokenizer knows them."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")


def _error(matcher: Any) -> str:
    """What is wrong, without the dump of the matcher's state."""
    return _one_line(str(matcher.get_error()).partition("\n<state>")[0])


def to_grammar(kind: str, source: str) -> str:
    """llguidance's form of a grammar, not yet checked. Raises UsageError."""
    matcher: Any = llguidance.LLMatcher
    try:
        if kind == "json":
            return str(matcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS))
        return str({"lark": matcher.grammar_from_lark, "regex": matcher.grammar_from_regex}[kind](source))
    except ValueError as error:
        raise UsageError(f"the grammar cannot be read: {_one_line(str(error))}") from error


def _named(name: str, kind: str, source: str) -> dict[str, Any]:
    """A grammar as llguidance wants it beside others. Raises UsageError."""
    grammar = to_grammar(kind, source)
    inner = {"lark_grammar": grammar} if kind == "lark" else json.loads(grammar)["grammars"][0]
    return {**inner, "name": name}


class GrammarConstraint:
    """core.Constraint over one matcher. Looking ahead along a draft leaves the state as it was."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._ended = False

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = [self._mask()]
        taken = 0
        after: np.ndarray | None = None  # what may follow the place where looking ahead ends
        for token in draft:
            mask = out[-1]
            if mask is not None and token in self._end_ids and mask[token]:
                after = self._only_end()  # a request may ignore the end: then plain decoding repeats it
                break
            if mask is None or not mask[token] or not self._matcher.consume_token(token):
                break
            taken += 1
            out.append(self._mask())
        if taken and not self._matcher.rollback(taken):
            raise GrammarFailed(f"the grammar failed: {_error(self._matcher)}")
        return out + [after] * (len(draft) + 1 - len(out))

    def commit(self, tokens: Seq[int]) -> None:
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
            raise GrammarFailed(f"the grammar became too complex: {_error(self._matcher)}")
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[: len(known)] = known
        return mask if known.any() else self._only_end()

    def _only_end(self) -> np.ndarray:
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[list(self._end_ids)] = True
        return mask


def check_depth(schema: Any, limit: int) -> None:
    """Raise UsageError for JSON nested deeper than `limit`; itself without recursion."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > limit:
            raise UsageError(f"nested deeper than {limit} levels: make it flatter")
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
        level = [item for item in inner if isinstance(item, (dict, list))]
