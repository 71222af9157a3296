"""A tiny random Gemma 4 and its assistant, written by transformers, with a window far shorter than the
texts, and a tiny Llama.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

from decoders import build_decoder

VOCAB, WINDOW = 96, 8
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """One token per character, with a chat template."""
    letters = (string.ascii_letters + string.digits + "▁\n.,:;!?'\"()[]{}=+-*/_<>#")[: VOCAB - len(SPECIAL)]
    vocab = {t: i for i, t in enumerate([*SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def text_config(**changes: object) -> Gemma4TextConfig:
    values: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    }  # fmt: skip
    return Gemma4TextConfig(**(values | changes))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the target and the assistant."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(text_config()).eval()
    target.save_pretrained(folder / "target")
    write_tokenizer(folder / "target")
    small = text_config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    config = Gemma4AssistantConfig(text_config=small, backbone_hidden_size=32)
    assistant = Gemma4AssistantForCausalLM(config)
    assistant.generation_config.num_assistant_tokens = 4
    for layer in assistant.model.layers:
        layer.layer_scalar.fill_(0.8)
    assistant.save_pretrained(folder / "assistant")
    return folder / "target", folder / "assistant"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of another family, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("llama") / "target"
    build_decoder("llama3", folder)
    write_tokenizer(folder)
    return folder
