"""How many pages of each kind a cache gets."""

from __future__ import annotations

from paceline.errors import CapacityError, sized
from paceline.kv.layout import STATE, Layout
from paceline.kv.store import PAGE_SIZE


def plan_pages(
    layout: Layout, *, budget: int, itemsize: int, max_sequences: int, max_tokens: int, chunk: int
) -> dict[str, int]:
    """Pages by kind that fit into `budget` bytes: full layers get what the longest texts need, sliding ones their window.

    Raises CapacityError, with the number of bytes needed, when not even one sequence fits.
    """
    per_page = {kind: cost * PAGE_SIZE for kind, cost in layout.bytes_per_token(itemsize).items()}
    kinds = layout.kinds
    if layout.states:
        per_page[STATE], kinds = layout.bytes_per_state(), (*kinds, STATE)
    longest = -(-max_tokens // PAGE_SIZE)

    def wanted(kind: str, sequences: float) -> int:
        if kind == STATE:
            return int(sequences) + 1  # a text that is cached beside those that are open
        window = layout.windows[kind]
        each = longest if window is None else min(longest, (window + chunk) // PAGE_SIZE + 3)
        return max(each, int(each * sequences))

    def cost(sequences: float) -> int:
        return sum(wanted(kind, sequences) * per_page[kind] for kind in kinds)

    if cost(1) > budget:
        raise CapacityError(
            f"one text of {max_tokens} tokens needs {sized(cost(1))} of K/V cache and {sized(max(budget, 0))} "
            "are free for it: lower max_model_len or raise cache_memory"
        )
    low, high = 1.0, float(max_sequences) * 2  # twice: room for cached prefixes
    if cost(high) > budget:
        for _ in range(40):
            mid = (low + high) / 2
            low, high = (mid, high) if cost(mid) <= budget else (low, mid)
        high = low
    return {kind: wanted(kind, high) for kind in kinds}
