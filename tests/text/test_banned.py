"""Texts that may not be written, against a search through the whole vocabulary."""

import random

import pytest

from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.sampling.shape import Counts
from paceline.text.banned import banned_of
from paceline.text.tokenizer import Tokenizer
from testing import Setup, make_engine
from text.tiny_tokenizers import CONFIG, byte_level, gemma_style

STRINGS = ("e", "ab", "END", "😀", "s t", "日本", "\n    ")
TEXT = "def parse(text):\n    return abab END 😀 日本語 s t  stop"


@pytest.fixture(params=[gemma_style, byte_level], scope="module")
def tokenizer(request):
    return Tokenizer(request.param(), CONFIG)


def test_exactly_what_would_complete_a_string(tokenizer):
    banned = banned_of(tokenizer, (), STRINGS)
    whole, rng = tokenizer.encode(TEXT, add_bos=False), random.Random(1)
    special = [i for i in tokenizer.special_ids if not tokenizer.piece(i)]
    for trial in range(40):
        cut = rng.randrange(len(whole))
        out = whole[:cut] + special[: trial % 3] * (trial % 40)
        before = b"".join(map(tokenizer.piece, out))
        wanted = set()
        for token in range(tokenizer.vocab_size):
            text = before + tokenizer.piece(token)
            for string in STRINGS:
                at = text.rfind(string.encode())
                if at >= 0 and at + len(string.encode()) > len(before):
                    wanted.add(token)
        assert set(banned.after(Counts([5, 6], out)).tolist()) == wanted
        view = Counts([5, 6], out[: len(out) // 2]).with_draft(out[len(out) // 2 :])
        assert set(banned.after(view).tolist()) == wanted, "a draft counts as text"


def test_bad_words_are_token_sequences_with_and_without_a_space(tokenizer):
    banned = banned_of(tokenizer, ("parse", "END 😀"), ())
    for word in ("parse", "END 😀"):
        ids = tokenizer.encode(word, add_bos=False)
        assert ids[-1] in banned.after(Counts([], ids[:-1]))
        assert ids[-1] not in banned.after(Counts(ids[:-1], [])) or len(ids) == 1, "the prompt does not count"
    assert banned_of(tokenizer, (), ()) is None


def test_the_whole_output_is_clean():
    from lossless.test_match import letters

    strings = ("x", "ot", "dae", "kk")
    params = SamplingParams(max_tokens=200, seed=11, temperature=1.0, banned_strings=strings)
    prompt = [23, 14, 19]  # "xot": what the prompt holds is no text of the answer
    engine = make_engine(Setup(drafter="random"), tokenizer=letters())
    done = engine.run({"a": (prompt, params)})["a"][0]
    assert not any(string in done.text for string in strings)
    free = make_engine(Setup(), tokenizer=letters()).run(
        {"a": (prompt, SamplingParams(max_tokens=200, seed=11, temperature=1.0))}
    )["a"][0]
    assert any(string in free.text for string in strings)


@pytest.mark.parametrize("name", ["bad_words", "banned_strings"])
def test_what_cannot_be(name):
    for wrong in (("",), ("a" * 41,), ("a",) * 65, "\ud800", (1,)):
        with pytest.raises(UsageError, match=name):
            SamplingParams(**{name: wrong})
    with pytest.raises(UsageError, match="tokenizer"):
        make_engine(Setup()).check([1], SamplingParams(**{name: "a"}))


def test_mirostat_does_not_go_on_with_what_another_engine_wrote():
    engine = make_engine(Setup())
    params = SamplingParams(temperature=1.0, mirostat=2)
    engine.add("a", [5], params, written={0: []})
    with pytest.raises(UsageError, match="mirostat"):
        engine.add("b", [5], params, written={0: [6]})
    with pytest.raises(UsageError, match="use 0 or 2"):
        SamplingParams(mirostat=1)
