"""Small random EAGLE-3 checkpoints, and an independent reading of the published source in plain torch.

`Reference` follows speculators 0.9.0, models/eagle3/core.py and model_definitions.py, step by step over a whole text:
no cache, no graph, nothing of paceline but the target's own hidden states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

HEADS, KV_HEADS, HEAD_DIM, INNER, THETA, EPS = 4, 2, 16, 40, 10_000.0, 1e-5
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def build_eagle3(
    folder: Path,
    *,
    hidden: int,
    vocab: int,
    draft_vocab: int | None = None,
    taps: tuple[int, ...] = (1, 2, 3),
    width: int | None = None,
    kind: str = "llama",
    original: bool = False,
    without: tuple[str, ...] = (),
    seed: int = 0,
    **flags: Any,
) -> Path:
    """Save a drafter for a target of `hidden` columns and `vocab` tokens; `width`: its own columns."""
    g = torch.Generator().manual_seed(seed)
    width, draft_vocab = width or hidden, draft_vocab or vocab

    def matrix(out: int, inner: int) -> Tensor:
        return torch.randn(out, inner, generator=g) * inner**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    at = "midlayer" if original else "layers.0"
    tensors = {
        "fc.weight": matrix(width, len(taps) * hidden),
        "norm.weight": norm(width),
        "lm_head.weight": matrix(draft_vocab, width) * 4,
        "embed_tokens.weight": torch.randn(vocab, width, generator=g),
        f"{at}.hidden_norm.weight": norm(width),
        f"{at}.input_layernorm.weight": norm(width),
        f"{at}.post_attention_layernorm.weight": norm(width),
        f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * width),
        f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * width),
        f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * width),
        f"{at}.self_attn.o_proj.weight": matrix(width, HEADS * HEAD_DIM),
        f"{at}.mlp.gate_proj.weight": matrix(INNER, width),
        f"{at}.mlp.up_proj.weight": matrix(INNER, width),
        f"{at}.mlp.down_proj.weight": matrix(width, INNER),
    }
    if kind == "qwen3":
        tensors |= {f"{at}.self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(taps) * hidden)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(hidden) for i in range(len(taps))}
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    layer = {
        "model_type": kind, "hidden_size": width, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": vocab,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    own = {
        "draft_vocab_size": draft_vocab, "target_hidden_size": hidden, "eagle_aux_hidden_state_layer_ids": list(taps),
    }  # fmt: skip
    config: dict[str, Any] = (
        layer | own | {"architectures": ["LlamaForCausalLMEagle3"]}
        if original
        else own
        | {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": layer,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in tensors.items() if k not in without}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config | flags), encoding="utf-8")
    return folder


class Reference:
    """Drafts greedily for a text, from the target's hidden states of it."""

    def __init__(self, folder: Path, embedding: Tensor | None = None, head: Tensor | None = None) -> None:
        """`embedding`, `head`: the target's, where the checkpoint has none."""
        self.w = {
            k.replace("midlayer.", "layers.0."): v for k, v in load_file(folder / "model.safetensors").items()
        }
        self.flags = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.ids = torch.arange(self.flags["draft_vocab_size"]) + self.w.get("d2t", torch.tensor(0))
        own = self.w.get("lm_head.weight")
        assert own is not None or head is not None
        self.head = own if own is not None else head[self.ids]  # type: ignore[index]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def rotated(self, x: Tensor) -> Tensor:
        """[T, heads, d] at positions 0, 1, ..."""
        turn = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = torch.arange(len(x))[:, None] * turn
        cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def layer(self, token: Tensor, hidden: Tensor) -> Tensor:
        """[T, H] of the embedded tokens and the states beside them."""
        at, w = "layers.0", self.w
        token, normed = self.norm(f"{at}.input_layernorm", token), self.norm(f"{at}.hidden_norm", hidden)
        residual = normed if self.flags.get("norm_before_residual") else hidden
        x = torch.cat((token, normed), -1)
        q, k, v = (
            (x @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM) for name in "qkv"
        )
        if f"{at}.self_attn.q_norm.weight" in w:
            q, k = self.norm(f"{at}.self_attn.q_norm", q), self.norm(f"{at}.self_attn.k_norm", k)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k, v)), is_causal=True
        )
        x = residual + out[0].transpose(0, 1).flatten(1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = self.norm(f"{at}.post_attention_layernorm", x)
        up = F.silu(y @ w[f"{at}.mlp.gate_proj.weight"].T) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        return x + up @ w[f"{at}.mlp.down_proj.weight"].T

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """(tokens, logits [C] of each) after `text`, from states [len(text) - 1, taps * hidden] of its rows."""
        x = states
        if self.flags.get("norm_before_fc"):
            x = self.norm("input_norm", x)
        if self.flags.get("fc_norm"):
            parts = x.chunk(len(self.flags["eagle_aux_hidden_state_layer_ids"]), -1)
            x = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        hidden, tokens = x @ self.w["fc.weight"].T, list(text[1:])
        out: list[Tensor] = []
        for _ in range(count):
            g = self.layer(self.embedding[torch.tensor(tokens)], hidden)  # type: ignore[index]
            normed = self.norm("norm", g)
            out.append(normed[-1] @ self.head.T)
            hidden = torch.cat((hidden, (normed if self.flags.get("norm_output") else g)[-1:]))
            tokens.append(int(self.ids[out[-1].argmax()]))
        return tokens[-count:], out


def eagle3_reference(target: Path, folder: Path) -> Reference:
    """The reading for a drafter that may take embedding and head of its target."""
    weights = {k.removeprefix("model."): v for k, v in load_file(target / "model.safetensors").items()}
    return Reference(folder, weights.get("embed_tokens.weight"), weights.get("lm_head.weight"))
