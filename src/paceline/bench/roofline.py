"""How fast this target could decode at best here: every weight read once per token at the measured bandwidth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.models.target import GraphTarget
from paceline.ops.recording import Code, RecordingOps
from paceline.ops.records import ExpertMatrix


@dataclass(frozen=True, slots=True)
class Roofline:
    bandwidth: float  # bytes per second, measured
    weight_bytes: int  # read for every token; embedding rows that are only looked up do not count

    @property
    def tokens_per_second(self) -> float:
        return self.bandwidth / self.weight_bytes

    def say(self, plain: float | None) -> str:
        """One line for a user; `plain`: tokens/s of plain decoding of one text, if it was measured."""
        line = (
            f"Roofline: {self.bandwidth / 1e9:.1f} GB/s read here, {self.weight_bytes / 1e6:.1f} MB of weights a token: "
            f"at most {self.tokens_per_second:.0f} tokens/s for one text without speculation"
        )
        if plain is None:
            return line + "."
        share = plain / self.tokens_per_second
        cached = ", weights that fit into the processor's cache are read faster" if share > 1 else ""
        return f"{line}; measured {plain:.0f} ({share:.0%}{cached})."

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def weight_bytes(target: GraphTarget) -> int:
    """Of its weights, as they are held here, what is read for every token: of experts those that a token is given to, of
    tables in which it is looked up nothing.
    """
    total = 0.0
    for graph in (target.hidden_graph, target.logits_graph):
        graph(ops := RecordingOps())
        for node in ops.nodes:
            if node.code is Code.EMBED:
                continue
            size = sum(weight.nbytes for weight in node.weights)
            record = node.record
            total += size * record.top_k / len(node.weights) if isinstance(record, ExpertMatrix) else size
    return round(total)
