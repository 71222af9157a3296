"""Tokenizers in every layout that transformers saves: ids, whole texts and joined streams are those of transformers."""

import json
import os
import random

import pytest
import sentencepiece
import transformers

from paceline.core import SamplingParams
from paceline.errors import ConfigError
from paceline.text.stream import Detokenizer, TextStream
from paceline.text.tokenizer import Tokenizer
from small_tokenizers import HARD, lines
from text.layouts_of_tokenizers import LAYOUTS, NAMED, sentencepiece_model

COUNT = int(os.environ.get("LAYOUT_LINES", "200"))  # 2000 before a release


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_texts_and_streams_are_those_of_transformers(layout, tmp_path):
    LAYOUTS[layout](tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    mine = Tokenizer.load(tmp_path)
    rng = random.Random(3)
    for text in [*lines(COUNT - len(HARD)), "<s>a</s> b <|user|> hi<think> x"]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert mine.encode(text, add_bos=False) == ids, text
        for skip in (True, False):
            whole = theirs.decode(ids, skip_special_tokens=skip) if ids else ""  # Strip panics over none
            assert mine.decode(ids, skip) == whole
            stream = Detokenizer(mine, skip)
            shown = []
            while len(shown) < len(ids):
                size = rng.choice((1, 1, 1, 2, 5))
                shown += [stream.push(*ids[len(shown) : len(shown) + size])] + [""] * (size - 1)
            assert "".join(shown) + stream.finish() == whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_goes_on_its_prompt(layout, tmp_path):
    """The space at its beginning is text: prompt and answer together are what transformers decodes of both."""
    LAYOUTS[layout](tmp_path)
    theirs, mine = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in ("def f of emoji and camelCase", "I'm we'LL  it's THEY'VE"):
        ids = mine.encode(text, add_bos=False)
        for at in range(1, len(ids)):
            stream = TextStream(mine, SamplingParams())
            answer = stream.push(ids[at:]).text + stream.finish()
            prompt = theirs.decode(ids[:at], skip_special_tokens=True)
            if layout not in ("strip-the-end", "gpt-1-suffix"):  # their prompts end in another way alone
                assert prompt + answer == theirs.decode(ids, skip_special_tokens=True), (at, ids)


@pytest.mark.parametrize("config", [{}, {"legacy": True}, {"add_prefix_space": False}], ids=str)
@pytest.mark.parametrize("size", [420, 600])
def test_a_tokenizer_model_alone(size, config, tmp_path):
    """SentencePiece's own file, as transformers reads it; its ids are SentencePiece's where no space comes first."""
    file = sentencepiece_model(tmp_path / "tokenizer.model", size=size, user_defined_symbols=["<think>"])
    own = sentencepiece.SentencePieceProcessor(model_file=str(file))
    count = own.get_piece_size()
    added = {"0": "<unk>", "1": "<s>", "2": "</s>", str(count): "<|user|>", str(count + 1): "<|end|>"}
    listed = {i: {"content": text, "special": True, "normalized": False} for i, text in added.items()}
    said = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "added_tokens_decoder": listed,
    } | NAMED
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | config))
    theirs, mine = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    assert mine.encode("a")[0] == mine.bos_id == 1
    assert mine.eos_ids == (2,)
    for text in [*lines(COUNT - len(HARD)), "<s>a</s> b <|user|> hi<think> x<|end|>"]:
        ids = mine.encode(text, add_bos=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        if not config and text[:1].strip() and not any(mark in text for mark in added.values()):
            assert ids == own.encode(text)


def test_a_token_that_cannot_stand_where_it_is_said(tmp_path):
    sentencepiece_model(tmp_path / "tokenizer.model", size=420)
    (tmp_path / "added_tokens.json").write_text('{"<|x|>": 9000}')
    with pytest.raises(
        ConfigError, match=r"'<\|x\|>' is said to be token 9000 and is 4\d\d .*tokenizer.json"
    ):
        Tokenizer.load(tmp_path)
