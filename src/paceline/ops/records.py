"""What an operation of a recording is given beside values and weights, by name: a record for each kind of operation.

`ops/base.py` says what the operations compute. Operations of values and weights alone have no record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from paceline.ops.base import DeltaRule, Experts, Growth, LowRank


class Sees(IntEnum):
    """How far a row of attention sees, in its own sequence."""

    BEFORE = 0  # what is before it, and a window one key further back
    ITSELF = 1  # itself and what is before it
    RUN = 2  # all rows of its sequence in this run


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapt:
    """Adds to what the product before it wrote, for the rows that ask for one of these; None: it changes nothing here."""

    adapters: tuple[LowRank | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    vector: Tensor  # [width]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    groups: int
    weight: Tensor | None  # [width / groups], the same for all, or [width]
    eps: float
    centered: bool = False  # of rows less their mean
    own: bool = False  # a slice has weights of its own


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    heads: int
    frequencies: Tensor  # [columns / 2], of those columns of a head that turn
    factor: float
    growth: Growth | None


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Keys and values of rows go to the cache. Also which rows of a recurrent layer stay."""

    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    layer: int
    heads: int
    window: int | None  # keys that a row sees, None: all
    sees: Sees
    sinks: Tensor | None = None  # [heads] float32
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """Of a scale and of a softcap."""

    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    layer: int
    rule: DeltaRule


@dataclass(frozen=True, slots=True, eq=False)
class BlockConv:
    base: Tensor  # [taps, width]


@dataclass(frozen=True, slots=True, eq=False)
class Convolve:
    layer: int
    taps: Tensor  # [taps, width]
    bias: Tensor | None  # [width]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    experts: Experts


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrix:
    """One matrix of each chosen expert: gate and value with the activation between them, or the way down."""

    top_k: int
    columns: int  # of the input that each choice has to itself, 0: all choices read the same
    gate: str | None  # the activation, None: there is none
    bias: Tensor | None  # [experts, outputs]


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class TopClusters:
    ordering: Tensor  # [tokens] int64, cluster by cluster
    size: int  # tokens of a cluster


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Logits of the tokens of the chosen clusters."""

    size: int  # tokens of a cluster
    top_k: int  # clusters


Record = (
    Embed | Adapt | Bias | Norm | Rotary | Store | Attention | Factor | Delta | BlockConv | Convolve | Route
    | ExpertMatrix | Mix | TopClusters | Gather
)  # fmt: skip
