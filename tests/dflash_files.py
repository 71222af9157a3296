"""Small random DFlash checkpoints, and an independent reading of the published source in plain torch.

`DFlashReference` follows z-lab's dflash/model.py and speculators 0.9.0, models/dflash/model_definitions.py, over a whole
text: no cache, no graph, nothing of paceline but the target's own hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

HEADS, KV_HEADS, HEAD_DIM, INNER, THETA, EPS, BLOCK, MASK = 4, 2, 16, 40, 10_000.0, 1e-6, 8, 3


def build_dflash(
    folder: Path,
    *,
    hidden: int,
    vocab: int,
    draft_vocab: int | None = None,
    taps: tuple[int, ...] = (1, 3),
    layers: int = 2,
    original: bool = False,
    seed: int = 0,
    layer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Save a drafter for a target of `hidden` columns and `vocab` tokens; `original`: in z-lab's layout.

    layer: changes of the config of its layers. changes: of config.json.
    """
    g = torch.Generator().manual_seed(seed)

    def matrix(out: int, inner: int) -> Tensor:
        return torch.randn(out, inner, generator=g) * inner**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=g)

    tensors = {"fc.weight": matrix(hidden, len(taps) * hidden), "hidden_norm.weight": norm(hidden),
               "norm.weight": norm(hidden)}  # fmt: skip
    for i in range(layers):
        at = f"layers.{i}"
        tensors |= {
            f"{at}.{name}.weight": norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {f"{at}.self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
        tensors |= {
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, hidden),
            f"{at}.mlp.up_proj.weight": matrix(INNER, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, INNER),
        }
    if draft_vocab is not None:
        ids = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        tensors["lm_head.weight"] = matrix(draft_vocab, hidden) * 4
    about = {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": layers, "vocab_size": vocab,
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 512, "hidden_act": "silu",
    } | (layer or {})  # fmt: skip
    if original:
        inner = {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in taps]}
        config = about | {"architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": inner}
    else:
        config = {
            "speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": BLOCK,
            "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(taps), "draft_vocab_size": draft_vocab or vocab,
            "transformer_layer_config": about,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


class DFlashReference:
    """Drafts greedily for a text, from the target's hidden states of it, in float64."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.w = {name: wide(value) for name, value in load_file(folder / "model.safetensors").items()}
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers = self.config.get("transformer_layer_config", self.config)
        self.rotary = Qwen3RotaryEmbedding(
            Qwen3Config(**{k: layers[k] for k in layers if k != "architectures"})
        )
        shared = load_file(target / "model.safetensors")
        name = next(name for name in shared if name.endswith(("embed_tokens.weight", "embeddings.weight")))
        self.embedding = self.w.get("embed_tokens.weight", wide(shared[name]))
        head = wide(shared["lm_head.weight"]) if "lm_head.weight" in shared else wide(shared[name])
        self.head = self.w.get("lm_head.weight", head)
        self.ids = torch.arange(len(self.head)) + self.w.get("d2t", torch.tensor(0))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def rotated(self, x: Tensor, first: int) -> Tensor:
        """[T, heads, d] at positions first, first + 1, ..."""
        cos, sin = (part[0][:, None] for part in self.rotary(x, first + torch.arange(len(x))[None]))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def mask(self, layer: int, rows: int, before: int) -> Tensor:
        """[rows, before + rows], which keys a row of the block sees in a layer."""
        said = self.config.get("transformer_layer_config", self.config)
        at, key = before + torch.arange(rows)[:, None], torch.arange(before + rows)[None]
        if "layer_types" not in said or said["layer_types"][layer] == "full_attention":
            return torch.ones(rows, before + rows, dtype=torch.bool)
        seen = key > at - said["sliding_window"]
        causal = self.config.get("sliding_window_non_causal") is False or self.config.get(
            "dflash_query_causal"
        )
        return seen & (key <= at) if causal else seen

    def attention(self, at: str, x: Tensor, context: Tensor) -> Tensor:
        """Queries of the block alone; keys and values of context and block."""
        q, both = (x @ self.w[f"{at}.q_proj.weight"].T).view(len(x), -1, HEAD_DIM), torch.cat((context, x))
        k, v = ((both @ self.w[f"{at}.{name}_proj.weight"].T).view(len(both), -1, HEAD_DIM) for name in "kv")
        q = self.rotated(self.norm(f"{at}.q_norm", q), len(context))
        k = self.rotated(self.norm(f"{at}.k_norm", k), 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        mask = self.mask(int(at.split(".")[1]), len(x), len(context))
        if f"{at}.attention_sink_bias" in self.w:  # a key of its own score that brings nothing
            scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
            sinks = self.w[f"{at}.attention_sink_bias"][:, None, None].expand(-1, len(x), 1)
            shares = torch.cat((scores.masked_fill(~mask, -torch.inf), sinks), -1).softmax(-1)[..., :-1]
            return torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ self.w[f"{at}.o_proj.weight"].T
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k, v)), attn_mask=mask
        )
        return out[0].transpose(0, 1).flatten(1) @ self.w[f"{at}.o_proj.weight"].T

    def feed(self, at: str, y: Tensor) -> Tensor:
        up = F.silu(y @ self.w[f"{at}.gate_proj.weight"].T) * (y @ self.w[f"{at}.up_proj.weight"].T)
        return up @ self.w[f"{at}.down_proj.weight"].T

    def around(self, name: str, y: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer of the normed rows `y`; relatives have something around it."""
        return inner(y)

    @property
    def first(self) -> int:
        return 0 if self.config.get("sample_from_anchor") else 1

    def block(self, text: list[int], states: Tensor) -> Tensor:
        """The normed rows of the block [B, H] behind `text`, from states [len(text) - 1, taps * hidden] of its rows."""
        rows = (
            self.config["block_size"]
            if "block_size" in self.config
            else self.config["dflash_config"]["block_size"]
        )
        context = self.norm("hidden_norm", states.double() @ self.w["fc.weight"].T)
        x = self.embedding[torch.tensor([text[-1], *[MASK] * (rows - 1)])]
        for i in range(sum(name.endswith("q_proj.weight") for name in self.w)):
            at = f"layers.{i}"
            y = self.norm(f"{at}.input_layernorm", x)
            x = x + self.around(
                f"{at}.attention", y, lambda y, at=at: self.attention(f"{at}.self_attn", y, context)
            )
            y = self.norm(f"{at}.post_attention_layernorm", x)
            x = x + self.around(f"{at}.mlp", y, lambda y, at=at: self.feed(f"{at}.mlp", y))
        return self.norm("norm", x)

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """(tokens, logits [C] of each) after `text`."""
        logits = (self.block(text, states) @ self.head.T)[self.first : self.first + count]
        return [int(self.ids[row.argmax()]) for row in logits], list(logits)


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
