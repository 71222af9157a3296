"""A small random model in the layout of facebook/multi-token-prediction, and its forward in plain torch.

`meta_forward` follows the published model.py over one whole text: rotary pairs lie side by side, the last of `layers` and
all of `extra_heads` read the same input, and norm and output are shared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints import VOCAB

PARAMS: dict[str, Any] = {
    "dim": 48, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 16, "norm_eps": 1e-5,
    "n_future_tokens": 4, "max_seq_len": 512,
}  # fmt: skip
INNER = 64


def build_meta(folder: Path, *, seed: int = 0, rows: int = VOCAB, **changes: Any) -> Path:
    """consolidated.pth with a vocabulary of `rows`, and params.json; `changes` of params.json."""
    params = PARAMS | changes
    g = torch.Generator().manual_seed(seed)
    dim, heads = params["dim"], params["n_future_tokens"]
    narrow = dim // params["n_heads"] * (params["n_kv_heads"] or params["n_heads"])

    def matrix(out: int, width: int) -> Tensor:
        return torch.randn(out, width, generator=g) * width**-0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(dim, generator=g)

    made = {"tok_embeddings.weight": torch.randn(rows, dim, generator=g), "norm.weight": norm(),
            "output.weight": matrix(rows, dim), "rope.freqs": torch.ones(dim // params["n_heads"] // 2)}  # fmt: skip
    blocks = [f"layers.{i}" for i in range(params["n_layers"] - heads + 1)]
    for at in blocks + [f"extra_heads.{k}" for k in range(heads - 1)]:
        made |= {
            f"{at}.attention.wq.weight": matrix(dim, dim), f"{at}.attention.wk.weight": matrix(narrow, dim),
            f"{at}.attention.wv.weight": matrix(narrow, dim), f"{at}.attention.wo.weight": matrix(dim, dim),
            f"{at}.feed_forward.w1.weight": matrix(INNER, dim), f"{at}.feed_forward.w2.weight": matrix(dim, INNER),
            f"{at}.feed_forward.w3.weight": matrix(INNER, dim), f"{at}.attention_norm.weight": norm(),
            f"{at}.ffn_norm.weight": norm(),
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(made, folder / "consolidated.pth")
    (folder / "params.json").write_text(json.dumps(params), encoding="utf-8")
    return folder


def meta_forward(folder: Path, tokens: list[int]) -> Tensor:
    """Logits [T, n_future_tokens, V]: those at [t, k] are of token t + 1 + k."""
    params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
    w = torch.load(folder / "consolidated.pth", weights_only=True)
    count, heads = len(tokens), params["n_heads"]
    size, grouped = params["dim"] // heads, params["n_kv_heads"] or heads
    turn = 1.0 / (params.get("rope_theta", 10000.0) ** (torch.arange(0, size, 2).float() / size))
    phase = torch.outer(torch.arange(count).float(), turn)
    freqs = torch.polar(torch.ones_like(phase), phase)[:, None]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * weight

    def rotated(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs).flatten(2)

    def block(x: Tensor, at: str) -> Tensor:
        h = norm(x, w[f"{at}.attention_norm.weight"])
        q, k, v = ((h @ w[f"{at}.attention.w{name}.weight"].T).view(count, -1, size) for name in "qkv")
        k, v = (part.repeat_interleave(heads // grouped, 1) for part in (rotated(k), v))
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (rotated(q), k, v)), is_causal=True
        )
        x = x + out[0].transpose(0, 1).flatten(1) @ w[f"{at}.attention.wo.weight"].T
        h = norm(x, w[f"{at}.ffn_norm.weight"])
        gate, down, up = (w[f"{at}.feed_forward.w{i}.weight"] for i in (1, 2, 3))
        return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T

    x = w["tok_embeddings.weight"][torch.tensor(tokens)]
    trunk = params["n_layers"] - params["n_future_tokens"]
    for i in range(trunk):
        x = block(x, f"layers.{i}")
    last = [f"layers.{trunk}"] + [f"extra_heads.{k}" for k in range(params["n_future_tokens"] - 1)]
    return norm(torch.stack([block(x, at) for at in last], 1), w["norm.weight"]) @ w["output.weight"].T


class HeadsReference:
    """Drafts greedily for a text, by Meta's own forward of it; the target's hidden states are not asked for."""

    def __init__(self, meta: Path) -> None:
        self.meta = meta

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        logits = list(meta_forward(self.meta, text[:-1])[-1, 1 : count + 1])
        return [int(one.argmax()) for one in logits], logits
