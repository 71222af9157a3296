"""The weights of a drafter, each looked at while it is loaded.

One that is not finite would never change a text. It would only have the drafter fail with the first draft, or be slow.
"""

from __future__ import annotations

from torch import Tensor

from paceline.checkpoints.loading import Weights
from paceline.errors import WeightsError
from paceline.ops.base import Weight


class FiniteWeights(Weights):
    def vector(self, name: str) -> Tensor:
        data = super().vector(name)
        self._check(name, data)
        return data

    def _weight(self, name: str, data: Tensor, scale: Tensor | None) -> Weight:
        self._check(name, data if scale is None else scale)
        return super()._weight(name, data, scale)

    def _check(self, name: str, data: Tensor) -> None:
        """Raises WeightsError."""
        if data.is_floating_point() and not bool(data.isfinite().all()):
            raise WeightsError(
                f"{self.folder}: the drafter's {name} holds values that are not finite: download or train it again, "
                "or use the drafter ngram"
            )
