"""Tokenizers from metadata: ids against transformers' and against the tokenizers that the metadata was written from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from gguf_files import write_gguf
from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.gguf.tokenizer import COMPOSED, SPLITS, build_tokenizer
from paceline.errors import ConfigError
from paceline.text.tokenizer import Tokenizer
from real_models import smollm2_file
from small_tokenizers import lines

# Of the ids that llama.cpp (npm package node-llama-cpp 3) gives to `lines(2000)` with SmolLM2's file. It gives ours for
# the small tokenizers that `paceline convert` writes, too, but for two kinds of lines: it does not compose accents for
# Qwen, and it approximates \p{M} of tekken and gpt-4o. There ours are those of the models' own tokenizers.
LLAMA_CPP = "5df836b7780c70657ffb697604ee637c0c6ac0d05672ed14119e1edab4d54d20"


def test_smollm2_ids_are_those_of_transformers() -> None:
    path = smollm2_file()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Transformers does not cut at digits where `pre` is smollm; SmolLM2's tokenizer.json and llama.cpp do.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    mine = Tokenizer.from_gguf(Gguf(path))
    found = [mine.encode(line) for line in lines(2000)]
    for line, ids in zip(lines(2000), found):
        assert ids == theirs.encode(line, add_special_tokens=False), line
    assert hashlib.sha256(json.dumps(found, separators=(",", ":")).encode()).hexdigest() == LLAMA_CPP
    assert mine.template == theirs.chat_template
    assert mine.eos_ids == (theirs.eos_token_id,)
    assert not mine.adds_bos


def test_smollm2_gives_back_what_it_was_given() -> None:
    tokenizer = Tokenizer.from_gguf(Gguf(smollm2_file()))
    for line in lines(500):
        assert tokenizer.decode(tokenizer.encode(line), skip_special=False) == line


def trained(backend: tokenizers.Tokenizer, special: list[str], **options: object) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False, **options)
    backend.train_from_iterator(lines(400), trainer)
    return backend


def metadata(backend: tokenizers.Tokenizer, kind: str, pre: str, special: list[str]) -> object:
    """The metadata of a trained tokenizer, as the converter writes it."""
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(
            [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
        )
        writer.add_token_merges(merges)
        writer.add_eos_token_id(backend.token_to_id("<eos>"))

    return write


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "default"]
)
def test_byte_level_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    original.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        original.normalizer = normalizers.NFC()
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    trained(original, special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    path = write_gguf(
        tmp_path / "m.gguf", "llama", {}, {}, tokenizer=metadata(original, "gpt2", pre, special)
    )
    mine = Tokenizer.from_gguf(Gguf(path))
    for line in lines(300):
        assert mine.encode(line, add_bos=False) == original.encode(line).ids
    assert mine.eos_ids == (original.token_to_id("<eos>"), original.token_to_id("<|im_end|>"))


def test_the_expressions_are_those_of_transformers() -> None:
    """Cuts, not ids: small vocabularies hide where a text was cut."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    for pre in set(GGUF_PRE_TOKENIZER_SPLITS) & set(SPLITS):
        theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
        (split,) = SPLITS[pre]
        mine = pre_tokenizers.Split(Regex(split), "isolated")
        for line in lines(200):
            assert mine.pre_tokenize_str(line) == theirs.pre_tokenize_str(line), pre
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= set(GGUF_PRE_TOKENIZER_SPLITS) & set(
        SPLITS
    )


def test_gemma4_ids_are_those_of_the_original(tmp_path: Path) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    lone = [f"<0x{byte:02X}>" for byte in range(256)]
    original = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Replace(" ", "▁")
    trained(original, [*special, *lone])
    original = tokenizers.Tokenizer.from_str(original.to_str())
    fields = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2}
    described = metadata(original, "gemma4", "gemma4", special)
    path = write_gguf(tmp_path / "m.gguf", "gemma4", fields, {}, tokenizer=described)
    mine = Tokenizer.from_gguf(Gguf(path))
    for line in [*lines(300), "ꙮ unseen ⵣ"]:
        assert mine.encode(line, add_bos=False) == original.encode(line).ids
    assert mine.encode("<bos>a") == mine.encode("a")  # a BOS that the template wrote is not doubled
    assert mine.encode("a")[0] == 2
    assert mine.eos_ids == (1, 4)


def spm(folder: Path, **fields: object) -> Path:
    """SentencePiece BPE: scores that fall with the merges' rank, no merges."""
    corpus = tokenizers.Tokenizer(models.BPE())
    corpus.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained(corpus, [])
    pieces = sorted(corpus.get_vocab().items(), key=lambda item: (len(item[0]) == 1, item[1]))
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(piece for piece, _ in pieces),
    ]
    tokens = list(dict.fromkeys(tokens))

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return write_gguf(folder / "m.gguf", "llama", fields, {}, tokenizer=write)


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    path = spm(tmp_path)
    architecture, parts, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, parts)
    mine = Tokenizer.from_gguf(Gguf(path))
    assert mine.encode("a")[0] == 1  # BOS is the rule unless the file says otherwise
    for line in [*lines(300), "ꙮ unseen ⵣ"]:
        if line and not line.startswith(
            " "
        ):  # theirs adds no space where there is one already, SentencePiece does
            assert mine.encode(line, add_bos=False) == theirs.encode(line, add_special_tokens=False).ids, line


def test_sentencepiece_adds_its_space_unless_told_otherwise(tmp_path: Path) -> None:
    with_space = Tokenizer.from_gguf(Gguf(spm(tmp_path)))
    assert with_space.decode(with_space.encode("don't")) == " don't"
    without = Tokenizer.from_gguf(Gguf(spm(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})))
    for line in lines(100):
        assert without.decode(without.encode(line)) == line


def bad(folder: Path, **changes: object) -> Gguf:
    parts: dict[str, object] = {
        "model": "gpt2", "pre": "llama-bpe", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"],
    }  # fmt: skip
    parts |= changes
    fields = {f"tokenizer.ggml.{name}": value for name, value in parts.items() if value is not None}
    return Gguf(write_gguf(folder / "m.gguf", "llama", fields, {}, tokenizer=lambda writer: None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"model": "bert"}, "of kind 'bert': paceline reads those of kind gpt2, llama, gemma4"),
        ({"pre": "klingon"}, "cuts text as 'klingon'"),
        ({"tokens": None}, "has no vocabulary"),
        ({"token_type": [1, 1]}, "3 tokens but 2 token types"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "'ab' is no merge of two tokens"),
        ({"merges": ["a x"]}, "merges do not fit its vocabulary"),
        ({"eos_token_id": 3}, "eos_token_id=3 is no token of a vocabulary of 3"),
        ({"model": "llama", "merges": None}, "3 tokens but 0 scores"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_one_line(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        build_tokenizer(bad(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_token_twice_and_a_merge_twice_are_read_as_llama_cpp_reads_them(tmp_path: Path) -> None:
    """The last id of a token is the one that texts are encoded with. Of a merge the first rank counts."""
    tokens = ["a", "b", "c", "ab", "bc", "a"]
    said = {"tokens": tokens, "token_type": [1] * 6, "merges": ["a b", "b c", "a b"]}
    tokenizer = Tokenizer.from_gguf(bad(tmp_path, **said))
    assert tokenizer.encode("abc", add_bos=False) == [3, 2]  # of the last rank it would be a, bc
    assert tokenizer.encode("a", add_bos=False) == [5]
    assert tokenizer.decode([0, 5, 1]) == "aab"
    assert tokenizer.vocab_size == 6
