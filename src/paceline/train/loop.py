"""The training loop: batches in, a better drafter out.

Every random choice is a function of (seed, step), so killing a run anywhere and starting it again gives the
same curve, bit for bit on a CPU. Progress is judged by acceptance on held-out data, not by the loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.errors import CapacityError, UsageError
from paceline.train.checkpoint import RunState, check_space, load_state, save_state
from paceline.train.objectives import find_objective
from paceline.train.options import TrainOptions
from paceline.train.parallel import Captured, DraftModule
from paceline.train.rounds import Observed, Plan, batch_loss, observe, summarise
from paceline.train.windows import Windows, batch_rows, step_generator

MUON_SHARE = 0.1  # of Muon's learning rate, for what AdamW updates beside it
LAW_BYTES = 512 << 20  # of the target's distributions that an evaluation holds at once

Report = Callable[[dict[str, Any]], None]  # gets each entry of the history as it is made
Phase = Callable[[str, int, int], None]  # a phase by its name, how much of it is done, and of how much


class Teacher(Protocol):
    """The frozen target."""

    @property
    def device(self) -> torch.device: ...

    def capture(self, windows: Windows) -> Captured:
        """Run the target over windows and return what the drafter reads."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V] float32"""
        ...

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C] float32, of the tokens that can be drafted"""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """How a run talks to its surroundings."""

    report: Report = lambda entry: None
    should_stop: Callable[[], bool] = lambda: False  # asked after every update; True saves and returns
    guard: Callable[[], AbstractContextManager[object]] = nullcontext  # held while updates run
    say: Callable[[str], None] = lambda line: None
    phase: Phase = lambda name, done, of: None  # how far what is done before and after them has come


@dataclass(slots=True)
class RunResult:
    state: RunState
    stopped: str  # "steps" | "no progress" | "interrupted"


def learning_rate(options: TrainOptions, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = max(1, round(options.warmup * options.steps))
    if step < warm:
        return options.lr * (step + 1) / warm
    share = (step - warm) / max(1, options.steps - warm)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def make_optimizers(module: DraftModule, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW over all parameters that the loss reaches, or Muon over the matrices inside and AdamW over the rest.

    `share` of a group: of the learning rate.
    """
    decay, parameters = options.weight_decay, [p for _, p in module.trainable()]
    apart = [module.head, *module.outside]
    inside = [
        p
        for p in parameters
        if options.optimizer == "muon" and p.dim() == 2 and not any(p is matrix for matrix in apart)
    ]
    others = [p for p in parameters if not any(p is other for other in inside)]
    share = MUON_SHARE if inside else 1.0
    adamw = {"params": others, "share": share, "betas": (0.9, 0.95), "weight_decay": decay}
    muon = {"params": inside, "share": 1.0, "weight_decay": decay}
    return [torch.optim.AdamW([adamw]), *([torch.optim.Muon([muon])] if inside else [])]


def observe_held(
    module: DraftModule, teacher: Teacher, held: Windows, options: TrainOptions,
    phase: Callable[[int, int], None], *, running: bool = False,
) -> list[Observed]:  # fmt: skip
    """Every draft round of the first `eval_windows` held-out windows; `phase` is notified how far it is."""
    rows = range(min(len(held), options.eval_windows))
    window = 4 * len(module.head) * held.length  # bytes of its distributions
    size = max(1, min(options.batch, LAW_BYTES // window))
    seen = []
    for start in range(0, len(rows), size):
        with memory_errors(options):
            captured = teacher.capture(held.take(list(rows[start : start + size])))
            seen.append(observe(module, captured, teacher.logits, options.draft_tokens, running=running))
        phase(min(start + size, len(rows)), len(rows))
    return seen


def weights_hash(module: DraftModule) -> str:
    """Of the parameters a run starts from."""
    digest = hashlib.sha256(module.kind.encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Run:
    """One training run in a folder. `module` ends up with the parameters of the best evaluation."""

    def __init__(
        self,
        module: DraftModule,
        teacher: Teacher,
        train: Windows,
        held: Windows,
        options: TrainOptions,
        folder: Path,
    ) -> None:
        """`train`: windows to train on, `held`: held out."""
        self.module, self.teacher, self.options, self.folder = module, teacher, options, folder
        self.train, self.held = train, held
        self.optimizers = make_optimizers(module, options)
        self.plan = Plan(
            find_objective(options.objective),
            options.weights,
            options.decay,
            options.draft_tokens,
            options.anchors,
        )
        self.state = RunState(
            "-".join((options.fingerprint, train.fingerprint, held.fingerprint, weights_hash(module)))
        )
        self.best = self._copy()

    def _copy(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.module.state_dict().items()}

    def go(self, hooks: Hooks = Hooks()) -> RunResult:
        """Train, resuming what the folder holds. Raises CapacityError when memory or disk run out."""
        check_space(self.folder, 16 * sum(t.numel() for t in self.module.state_dict().values()))
        stored = load_state(self.folder, self.state.fingerprint, self.module, self.optimizers)
        if stored is not None:
            self.state, self.best = stored
        else:
            self._evaluate(hooks)
        stopped = "steps"
        while self.state.step < self.options.steps:
            self._update(hooks)
            last = self.state.step == self.options.steps
            if last or self.state.step % self.options.eval_every == 0:
                self._evaluate(hooks)
            tired = 0 < self.options.patience <= self.state.bad_evaluations
            ask = hooks.should_stop()
            if last or tired or ask or self.state.step % self.options.save_every == 0:
                save_state(self.folder, self.state, self.module, self.optimizers, self.best)
            if tired or (ask and not last):
                stopped = "no progress" if tired else "interrupted"
                break
        if stopped != "interrupted":
            self.module.load_state_dict(self.best)
        return RunResult(self.state, stopped)

    def _update(self, hooks: Hooks) -> None:
        """One optimizer step over `accumulate` batches."""
        options, step = self.options, self.state.step
        began = time.perf_counter()
        total = 0.0
        for part in range(options.accumulate):
            total += self.backward(step * options.accumulate + part)
        if not math.isfinite(total):
            raise UsageError(
                f"the loss of update {step + 1} is no number: give a lower --lr, and remove {self.folder} to start anew"
            )
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.module.trainable()], options.clip)
        rate = learning_rate(options, step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        entry = {"step": self.state.step, "loss": total, "lr": rate, "norm": float(norm)}
        self.state.history.append(entry)
        hooks.report(entry | {"seconds": time.perf_counter() - began})

    def backward(self, index: int) -> float:
        """Add the gradient of the index-th batch; returns its share of the update's loss."""
        options = self.options
        rows = batch_rows(len(self.train), options.batch, options.seed, index)
        with memory_errors(options):
            captured = self.teacher.capture(self.train.take(rows))
            generator = step_generator(options.seed, index)
            loss, _ = batch_loss(self.module, captured, self.teacher.narrow_logits, self.plan, generator)
            loss = loss / options.accumulate
            torch.autograd.backward(loss)
        return float(loss.detach())

    def _evaluate(self, hooks: Hooks) -> None:
        phase = partial(hooks.phase, "evaluating")
        seen = summarise(observe_held(self.module, self.teacher, self.held, self.options, phase))
        better = seen.score > self.state.best_score
        if better:
            self.state.best_score, self.state.best_step = seen.score, self.state.step
            self.best = self._copy()
        self.state.bad_evaluations = 0 if better else self.state.bad_evaluations + 1
        entry = {"step": self.state.step, "held_out": dataclasses.asdict(seen)}
        self.state.history.append(entry)
        hooks.report(entry)


@contextmanager
def memory_errors(options: TrainOptions) -> Iterator[None]:
    """Turn running out of memory into the setting to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(options) from error
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the CPU allocator has no class of its own
            raise out_of_memory(options) from error
        raise


def out_of_memory(options: TrainOptions) -> CapacityError:
    """Which setting to lower, and to what."""
    if options.batch > 1:
        half = options.batch // 2
        more = -(-options.batch * options.accumulate // half)
        return CapacityError(
            f"out of memory with --batch {options.batch}: use --batch {half} --accumulate {more} for the "
            "same updates"
        )
    anchors = options.anchors or options.length
    if anchors > 16:
        return CapacityError(
            f"out of memory with one window: use --anchors {anchors // 2} (now {anchors} a window)"
        )
    return CapacityError(
        f"out of memory with one window: use --length {options.length // 2} (now {options.length})"
    )
