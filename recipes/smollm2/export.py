"""The trained head as a folder in `speculators` format, bfloat16.

    python recipes/smollm2/export.py --run DIR --data DIR --out src/paceline/smollm2/drafter

The draft vocabulary is chosen here, by counts on all of the data. Its head is rows of the target's own, so it may be
another one than in training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from data import counts
from head import Head, Shape
from safetensors.torch import save_file

VOCABULARY = 49152


def config(shape: Shape, vocabulary: int, drafted: int) -> dict[str, Any]:
    layer = {
        "model_type": "llama", "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "num_hidden_layers": 1, "vocab_size": vocabulary, "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "max_position_embeddings": 8192, "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    verifier = {"name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "architectures": ["LlamaForCausalLM"]}
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": drafted, "target_hidden_size": shape.hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": False,
        "embed_requires_grad": False, "tie_word_embeddings": False, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
                               "verifier": verifier},
    }  # fmt: skip


def export(
    head: Head, size: int, vocabulary: torch.Tensor, out: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """size: tokens of the target; vocabulary [D]: those that are drafted, rising."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(dtype).clone() for name, t in head.tensors().items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    save_file(tensors, str(out / "model.safetensors"), {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(head.shape, size, len(vocabulary)), indent=2) + "\n")


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--run", type=Path, required=True)
    said.add_argument("--data", type=Path, required=True)
    said.add_argument("--out", type=Path, required=True)
    said.add_argument("--vocabulary", type=int, default=8000)
    args = said.parse_args()
    state = torch.load(args.run / "head.pt")
    head = Head(Shape(state["inner"]))
    head.load_state_dict(state["head"])
    often = torch.from_numpy(counts(args.data, VOCABULARY))
    drafted = often.argsort(descending=True, stable=True)[: args.vocabulary].sort().values
    export(head, VOCABULARY, drafted, args.out)


if __name__ == "__main__":
    main()
