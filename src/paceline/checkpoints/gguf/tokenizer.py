"""The tokenizer that a GGUF file describes, built with the `tokenizers` library.

Three kinds (`tokenizer.ggml.model`): `gpt2` is byte-level BPE, whose `tokenizer.ggml.pre` names the expression that cuts
text before merging; `llama` is SentencePiece BPE, whose merges are recovered from the vocabulary and its scores; `gemma4`
is BPE with merges over text whose spaces are written as U+2581. The expressions are those of the models' own
tokenizer.json; llama.cpp's `llama-vocab.cpp` says which name stands for which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.checkpoints.gguf.reader import Metadata
from paceline.errors import ConfigError

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # `tokenizer.ggml.token_type`
SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED % (_SUFFIX, _SUFFIX) + r"|\p{N}{1,3}" + _CASED_REST
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# `tokenizer.ggml.pre` -> expressions that cut the text one after the other
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("default",), _DEFAULT),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe",
         "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "f2llmv2", "solar-open", "grok-2"),
        (_QWEN2,),
    ),
    "qwen35": (_QWEN35,),
    "deepseek-v3": _DEEPSEEK3,
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
}  # fmt: skip
# A word that is a token is taken whole, whatever the merges say, and a BOS is added unless the file says otherwise.
WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
)
COMPOSED = ("qwen2", "qwen35")  # Qwen composes accents before it cuts (NFC), which llama.cpp leaves out
KINDS = ("gpt2", "llama", "gemma4")
# Tokens that end a turn, by which llama.cpp, too, finds the end of a turn where the file gives no id for it.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")
HARMONY = ("<|return|>", "<|call|>")  # of gpt-oss, where "<|end|>" ends a message, and the next one follows
_NAMED = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What `text.tokenizer.Tokenizer` is made of; `config` as a tokenizer_config.json has it."""

    backend: Backend
    config: dict[str, Any]
    eos_ids: tuple[int, ...]
    template: str | None
    twins: dict[int, str]  # ids whose token is also that of a later id, which a text is encoded with
    tool_template: str | None = None  # for requests with tools, of models that have two


def build_tokenizer(model: Metadata) -> GgufTokenizer:
    """The tokenizer of a GGUF file. Raises ConfigError for a kind that is unknown and for a broken vocabulary."""
    kind = model.get("tokenizer.ggml.model")
    if kind not in KINDS:
        trouble = "has no tokenizer" if kind is None else f"has a tokenizer of kind {str(kind)[:40]!r}"
        raise ConfigError(f"{model.path} {trouble}: paceline reads those of kind {', '.join(KINDS)}")
    tokens = _tokens(model)
    backend = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma}[kind](model, tokens)
    types = _types(model)
    for wanted, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, t in zip(tokens, types)
            if t in wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    config: dict[str, Any] = {}
    for name, key in _NAMED.items():
        at = _id(model, key, len(tokens))
        if at is not None:
            config[name] = tokens[at]
    whole = model.get("tokenizer.ggml.pre") in WHOLE_WORDS
    config["add_bos_token"] = bool(model.get("tokenizer.ggml.add_bos_token", kind == "llama" or whole))
    config["add_eos_token"] = model.get("tokenizer.ggml.add_eos_token") is True
    template = model.get("tokenizer.chat_template")
    last = {token: i for i, token in enumerate(tokens)}
    twins = {i: token for i, token in enumerate(tokens) if last[token] != i}
    template = template if isinstance(template, str) else None
    tools = model.get("tokenizer.chat_template.tool_use")
    return GgufTokenizer(
        backend, config, end_ids(model), template, twins, tools if isinstance(tools, str) else None
    )


def end_ids(model: Metadata) -> tuple[int, ...]:
    """The tokens after which a text is over: end of sequence, of turn, of message. Raises ConfigError."""
    tokens = _tokens(model)
    named = [_id(model, f"{key}_token_id", len(tokens)) for key in ("eos", "eot", "eom")]
    ids = [i for i in named if i is not None]
    types = _types(model)
    known = {tokens[i]: i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)}
    if all(token in known for token in HARMONY):
        return tuple(
            dict.fromkeys([*(i for i in ids if tokens[i] != "<|end|>"), *(known[t] for t in HARMONY)])
        )
    turn = {i for token, i in known.items() if token in END_OF_TURN}
    return tuple(dict.fromkeys([*ids, *sorted(turn)]))


def _tokens(model: Metadata) -> list[str]:
    """The vocabulary without the padding at its end, which fills it up to the rows of the embedding table."""
    tokens = model.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError(f"{model.path} has no vocabulary (tokenizer.ggml.tokens): get a complete GGUF file")
    types = model.get("tokenizer.ggml.token_type", ())
    if len(types) not in (0, len(tokens)):
        raise ConfigError(
            f"{model.path} has {len(tokens)} tokens but {len(types)} token types: the file is damaged, download it again"
        )
    count = len(tokens)
    while (
        count > 1 and len(types) and types[count - 1] == UNUSED and tokens[count - 1] == f"[PAD{count - 1}]"
    ):
        count -= 1
    return tokens if count == len(tokens) else tokens[:count]


def _types(model: Metadata) -> list[int]:
    """The kind of each token, [] where the file does not say. A list: numpy's scalars are slow one by one."""
    types: Any = model.get("tokenizer.ggml.token_type", [])
    listed: list[int] = types.tolist() if isinstance(types, np.ndarray) else types
    return listed


def _id(model: Metadata, key: str, count: int) -> int | None:
    value = model.get(f"tokenizer.ggml.{key}")
    if value is None or value == 2**32 - 1:  # what converters write for none
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise ConfigError(
            f"{model.path}: {key}={str(value)[:40]} is no token of a vocabulary of {count}: get another GGUF file"
        )
    return value


def _bpe(model: Metadata, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = list(dict.fromkeys(merges))  # of one that is listed twice the first rank counts, as in llama.cpp
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{model.path}: its merges do not fit its vocabulary ({error}): get another GGUF file"
        ) from error


def _merges(model: Metadata) -> list[tuple[str, str]]:
    """The merges that the file lists. The first character may be a space, so the cut is the first space after it."""
    listed = model.get("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise ConfigError(f"{model.path} has no tokenizer.ggml.merges: get a GGUF file of a newer converter")
    out = []
    for merge in listed:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ConfigError(
                f"{model.path}: {merge[:40]!a} is no merge of two tokens: get another GGUF file"
            )
        out.append((merge[:cut], merge[cut + 1 :]))
    return out


def _byte_level(model: Metadata, tokens: list[str]) -> Backend:
    pre = model.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ConfigError(
            f"{model.path} cuts text as {str(pre)[:40]!r} (tokenizer.ggml.pre), which is unknown: use the "
            "safetensors checkpoint of this model"
        )
    backend = _bpe(model, tokens, _merges(model), ignore_merges=pre in WHOLE_WORDS)
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(model: Metadata, tokens: list[str]) -> Backend:
    listed = "tokenizer.ggml.merges" in model
    backend = _bpe(
        model, tokens, _merges(model) if listed else _merges_of(model, tokens),
        unk_token=_unknown(model, tokens), fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    escape = normalizers.Replace(" ", SPACE)
    prefixed = model.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if prefixed else escape
    backend.decoder = _unescape()
    return backend


def _gemma(model: Metadata, tokens: list[str]) -> Backend:
    backend = _bpe(
        model, tokens, _merges(model), unk_token=_unknown(model, tokens), fuse_unk=True, byte_fallback=True
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = _unescape()
    return backend


def _unescape() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _unknown(model: Metadata, tokens: list[str]) -> str | None:
    at = _id(model, "unknown_token_id", len(tokens))
    return tokens[at] if at is not None else "<unk>" if "<unk>" in tokens else None


def _merges_of(model: Metadata, tokens: list[str]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores mean: each token from any two others, the best score first.

    Among merges of one score those with the longer left side come first, as transformers orders them.
    """
    scores = model.get("tokenizer.ggml.scores", ())
    types = model.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(scores) < len(tokens):
        raise ConfigError(
            f"{model.path} has {len(tokens)} tokens but {len(scores)} scores: get another GGUF file"
        )
    known = set(tokens)
    merges = [
        (float(score), cut, token[:cut], token[cut:])
        for token, score, kind in zip(tokens, scores, types)
        if kind not in (UNKNOWN, CONTROL, BYTE)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    merges.sort(key=lambda merge: (merge[0], merge[1], len(merge[3])), reverse=True)
    return [(left, right) for _, _, left, right in merges]
