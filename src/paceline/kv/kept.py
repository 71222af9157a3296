"""Recurrent states that stay with the prefix index when their text has gone on or ended: a hit goes as far as one stands.

They are kept where a prompt ends, where it parts from another one, and where a text ended; those that were not used for
longest give way to texts that are open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.kv.layout import STATE
from paceline.kv.pages import OutOfPages
from paceline.kv.prefix import Node

if TYPE_CHECKING:
    from paceline.kv.cache import Entry, KVCache


def offer(cache: KVCache, entry: Entry, state: int) -> None:
    """Let texts that begin like this one begin with `state`, a copy of its own or itself."""
    assert cache.states is not None
    node, at = entry.parent, entry.committed // cache.page_size * cache.page_size
    while isinstance(node, Node) and at > cache.states.folded[state]:
        node, at = node.key[0], at - cache.page_size  # type: ignore[assignment]
    if isinstance(node, Node) and at == cache.states.folded[state]:  # it may stand within a page
        cache.prefix.insert(node.key[0], node.key[1], {STATE: state})  # type: ignore[arg-type]


def keep(cache: KVCache, entry: Entry) -> None:
    """Where the state of a text stands at a stop, offer a copy, if there is room for one."""
    assert cache.states is not None
    folded = cache.states.folded[entry.state]
    assert entry.committed >= folded, "the state went over refused rows"
    reached = [stop for stop in entry.stops if stop <= folded]
    del entry.stops[: len(reached)]
    if folded not in reached:
        return
    try:
        (copy,) = cache.pools[STATE].take(1)
    except OutOfPages:
        return
    cache.states.copy(entry.state, copy)
    offer(cache, entry, copy)
    cache.pools[STATE].release(copy)
