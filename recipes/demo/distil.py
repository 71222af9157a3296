"""Distil the MTP drafter and the small draft model from the target's own distribution."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RecipeError, fingerprint, need_space, say, write_atomic
from drafter import (
    DrafterShape,
    DraftLoss,
    balanced_clusters,
    cluster_targets,
    draft_tables,
    init_drafter,
    unroll,
)
from model import Params, Shape, hidden_states, logits, tables
from muon import Optimiser, schedule
from pretrain import Windows
from sample import continue_rows
from torch import Tensor


@dataclass(frozen=True)
class DistilPlan:
    """Budget and data of a distillation."""

    minutes: float = 20.0
    rows: int = 6
    length: int = 257
    own_share: float = 0.75  # share of batches that are the target's own text
    own_rows: int = 48  # rows sampled at a time
    decay: float = 0.9  # weight of draft step k is decay**k
    rates: tuple[float, float, float] = (0.01, 0.002, 0.003)
    seed: int = 3
    save_every: float = 120.0


def load_target(path: Path) -> tuple[Params, Shape, float]:
    """Weights of a pretraining checkpoint, its shape and the file's time."""
    if not path.exists():
        raise RecipeError(f"{path.parent.name} has no checkpoint: run the pretrain stage")
    state = torch.load(path, weights_only=False)
    shape = {key: value for key, value in state["shape"].items() if key != "kinds"}
    return state["params"], Shape(**shape), path.stat().st_mtime


def load_part(path: Path, mark: str) -> dict[str, Any] | None:
    """A distillation checkpoint, refused when it is from another configuration."""
    if not path.exists():
        return None
    state = torch.load(path, weights_only=False)
    if state["mark"] != mark:
        raise RecipeError(f"checkpoint {path.name} is from another config; move it away or use its settings")
    return dict(state)


class OwnText:
    """Rows the target wrote from the middle or the first quarter on, most of them greedily."""

    def __init__(self, plan: DistilPlan, data: Windows) -> None:
        self.plan, self.data = plan, data
        self.pool: list[Tensor] = []
        self.round = 0

    def take(self, target: Params, shape: Shape) -> Tensor:
        """The next batch; a new pool is sampled when the old one is used up twice."""
        if not self.pool:
            self.pool = self.fill(target, shape)
        return self.pool.pop()

    def fill(self, target: Params, shape: Shape) -> list[Tensor]:
        """Sample a pool of batches."""
        self.round += 1
        new = (self.plan.length - 1) * (6 if self.round % 2 else 4) // 8
        prompts, _ = self.data.batch(self.plan.own_rows, self.plan.length - new)
        heat = torch.tensor([0.0, 0.0, 0.0, 0.8]).repeat(self.plan.own_rows // 4 + 1)[: self.plan.own_rows]
        rows = continue_rows((target, shape), prompts, new, heat, 1000 * self.plan.seed + self.round)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.round))]
        return list(rows.split(self.plan.rows)) * 2


@torch.no_grad()
def teach(
    target: Params, shape: Shape, ids: Tensor, table: dict[str, Any]
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """The target's hidden states, shared K/V and distribution at every position."""
    hidden, kv = hidden_states(target, shape, ids, table)
    return hidden, kv, torch.softmax(logits(target, hidden), -1)


class DrafterRun:
    """Distillation of the MTP drafter with a checkpoint; follows the target's checkpoint if that changes."""

    def __init__(
        self, folder: Path, target: Path, shape: DrafterShape, plan: DistilPlan, tokens: np.ndarray
    ) -> None:
        self.folder, self.source, self.shape, self.plan = folder, target, shape, plan
        self.target, self.big, self.stamp = load_target(target)
        embed = self.target["model.embed_tokens.weight"]
        self.params = init_drafter(shape, self.big, embed, plan.seed)
        self.elapsed, self.count = 0.0, 0
        self.mark = fingerprint([asdict(shape) | {"top_k": 0}, asdict(self.big), plan.seed])
        state = load_part(self.path, self.mark)
        if state:
            self.params, self.elapsed, self.count = state["params"], state["elapsed"], state["count"]
            say(f"distil: going on at {self.elapsed / 60:.1f} minutes")
        for p in self.params.values():
            p.requires_grad_()
        self.optimiser = Optimiser(self.params, *plan.rates)
        if state:
            self.optimiser.load(state["optimiser"])
        self.data = Windows(tokens, plan.seed + self.count)
        self.own = OwnText(plan, self.data)
        self.accepted = [0.0] * shape.steps
        self.table = tables(self.big, plan.length)
        self.draft_table = draft_tables(self.big, plan.length)

    @property
    def path(self) -> Path:
        return self.folder / "drafter.pt"

    def follow(self) -> None:
        """Load the target again when its checkpoint is newer (the pretraining may still run)."""
        if self.source.stat().st_mtime != self.stamp:
            self.target, _, self.stamp = load_target(self.source)
            say("distil: newer target loaded")

    def save(self) -> None:
        """Write the checkpoint atomically."""
        need_space(self.folder, 64)
        state = {
            "mark": self.mark,
            "params": {k: v.detach() for k, v in self.params.items()},
            "count": self.count,
            "optimiser": self.optimiser.state(),
            "elapsed": self.elapsed,
            "accepted": self.accepted,
        }
        write_atomic(self.path, lambda path: torch.save(state, path))

    def batch(self) -> Tensor:
        """Corpus text or the target's own text."""
        if self.data.random.random() < self.plan.own_share:
            return self.own.take(self.target, self.big)
        return self.data.batch(self.plan.rows, self.plan.length)[0]

    def step(self, rate: float) -> float:
        """One optimiser step; returns the mean of 1 - TV over the draft steps."""
        ids = self.batch()
        n = ids.shape[1]
        hidden, kv, p = teach(self.target, self.big, ids, self.table)
        embed = self.target["model.embed_tokens.weight"]
        text = self.shape.text(self.big)
        states = unroll(self.params, text, self.shape.steps, (ids, hidden, kv), embed, self.draft_table)
        total = hidden.new_zeros(())
        for k, x in enumerate(states):
            rows = n - 1 - k
            want = p[:, 1 + k :].reshape(-1, p.shape[-1])
            loss, accepted = DraftLoss.apply(
                x[:, :rows].reshape(-1, x.shape[-1]), self.params["model.embed_tokens.weight"], want
            )
            total = total + self.plan.decay**k * loss
            self.accepted[k] += 0.05 * (float(accepted.detach()) - self.accepted[k])
        total.backward()
        self.optimiser.step(rate)
        self.count += 1
        return sum(self.accepted) / len(self.accepted)

    def train(self, minutes: float, rate: Callable[[float], float] = schedule) -> None:
        """Train for so many minutes from now; `rate` maps the fraction done to a learning-rate factor."""
        began = reported = saved = time.monotonic()
        start = self.elapsed
        while (spent := time.monotonic() - began) < minutes * 60:
            self.follow()
            self.step(rate(spent / (minutes * 60)))
            now = time.monotonic()
            self.elapsed = start + now - began
            if now - reported > 20:
                reported = now
                shown = " ".join(f"{a:.3f}" for a in self.accepted)
                say(f"distil: {spent / 60:.1f}/{minutes:.1f} min, step {self.count}, 1-TV by step {shown}")
            if now - saved > self.plan.save_every:
                saved = now
                self.save()
        self.save()


def centroid_head(run: DrafterRun, minutes: float) -> Params:
    """Build the ordered-embedding head: balanced clusters, then train the centroids to find the mass."""
    head = run.params["model.embed_tokens.weight"].detach()
    counts = np.bincount(np.asarray(run.data.tokens[:4_000_000]), minlength=len(head)).astype(np.float32)
    weights = torch.from_numpy(counts + 1.0)
    count = run.shape.centroids
    centre, ordering = balanced_clusters(
        head - head.mean(0), weights / weights.sum(), count, 6, run.plan.seed
    )
    centroids = (centre * head.norm(dim=-1).mean()).requires_grad_()
    rate, began, seen = 0.01, time.monotonic(), 0
    optimiser = torch.optim.Adam([centroids], lr=rate)
    while (spent := time.monotonic() - began) < minutes * 60 or seen < 3:
        ids = run.batch()
        with torch.no_grad():
            hidden, kv, _ = teach(run.target, run.big, ids, run.table)
            states = unroll(
                run.params,
                run.shape.text(run.big),
                run.shape.steps,
                (ids, hidden, kv),
                run.target["model.embed_tokens.weight"],
                run.draft_table,
            )
            x = torch.cat(
                [s[:, : ids.shape[1] - 1 - k : 2].reshape(-1, s.shape[-1]) for k, s in enumerate(states)]
            )
            q = torch.softmax(x @ head.T, -1)
            mass = cluster_targets(ordering, q, count)
        loss = -(mass * torch.log_softmax(x @ centroids.T, -1)).sum(-1).mean()
        optimiser.param_groups[0]["lr"] = rate * max(0.05, 1 - spent / max(1.0, minutes * 60))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen += 1
    say(f"distil: centroid head trained for {seen} steps")
    return {
        "masked_embedding.centroids.weight": centroids.detach(),
        "masked_embedding.token_ordering": ordering,
    }


def distil_draft(folder: Path, target: Path, plan: DistilPlan, tokens: np.ndarray, start: Path) -> None:
    """Continue a pretrained small model on the target's distribution (same loss, one step)."""
    params, shape, _ = load_target(start)
    run_target, big, stamp = load_target(target)
    for p in params.values():
        p.requires_grad_()
    optimiser = Optimiser(params, *plan.rates)
    data = Windows(tokens, plan.seed)
    own = OwnText(plan, data)
    table, small = tables(big, plan.length), tables(shape, plan.length)
    began = reported = time.monotonic()
    mean = 0.0
    while (spent := time.monotonic() - began) < plan.minutes * 60:
        if target.stat().st_mtime != stamp:
            run_target, big, stamp = load_target(target)
        mine = data.random.random() < plan.own_share
        ids = own.take(run_target, big) if mine else data.batch(plan.rows, plan.length)[0]
        _, _, p = teach(run_target, big, ids, table)
        h, _ = hidden_states(params, shape, ids, small)
        z_head = params["model.embed_tokens.weight"]
        loss, accepted = DraftLoss.apply(h.reshape(-1, h.shape[-1]), z_head, p.reshape(-1, p.shape[-1]))
        loss.backward()
        optimiser.step(schedule(spent / (plan.minutes * 60)))
        mean += 0.05 * (float(accepted.detach()) - mean)
        if time.monotonic() - reported > 20:
            reported = time.monotonic()
            say(f"draft model: {spent / 60:.1f}/{plan.minutes:.1f} min, 1-TV {mean:.3f}")
    state = {"params": {k: v.detach() for k, v in params.items()}, "shape": asdict(shape)}
    write_atomic(folder / "draft.pt", lambda path: torch.save(state, path))
