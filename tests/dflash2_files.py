"""Small random DFlash 2 checkpoints, and an independent reading of the published formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_files import DFlashReference, build_dflash

GROUP, TAPS, RANK, TOP = 8, 2, 12, 5


def build_dflash2(
    folder: Path, *, hidden: int, vocab: int, original: bool = True, layers: int = 2, seed: int = 0,
    inner: dict[str, Any] | None = None, **more: Any,
) -> Path:  # fmt: skip
    """Save a drafter in z-lab's layout, or in that of speculators. inner: changes of `dflash_config`."""
    build_dflash(folder, hidden=hidden, vocab=vocab, original=original, layers=layers, seed=seed, **more)
    g = torch.Generator().manual_seed(seed + 1)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for i in range(layers):
        for name in ("attention", "mlp"):
            base = torch.randn(2, TAPS, hidden, generator=g) * 0.2
            base[:, 0] += 1
            at = f"layers.{i}.{name}_conv"
            tensors[f"{at}.base_kernel"] = base
            count = 2 * TAPS * (hidden // GROUP)
            tensors[f"{at}.kernel_projection.weight"] = (
                torch.randn(count, hidden, generator=g) * 0.3 * hidden**-0.5
            )
    tensors |= {
        "candidate_selector.hidden_projection.weight": torch.randn(RANK, hidden, generator=g) * hidden**-0.5,
        "candidate_selector.predecessor_codebook": torch.randn(vocab, RANK, generator=g),
        "candidate_selector.successor_codebook": torch.randn(vocab, RANK, generator=g),
    }
    sizes = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP}
    if original:
        block = config.pop("block_size")
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        config["dflash_config"] |= {"block_size": block, **sizes, **(inner or {})}
    else:
        config |= {"speculators_model_type": "dflash2", "architectures": ["DFlash2Speculator"], **sizes}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class DFlash2Reference(DFlashReference):
    def __init__(self, target: Path, folder: Path) -> None:
        super().__init__(target, folder)
        self.said = {**self.config, **self.config.get("dflash_config", {})}
        self.embedding = self.embedding * self.said.get("input_embedding_scale", 1.0)

    def conv(self, at: str, side: int, x: Tensor, d: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, row in enumerate(x):
            for tap in range(min(TAPS, i + 1)):
                taps = self.w[f"{at}.base_kernel"][side, tap] + d[i, side, tap].repeat_interleave(GROUP)
                out[i] += taps * (row if not tap else x[i - tap])
        return out

    def around(self, name: str, y: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        d = (y @ self.w[f"{name}_conv.kernel_projection.weight"].T).view(len(y), 2, TAPS, -1)
        return self.conv(f"{name}_conv", 1, inner(self.conv(f"{name}_conv", 0, y, d)), d)

    def walk(self, text: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """(rows that draft, their scores by the head alone)."""
        rows = self.block(text, states)[1:]
        scores = rows @ self.head.T * self.said.get("output_multiplier", 1.0)
        cap = self.said.get("final_logit_softcapping")
        return rows, scores if cap is None else cap * torch.tanh(scores / cap)

    def follows(self, h: Tensor, before: int) -> Tensor:
        """[V]"""
        w = {
            name: self.w[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook")
        }
        hs = self.w["candidate_selector.hidden_projection.weight"] @ h
        return torch.einsum("j,j,vj->v", w["predecessor_codebook"][before], hs, w["successor_codebook"])

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        rows, scores = self.walk(text, states)
        tokens: list[int] = []
        logits: list[Tensor] = []
        for h, own in zip(rows[:count], scores, strict=False):
            chosen = own.topk(TOP).indices
            s = own + self.follows(h, tokens[-1] if tokens else text[-1])
            logits.append(s[chosen])
            tokens.append(int(chosen[s[chosen].argmax()]))
        return tokens, logits
