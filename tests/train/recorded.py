"""Fixed-seed training of each kind of drafter, as numbers: of the weights, texts and seeds that this file makes itself.

`python tests/train/recorded.py` prints what `recorded.json` holds. That was written by the code before drafters' networks
were trained through their own graphs, which had each network a second time, as a torch module.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from paceline.train import (
    DFlash,
    DSpark,
    Eagle3,
    GemmaAssistant,
    Mtp,
    Recipe,
    Text,
    TrainOptions,
    distil,
    pack,
)
from paceline.train.methods import Method
from paceline.train.objectives import find_objective
from paceline.train.parallel import choose_anchors
from paceline.train.rounds import Plan, batch_loss
from paceline.train.windows import Windows

FILE = Path(__file__).with_suffix(".json")
STEPS = 3
# method, target
KINDS: dict[str, tuple[Method, str]] = {
    "eagle3": (Eagle3(vocabulary=30), "llama3"),
    "eagle3, head of the target": (Eagle3(vocabulary=40, flags=("fc_norm", "norm_output"), shared=True), "qwen3"),
    "eagle3, whole vocabulary": (Eagle3(flags=("norm_before_fc",)), "gemma4"),
    "mtp": (Mtp(), "llama3"),
    "mtp for gemma4": (Mtp(), "gemma4"),
    "dflash": (DFlash(vocabulary=30), "llama3"),
    "dflash, head of the target": (DFlash(taps=(0, 2, 4), shared=True), "gemma4"),
    "dspark": (DSpark(vocabulary=30, rank=8), "llama3"),
    "dspark for gemma4": (DSpark(rank=8, shared=True), "gemma4"),
    "gemma-assistant": (GemmaAssistant(), "gemma4"),
}  # fmt: skip


def build(kind: str, folder: Path) -> Path:
    """A target whose weights are numpy's: those of transformers' initialisation may change from version to version."""
    if kind == "gemma4":
        build_target("dense", folder)
    else:
        build_decoder(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        drawn = (
            np.random.default_rng(crc32(name.encode())).normal(size=tuple(tensor.shape)).astype(np.float32)
        )
        wide = tensor.dim() > 1
        tensors[name] = torch.from_numpy(drawn * tensor.shape[-1] ** -0.5 if wide else 1 + 0.1 * drawn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def windows(seed: int, *lengths: int) -> Windows:
    draw = np.random.default_rng(seed)
    return pack((Text(draw.integers(3, VOCAB, size=n).tolist(), ((0, n),)) for n in lengths), 50)


def loss_and_gradient(method: Method, target: Path) -> dict[str, Any]:
    """Of one batch from every position of it, with norms that are not one."""
    teacher = method.teacher(target, "cpu")
    train = windows(5, 29, 17, 21, 50)
    module = method.start(teacher, train, "scratch", 0).module
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.cos(torch.arange(len(parameter)) * 1.7))
    captured = teacher.capture(train)
    plan = Plan(find_objective("hybrid"), "decay", 0.8, STEPS, 0)
    loss, count = batch_loss(module, captured, teacher.narrow_logits, plan, None)
    loss.backward()
    norms = sorted(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)
    with torch.no_grad():
        states = module.unroll(captured, choose_anchors(captured, STEPS, 0, None), STEPS)
    size = [float(module.logits(state).detach().std()) for state in states]
    return {"loss": float(loss.detach()), "count": count, "gradients": norms, "logits": size}


def training(method: Method, target: Path, out: Path) -> dict[str, Any]:
    """Loss and gradient's norm of each update, and what is accepted of each position at the end."""
    options = TrainOptions(
        steps=6, batch=2, length=50, draft_tokens=STEPS, eval_every=3, save_every=6, anchors=20, optimizer="muon"
    )  # fmt: skip
    done = distil(
        target, windows(7, 29, 17, 21, 50, 33, 12, 40), windows(8, 50, 41), out, Recipe(options, method=method)
    )  # fmt: skip
    history = done.run.state.history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["norm"] for entry in history if "norm" in entry],
        "accepted": done.after.sampled, "tokens": done.after.sampled_tokens, "rounds": done.after.rounds,
    }  # fmt: skip


def numbers(name: str, folder: Path) -> dict[str, Any]:
    method, kind = KINDS[name]
    target = build(kind, folder / "target")
    return loss_and_gradient(method, target) | training(method, target, folder / "out")


def main() -> None:
    rows = []
    for name in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(f" {json.dumps(name)}: {json.dumps(numbers(name, Path(folder)))}")
    print("{", ",\n".join(rows), "}", sep="\n")


if __name__ == "__main__":
    main()
