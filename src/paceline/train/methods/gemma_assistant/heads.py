"""Drafter heads: from the dense vocabulary head to centroids, and how many of them to look at.

Training always scores the full vocabulary, since top-k blocks the gradient of what it leaves out. Afterwards
the rows of the head are divided into clusters of equal size (the layout that transformers loads:
token_ordering lists the tokens cluster by cluster), the centroids are fitted so that the right cluster is
found, and top_clusters is the smallest number that reaches the stated recall on held-out states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from paceline.errors import UsageError
from paceline.models.families.gemma4.config import AssistantConfig

ROUNDS = 12  # of k-means
CHUNK = 8192  # rows scored at once


@dataclass(slots=True)
class CentroidHead:
    centroids: torch.Tensor  # [clusters, hidden]
    ordering: torch.Tensor  # [V] int64, the tokens of cluster 0, then of cluster 1, ...
    top_clusters: int
    recall: float  # share of held-out states whose most likely token is among the candidates


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """keep: the kind and size that the drafter began with. CentroidHead 0: as many tokens in each as Gemma 4
    has, 128.
    """

    kind: Literal["keep", "dense", "centroid"] = "keep"
    clusters: int = 0
    recall: float = 0.99
    batches: int = 60  # of drafter states that the centroids are fitted on

    def __post_init__(self) -> None:
        if self.kind not in ("keep", "dense", "centroid"):
            raise UsageError(f"head {self.kind!r} is unknown: use keep, dense or centroid")
        if not 0 < self.recall < 1 or self.batches < 1 or self.clusters < 0:
            raise UsageError("recall must be in (0, 1), clusters and batches above 0")

    def wanted(self, config: AssistantConfig) -> int:
        """CentroidHead of the finished drafter, 0 = dense head. Raises UsageError."""
        if self.kind == "dense" or (self.kind == "keep" and not config.clusters):
            return 0
        clusters = self.clusters or (
            config.clusters if self.kind == "keep" else max(2, config.text.vocab_size // 128)
        )
        check_clusters(config.text.vocab_size, clusters)
        return clusters


def check_clusters(vocab: int, clusters: int) -> None:
    """UsageError unless the vocabulary divides into `clusters` equal parts."""
    if clusters < 2 or vocab % clusters:
        near = [c for c in range(2, vocab) if vocab % c == 0]
        best = min(near, key=lambda c: abs(c - clusters)) if near else 1
        raise UsageError(f"{clusters} clusters do not divide {vocab} tokens equally: use --clusters {best}")


def balanced_clusters(rows: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Cluster of each row [V] (k-means over directions, each cluster exactly V / clusters rows)."""
    points = F.normalize(rows.float(), dim=-1)
    size = points.shape[0] // clusters
    start = torch.randperm(points.shape[0], generator=generator)[:clusters].to(points.device)
    centres = points[start]
    owner = torch.empty(points.shape[0], dtype=torch.long, device=points.device)
    for _ in range(ROUNDS):
        owner = _assign(points, centres, size)
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        centres = F.normalize(sums, dim=-1)
    return owner


def _assign(points: torch.Tensor, centres: torch.Tensor, size: int) -> torch.Tensor:
    """Nearest centre with room: all free rows ask at once, each centre keeps the closest, the rest ask
    again.
    """
    owner = torch.full((points.shape[0],), -1, dtype=torch.long, device=points.device)
    room = torch.full((centres.shape[0],), size, dtype=torch.long, device=points.device)
    while (free := (owner < 0).nonzero()[:, 0]).numel():
        closed = (room == 0)[None]
        best = [
            (points[part] @ centres.T).masked_fill(closed, -2.0).max(-1) for part in torch.split(free, CHUNK)
        ]
        score, wish = torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])
        order = score.argsort(descending=True, stable=True)
        order = order[wish[order].argsort(stable=True)]  # by centre, closest first
        sorted_wish = wish[order]
        first = torch.searchsorted(sorted_wish, torch.arange(centres.shape[0], device=points.device))
        rank = torch.arange(len(order), device=points.device) - first[sorted_wish]
        taken = order[rank < room[sorted_wish]]
        owner[free[taken]] = wish[taken]
        room -= torch.bincount(wish[taken], minlength=centres.shape[0])
    return owner


def fit_centroids(
    head: torch.Tensor, owner: torch.Tensor, states: Iterable[torch.Tensor], clusters: int, lr: float = 3e-3
) -> torch.Tensor:
    """Centroids [clusters, hidden] that score a cluster by the probability that the dense head gives its
    tokens.

    Starts at the mean row of each cluster; `states` are batches [n, hidden] of drafter states, each used
    once.
    """
    head = head.detach().float()
    sums = torch.zeros(clusters, head.shape[1], device=head.device).index_add_(0, owner, head)
    centroids = (sums / (head.shape[0] // clusters)).requires_grad_()
    optimizer = torch.optim.AdamW([centroids], lr=lr, weight_decay=0.0)
    for batch in states:
        with torch.no_grad():
            q = torch.softmax(batch.float() @ head.T, dim=-1)
            mass = torch.zeros(len(batch), clusters, device=head.device).index_add_(1, owner, q)
        loss = -(mass * torch.log_softmax(batch.float() @ centroids.T, dim=-1)).sum(-1).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return centroids.detach()


def choose_top(
    head: torch.Tensor,
    owner: torch.Tensor,
    centroids: torch.Tensor,
    states: Iterable[torch.Tensor],
    recall: float,
) -> tuple[int, float]:
    """Fewest clusters whose candidates hold the dense head's most likely token in `recall` of the states."""
    clusters = centroids.shape[0]
    ranks = torch.zeros(clusters, dtype=torch.long)
    for batch in states:
        best = (batch.float() @ head.detach().float().T).argmax(-1)
        scores = batch.float() @ centroids.T
        own = scores.gather(1, owner[best][:, None])
        ranks += torch.bincount((scores > own).sum(-1).cpu(), minlength=clusters)
    total = int(ranks.sum())
    if not total:
        raise UsageError("no held-out states to choose top_clusters with: give more data")
    reached = ranks.cumsum(0).double() / total
    top = int((reached < recall).sum()) + 1
    top = min(top, clusters)
    return top, float(reached[top - 1])


def build_head(
    head: torch.Tensor,
    fit: Iterable[torch.Tensor],
    held: Iterable[torch.Tensor],
    clusters: int,
    recall: float,
) -> CentroidHead:
    """A centroid head for the dense `head` [V, hidden]; `fit` and `held` are batches of states [n,
    hidden].
    """
    owner = balanced_clusters(head.detach(), clusters, torch.Generator().manual_seed(0))
    centroids = fit_centroids(head, owner, fit, clusters)
    top, reached = choose_top(head, owner, centroids, held, recall)
    return CentroidHead(centroids, owner.argsort(stable=True), top, reached)
