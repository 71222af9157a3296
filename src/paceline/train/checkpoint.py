"""The state of a run in one file, replaced atomically: whatever happens, the last good one is there.

The file is safetensors: parameters, the optimizer's moments and the best parameters so far, with the counters
as JSON metadata. No pickle, so a third party's checkpoint cannot run code.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CapacityError, LoadError, UsageError, sized
from paceline.train.parallel import DraftModule

MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW and of Muon
STATE_FILE = "state.safetensors"


@dataclass(slots=True)
class RunState:
    """Everything beside the parameters that a resumed run needs; randomness and data order follow from
    `step`.
    """

    fingerprint: str
    step: int = 0  # updates done
    best_score: float = float("-inf")
    best_step: int = 0
    bad_evaluations: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def disk_errors(path: Path, remains: str) -> Iterator[None]:
    """Turn a full disk and other write errors into one line; `kept` says what is still good."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = "No space left" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)
        why = "the disk is full" if full else str(error)
        raise CapacityError(
            f"cannot save {path}: {why}; {remains}; free some space and run the same command again"
        ) from error


def write_atomic(path: Path, write: Callable[[Path], None], remains: str) -> None:
    """Let `write` fill a file beside `path`, then rename it into place; on failure nothing of it stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, remains):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def check_space(folder: Path, need: int) -> None:
    """Raise CapacityError before anything is computed if `need` bytes cannot be saved in `folder`."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < need:
        raise CapacityError(
            f"{folder} has {sized(free)} free and saving needs {sized(need)}: free some space"
        )


def save_state(
    folder: Path,
    state: RunState,
    module: DraftModule,
    optimizers: Seq[torch.optim.Optimizer],
    best: dict[str, torch.Tensor],
) -> None:
    """Write everything to folder/state.safetensors. Raises CapacityError on a full disk; the old file
    stays.
    """
    tensors = {f"now.{n}": t.detach().cpu().contiguous() for n, t in module.state_dict().items()}
    tensors |= {f"best.{n}": t.cpu().contiguous() for n, t in best.items()}
    for name, parameter in module.trainable():
        for key, value in _own(optimizers, parameter).state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).detach().cpu().clone()
    meta = {
        "fingerprint": state.fingerprint, "step": state.step, "best_score": repr(state.best_score),
        "best_step": state.best_step, "bad_evaluations": state.bad_evaluations, "history": state.history,
    }  # fmt: skip
    path = folder / STATE_FILE
    state_kept = (
        f"the checkpoint before step {state.step} is untouched"
        if path.exists()
        else "nothing was saved before"
    )
    write_atomic(path, lambda p: save_file(tensors, p, metadata={"run": json.dumps(meta)}), state_kept)


def load_state(
    folder: Path, fingerprint: str, module: DraftModule, optimizers: Seq[torch.optim.Optimizer]
) -> tuple[RunState, dict[str, torch.Tensor]] | None:
    """Restore a run in place; None if there is none. UsageError if it was started with other options."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path} is not a training checkpoint ({error}): remove it to start anew") from error
    if meta["fingerprint"] != fingerprint:
        raise UsageError(
            f"{folder} holds a run with other options or data: use another --out, or remove {path}"
        )
    meta["best_score"] = float(meta["best_score"])
    parts: dict[str, dict[str, torch.Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = tensor
    module.load_state_dict(parts["now"])
    for name, parameter in module.trainable():
        stored = {k: parts["optimizer"].get(f"{k}.{name}") for k in MOMENTS}
        moments = {
            k: v if k == "step" else v.to(parameter.device) for k, v in stored.items() if v is not None
        }
        if moments:
            _own(optimizers, parameter).state[parameter] = moments
    return RunState(**meta), parts["best"]


def _own(optimizers: Seq[torch.optim.Optimizer], parameter: torch.Tensor) -> torch.optim.Optimizer:
    """The one that updates a parameter."""
    return next(
        o for o in optimizers for group in o.param_groups if any(p is parameter for p in group["params"])
    )
