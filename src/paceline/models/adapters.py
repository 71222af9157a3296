"""LoRA adapters that requests choose by name: several beside one set of weights, none of them merged.

Each matrix that an adapter changes has its `LowRank` beside it (`Weight.adapted`), and `Ops.linear` adds that for the
rows that ask for it. So rows with different adapters, and with none, are computed in one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import ConfigError, PairError
from paceline.models.adapter import Adapter, Part
from paceline.models.target import GraphTarget
from paceline.ops.base import LowRank
from paceline.ops.recording import Code, RecordingOps
from paceline.ops.records import Adapt

MOST_RANK = 1024
WHOLE = ("embed_tokens", "lm_head")  # what drafters read, too, and for which rows are not known by text
_MERGE = "merge that adapter: give it alone, without a name"


@dataclass(frozen=True, slots=True)
class AdapterBank:
    """What each adapter adds to the matrices of one target; an adapter's number is its place in `names`."""

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    by_module: Mapping[str, tuple[LowRank | None, ...]]

    @classmethod
    def of(cls, adapters: Seq[tuple[str, Adapter]]) -> AdapterBank:
        """Raises LoadError for one that has to be merged."""
        by_module: dict[str, list[LowRank | None]] = {}
        for number, (name, adapter) in enumerate(adapters):
            _check(name, adapter)
            for module, part in adapter.parts.items():
                by_module.setdefault(module, [None] * len(adapters))[number] = _low_rank(module, part)
        return cls(
            tuple(name for name, _ in adapters),
            tuple(adapter.folder for _, adapter in adapters),
            {module: tuple(each) for module, each in by_module.items()},
        )

    def nbytes(self, name: str | None = None) -> int:
        """Of all adapters, or of one."""
        number = None if name is None else self.names.index(name)
        return sum(
            low_rank.a.nbytes + low_rank.b.nbytes
            for each in self.by_module.values()
            for i, low_rank in enumerate(each)
            if low_rank is not None and number in (None, i)
        )

    def ranks(self, name: str) -> list[int]:
        """The ranks that an adapter has, rising."""
        number = self.names.index(name)
        parts = (each[number] for each in self.by_module.values())
        return sorted({part.rank for part in parts if part is not None})

    def about(self) -> dict[str, dict[str, object]]:
        """Path, ranks and bytes of each, by name."""
        return {
            name: {"path": str(path), "ranks": self.ranks(name), "bytes": self.nbytes(name)}
            for name, path in zip(self.names, self.paths)
        }

    def on(self, device: torch.device) -> dict[str, tuple[LowRank | None, ...]]:
        """What each matrix gets, on a device."""
        return {
            module: tuple(
                None if part is None else LowRank(module, part.a.to(device), part.b.to(device))
                for part in each
            )
            for module, each in self.by_module.items()
        }

    def check(self, target: GraphTarget) -> None:
        """Raise PairError unless everything that the adapters change is read by `Ops.linear` alone."""
        target.hidden_graph(ops := RecordingOps())
        adding = [node for node in ops.nodes if node.code is Code.ADAPT]
        products = {id(node.after[0]) for node in adding}
        elsewhere = {
            part.module
            for node in ops.nodes
            if id(node) not in products
            for weight in node.weights
            for part in weight.adapted
            if part is not None
        }
        per_node = [node.record.adapters for node in adding if isinstance(node.record, Adapt)]
        read = {part.module for each in per_node for part in each if part is not None}
        for module, each in self.by_module.items():
            if module in elsewhere or module not in read:
                number = next(i for i, part in enumerate(each) if part is not None)
                raise PairError(
                    f"the adapter {self.names[number]} changes {module}, which this model computes in a way that "
                    f"adapters chosen by request cannot join: {_MERGE}"
                )


def _check(name: str, adapter: Adapter) -> None:
    if adapter.whole:
        module = next(iter(adapter.whole))
        raise ConfigError(
            f"the adapter {name} replaces {module} as a whole (modules_to_save), which no request can choose: {_MERGE}"
        )
    for module, part in adapter.parts.items():
        if module in WHOLE:
            raise ConfigError(f"the adapter {name} changes {module}, which no request can choose: {_MERGE}")
        if len(part.a) > MOST_RANK:
            raise ConfigError(
                f"the adapter {name} has rank {len(part.a)} at {module}, at most {MOST_RANK} are added by request: "
                f"{_MERGE}"
            )


def _low_rank(module: str, part: Part) -> LowRank:
    return LowRank(module, part.a.float().contiguous(), (part.scale * part.b.float()).T.contiguous())
