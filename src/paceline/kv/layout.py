"""What a model asks to have cached: layers grouped by kind. Pure data, no torch.

Layers of one kind share page tables. A layer without K/V of its own (Gemma 4's shared layers, the drafter's
Q-only layers) reads the K/V of another layer and owns no storage.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE = "state"  # the kind of what is kept of a text once, not for each token
SCALED = 32  # columns of a key or value in int8 that have a float32 beside them, what they are to be multiplied with
RECENT = (
    48  # rows that are kept beside a recurrent state: a page, the longest tail, and what the first one reads
)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Storage of one layer: K and V, each [tokens, kv_heads, head_dim]; or K alone, whose first columns are V."""

    kind: str  # "sliding_attention" | "full_attention"
    kv_heads: int
    head_dim: int
    latent: int | None = None  # columns of a key that are its value, too; None: values of their own

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent


@dataclass(frozen=True, slots=True)
class LayerState:
    """Storage of one layer of linear attention: a state for each text, and what its last rows hold (see kv/states.py)."""

    heads: int
    key_dim: int
    value_dim: int
    width: int  # values that a row holds
    history: int  # rows before itself that a row reads

    @property
    def elements(self) -> int:
        """Of one text."""
        return self.heads * self.key_dim * self.value_dim + RECENT * self.width


@dataclass(frozen=True, slots=True)
class Layout:
    layers: tuple[LayerKV, ...]  # storage index -> layer; only layers that own K/V
    windows: dict[str, int | None]  # kind -> sliding window in tokens, None = full
    states: tuple[LayerState, ...] = ()
    run: int = (
        0  # most rows that are computed in one forward because they see each other, as those of a picture
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(k for k in self.windows if any(layer.kind == k for layer in self.layers))

    @property
    def branches(self) -> bool:
        """Whether several continuations of a text can be computed side by side: what is cached of a token is at its
        position, and changes nothing that is cached of the others.
        """
        return not self.states

    def last_of(self, kind: str) -> int:
        """Storage index of the last layer of `kind`: the one that shared layers and the MTP drafter read."""
        return max(i for i, layer in enumerate(self.layers) if layer.kind == kind)

    def bytes_per_state(self, itemsize: int = 4) -> int:
        """Bytes of the recurrent states of one text."""
        return itemsize * sum(layer.elements for layer in self.states)

    def bytes_per_token(self, itemsize: int) -> dict[str, int]:
        """Bytes that one token costs, by kind. Vectors of one byte a column have scales beside them."""
        out = dict.fromkeys(self.kinds, 0)
        for layer in self.layers:
            scales = 4 * (layer.head_dim // SCALED) if itemsize == 1 else 0
            size = layer.kv_heads * (layer.head_dim * itemsize + scales)
            out[layer.kind] += (2 if layer.latent is None else 1) * size
        return out
