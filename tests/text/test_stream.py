"""Streams: the same final text for any chunking, whole characters only, stop strings found wherever they fall."""

import random

import pytest

from paceline.core import SamplingParams
from paceline.text.stream import Detokenizer, StopStrings, TextStream
from paceline.text.tokenizer import Tokenizer
from text.tiny_tokenizers import CONFIG, byte_level, gemma_style

GOLDEN = ["def parse(text):\n    return text.split()", "é€😀 mixed ▁ 日本語", "", "👩‍💻 family 🇨🇭 END tail",
          "aaabaaab", "stop sto stopstop", "\n\nclass Stack:\n        pass"]  # fmt: skip


@pytest.fixture(params=[gemma_style, byte_level], scope="module")
def tokenizer(request):
    return Tokenizer(request.param(), CONFIG)


def chunkings(ids, seed):
    """The tokens in random chunks of 1..8."""
    generator, at = random.Random(seed), 0
    while at < len(ids):
        size = generator.randint(1, 8)
        yield ids[at : at + size]
        at += size


def run(tokenizer, params, chunks):
    """(text, kept tokens, stopped) of a stream, and every piece of text that it gave."""
    stream, pieces, kept = TextStream(tokenizer, params), [], 0
    for chunk in chunks:
        pushed = stream.push(chunk)
        pieces.append(pushed.text)
        kept += pushed.kept_tokens
        if pushed.stopped:
            return "".join(pieces), kept, True, pieces
    pieces.append(stream.finish())
    return "".join(pieces), kept, False, pieces


@pytest.mark.parametrize("text", GOLDEN)
@pytest.mark.parametrize(
    "stop", [(), ("END",), ("aab", "b"), ("stop",), ("\n    ", "zzz"), ("😀",), ("日本",)]
)
def test_any_chunking_gives_the_same(tokenizer, text, stop):
    ids = tokenizer.encode(text)
    params = SamplingParams(stop=stop)
    first = run(tokenizer, params, [[i] for i in ids])
    for seed in range(10):
        assert run(tokenizer, params, chunkings(ids, seed))[:3] == first[:3]
    whole = tokenizer.decode(ids)
    starts = [whole.find(s) for s in stop if s in whole]
    assert first[2] == bool(starts)
    if not starts:
        assert first[0] == whole
        assert first[1] == len(ids)
    else:  # the text ends before a stop string, and the last token kept is the one that completed it (T4)
        kept = tokenizer.decode(ids[: first[1]])
        assert first[0] == whole[: len(first[0])]
        assert any(kept.startswith(first[0] + s) for s in stop)
        assert not any(s in tokenizer.decode(ids[: first[1] - 1]) for s in stop)
    assert not any(s in first[0] for s in stop)


def test_random_bytes_never_differ_from_decode(tokenizer):
    """T8: broken UTF-8 in any cut; each piece shown is final."""
    generator = random.Random(1)
    for _ in range(200):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(12)]
        text = run(tokenizer, SamplingParams(), chunkings(ids, generator.random()))[0]
        assert text == tokenizer.decode(ids)


def test_no_half_characters(tokenizer):
    ids = tokenizer.encode("😀é", add_bos=False)
    characters = Detokenizer(tokenizer)
    pieces = [characters.push(i) for i in ids]
    assert "".join(pieces) == "😀é"
    assert all("�" not in piece for piece in pieces)
    cut = Detokenizer(tokenizer)
    assert "".join(cut.push(i) for i in ids[:2]) + cut.finish() in ("�", "��", "😀")


def test_a_real_replacement_character_is_not_held(tokenizer):
    ids = tokenizer.encode("a�b", add_bos=False)
    assert run(tokenizer, SamplingParams(), [ids])[0] == "a�b"


def test_a_stop_early_in_a_long_block_is_found(tokenizer):
    """T3: the scan covers all of the new text, not its tail."""
    ids = tokenizer.encode("x END " + "and so on and on " * 20, add_bos=False)
    text, kept, stopped, _ = run(tokenizer, SamplingParams(stop=("END",)), [ids])
    assert (text, stopped) == ("x ", True)
    assert tokenizer.decode(ids[:kept]).startswith("x END")
    assert kept < 8


def test_the_earliest_stop_wins():
    stops = StopStrings(("later", "ab"))
    assert stops.push("xx ab then later") == ("xx ", True)
    assert StopStrings(("abc", "b")).push("zabc") == ("z", True)


def test_text_that_could_begin_a_stop_waits():
    stops = StopStrings(("abcd", "xyz"))
    assert stops.push("1ab") == ("1", False)
    assert stops.push("c") == ("", False)
    assert stops.push("abc") == ("abc", False)  # the first three cannot become a stop any more
    assert stops.push("xy") == ("abc", False)
    assert stops.finish() == "xy"
    assert stops.finish() == ""
    assert StopStrings(()).push("abc") == ("abc", False)


def test_overlapping_beginnings():
    stops = StopStrings(("aab",))
    assert [stops.push(c) for c in "aaab"] == [("", False), ("", False), ("a", False), ("", True)]


def test_min_tokens_puts_off_stop_strings(tokenizer):
    ids = tokenizer.encode("stop stop stop", add_bos=False)
    everywhere = run(tokenizer, SamplingParams(stop=("stop",)), [ids])
    assert everywhere[0] == ""
    params = SamplingParams(stop=("stop",), min_tokens=everywhere[1])
    text, kept, stopped, _ = run(tokenizer, params, [ids])
    assert (text, stopped) == ("stop ", True)
    assert kept > everywhere[1]
    for seed in range(5):
        assert run(tokenizer, params, chunkings(ids, seed))[:3] == (text, kept, stopped)


MIXED = [  # stop string, the text that is left, whether it stops
    ("END<turn|>", "say ", True), ("<turn|>user", "say END", True), ("D<turn|>us", "say EN", True),
    ("<turn|><eos>", "say ENDuser 😀", True), ("😀<turn|><eos>", "say ENDuser ", True), ("say<turn|>", "", False),
    ("<eos><turn|>", "", False), ("END<|turn>", "", False),
]  # fmt: skip


@pytest.mark.parametrize(("stop", "left", "stops"), MIXED)
def test_a_stop_string_of_text_and_special_tokens(tokenizer, stop, left, stops):
    """It stops where they follow each other; the special tokens stay out of the text."""
    ids = tokenizer.encode("say END<turn|>user 😀<turn|><eos>after", add_bos=False)
    params = SamplingParams(stop=(stop, "never"))
    text, kept, stopped, _ = run(tokenizer, params, [[i] for i in ids])
    assert (text, stopped) == (left if stops else "say ENDuser 😀after", stops)
    assert stops == (kept < len(ids))
    for seed in range(10):
        assert run(tokenizer, params, chunkings(ids, seed))[:3] == (text, kept, stopped)


def test_special_tokens_are_hidden_unless_asked_for(tokenizer):
    ids = tokenizer.encode("<|turn>user hi<turn|>", add_bos=False)
    assert run(tokenizer, SamplingParams(), [ids])[0] == "user hi"
    shown = TextStream(tokenizer, SamplingParams(), skip_special=False)
    assert shown.push(ids).text + shown.finish() == "<|turn>user hi<turn|>"


@pytest.mark.parametrize("text", GOLDEN)
@pytest.mark.parametrize("stop", [("END",), ("aab", "b"), ("stop", "stopstop"), ("\n    ", "zzz"), ("😀",)])
def test_a_stop_string_may_be_shown(tokenizer, text, stop):
    ids = tokenizer.encode(text)
    hidden = run(tokenizer, SamplingParams(stop=stop), [[i] for i in ids])
    params = SamplingParams(stop=stop, include_stop_str_in_output=True)
    shown = run(tokenizer, params, [[i] for i in ids])
    assert shown[1:3] == hidden[1:3], "the same tokens are kept"
    if hidden[2]:
        assert shown[0] in {hidden[0] + s for s in stop}
    else:
        assert shown[0] == hidden[0]
    for seed in range(5):
        assert run(tokenizer, params, chunkings(ids, seed))[:3] == shown[:3]


def test_a_special_token_that_a_stop_string_spells_may_be_shown(tokenizer):
    params = SamplingParams(stop=("<turn|>", "END<turn|>"), include_stop_str_in_output=True)
    end = tokenizer.token_id("<turn|>")
    assert TextStream(tokenizer, params).told(end) == "<turn|>"
    assert TextStream(tokenizer, params).told(tokenizer.token_id("<eos>")) == ""
    assert TextStream(tokenizer, SamplingParams(stop=("<turn|>",))).told(end) == ""
    ids = tokenizer.encode("say END<turn|>user", add_bos=False)
    assert run(tokenizer, params, [ids])[0] == "say END<turn|>"
