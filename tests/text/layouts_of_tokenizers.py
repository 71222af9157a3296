"""The tokenizers that transformers saves, one of each layout, from small vocabularies made here.

Each maker gives a folder's files by transformers' own class where it has one, else by the `tokenizers` library.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from paceline.checkpoints.gguf.tokenizer import SPLITS
from small_tokenizers import lines

SPACE = "▁"
PLAIN = ["<unk>", "<s>", "</s>"]
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_model(path: Path, kind: str = "bpe", size: int = 600, **options: Any) -> Path:
    """A tokenizer.model of SentencePiece's own trainer."""
    given = {
        "character_coverage": 0.98, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "hard_vocab_limit": False, "minloglevel": 5,
    }  # fmt: skip
    out = io.BytesIO()
    text = [part for line in lines(300) for part in line.split("\n") if part.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=out, model_type=kind, vocab_size=size, **(given | options)
    )
    path.write_bytes(out.getvalue())
    return path


def pieces_bpe(special: list[str] = PLAIN) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of BPE with byte fallback, over text with U+2581 for the space."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=True)
    train(backend, [*special, *BYTES], [], 560)
    raw = json.loads(backend.to_str())["model"]
    return raw["vocab"], [tuple(merge) for merge in raw["merges"]]


def train(backend: Tokenizer, special: list[str], alphabet: list[str], size: int = 400) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=150 + len(alphabet),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(lines(200), trainer)
    return backend


def pieces_backend(
    normalizer: Any = None, pre: Any = None, decoder: Any = None, post: Any = None
) -> Tokenizer:
    vocab, merges = pieces_bpe()
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(PLAIN)
    for name, value in (("normalizer", normalizer), ("pre_tokenizer", pre), ("decoder", decoder)):
        if value is not None:
            setattr(backend, name, value)
    if post is not None:
        backend.post_processor = post
    return backend


def chain(*more: Any, space: str = SPACE) -> Any:
    return decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def wrapped(backend: Tokenizer, folder: Path, **config: Any) -> None:
    named = {name: token for name, token in NAMED.items() if backend.token_to_id(token) is not None}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **(named | {"clean_up_tokenization_spaces": False} | config)
    ).save_pretrained(folder)


def with_bos() -> Any:
    return processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])


def prepended() -> Any:
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def llama(folder: Path, **options: Any) -> None:
    vocab, merges = pieces_bpe()
    transformers.LlamaTokenizer(vocab=vocab, merges=merges, **options).save_pretrained(folder)


def llama_added(folder: Path) -> None:
    """Phi-3 and others: marks beside Llama's vocabulary, some of which swallow the blanks after them."""
    vocab, merges = pieces_bpe()
    tokenizer = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    marks = [transformers.AddedToken(t, rstrip=True, normalized=False) for t in ("<|user|>", "<|end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens([transformers.AddedToken("<think>", normalized=False), "[plain]"])
    tokenizer.save_pretrained(folder)


def gemma(folder: Path) -> None:
    vocab, merges = pieces_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    transformers.GemmaTokenizer(vocab=vocab, merges=merges).save_pretrained(folder)


def byte_level_backend(pre: str | None, **options: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE(**options))
    if pre is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.decoder = decoders.ByteLevel()
    return train(backend, PLAIN, pre_tokenizers.ByteLevel.alphabet())


def of_class(name: str, pre: str | None) -> Callable[[Path], None]:
    """By a class of transformers over byte-level BPE."""

    def make(folder: Path) -> None:
        raw = json.loads(byte_level_backend(pre).to_str())["model"]
        merges = [tuple(merge) for merge in raw["merges"]]
        tokenizer = getattr(transformers, name)(vocab=raw["vocab"], merges=merges, **NAMED)
        tokenizer.save_pretrained(folder)

    return make


def llama3(folder: Path) -> None:
    backend = byte_level_backend("llama-bpe", ignore_merges=True)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), with_bos()])
    wrapped(backend, folder)


def unigram(folder: Path, name: str = "T5Tokenizer") -> None:
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_model(folder / "spiece.model", "unigram", byte_fallback=False))
    )
    vocab = [(model.id_to_piece(i), model.get_score(i)) for i in range(model.get_piece_size())]
    (folder / "spiece.model").unlink()
    getattr(transformers, name)(vocab=vocab, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)


def word_piece(folder: Path, prefix: str = "##", cleanup: bool = True) -> None:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix, cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=PLAIN, show_progress=False)
    backend.train_from_iterator(lines(200), trainer)
    wrapped(backend, folder)


def suffix_bpe(folder: Path) -> None:
    """GPT-1's and CLIP's way: a mark after each word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=PLAIN, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(lines(200), trainer)
    wrapped(backend, folder)


def words_without_decoder(folder: Path) -> None:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        lines(200), trainers.WordLevelTrainer(vocab_size=300, special_tokens=PLAIN, show_progress=False)
    )
    wrapped(backend, folder)


def metaspace(scheme: str, split: bool = True) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        pre = pre_tokenizers.Metaspace(SPACE, scheme, split=split)
        wrapped(pieces_backend(None, pre, decoders.Metaspace(SPACE, scheme), with_bos()), folder)

    return make


def plain(**parts: Callable[[], Any]) -> Callable[[Path], None]:
    return lambda folder: wrapped(pieces_backend(**{k: make() for k, make in parts.items()}), folder)


def steps(*parts: Any) -> Callable[[], Any]:
    return lambda: decoders.Sequence([*parts])


def escaped() -> Any:
    return normalizers.Replace(" ", SPACE)


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "llama-2": llama,
    "llama-2-legacy": lambda folder: (llama(folder, legacy=True), add_to_config(folder, legacy=True)),
    "llama-no-prefix": lambda folder: llama(folder, add_prefix_space=False),
    "llama-1-normalizer": plain(
        normalizer=prepended, decoder=lambda: chain(decoders.Strip(" ", 1, 0)), post=with_bos
    ),
    "published-llama": lambda folder: published_llama(folder, legacy=False),
    "published-mistral": lambda folder: published_llama(folder, legacy=True, clean_up_tokenization_spaces=False),
    "phi-3-added": llama_added,
    "gemma": gemma,
    "gemma-plain": plain(normalizer=escaped, decoder=chain),
    "metaspace-always": metaspace("always"),
    "metaspace-first": metaspace("first"),
    "metaspace-never": metaspace("never"),
    "metaspace-first-whole": metaspace("first", split=False),
    "two-leading-spaces": plain(normalizer=prepended, decoder=lambda: chain(decoders.Strip(" ", 2, 0))),
    "strip-each-token": plain(
        normalizer=escaped,
        decoder=steps(decoders.Replace(SPACE, " "), decoders.Strip("e", 0, 1), decoders.ByteFallback()),
    ),
    "strip-the-end": plain(normalizer=prepended, decoder=lambda: chain(decoders.Strip(" ", 0, 1))),
    "regex-replaced": plain(
        normalizer=escaped,
        decoder=steps(decoders.Replace(Regex(f"{SPACE}+"), " "), decoders.ByteFallback(), decoders.Fuse()),
    ),
    "replaced-after-fuse": plain(
        normalizer=escaped, decoder=steps(decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(SPACE, " "))
    ),
    "replace-then-metaspace": plain(
        pre=lambda: pre_tokenizers.Metaspace(SPACE, "first"),
        decoder=steps(decoders.Replace("e", "E"), decoders.Metaspace(SPACE, "first"), decoders.Fuse()),
    ),
    "llama-3": llama3,
    "gpt-2": of_class("GPT2Tokenizer", None),
    "qwen-2": of_class("Qwen2Tokenizer", "qwen2"),
    "byte-level-smollm": lambda folder: wrapped(byte_level_backend("smollm"), folder),
    "byte-level-sequence": lambda folder: wrapped(_in_sequence(byte_level_backend("qwen2")), folder),
    "t5-unigram": unigram,
    "bert-word-piece": word_piece,
    "word-piece-raw": lambda folder: word_piece(folder, "##", False),
    "gpt-1-suffix": suffix_bpe,
    "words-without-decoder": words_without_decoder,
}  # fmt: skip


def add_to_config(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def published_llama(folder: Path, **more: Any) -> None:
    """As the repositories of Llama 1 and 2, TinyLlama and Mistral 7B hold it: converted by transformers 4."""
    LAYOUTS["llama-1-normalizer"](folder)
    add_to_config(folder, tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, **more)


def _in_sequence(backend: Tokenizer) -> Tokenizer:
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip("\n", 1, 0)])
    return backend
