"""Every parser gives the same final message for any way of cutting the text."""

from __future__ import annotations

import json
import random

import pytest

from paceline.chat.asked import Asked, ToolChoice
from paceline.chat.road import Chats
from paceline.core import SamplingParams
from paceline.text.formats.events import CallArguments, CallStart, Text
from paceline.text.formats.gemma import GEMMA
from paceline.text.formats.gemma_arguments import ArgumentReader
from paceline.text.formats.gemma_calls import GemmaCallParser
from paceline.text.formats.gemma_thoughts import GemmaThoughtParser
from paceline.text.formats.probe import named
from server.fake_engine import make_tokenizer

Q = '<|"|>'
CALLS = {  # name: (source, text, calls)
    "plain": ("hello world", "hello world", []),
    "one": (f"<|tool_call>call:add{{a:1,b:{Q}x{Q}}}<tool_call|>", "", [("add", {"a": 1, "b": "x"})]),
    "two in a row": (
        f"ok <|tool_call>call:f{{a:true}}<tool_call|><|tool_call>call:g-1.x{{b:[1,-2.5e3,null,{Q}é🎉{Q}]}}<tool_call|>",
        "ok ",
        [("f", {"a": True}), ("g-1.x", {"b": [1, -2500.0, None, "é🎉"]})],
    ),
    "nested": (
        f"<|tool_call>call:f{{o:{{k:{Q}}}],:{{{Q},deep:[[{{z:0}}]]}},t:12}}<tool_call|>\n",
        "",
        [("f", {"o": {"k": "}],:{", "deep": [[{"z": 0}]]}, "t": 12})],
    ),
    "string escapes": (
        f'<|tool_call>call:f{{s:{Q}a "q" \\ \n <b> <|x|> {Q}}}<tool_call|>',
        "",
        [("f", {"s": 'a "q" \\ \n <b> <|x|> '})],
    ),
    "json quotes": (r'<|tool_call>call:f{"s":"a\"b\u00e9\q","n": 3 }<tool_call|>', "", [("f", {"s": 'a"bé\\q', "n": 3})]),
    "empty": ("<|tool_call>call:ping{}<tool_call|>", "", [("ping", {})]),
    "no braces": ("<|tool_call>call:ping<tool_call|>", "", [("ping", {})]),
    "quoted number stays text": (f"<|tool_call>call:f{{a:{Q}5{Q},b:5}}<tool_call|>", "", [("f", {"a": "5", "b": 5})]),
    "url and time as bare words": (
        "<|tool_call>call:f{u:http://a/b?c=d,t:12:30}<tool_call|>", "", [("f", {"u": "http://a/b?c=d", "t": "12:30"})],
    ),
    "quoted keys": (f"<|tool_call>call:f{{{Q}a b{Q}:1}}<tool_call|>", "", [("f", {"a b": 1})]),
    "missing values": ("<|tool_call>call:f{a:,b,c:1,}<tool_call|>", "", [("f", {"a": None, "b": None, "c": 1})]),
    "missing brace": ("<|tool_call>call:f{a:{b:[1<tool_call|>!", "!", [("f", {"a": {"b": [1]}})]),
    "no end marker": ("<|tool_call>call:f{a:1}<|tool_call>call:g{}<tool_call|>", "", [("f", {"a": 1}), ("g", {})]),
    "text after": ("<|tool_call>call:f{}<tool_call|> and more", " and more", [("f", {})]),
    "no call": ("<|tool_call>bad name{a:1}<tool_call|>", "<|tool_call>bad name{a:1}<tool_call|>", []),
    "call without marker": ("call:f{a:1}", "call:f{a:1}", []),
    "marker begun": ("a <|tool_cal", "a <|tool_cal", []),
    "response marker": ("<|tool_call>call:f{}<tool_call|><|tool_response>", "", [("f", {})]),
    "spaces": ("<|tool_call> call:f { a : 1 , b : [ 1 , 2 ] } <tool_call|>", "", [("f", {"a": 1, "b": [1, 2]})]),
}  # fmt: skip


def pieces(text: str, seed: int) -> list[str]:
    rng, out = random.Random(seed), []
    while text:
        size = rng.randint(1, 8)
        out.append(text[:size])
        text = text[size:]
    return out


def run(chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, text, calls = GemmaCallParser(), "", []
    for events in [*(parser.feed(chunk) for chunk in chunks), parser.finish()]:
        for event in events:
            match event:
                case Text(piece):
                    text += piece
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append((name, ""))
                case CallArguments(index, piece):
                    calls[index] = (calls[index][0], calls[index][1] + piece)
    return text, calls


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_do_not_depend_on_the_cuts(name: str) -> None:
    source, text, calls = CALLS[name]
    whole = run([source])
    assert whole[0] == text
    assert [(n, json.loads(a)) for n, a in whole[1]] == calls
    for seed in range(300):
        assert run(pieces(source, seed)) == whole


def test_arguments_stream_before_the_call_ends() -> None:
    parser = GemmaCallParser()
    parser.feed(f"<|tool_call>call:f{{s:{Q}abc")
    assert parser.feed("def") == [CallArguments(0, "def")]


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    for seed in range(50):
        assert run(pieces(f"<|tool_call>call:f{{s:{Q}abc<|", seed)) == ("", [("f", '{"s":"abc<|')])


@pytest.mark.parametrize("seed", range(200))
def test_any_garbage_becomes_valid_json(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = ["{", "}", "[", "]", ",", ":", Q, '"', "\\", "a", "1", "-", " ", "true", "<", "|", "\n", "é"]
    garbage = "{" + "".join(rng.choices(alphabet, k=60)) + Q + '"' + Q + "<tool_call|>"
    reader = ArgumentReader()
    out = reader.feed(garbage)[0]
    if reader.done:
        json.loads(out)
    again = ArgumentReader()
    assert "".join(again.feed(p)[0] for p in pieces(garbage, seed)) == out


def test_depth_is_limited() -> None:
    out = ArgumentReader().feed("{a:" + "[" * 5000 + "]" * 5000 + "}")[0]
    assert out.startswith('{"a":[[[')
    assert "[" * 64 not in out


THOUGHTS = {
    "none": ("just text", False, "", "just text"),
    "first": ("<|channel>thought\nI think\n<channel|>Answer", False, "I think\n", "Answer"),
    "inside": ("so far<channel|>Answer", True, "so far", "Answer"),
    "empty": ("<|channel>thought\n<channel|>Answer", False, "", "Answer"),
    "closed at once": ("<|channel>thought<channel|>A", False, "", "A"),
    "cut off": ("<|channel>thought\nhm <chan", False, "hm <chan", ""),
    "cut in the name": ("a<|channel>thou", False, "", "a"),
    "twice": ("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d", False, "ac", "bd"),
    "only begun": ("a <|chan", False, "", "a <|chan"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thinking_is_parted_for_any_cuts(name: str) -> None:
    source, inside, reasoning, content = THOUGHTS[name]
    for seed in range(-1, 200):
        parser = GemmaThoughtParser(inside)
        parts = [parser.feed(p) for p in ([source] if seed < 0 else pieces(source, seed))] + [parser.finish()]
        assert ("".join(p.reasoning for p in parts), "".join(p.content for p in parts)) == (
            reasoning,
            content,
        )


def test_a_prompt_may_open_the_thinking_part() -> None:
    assert GEMMA.opened_by("<|turn>model\n<|channel>thought\n")
    assert not GEMMA.opened_by("<|turn>model\n<|channel>thought\n<channel|>")
    assert not GEMMA.opened_by("plain")


@pytest.mark.parametrize(("strict", "called"), [(False, True), (True, False)])
def test_a_call_without_its_marks_is_one_but_where_a_grammar_has_to_hold_it(
    strict: bool, called: bool
) -> None:
    tokenizer = make_tokenizer()
    written = '```json\n{"name": "f", "arguments": {"a": 1}}\n```'
    function = {"name": "f", "parameters": {"type": "object"}, "strict": strict}
    tools = [{"type": "function", "function": function}]
    asked = Asked(messages=[{"role": "user", "content": "x"}], tools=tools, choice=ToolChoice("auto"))
    chats = Chats(tokenizer, lambda *_: "", named("hermes"))
    events = chats.answer(asked, False, SamplingParams(), "id").events
    found = [event for token in tokenizer.encode(written) for event in events.one(token)] + events.end()
    assert [event.name for event in found if isinstance(event, CallStart)] == (["f"] if called else [])
    assert "".join(event.text for event in found if isinstance(event, Text)) == ("" if called else written)
