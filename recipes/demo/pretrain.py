"""Pretrain a text model within a fixed number of minutes; resumable, annealed to the end of the budget."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RecipeError, fingerprint, need_space, say, write_atomic
from model import HeadLoss, Params, Shape, block, grad_of_loss, hidden_states, init_params, logits, tables
from muon import Optimiser, schedule
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """How long and how to train. Phases are (fraction of the budget where it ends, sequences, length)."""

    minutes: float = 55.0
    phases: tuple[tuple[float, int, int], ...] = (
        (0.2, 16, 128),
        (0.45, 24, 128),
        (0.72, 12, 256),
        (0.93, 8, 512),
        (1.0, 2, 2048),
    )
    rates: tuple[float, float, float] = (0.02, 0.003, 0.004)
    seed: int = 1
    compiled: bool = False
    save_every: float = 180.0
    check_every: float = 240.0

    def mark(self, shape: Shape) -> str:
        """What must agree for a checkpoint to be continued."""
        return fingerprint(
            {"shape": asdict(shape), "rates": self.rates, "seed": self.seed, "minutes": self.minutes}
        )


class Windows:
    """Random windows of a token stream; the state of the generator is part of a checkpoint."""

    def __init__(self, tokens: np.ndarray, seed: int) -> None:
        self.tokens, self.random = tokens, np.random.default_rng(seed)

    def batch(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and next tokens."""
        starts = self.random.integers(0, max(1, len(self.tokens) - length - 1), count)
        rows = np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64)
        ids = torch.from_numpy(rows)
        return ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)


@torch.no_grad()
def bits_per_byte(
    p: Params, shape: Shape, tokens: np.ndarray, bytes_per_token: float, rows: int = 24, length: int = 1024
) -> float:
    """Held-out bits per byte over evenly spaced windows."""
    length = min(length, shape.context, len(tokens) - 1)
    starts = np.linspace(0, len(tokens) - length - 1, rows).astype(int)
    table, nats, count = tables(shape, length), 0.0, 0
    for start in starts:
        ids = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))[None]
        h, _ = hidden_states(p, shape, ids[:, :-1], table)
        nats += float(torch.nn.functional.cross_entropy(logits(p, h[0]), ids[0, 1:], reduction="sum"))
        count += length
    return nats / count / 0.6931471805599453 / bytes_per_token


class Run:
    """A training run with its checkpoint file."""

    def __init__(self, folder: Path, shape: Shape, plan: Plan, tokens: np.ndarray) -> None:
        self.folder, self.shape, self.plan = folder, shape, plan
        self.params = {name: p.requires_grad_() for name, p in init_params(shape, plan.seed).items()}
        self.optimiser = Optimiser(self.params, *plan.rates)
        self.data = Windows(tokens, plan.seed)
        self.elapsed, self.seen, self.curve = 0.0, 0, []
        self.curve: list[list[float]] = []
        self.tables: dict[int, dict[str, Any]] = {}
        self.step_fn = block
        if plan.compiled:
            self.step_fn = torch.compile(block, dynamic=False)
            HeadLoss.grad = staticmethod(torch.compile(grad_of_loss, dynamic=False))

    @property
    def path(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint atomically."""
        need_space(self.folder, 256)
        state = {
            "mark": self.plan.mark(self.shape),
            "params": {k: v.detach() for k, v in self.params.items()},
            "optimiser": self.optimiser.state(),
            "elapsed": self.elapsed,
            "seen": self.seen,
            "random": self.data.random.bit_generator.state,
            "curve": self.curve,
            "shape": asdict(self.shape),
        }
        write_atomic(self.path, lambda path: torch.save(state, path))

    def load(self) -> None:
        """Continue from the checkpoint if there is one; refuse one of another configuration."""
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, weights_only=False)
        except Exception as problem:
            raise RecipeError(
                f"checkpoint {self.path.name} is damaged: {type(problem).__name__}"
            ) from problem
        if state["mark"] != self.plan.mark(self.shape):
            raise RecipeError(
                f"checkpoint in {self.folder.name} is from another config; move it away or use its settings"
            )
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(state["params"][name])
        self.optimiser.load(state["optimiser"])
        self.elapsed, self.seen, self.curve = state["elapsed"], state["seen"], state["curve"]
        self.data.random.bit_generator.state = state["random"]
        say(f"pretrain: going on at {self.seen} tokens, {self.elapsed / 60:.1f} minutes")

    def step(self, done: float) -> float:
        """One optimiser step at a fraction of the budget; returns the loss."""
        _, count, length = next(phase for phase in self.plan.phases if done < phase[0] or phase[0] >= 1)
        table = self.tables.setdefault(length, tables(self.shape, length))
        ids, targets = self.data.batch(count, length)
        h, _ = hidden_states(self.params, self.shape, ids, table, self.step_fn)
        loss = HeadLoss.apply(h.reshape(-1, h.shape[-1]), self.params["model.embed_tokens.weight"], targets)
        loss.backward()
        self.optimiser.step(schedule(done))
        self.seen += ids.numel()
        return float(loss.detach())


def pretrain(
    folder: Path, shape: Shape, plan: Plan, train: np.ndarray, held: np.ndarray, bytes_per_token: float
) -> Run:
    """Train until the budget is used; evaluation and saving count as training time."""
    need_space(folder, 512)
    run = Run(folder, shape, plan, train)
    run.load()
    budget = plan.minutes * 60
    began = time.monotonic() - run.elapsed
    saved = checked = reported = run.elapsed
    loss, steps = float("nan"), 0
    while run.elapsed < budget:
        now = run.step(min(run.elapsed / budget, 0.9999))
        loss = now if steps == 0 else 0.95 * loss + 0.05 * now
        run.elapsed = time.monotonic() - began
        steps += 1
        if run.elapsed - reported > 15 or steps <= 3:
            reported = run.elapsed
            say(
                f"pretrain: {run.elapsed / 60:5.1f}/{plan.minutes:.0f} min, step {run.optimiser.count}, "
                f"{run.seen} tokens, {run.seen / max(run.elapsed, 1):.0f}/s, loss {loss:.3f}"
            )
        last = run.elapsed >= budget
        if run.elapsed - checked > plan.check_every or last:
            checked = run.elapsed
            bpb = bits_per_byte(run.params, shape, held, bytes_per_token, rows=48 if last else 12)
            run.curve.append([run.elapsed / 60, run.seen, bpb])
            say(f"pretrain: held-out {bpb:.4f} bits per byte")
            write_atomic(folder / "curve.json", lambda path: path.write_text(json.dumps(run.curve)))
        if run.elapsed - saved > plan.save_every or last:
            saved = run.elapsed
            run.save()
    return run
