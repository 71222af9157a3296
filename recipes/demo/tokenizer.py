"""Train the Gemma-style tokenizer: BPE with byte fallback and `▁` for the space."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import need_space, say, write_atomic, write_json, write_text
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
# Units a merge may not cross: newline with indent, word with one space before, digits, punctuation.
UNITS = r"\n[\n▁]*|▁?_*[A-Za-z]+|▁?[0-9]{1,3}|▁?[^A-Za-z0-9▁\n]+|▁+"
TEMPLATE = (
    "{#- The demo model is a base model that continues Python code: it was never taught to chat, so the\n"
    "    turns are only joined as text. With one message and nothing else the prompt is that message. -#}\n"
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if messages | length == 1 -%}{{ message['content'] }}"
    "{%- else -%}{{ '# ' + message['role'] + ':\\n' + message['content'] + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
)


def texts(path: Path, limit: int) -> Iterator[str]:
    """Documents of a split, up to `limit` bytes."""
    used = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            used += len(text)
            yield text
            if used > limit:
                return


def with_bytes(trained: dict[str, Any]) -> dict[str, Any]:
    """Give the specials the first ids, the 256 byte tokens the next ones, and the merges the rest."""
    vocab = trained["model"]["vocab"]
    rest = [t for t, _ in sorted(vocab.items(), key=lambda item: item[1]) if t not in SPECIAL]
    trained["model"]["vocab"] = {token: i for i, token in enumerate(SPECIAL + BYTES + rest)}
    trained["model"]["byte_fallback"] = True
    trained["model"]["unk_token"] = "<unk>"
    trained["model"]["fuse_unk"] = True
    return trained


def build(documents: Iterator[str], size: int) -> Tokenizer:
    """Train on documents; the vocabulary has exactly `size` entries when the text allows it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(UNITS), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(BYTES),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        limit_alphabet=110,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    done = Tokenizer.from_str(json.dumps(with_bytes(json.loads(tokenizer.to_str()))))
    done.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    return done


def save(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "chat_template": TEMPLATE,
        "extra_special_tokens": {"sot_token": "<|turn>", "eot_token": "<turn|>"},
    }
    write_json(folder / "tokenizer_config.json", config)
    write_text(folder / "chat_template.jinja", TEMPLATE)


def train_tokenizer(work: Path, size: int = 8192, limit: int = 24_000_000, length: int = 4096) -> Tokenizer:
    """Train once into work/tokenizer, or load what is there."""
    folder = work / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    need_space(folder, 32)
    tokenizer = build(texts(work / "corpus/train.jsonl", limit), size)
    save(tokenizer, folder, length)
    say(f"tokenizer: {tokenizer.get_vocab_size()} entries")
    return tokenizer


def encode_split(work: Path, name: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of a split as `<bos> document <eos> ...`, kept in work/tokens."""
    path = work / "tokens" / f"{name}.npy"
    if path.exists():
        return np.load(path, mmap_mode="r")
    need_space(path.parent, 128)
    documents = list(texts(work / f"corpus/{name}.jsonl", 1 << 40))
    parts = []
    for start in range(0, len(documents), 256):
        for item in tokenizer.encode_batch(documents[start : start + 256], add_special_tokens=False):
            parts.append(np.asarray([2, *item.ids, 1], dtype=np.uint16))
    tokens = np.concatenate(parts)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as out:
            np.save(out, tokens)

    write_atomic(path, write)
    size = sum(len(d.encode()) for d in documents)
    say(f"tokens: {name} {len(tokens)} tokens, {size / len(tokens):.3f} bytes per token")
    return tokens
