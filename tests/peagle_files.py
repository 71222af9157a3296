"""Small random P-EAGLE checkpoints, and an independent reading of speculators' models/peagle: no cache, no graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from eagle3_files import HEAD_DIM, HEADS, INNER, KV_HEADS, Reference, build_eagle3

MASK, LAYERS = 3, 3


def build_peagle(
    folder: Path,
    *,
    hidden: int,
    vocab: int,
    layers: int = LAYERS,
    theirs: bool = False,
    flat: bool = False,
    **more: Any,
) -> Path:
    """Save a drafter in the layout of speculators or, if `theirs`, vLLM's. `flat`: its learned row has two dimensions."""
    build_eagle3(folder, hidden=hidden, vocab=vocab, original=theirs, **more)
    g = torch.Generator().manual_seed(9)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def matrix(out: int, inner: int) -> Tensor:
        return torch.randn(out, inner, generator=g) * inner**-0.5

    wide = tensors["fc.weight"].shape[1]
    tensors["mask_hidden"] = torch.randn((1, wide) if flat else (1, 1, wide), generator=g)
    for i in range(1, layers):
        at = f"layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": 1 + 0.2 * torch.randn(hidden, generator=g),
            f"{at}.post_attention_layernorm.weight": 1 + 0.2 * torch.randn(hidden, generator=g),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, hidden),
            f"{at}.mlp.up_proj.weight": matrix(INNER, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, INNER),
        }
    config.get("transformer_layer_config", config)["num_hidden_layers"] = layers
    if theirs:
        config |= {"model_type": "llama", "dflash_config": {"mask_token_id": MASK}, "parallel_drafting": True}
    else:
        config |= {
            "speculators_model_type": "peagle",
            "mask_token_id": MASK,
            "architectures": ["PEagleSpeculator"],
        }
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class PEagleReference(Reference):
    def deeper(self, i: int, x: Tensor) -> Tensor:
        at, w = f"layers.{i}", self.w
        h = self.norm(f"{at}.input_layernorm", x)
        q, k, v = (
            (h @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(len(h), -1, HEAD_DIM) for name in "qkv"
        )
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k, v)), is_causal=True
        )
        x = x + out[0].transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = self.norm(f"{at}.post_attention_layernorm", x)
        up = F.silu(y @ w[f"{at}.mlp.gate_proj.weight"].T) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        return x + up @ w[f"{at}.mlp.down_proj.weight"].T

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        x = torch.cat((states, self.w["mask_hidden"].view(1, -1).expand(count - 1, -1)))
        if self.flags.get("norm_before_fc"):
            x = self.norm("input_norm", x)
        if self.flags.get("fc_norm"):
            parts = x.chunk(len(self.flags["eagle_aux_hidden_state_layer_ids"]), -1)
            x = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        tokens = [*text[1:], *[MASK] * (count - 1)]
        x = self.layer(self.embedding[torch.tensor(tokens)], x @ self.w["fc.weight"].T)  # type: ignore[index]
        for i in range(1, sum(name.endswith("q_proj.weight") for name in self.w)):
            x = self.deeper(i, x)
        logits = (self.norm("norm", x) @ self.head.T)[-count:]
        return [int(self.ids[row.argmax()]) for row in logits], list(logits)
