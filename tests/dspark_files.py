"""Small random DSpark checkpoints in the published layouts, and an independent reading of DeepSpec's source in float64.

`DSparkReference` follows DeepSpec's modeling/dspark over a whole text: no cache, no graph.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from dflash_files import BLOCK, EPS, HEAD_DIM, HEADS, KV_HEADS, MASK, DFlashReference, build_dflash

RANK = 12
STYLES = ("speculators", "deepseek", "specforge", "liquid")


def build_dspark(
    folder: Path,
    *,
    hidden: int,
    vocab: int,
    style: str = "speculators",
    markov: str = "vanilla",
    rank: int = RANK,
    anchored: bool | None = None,
    reads_token: bool = True,
    sinks: bool = False,
    seed: int = 0,
    **more: Any,
) -> Path:
    """Save a drafter. `sinks`: as NVIDIA has them, without a confidence head. `anchored`: what the config says of it,
    None nothing; more: as for `build_dflash`.
    """
    original = style != "speculators"
    build_dflash(folder, hidden=hidden, vocab=vocab, original=original, seed=seed, **more)
    g = torch.Generator().manual_seed(seed + 1)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = more.get("draft_vocab") or vocab

    def matrix(out: int, inner: int, scale: float = 1.0) -> Tensor:
        return torch.randn(out, inner, generator=g) * inner**-0.5 * scale

    if rank:
        tensors |= {
            "markov_head.markov_w1.weight": matrix(vocab, rank, rank**0.5),
            "markov_head.markov_w2.weight": matrix(rows, rank, 3.0),
        }
    if rank and markov == "gated":
        tensors |= {"markov_head.gate_proj.weight": matrix(rank, hidden + rank, 3.0),
                    "markov_head.gate_proj.bias": matrix(1, rank)[0]}  # fmt: skip
    if rank and markov == "rnn":
        tensors |= {"markov_head.joint_proj.weight": matrix(3 * rank, 2 * rank + hidden, 2.0),
                    "markov_head.joint_proj.bias": matrix(1, 3 * rank)[0]}  # fmt: skip
    width = hidden + rank if rank and reads_token else hidden
    tensors |= {
        "confidence_head.proj.weight": matrix(1, width, 2.0),
        "confidence_head.proj.bias": torch.tensor([0.3]),
    }
    heads = {
        "markov_rank": rank, "markov_head_type": markov, "enable_confidence_head": True,
        "confidence_head_with_markov": bool(rank) and reads_token,
    }  # fmt: skip
    if style == "speculators":
        config |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], **heads}
    elif style == "deepseek":
        inner = config.pop("dflash_config")
        config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **inner, **heads}
    elif style == "specforge":
        config |= {"architectures": ["DSparkDraftModel"]}
        config["dflash_config"] |= {"attention_mode": "gqa", "projector_type": "dspark", **heads}
    else:
        config |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, **heads}
        tensors = {name: pairs(name, value) for name, value in tensors.items()}
    if anchored is not None:
        config["sample_from_anchor"] = anchored
    if sinks:
        tensors = {name: value for name, value in tensors.items() if "confidence" not in name}
        for i in range(config["num_hidden_layers"]):
            tensors[f"layers.{i}.self_attn.attention_sink_bias"] = torch.randn(HEADS, generator=g)
        del config["enable_confidence_head"], config["confidence_head_with_markov"]
        config |= {"dspark_bonus_anchor": True, "dflash_query_causal": True, "attention_sink_bias": True}
        config["dflash_config"] = {name: config.pop(name) for name in ("mask_token_id", "target_layer_ids")} | {
            "attention_sink_bias": True, "causal": True, "swa_window_size": config["sliding_window"], "use_swa": True,
            "sample_from_anchor": False,
        }  # fmt: skip
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def pairs(name: str, value: Tensor) -> Tensor:
    """Heads whose rotated pairs, columns i and i + d / 2, lie side by side."""
    order = torch.arange(HEAD_DIM).view(2, -1).T.flatten()
    for what, heads in (("q", HEADS), ("k", KV_HEADS)):
        if name.endswith(f"{what}_proj.weight"):
            return value.view(heads, HEAD_DIM, -1)[:, order].flatten(0, 1)
        if name.endswith(f"{what}_norm.weight"):
            return value[order]
    return value


class DSparkReference(DFlashReference):
    def __init__(self, target: Path, folder: Path) -> None:
        super().__init__(target, folder)
        self.config = {**self.config, **self.config.get("dflash_config", {})}
        if self.config.get("rope_is_neox_style") is False:
            back = torch.arange(HEAD_DIM).view(-1, 2).T.flatten()
            for name, value in self.w.items():
                for what, heads in (("q", HEADS), ("k", KV_HEADS)):
                    if name.endswith(f"{what}_proj.weight"):
                        self.w[name] = value.view(heads, HEAD_DIM, -1)[:, back].flatten(0, 1)
                    elif name.endswith(f"{what}_norm.weight"):
                        self.w[name] = value[back]

    @property
    def first(self) -> int:
        said = self.config.get("sample_from_anchor")
        return (0 if said else 1) if said is not None else int("speculators_model_type" in self.config)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def walk(self, text: list[int], states: Tensor) -> tuple[list[Tensor], Tensor]:
        """(rows of the block that draft, their scores by the head alone)."""
        rows = self.block(text, states)[self.first :]
        return list(rows), rows @ self.head.T

    def step(self, h: Tensor, base: Tensor, last: int, s: Tensor) -> tuple[Tensor, float, Tensor]:
        """(logits, confidence, the next state)."""
        if "markov_head.markov_w1.weight" not in self.w:
            return base, float(torch.sigmoid(self.linear("confidence_head.proj", h))), s
        e = self.w["markov_head.markov_w1.weight"][last]
        latent = e
        if self.config["markov_head_type"] == "gated":
            latent = torch.sigmoid(self.linear("markov_head.gate_proj", torch.cat((h, e)))) * e
        if self.config["markov_head_type"] == "rnn":
            gate, candidate, out = self.linear("markov_head.joint_proj", torch.cat((s, e, h))).chunk(3)
            s = torch.sigmoid(gate) * s + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            latent = torch.tanh(out)
        sure = 0.0
        if "confidence_head.proj.weight" in self.w:
            seen = torch.cat((h, e)) if self.config["confidence_head_with_markov"] else h
            sure = float(torch.sigmoid(self.linear("confidence_head.proj", seen)))
        return base + self.w["markov_head.markov_w2.weight"] @ latent, sure, s

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        rows, base = self.walk(text, states)
        s = torch.zeros(self.config["markov_rank"], dtype=torch.float64)
        tokens: list[int] = []
        scores: list[Tensor] = []
        self.sure: list[float] = []
        for h, own in zip(rows[:count], base, strict=False):
            logits, sure, s = self.step(h, own, tokens[-1] if tokens else text[-1], s)
            tokens.append(int(self.ids[logits.argmax()]))
            scores.append(logits)
            self.sure.append(sure)
        return tokens, scores


def build_gemma_dspark(
    folder: Path, *, hidden: int, vocab: int, k_eq_v: bool = False, layers: int = 2
) -> Path:
    """Save a drafter with layers of Gemma 4, as DeepSpec has them."""
    build_dspark(folder, hidden=hidden, vocab=vocab, style="deepseek", layers=layers, taps=(1, 2))
    g = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=g)
    tensors["lm_head.weight"] = torch.randn(vocab, hidden, generator=g) * hidden**-0.5 * 4
    for i in range(layers):
        at = f"layers.{i}"
        for name in ("pre_feedforward", "post_feedforward"):
            tensors[f"{at}.{name}_layernorm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=g)
        tensors[f"{at}.layer_scalar"] = 0.8 + 0.1 * torch.randn(1, generator=g)
        if k_eq_v:
            del tensors[f"{at}.self_attn.v_proj.weight"]
    for name in ("rope_theta", "hidden_act"):
        config.pop(name)
    config |= {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "global_head_dim": HEAD_DIM,
        "num_global_key_value_heads": KV_HEADS, "attention_k_eq_v": k_eq_v, "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 3.0, "layer_types": ["full_attention"] * layers, "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        },
    }  # fmt: skip
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class GemmaDSparkReference(DSparkReference):
    """By transformers' models/gemma4, with the block and the heads of DeepSpec."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.w = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.embedding = self.w["embed_tokens.weight"] * self.w["embed_tokens.weight"].shape[1] ** 0.5
        self.head = self.w["lm_head.weight"]
        self.ids = torch.arange(len(self.head))

    def rotated(self, x: Tensor, first: int) -> Tensor:
        turning = HEAD_DIM // 4  # half of the pairs rotate, by frequencies of the whole head
        turn = 1e4 ** -(torch.arange(0, 2 * turning, 2).double() / HEAD_DIM)
        turn = torch.cat((turn, torch.zeros(HEAD_DIM // 2 - turning)))
        angle = (first + torch.arange(len(x)))[:, None] * turn
        cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def seen(self, at: str, x: Tensor, context: Tensor) -> Tensor:
        q, both = (x @ self.w[f"{at}.q_proj.weight"].T).view(len(x), -1, HEAD_DIM), torch.cat((context, x))
        k = (both @ self.w[f"{at}.k_proj.weight"].T).view(len(both), -1, HEAD_DIM)
        v = (
            k
            if f"{at}.v_proj.weight" not in self.w
            else (both @ self.w[f"{at}.v_proj.weight"].T).view(k.shape)
        )
        v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)
        q = self.rotated(self.norm(f"{at}.q_norm", q), len(context))
        k = self.rotated(self.norm(f"{at}.k_norm", k), 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        shares = torch.einsum("qhd,khd->hqk", q, k).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, v).flatten(1) @ self.w[f"{at}.o_proj.weight"].T

    def block(self, text: list[int], states: Tensor) -> Tensor:
        context = self.norm("hidden_norm", states.double() @ self.w["fc.weight"].T)
        x = self.embedding[torch.tensor([text[-1], *[MASK] * (BLOCK - 1)])]
        for i in range(self.config["num_hidden_layers"]):
            at = f"layers.{i}"
            y = self.seen(f"{at}.self_attn", self.norm(f"{at}.input_layernorm", x), context)
            x = x + self.norm(f"{at}.post_attention_layernorm", y)
            y = self.norm(f"{at}.pre_feedforward_layernorm", x)
            gate = F.gelu(y @ self.w[f"{at}.mlp.gate_proj.weight"].T, approximate="tanh")
            y = (gate * (y @ self.w[f"{at}.mlp.up_proj.weight"].T)) @ self.w[f"{at}.mlp.down_proj.weight"].T
            x = (x + self.norm(f"{at}.post_feedforward_layernorm", y)) * self.w[f"{at}.layer_scalar"]
        return self.norm("norm", x)

    @property
    def first(self) -> int:
        return 0

    def walk(self, text: list[int], states: Tensor) -> tuple[list[Tensor], Tensor]:
        rows = self.block(text, states)
        return list(rows), 3.0 * torch.tanh(rows @ self.head.T / 3.0)


__all__ = ["BLOCK", "DSparkReference", "GemmaDSparkReference", "build_dspark", "build_gemma_dspark"]
