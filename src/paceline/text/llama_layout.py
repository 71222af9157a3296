"""How transformers reads the tokenizer.json of a folder whose tokenizer_class is Llama's: vocabulary and merges only.

Files of Llama 1 and 2, TinyLlama and Mistral 7B were converted when SentencePiece's space before a text was a step of the
normalizer, and came after each special token. transformers 5 builds the steps itself (tokenization_llama.py): the space
comes before the first word of a text, or after special tokens too where the config says `legacy`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.errors import ConfigError
from paceline.files import read_json

LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
# model types of which transformers knows that their files name a wrong class: it reads their tokenizer.json as it is
AS_SAVED = frozenset(
    {"internlm2", "jamba", "llava", "llava_next", "minicpm3", "minicpmv", "phi3", "phi3_v", "phimoe", "qwen2"}
)
SPACE = "▁"


def rebuilt_as_llama(config: dict[str, Any], model: dict[str, Any]) -> bool:
    """Whether transformers leaves the steps of such a folder's tokenizer.json aside."""
    return config.get("tokenizer_class") in LLAMA_CLASSES and model.get("model_type") not in AS_SAVED


def rebuild_llama(backend: Backend, config: dict[str, Any]) -> None:
    """Give BPE with byte fallback the steps of transformers' LlamaTokenizer; others stay as they are."""
    raw = json.loads(backend.to_str())
    if raw["model"]["type"] != "BPE" or not raw["model"].get("byte_fallback"):
        return
    prefixed = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefixed else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefixed else []))


def add_tokens(backend: Backend, config: dict[str, Any], folder: Path) -> None:
    """Tokens that tokenizer_config.json and added_tokens.json put beside a tokenizer.model. Raises ConfigError."""
    added: dict[int, AddedToken] = {}
    for content, i in (read_json(folder / "added_tokens.json") or {}).items():
        if isinstance(i, int):
            added[i] = AddedToken(content, normalized=False, special=False)
    listed = config.get("added_tokens_decoder")
    for key, entry in (listed if isinstance(listed, dict) else {}).items():
        if key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "normalized", "special")}
            added[int(key)] = AddedToken(entry["content"], **flags)
    for i, token in sorted(added.items()):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        at = backend.token_to_id(token.content)
        if at != i:
            raise ConfigError(
                f"{folder}: {token.content[:40]!a} is said to be token {i} and is {at} behind tokenizer.model: give the "
                "folder the tokenizer.json of its makers"
            )
