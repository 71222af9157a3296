"""What a model needs of a GPU's memory: weights, drafter, K/V for a stated context, and what captured steps take.

Nothing is allocated: it follows from the config, so a card that is not here can be planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.forecast.estimate import Size
from paceline.forecast.shapes import TARGETS, assistant_config, bytes_of, row_bytes
from paceline.kv.layout import Layout
from paceline.kv.plan import plan_pages
from paceline.models.drafters.gemma4_assistant import assistant_shapes
from paceline.models.families import spec_of
from paceline.models.spec import ModelConfig
from paceline.ops.base import WeightKind

BESIDE = 5 << 28  # bytes of the driver's own, of activations, and of captured steps, about
SHORTEST = 256  # tokens of context below which nothing is worth running
PAGE = 16


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a model kept as `kind`, with K/V for one text of `context` tokens."""

    kind: WeightKind
    weights: int
    drafter: int
    cache: int
    beside: int
    context: int
    longest: int | None  # context that the card has room for; None: not even the shortest

    @property
    def total(self) -> int:
        return self.weights + self.drafter + self.cache + self.beside


def needs(
    config: ModelConfig, sizes: Mapping[WeightKind, Size], drafter: int, context: int, card: int
) -> list[Need]:
    """For each way to keep the weights, on a card of `card` bytes; `drafter`: bytes of it."""
    layout = spec_of(config.model_type).layout(config)
    context = min(context, config.max_len)
    rows = []
    for kind, size in sizes.items():
        weights = weights_of(config, kind, size)
        cache = cache_bytes(layout, context)
        room = card - weights - drafter - BESIDE
        rows.append(
            Need(kind, weights, drafter, cache, BESIDE, context, _longest(layout, room, config.max_len))
        )
    return rows


def weights_of(config: ModelConfig, kind: WeightKind, size: Size) -> int:
    """Of the weights in a GPU's memory: tables in which tokens are looked up are there, too."""
    shapes = spec_of(config.model_type).shapes(config)
    tables = 0
    for name, shape in shapes.items():
        looked_up = name.startswith("embed_tokens_per_layer") or (
            name.startswith("embed_tokens") and not config.tied
        )
        if looked_up and kind not in ("int8", "int4"):
            tables += shape[0] * row_bytes(kind, shape[1])
    return size.memory + tables


def cache_bytes(layout: Layout, context: int, itemsize: int = 2) -> int:
    """Of K/V of one text of so many tokens, in whole pages, as `plan_pages` counts them."""
    pages = plan_pages(
        layout, budget=1 << 60, itemsize=itemsize, max_sequences=1, max_tokens=context, chunk=EngineConfig().step_tokens
    )  # fmt: skip
    cost = layout.bytes_per_token(itemsize)
    per_token = {
        kind: -(-count // 2) for kind, count in pages.items()
    }  # it plans for a second text of cached prefixes
    states = layout.bytes_per_state() if layout.states else 0
    return sum(per_token[kind] * cost[kind] * PAGE for kind in layout.kinds) + states


def _longest(layout: Layout, room: int, most: int) -> int | None:
    if room < cache_bytes(layout, min(SHORTEST, most)):
        return None
    low, high = min(SHORTEST, most), most
    while high - low > PAGE:
        mid = (low + high) // 2
        low, high = (mid, high) if cache_bytes(layout, mid) <= room else (low, mid)
    return most if cache_bytes(layout, most) <= room else low


def assistant_bytes(config: ModelConfig) -> int:
    """Of the published MTP drafter of a published Gemma 4; 0 for other models."""
    for name, fields in TARGETS.items():
        if (fields["hidden_size"], fields["num_hidden_layers"]) == (config.hidden_size, config.layer_count):
            return bytes_of(assistant_shapes(assistant_config(name)), "bfloat16")
    return 0
