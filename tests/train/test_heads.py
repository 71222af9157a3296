"""Centroid heads: equal clusters that keep together what is alike, and a top-k that reaches its recall."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.train.methods.gemma_assistant.files import set_head
from paceline.train.methods.gemma_assistant.heads import (
    CentroidHead,
    HeadOptions,
    balanced_clusters,
    build_head,
    check_clusters,
)
from paceline.train.methods.gemma_assistant.learning import load_module


def clustered_head(clusters: int = 8, each: int = 12, width: int = 16) -> torch.Tensor:
    """Rows around `clusters` directions, in a random order of tokens."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(clusters, width, generator=generator)
    rows = centres.repeat_interleave(each, 0) + 0.3 * torch.randn(clusters * each, width, generator=generator)
    return rows[torch.randperm(len(rows), generator=generator)]


def test_clusters_are_equal_and_no_token_is_lost() -> None:
    for vocab, clusters in ((96, 8), (60, 30), (64, 2)):
        rows = torch.randn(vocab, 6, generator=torch.Generator().manual_seed(vocab))
        owner = balanced_clusters(rows, clusters, torch.Generator().manual_seed(1))
        assert torch.bincount(owner, minlength=clusters).tolist() == [vocab // clusters] * clusters


def test_the_head_reaches_its_recall_with_few_clusters() -> None:
    head = clustered_head()
    states = [head[torch.randint(96, (64,), generator=torch.Generator().manual_seed(i))] for i in range(12)]
    states = [s + 0.3 * torch.randn(s.shape, generator=torch.Generator().manual_seed(99)) for s in states]
    built = build_head(head, states[:10], states[10:], 8, 0.95)
    assert built.recall >= 0.95
    assert built.top_clusters <= 3
    assert sorted(built.ordering.tolist()) == list(range(96))
    looser = build_head(head, states[:10], states[10:], 8, 0.5)
    assert looser.top_clusters <= built.top_clusters


def test_running_logits_hide_exactly_what_is_no_candidate(pair: tuple[Path, Path]) -> None:
    dense, _, _ = load_module(pair[1])
    generator = torch.Generator().manual_seed(0)
    head = CentroidHead(
        torch.randn(6, 16, generator=generator), torch.randperm(96, generator=generator), 2, 1.0
    )
    module = set_head(dense, head)
    states = torch.randn(5, 16, generator=generator)
    for _ in range(2):
        shown = module.running_logits(states)
        keep = shown.isfinite()
        assert (keep.sum(-1) == 2 * 16).all()
        torch.testing.assert_close(shown[keep], module.logits(states)[keep])
        with torch.no_grad():
            module.head.mul_(1.5)  # the second time it is another head


def test_impossible_clusters_name_a_possible_number() -> None:
    with pytest.raises(UsageError, match="use --clusters 32"):
        check_clusters(96, 30)
    with pytest.raises(UsageError, match="keep, dense or centroid"):
        HeadOptions("sparse")  # type: ignore[arg-type]
