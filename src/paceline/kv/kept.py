"""Recurrent states that stay with the prefix index when their text has gone on or ended: a hit goes as far as one stands.

They are kept where a prompt ends, where it parts from another one, and at a text's last page end. Those that were not
used for longest give way to texts that are open.
"""

from __future__ import annotations

from paceline.kv.layout import STATE
from paceline.kv.pages import OutOfPages
from paceline.kv.prefix import Node
from paceline.kv.store import Entry, PageStore


def offer(cache: PageStore, entry: Entry, state: int) -> None:
    """Offer `state`, a copy or the state itself, to texts with the same prefix."""
    assert cache.states is not None
    node, at = entry.parent, entry.committed // cache.page_size * cache.page_size
    while isinstance(node, Node) and at > cache.states.folded[state]:
        node, at = node.key[0], at - cache.page_size  # type: ignore[assignment]
    if isinstance(node, Node) and at == cache.states.folded[state]:  # it may stand within a page
        cache.prefix.insert(node.key[0], node.key[1], {STATE: state})  # type: ignore[arg-type]


def keep(cache: PageStore, entry: Entry) -> None:
    """Where the state of a text is at a page end, offer a copy, if there is room for one: the text may end before the
    next. The copy of the page end before is given up, unless that was a stop.
    """
    assert cache.states is not None
    folded = int(cache.states.folded[entry.state])
    assert entry.committed >= folded, "the state went over refused rows"
    reached = [stop for stop in entry.stops if stop <= folded]
    del entry.stops[: len(reached)]
    if entry.parent is None or folded == entry.copied or folded % cache.page_size:
        return
    entry.copied = folded
    if entry.latest is not None:
        cache.prefix.take_back(STATE, entry.latest)
    try:
        (copy,) = cache.pools[STATE].take(1)
    except OutOfPages:
        entry.latest = None
        return
    cache.states.copy(entry.state, copy)
    offer(cache, entry, copy)
    entry.latest = None if folded in reached or cache.pools[STATE].refs(copy) == 1 else copy
    cache.pools[STATE].release(copy)
