"""A tokenizer of Hugging Face -> the metadata of a GGUF file: `checkpoints/gguf/tokenizer.py` the other way round."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from paceline.checkpoints.gguf.tokenizer import (
    BYTE,
    COMPOSED,
    CONTROL,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS,
)
from paceline.errors import ConfigError
from paceline.text.tokenizer import Tokenizer

NORMAL = 1  # `tokenizer.ggml.token_type`
GPT2 = SPLITS["gpt-2"][0]
DIGIT = r"\p{N}"
# What llama.cpp's converter makes visible in Gemma 4, so that its parser of chats can read them
VISIBLE = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
SAMPLES = (
    "def f(x):\n\treturn {'a': [1, 22, 333, 4444], \"b\": x ** -2}  # don't\n\n\n    pass\n",
    "I'm sure we'LL see 1234567 of 3.14159, THEY'VE said (in 2024)... naïve café Straße",
    "  two  spaces   three\n\n\nlines\r\n\ttab ", "日本語のテキスト、中文文本。한국어", "emoji 👍🏽 👩‍👩‍👧 ❤️ ꙮ",
    "http://example.org/?q=1&r=%20#x HelloWorld snake_case __init__", "a\u00a0b\u3000c\u200bd ½ ² Ⅷ ٣٤ e\u0301",
)  # fmt: skip


def vocabulary(tokenizer: Tokenizer, size: int, gemma: bool, folder: Path) -> dict[str, Any]:
    """The values under `tokenizer.`; ids that have no token are filled up to `size`. ConfigError for other kinds."""
    raw = json.loads(tokenizer.to_json())
    model = raw["model"]
    if model["type"] != "BPE":
        raise ConfigError(
            f"{folder}: a tokenizer of type {model['type']} cannot be written as GGUF, which holds BPE: convert a model "
            "with another tokenizer"
        )
    fields = _kind(raw, gemma, folder)
    tokens, types = _tokens(raw, size)
    fields |= {"ggml.tokens": tokens, "ggml.token_type": types}
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if fields["ggml.model"] == "llama":
        fields["ggml.scores"] = _scores(tokens, types, merges)
    else:
        fields["ggml.merges"] = merges
    return fields | _special(tokenizer, model)


def differing(first: Tokenizer, other: Tokenizer) -> int:
    """How many of SAMPLES the two cut into other tokens."""
    return sum(first.encode(text) != other.encode(text) for text in SAMPLES)


def _kind(raw: dict[str, Any], gemma: bool, folder: Path) -> dict[str, Any]:
    """Which of GGUF's kinds of tokenizer it is."""
    if gemma:
        return {"ggml.model": "gemma4", "ggml.pre": "gemma4", "ggml.add_space_prefix": False}
    if raw["model"].get("byte_fallback"):
        prefixed = "Prepend" in json.dumps(raw["normalizer"]) or _metaspace_prefix(raw["pre_tokenizer"])
        return {"ggml.model": "llama", "ggml.pre": "default", "ggml.add_space_prefix": prefixed}
    cuts, whole = _cuts(raw["pre_tokenizer"]), bool(raw["model"].get("ignore_merges"))
    fitting = [pre for pre, splits in SPLITS.items() if cuts == splits and whole == (pre in WHOLE_WORDS)]
    composed = '"NFC"' in json.dumps(raw["normalizer"])
    if fitting:
        return {"ggml.model": "gpt2", "ggml.pre": min(fitting, key=lambda pre: (pre in COMPOSED) != composed)}
    raise ConfigError(
        f"{folder}: its tokenizer cuts text in a way for which GGUF has no name: convert it with llama.cpp's "
        "convert_hf_to_gguf.py"
    )


def _parts(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]


def _metaspace_prefix(step: dict[str, Any] | None) -> bool:
    return any(
        p["type"] == "Metaspace" and p.get("prepend_scheme", "always") != "never" for p in _parts(step)
    )


def _cuts(step: dict[str, Any] | None) -> tuple[str, ...]:
    """The expressions that cut text, as `SPLITS` has them."""
    out = []
    for part in _parts(step):
        if part["type"] == "Split":
            pattern = part["pattern"]
            out.append(pattern.get("Regex") or re.escape(pattern.get("String", "")))
        elif part["type"] == "Digits" and part.get("individual_digits"):
            out.append(DIGIT)
        elif part["type"] == "ByteLevel":
            out += [GPT2] if part.get("use_regex", True) else []
        else:
            out.append(part["type"])
    return tuple(out)


def _tokens(raw: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    model = raw["model"]
    vocab = dict(model["vocab"])
    added = {token["content"]: token for token in raw["added_tokens"]}
    vocab |= {content: token["id"] for content, token in added.items()}
    names = {i: token for token, i in vocab.items()}
    tokens = [names.get(i, f"[PAD{i}]") for i in range(max(size, *(i + 1 for i in names)))]
    fallback = bool(model.get("byte_fallback"))

    def kind(i: int, token: str) -> int:
        if i not in names:
            return UNUSED
        if token == model.get("unk_token"):
            return UNKNOWN
        if token in added:
            return CONTROL if added[token]["special"] and token not in VISIBLE else USER_DEFINED
        return BYTE if fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token) else NORMAL

    return tokens, [kind(i, token) for i, token in enumerate(tokens)]


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """SentencePiece's scores: the sooner a token is merged, the higher."""
    rank: dict[str, int] = {}
    for merge in merges:
        rank.setdefault(merge.replace(" ", "", 1), len(rank))
    last = len(rank)
    return [
        -float(rank.get(token, last)) if kind in (NORMAL, USER_DEFINED) else 0.0
        for token, kind in zip(tokens, types)
    ]


def _special(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    """Ids of special tokens, whether a text begins with BOS, the chat template."""
    unknown = model.get("unk_token")
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "padding_token_id": tokenizer.pad_id,
        "unknown_token_id": None if unknown is None else tokenizer.token_id(unknown),
    } | dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), tokenizer.eos_ids))
    out: dict[str, Any] = {f"ggml.{name}": i for name, i in ids.items() if i is not None}
    out["ggml.add_bos_token"] = tokenizer.adds_bos and tokenizer.bos_id is not None
    if tokenizer.template is not None:
        out["chat_template"] = tokenizer.template
    if tokenizer.tool_template is not None:
        out |= {"chat_templates": ["tool_use"], "chat_template.tool_use": tokenizer.tool_template}
    return out
