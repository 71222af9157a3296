"""Lone bytes `<0xNN>` and other added tokens: decoded as Hugging Face does, and a grammar can use them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from paceline.text.grammar import Grammars
from paceline.text.stream import Detokenizer
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import Vocabulary

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *'"{}:,[]', "▁", "1"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def backend(special: bool, in_vocab: bool) -> Backend:
    vocab = {token: i for i, token in enumerate(["<eos>", *LETTERS])}
    if in_vocab:
        vocab |= {token: len(vocab) + i for i, token in enumerate(BYTES)}
    made = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    extra = [AddedToken(token, special=special, normalized=False) for token in BYTES]
    (made.add_special_tokens if special else made.add_tokens)(extra)
    made.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("<tag>", normalized=False)])
    return made


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("in_vocab", [False, True], ids=["added only", "in the vocabulary, too"])
def test_they_are_decoded_as_hugging_face_does(special: bool, in_vocab: bool) -> None:
    oracle = backend(special, in_vocab)
    tokenizer = Tokenizer(backend(special, in_vocab), {"eos_token": "<eos>"})
    texts = ["😀", "a😀b", "é", "▁▁", "a▁▁b<tag>", "日本 b"]
    rows = [oracle.encode(text, add_special_tokens=False).ids for text in texts]
    rows.append([oracle.token_to_id("a"), *(oracle.token_to_id(f"<0x{b:02X}>") for b in "😀".encode())])
    rows.append([oracle.token_to_id("<0xF0>"), oracle.token_to_id("a")])
    for ids in rows:
        for skip in (True, False):
            wanted = oracle.decode(ids, skip_special_tokens=skip)
            stream = Detokenizer(tokenizer, skip)
            got = "".join(stream.push(token) for token in ids) + stream.finish()
            assert got == tokenizer.decode(ids, skip) == wanted
    if not special:
        assert tokenizer.decode(rows[-2]) == "a😀"


@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("in_vocab", [False, True], ids=["added only", "in the vocabulary, too"])
def test_a_grammar_can_write_them(special: bool, in_vocab: bool) -> None:
    tokenizer = Tokenizer(backend(special, in_vocab), {"eos_token": "<eos>"})
    grammars = Grammars(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (0,)), {}, 10.0)
    try:
        constraint = grammars.compile("json", '{"enum": ["😀"]}')()
        wanted = [tokenizer.token_id('"'), *(tokenizer.token_id(f"<0x{b:02X}>") for b in "😀".encode())]
        for token in wanted:
            assert token is not None
            mask = constraint.masks([])[0]
            assert mask is not None
            assert mask[token]
            constraint.commit([token])
    finally:
        grammars.close()


def test_other_tokenizers_are_handed_on_as_they_are() -> None:
    made = Backend(models.BPE(vocab={"a": 0, "<0x41>": 1}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<0x41>", normalized=False)])
    tokenizer = Tokenizer(made, {})
    assert tokenizer.to_json() == made.to_str()
    assert tokenizer.decode([1]) == made.decode([1]) == "<0x41>"
