"""Small random modules for multi-token prediction, and an independent reading of the published source in plain torch.

`MtpReference` follows transformers 5.22, modeling_layers.MtpLayer and MtpModel.forward, over a whole text: each module
sees the tokens one place further than the one before. A single module goes on from its own output, as vLLM does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

# names of a module's own parts: embedding norm, hidden norm, projection, last norm
LAYOUTS = {
    "deepseek": ("model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj",
                 "model.layers.{n}.shared_head.norm", "model.layers.{n}"),
    "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"),
    "speculators": ("mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm", "mtp_layers.0.input_proj",
                    "mtp_layers.0.final_layernorm", "mtp_layers.0"),
}  # fmt: skip


def build_mtp(
    target: Path, folder: Path, layout: str = "deepseek", *, modules: int = 1, seed: int = 0, **changes: Any
) -> Path:
    """A copy of the target in `folder` that holds modules, or (layout speculators) a drafter for it; config `changes`.

    `own`: module tables and heads that are no copies of the target's. `without`: endings of names that are left out.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(target / "model.safetensors")
    own, without = changes.pop("own", False), changes.pop("without", ())
    g, hidden = torch.Generator().manual_seed(seed), config["hidden_size"]
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    made = {}
    for k in range(modules):
        names = [name.format(n=config["num_hidden_layers"] + k) for name in LAYOUTS[layout]]
        for name in (names[0], names[1], names[3]):
            made[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=g)
        made[f"{names[2]}.weight"] = torch.randn(hidden, 2 * hidden, generator=g) * (2 * hidden) ** -0.5
        for name, tensor in tensors.items():
            if name.startswith(last):
                value = torch.randn(tensor.shape, generator=g)
                value = 1 + 0.2 * value if tensor.dim() == 1 else value * tensor.shape[-1] ** -0.5
                made[f"{names[4]}.{name[len(last) :]}"] = value
        if own:
            made[f"{names[4]}.embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=g)
            made[f"{names[4]}.shared_head.head.weight"] = torch.randn(
                config["vocab_size"], hidden, generator=g
            )
    made = {name: tensor for name, tensor in made.items() if not name.endswith(tuple(without))}
    if layout == "speculators":
        folder.mkdir(parents=True, exist_ok=True)
        config = {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1,
                  "transformer_layer_config": config}  # fmt: skip
        save_file(made, folder / "model.safetensors")
    else:
        shutil.copytree(target, folder, dirs_exist_ok=True)
        save_file(tensors | made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


class MtpReference:
    """Drafts greedily for a text, from the target's hidden states of it after its final norm."""

    def __init__(self, target: Path, folder: Path, layout: str = "deepseek", modules: int = 1) -> None:
        self.config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        self.first = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
            "mtp_hidden_states_first"
        )
        self.w, self.layout, self.modules = load_file(folder / "model.safetensors"), layout, modules
        shared = load_file(target / "model.safetensors")
        self.embedding = shared["model.embed_tokens.weight"]
        self.head = shared.get("lm_head.weight", self.embedding)
        self.heads = self.config["num_attention_heads"]
        self.size = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        rope = self.config.get("rope_parameters") or {}
        self.partial = rope.get("partial_rotary_factor", 1.0)
        self.theta = rope.get("rope_theta") or self.config.get("rope_theta") or 10_000.0

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config["rms_norm_eps"]
        weight = self.w[f"{name}.weight"] + ("qwen3_5" in self.config["model_type"])
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def rotated(self, x: Tensor) -> Tensor:
        """[T, heads, d] at positions 0, 1, ..."""
        size = int(self.size * self.partial)
        turn = self.theta ** -(torch.arange(0, size, 2) / size)
        angle = torch.arange(len(x))[:, None] * turn
        cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
        x, rest = x[..., :size], x[..., size:]
        low, high = x.chunk(2, -1)
        return torch.cat((x * cos + torch.cat((-high, low), -1) * sin, rest), -1)

    def module(self, k: int, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(states of all rows, logits of the last)"""
        number = self.config["num_hidden_layers"] + k
        enorm, hnorm, projection, norm, at = (name.format(n=number) for name in LAYOUTS[self.layout])
        table = self.w.get(f"{at}.embed_tokens.weight", self.embedding)
        both = [self.norm(enorm, table[torch.tensor(tokens)]), self.norm(hnorm, hidden)]
        x = torch.cat(both[::-1] if self.first else both, -1) @ self.w[f"{projection}.weight"].T
        y = self.norm(f"{at}.input_layernorm", x)
        q, k_, v = (
            (y @ self.w[f"{at}.self_attn.{name}_proj.weight"].T).view(len(x), -1, self.size) for name in "qkv"
        )
        gate = torch.ones(len(x), 1)
        if "qwen3_5" in self.config["model_type"]:  # beside the query of each head
            q, gate = q.reshape(len(x), self.heads, -1).chunk(2, -1)
            gate = torch.sigmoid(gate.flatten(1))
        if f"{at}.self_attn.q_norm.weight" in self.w:
            q, k_ = self.norm(f"{at}.self_attn.q_norm", q), self.norm(f"{at}.self_attn.k_norm", k_)
        q, k_ = self.rotated(q), self.rotated(k_)
        k_, v = (part.repeat_interleave(self.heads // part.shape[1], 1) for part in (k_, v))
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (q, k_, v)), is_causal=True
        )
        x = x + (out[0].transpose(0, 1).flatten(1) * gate) @ self.w[f"{at}.self_attn.o_proj.weight"].T
        y = self.norm(f"{at}.post_attention_layernorm", x)
        gate, up, down = (self.w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = self.norm(norm, x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T)
        return x, x[-1] @ self.w.get(f"{at}.shared_head.head.weight", self.head).T

    def draft(self, text: list[int], states: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """(tokens, logits of each) after `text`, from states [len(text) - 1, hidden] of its rows."""
        tokens, hidden, drafted, scores = list(text[1:]), states, [], []
        for depth in range(count):
            after, logits = self.module(depth % self.modules, tokens, hidden)
            scores.append(logits)
            drafted.append(int(logits.argmax()))
            if self.modules == 1:
                tokens, hidden = [*tokens, drafted[-1]], torch.cat((hidden, after[-1:]))
            else:
                tokens, hidden = [*tokens[1:], drafted[-1]], after
        return drafted, scores


class TheirModules(MtpReference):
    """The modules as transformers loads and runs them (MtpModel), of a target whose block it knows."""

    def __init__(self, folder: Path, modules: int = 1) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_layers import MtpModel

        main: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        main.config.num_mtp_layers = modules
        first = main.config.num_hidden_layers  # it knows the numbers of published files only
        main._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{first + k}\.(?!embed_tokens|shared_head\.head)" for k in range(modules)
        ]
        self.theirs, self.modules = MtpModel.from_pretrained(main), modules

    @torch.no_grad()
    def module(self, k: int, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        positions, ids = torch.arange(1, len(tokens) + 1)[None], torch.tensor([tokens])
        states = self.theirs.forward_layer(k, hidden[None], positions, None, input_ids=ids)[0]
        return states, self.theirs.shared_head(states[-1])
