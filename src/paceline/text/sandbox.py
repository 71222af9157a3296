"""Where chat templates run: jinja2's immutable sandbox, with bounds.

The sandbox keeps a template from Python's insides; the bounds keep it from running for ever or filling the
memory: every loop turn, call, filter and printed value is a step, and no value grows past `MAX_CHARACTERS`.
One sandbox serves one rendering; the compiled code is shared.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 8 * 2**20  # of any value, and of all that is printed
MAX_ITEMS = 100_000  # of a range or list, and the widest padding
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
_PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"}
)
_WIDTH = re.compile(r"\d{5}|\*")  # in a format string


class MessagesRefused(TemplateError):
    """`raise_exception` of a template: the messages are not what it was made for."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A bounded environment, otherwise set up as transformers sets up its own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._print,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self._steps, self._printed = 0, 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guard(name, run) for name, run in self.filters.items()}
        self.filters |= {"_each": self._each, "_checked": self._checked}
        self.globals |= {"range": self._range, "raise_exception": _refuse, "strftime_now": _now}
        del self.globals["lipsum"]

    def run(self, code: CodeType, values: dict[str, Any]) -> str:
        """Render compiled code. Raises TemplateError when it refuses the values, or exceeds a bound."""
        return Template.from_code(self, code, dict(self.globals)).render(values)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bounded = _Bound().visit(tree)
        assert isinstance(bounded, nodes.Template)
        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step()
        # Only a text's own methods can grow; jinja2 wraps str.format in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self._foresee(__obj.__name__, (owner, *args, *kwargs.values()))
        return __self._checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._step()
        if operator == "%" and isinstance(left, str):
            self._foresee("format", (left, right))
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    self._limit(len(many) * times, MAX_ITEMS, "repeats a value to more than {} items")
        if operator == "**":
            self._limit(max(abs(left), abs(right)), 1000, "raises to a power a number above {}")
        return self._checked(super().call_binop(context, operator, left, right))

    def _guard(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts as a step and cannot make too much."""

        @functools.wraps(function)  # keeps jinja's own marks on the function
        def run(*args: Any, **kwargs: Any) -> Any:
            self._step()
            plain = tuple(a for a in args if not isinstance(a, (Sandbox, Context, nodes.EvalContext)))
            self._foresee(name, (*plain, *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return run

    def _foresee(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuse what would make far more than it is given: `args` start with the value itself."""
        texts = [a for a in args if isinstance(a, str)]
        if name in _PADDING:
            self._limit(
                max((a for a in args if isinstance(a, int)), default=0), MAX_ITEMS, "pads to more than {}"
            )
        elif name == "replace" and len(texts) >= 3:
            size = texts[0].count(texts[1]) * len(texts[2])
            self._limit(size, MAX_CHARACTERS, "makes a text of more than {} characters")
        elif name == "join":
            parts = next((a for a in args if isinstance(a, (list, tuple))), ())
            glue = max(map(len, texts), default=0)
            size = sum((len(p) if isinstance(p, str) else 0) + glue for p in parts)
            self._limit(size, MAX_CHARACTERS, "makes a text of more than {} characters")
        elif name in ("format", "format_map"):
            numbers = [a for a in args if isinstance(a, int) and abs(a) > 2**63]
            if numbers or any(_WIDTH.search(t) for t in texts[:1]) or "{:{" in texts[0]:
                raise SecurityError("it formats with a width that is given by a value or too large")

    def _step(self) -> None:
        self._steps += 1
        self._limit(self._steps, MAX_STEPS, "takes more than {} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def _print(self, value: Any) -> Any:
        self._step()
        self._printed += len(value if isinstance(value, str) else str(value))
        self._limit(self._printed, MAX_CHARACTERS, "prints more than {} characters")
        return value

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str):
            self._limit(len(value), MAX_CHARACTERS, "makes a text of more than {} characters")
        elif isinstance(value, (list, tuple)):
            self._limit(len(value), MAX_ITEMS, "makes a list of more than {} items")
        elif isinstance(value, int):
            self._limit(value.bit_length(), 4096, "makes a number of more than {} bits")
        return value

    def _range(self, *args: int) -> range:
        values = range(*args)
        self._limit(len(values), MAX_ITEMS, "asks for more than {} numbers")
        return values

    @staticmethod
    def _limit(size: float, limit: int, what: str) -> None:
        if size > limit:
            raise SecurityError("it " + what.format(limit))


class Generation(Extension):
    """The block `generation`, which marks an assistant's words for training: here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bound(NodeTransformer):
    """Sends every loop and every `~` through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _through("_each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("_checked", node)


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False, **rest: Any
) -> str:
    """JSON as transformers' templates expect it: characters as they are, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, **rest)


def _refuse(message: str) -> NoReturn:
    raise MessagesRefused(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
