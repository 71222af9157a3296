"""Muon for the hidden matrices, AdamW for embeddings and norms; one schedule for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices of a batch (wide or square)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class Optimiser:
    """Holds both rules; `step(scale)` multiplies every learning rate by the schedule's value."""

    def __init__(self, params: dict[str, Tensor], matrix: float, embed: float, vector: float) -> None:
        self.params, self.rates = params, (matrix, embed, vector)
        self.count = 0
        self.first = {name: torch.zeros_like(p) for name, p in params.items()}
        self.second = {name: torch.zeros_like(p) for name, p in params.items() if not self.is_matrix(name)}
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, p in params.items():
            if self.is_matrix(name):
                self.groups.setdefault((min(p.shape), max(p.shape)), []).append(name)

    def is_matrix(self, name: str) -> bool:
        """Whether Muon takes this parameter."""
        return self.params[name].dim() == 2 and "embed" not in name and "centroid" not in name

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all parameters from their gradients and clear these."""
        self.count += 1
        for names in self.groups.values():
            self._muon(names, scale * self.rates[0])
        for name in self.second:
            rate = self.rates[1] if self.params[name].dim() == 2 else self.rates[2]
            self._adam(name, scale * rate)
        for p in self.params.values():
            p.grad = None

    def _muon(self, names: list[str], rate: float, momentum: float = 0.95) -> None:
        wide = []
        for name in names:
            p, first = self.params[name], self.first[name]
            grad = p.grad if p.grad is not None else torch.zeros_like(p)
            first.lerp_(grad, 1 - momentum)
            update = grad.lerp(first, momentum)
            wide.append(update.T if p.shape[0] > p.shape[1] else update)
        for name, update in zip(names, orthogonal(torch.stack(wide)), strict=True):
            p = self.params[name]
            tall = p.shape[0] > p.shape[1]
            p.mul_(1 - 0.02 * rate)
            p.sub_((update.T if tall else update) * (rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5))

    def _adam(self, name: str, rate: float, b1: float = 0.9, b2: float = 0.98) -> None:
        p, first, second = self.params[name], self.first[name], self.second[name]
        if p.grad is None:
            return
        first.lerp_(p.grad, 1 - b1)
        second.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        size = (second / (1 - b2**self.count)).sqrt_().add_(1e-9)
        p.addcdiv_(first, size, value=-rate / (1 - b1**self.count))

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"count": self.count, "first": self.first, "second": self.second}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.count = state["count"]
        for mine, saved in ((self.first, state["first"]), (self.second, state["second"])):
            for name, value in mine.items():
                value.copy_(saved[name])


def schedule(done: float, warmup: float = 0.01, flat: float = 0.35) -> float:
    """Learning-rate factor at a fraction of the budget: warm up, hold, then fall linearly to zero."""
    if done < warmup:
        return max(done / warmup, 0.05)
    return 1.0 if done < flat else max(0.0, (1 - done) / (1 - flat))
