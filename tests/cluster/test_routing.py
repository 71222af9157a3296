"""Which replica an order is for, and what crosses the wire."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install paceline[ray]")

from paceline.cluster.prefixes import PAGE, Prefixes
from paceline.cluster.router import HOT, PrefixRouter
from paceline.cluster.wire import Order, Recipes, pack, unpack
from paceline.core import SamplingParams
from paceline.text.phases import AfterThinking

A, B = list(range(4 * PAGE)), list(range(100, 100 + 4 * PAGE))


def test_the_longest_known_beginning_wins_within_one_salt() -> None:
    known = Prefixes()
    known.add("s", A[: 2 * PAGE], "one")
    known.add("s", A[: 2 * PAGE] + B, "two")
    assert known.find("s", A, {"one", "two"}) == "two"  # it was given the shared part last
    assert known.find("s", A[: 2 * PAGE] + B, {"one", "two"}) == "two"
    assert known.find("s", A, {"one"}) is None
    assert known.find("other", A, {"one", "two"}) is None
    assert known.find("s", A[: PAGE - 1], {"one", "two"}) is None


def test_what_is_not_used_is_forgotten() -> None:
    known = Prefixes(most=8)
    known.add("", A, "one")
    for i in range(3):
        known.add("", [1000 + i] * 2 * PAGE, "two")
        known.add("", A, "one")
    assert known.find("", A, {"one"}) == "one"
    assert known.find("", [1000] * 2 * PAGE, {"two"}) is None


def make_router() -> Any:
    """The router without Ray around it."""
    router = object.__new__(PrefixRouter)
    router.initialize_state()
    return router


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def route(router: Any, replicas: list[Any], order: Order, taken_by: str | None = None) -> str:
    """The first choice; the order is taken by it or by another."""
    pending: Any = SimpleNamespace(
        args=[order],
        routing_context=SimpleNamespace(should_backoff=False),
        metadata=SimpleNamespace(internal_request_id=order.id),
    )
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    assert pending.routing_context.should_backoff
    chosen = next(r for rank in ranks for r in rank).replica_id.unique_id
    router.on_request_routed(pending, replica(taken_by or chosen).replica_id, None)
    return str(chosen)


def test_a_known_beginning_until_it_is_hot_else_the_least_busy() -> None:
    router, both = make_router(), [replica("one"), replica("two")]
    first = route(router, both, Order("0", A, b"", "s"))
    for i in range(1, HOT + 1):
        order = Order(str(i), A, b"", "s")
        assert route(router, both, order) == first
        assert order.chosen == "prefix"
    order = Order("hot", A, b"", "s")
    assert route(router, both, order) != first
    assert order.chosen == "hot"
    order = Order("new", B, b"", "s")
    assert route(router, both, order) != first
    assert order.chosen == "load"
    for i in range(HOT + 1):
        router.on_request_completed(replica(first).replica_id, str(i))
    router.on_request_completed(replica(first).replica_id, "one that was refused")
    assert route(router, both, Order("after", B[::-1], b"", "s")) == first


def test_replicas_that_failed_an_order_are_avoided_and_full_ones_named() -> None:
    router, both = make_router(), [replica("one"), replica("two")]
    first = route(router, both, Order("0", A, b"", "s"))
    other = "two" if first == "one" else "one"
    assert route(router, both, Order("1", A, b"", "s", avoid=frozenset({first}))) == other
    assert route(router, both, Order("2", A, b"", "s", avoid=frozenset({"one", "two"}))) in ("one", "two")
    order = Order("3", A, b"", "s")
    known = route(router, both, order, taken_by="three")
    assert known == other
    assert order.chosen == "full"


class Compiled:
    """Grammars that remember what they were asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        def compile_(*arguments: Any) -> Any:
            self.calls.append((method, arguments))
            return lambda: SimpleNamespace(method=method)

        return compile_


def test_a_grammar_is_sent_as_its_recipe_and_compiled_again_where_it_arrives() -> None:
    here, there = Compiled(), Compiled()
    recipes: Any = Recipes(here)  # type: ignore[arg-type]
    tools: dict[str, dict[str, Any]] = {"f": {"type": "object"}}
    asked = {
        "compile": ("json", "{}"), "compile_call": (tools, 2), "compile_either": ("json", "{}", tools, 1),
        "compile_strict": (tools,),
    }  # fmt: skip
    asked = {name: (*given, "bare" if name == "compile" else "may") for name, given in asked.items()}
    for method, arguments in asked.items():
        make = getattr(recipes, method)(*arguments)
        assert make().method == method
        for wrapped in (make, lambda make=make: AfterThinking(make(), (1, 2), False)):
            params = SamplingParams(seed=3, constraint=wrapped, logit_bias={3: 1.0}, stop=("x",))
            got = unpack(pack(params), there)  # type: ignore[arg-type]
            assert got.constraint is not None
            got.constraint()
            assert there.calls[-1] == (method, arguments)
            assert (got.seed, got.logit_bias, got.stop) == (3, {3: 1.0}, ("x",))
    assert here.calls == list(asked.items())
