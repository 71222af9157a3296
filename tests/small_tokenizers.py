"""Small tokenizers as real ones are built, saved as tokenizer.json: byte-level BPE, and BPE with byte fallback.

Ids 0 to 2 are <pad>, <eos> and <bos>, as the configs of `checkpoints` and `decoders` say.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from paceline.checkpoints.gguf.tokenizer import COMPOSED, SPLITS

SPECIAL = ["<pad>", "<eos>", "<bos>"]
SIZE = 400
NAMED = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "add_bos_token": True}
HARD = [
    "def f(x):\n\treturn {'a': [1, 22, 333, 4444], \"b\": x ** -2}  # don't\n\n\n", "I'm we'LL it's don'T THEY'VE",
    "  leading and trailing   ", "\n\n\n", "\t\t x \r\n\r\n y", " ", "",
    "日本語のテキスト、中文文本。한국어", "emoji 👍🏽 👩‍👩‍👧 ❤️",
    "1234567 3.14159 ½ ² Ⅷ ٣٤", "naïve café Straße ÆØÅ ǅ ﬁ", "<|im_start|>user\nhi<|im_end|>\n", "a\u00a0b\u3000c\u200bd",
    "http://example.org/?q=1&r=%20#x", "HelloWorld camelCase XMLHttp snake_case __init__", "e\u0301 a\u0308 ก็ हिन्दी",
]  # fmt: skip


def lines(count: int) -> list[str]:
    """Lines of pieces of the hard ones in any order: code, prose, emoji, CJK, runs of spaces and newlines."""
    rng = random.Random(5)
    pieces = [line[i : i + 7] for line in HARD for i in range(0, len(line), 5)]
    return HARD + [
        "".join(rng.choices([*pieces, " ", "  ", "\n", "\n\n"], k=rng.randint(1, 12))) for _ in range(count)
    ]


def byte_level(folder: Path, pre: str = "llama-bpe", **config: object) -> Tokenizer:
    """Of Llama 3, Qwen and others, by the name that GGUF gives to their way to cut text."""
    backend = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    backend.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return save(train(backend, SPECIAL, pre_tokenizers.ByteLevel.alphabet()), folder, config)


def fallback(folder: Path, prefixed: bool = False, **config: object) -> Tokenizer:
    """Of Gemma; `prefixed`: with a space before each text, as Llama 2 has it."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefixed else escape
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [*SPECIAL, "<unk>"]
    train(backend, [*special, *(f"<0x{byte:02X}>" for byte in range(256))], [])
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in special]
    return save(Tokenizer.from_str(json.dumps(raw)), folder, config | {"unk_token": "<unk>"})


def train(backend: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    size = SIZE if alphabet else SIZE + 120
    backend.train_from_iterator(
        lines(200),
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return backend


def save(backend: Tokenizer, folder: Path, config: dict[str, object]) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED | config
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return backend
