"""Formats of public templates: what is found, prompts as of transformers, answers parsed however they are cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from families import ARGUMENTS, FAMILIES, RAW, STRING, TOOLS, F, tokenizer_of
from families import A as WRITTEN
from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.formats.base import ChatFormat, Needs
from paceline.text.formats.choose import format_of
from paceline.text.formats.events import CallArguments, CallStart, Text, Thought
from paceline.text.formats.needs import suited
from paceline.text.formats.probe import NAMES, named
from paceline.text.grammar import GrammarFailed, Grammars, Lead
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import Vocabulary
from text.tiny_tokenizers import gemma_style


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, Tokenizer, ChatFormat]]:
    tokenizer = tokenizer_of(request.param)
    yield request.param, tokenizer, format_of(tokenizer)
    ChatTemplate.of(tokenizer).close()


def test_the_format_is_what_the_template_writes(family: tuple[str, Tokenizer, ChatFormat]) -> None:
    name, _, chat = family
    want = FAMILIES[name]
    assert chat.name == want.format
    assert chat.needs == Needs(**want.needs)
    assert (chat.thoughts is not None) == (want.thought is not None)
    assert (chat.thinks_unasked, chat.switches) == (want.thinks, want.switches)
    assert not chat.note


def said(role: str, content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: dict[str, Any], id_: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


DECLARED = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
    for name, schema in TOOLS.items()
]
U, A = said("user"), said("assistant", "fine")
ONE = said("assistant", "", tool_calls=[call("f", {"s": "x", "n": 1}, "abcdefgh1")])
TWO = said("assistant", "", tool_calls=[*ONE["tool_calls"], call("g", {}, "abcdefgh2")])
R1 = said("tool", "12 degrees", tool_call_id="abcdefgh1", name="f")
R2 = said("tool", "grey", tool_call_id="abcdefgh2", name="g")
CHATS: dict[str, tuple[list[dict[str, Any]], bool, dict[str, Any]]] = {  # messages, with tools, switches
    "plain": ([U], False, {}),
    "system and turns": ([said("system", "be brief"), U, A, U], False, {}),
    "thinking": ([U], False, {"enable_thinking": True, "thinking": True}),
    "thinking off": ([U], False, {"enable_thinking": False, "thinking": False}),
    "thought of an earlier turn": ([U, A | {"reasoning_content": "hm"}, U], False, {}),
    "tools": ([U], True, {}),
    "tool result": ([U, ONE, R1], True, {}),
    "result, then an answer": ([U, ONE, R1, A, U], True, {}),
    "parallel calls": ([U, TWO, R1, R2], True, {}),
    "call after a thought": ([U, ONE | {"reasoning_content": "hm"}, R1], True, {}),
}


def theirs(source: str, messages: Any, tools: Any, switches: dict[str, Any]) -> str | None:
    """What transformers renders; None if the template refuses."""
    oracle = PreTrainedTokenizerFast(tokenizer_object=gemma_style(), bos_token="<bos>", eos_token="<eos>")
    try:
        made: str = oracle.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            tools=tools,
            add_generation_prompt=True,
            **switches,
        )
    except (TemplateError, TypeError):
        return None
    return made


@pytest.mark.parametrize("cell", CHATS)
def test_prompts_are_those_of_transformers(family: tuple[str, Tokenizer, ChatFormat], cell: str) -> None:
    """Messages as the template needs them: transformers is given the same. Nothing that was said is lost."""
    name, tokenizer, chat = family
    messages, with_tools, switches = CHATS[cell]
    tools = DECLARED if with_tools else None
    before = json.dumps(messages)
    given = suited(messages, chat.needs)
    want = theirs(FAMILIES[name].template(name), given, tools, switches)
    try:
        got = ChatTemplate.of(tokenizer).render(given, tools=tools, options=switches)
    except UsageError:
        got = None
    assert got == want
    assert json.dumps(messages) == before, "the client's messages were changed"
    if "call" in cell or "result" in cell:
        assert (got is not None) or chat.calls is None or "hermes" in name
        for said_before in (
            (["f", "12 degrees"] + (["grey"] if "parallel" in cell else [])) if chat.calls and got else ()
        ):
            assert said_before in got


def run(
    chat: ChatFormat, pieces: Sequence[str], inside: bool = False, tools: Any = TOOLS
) -> tuple[str, str, list[Any]]:
    """(what was thought, what was said, calls with their arguments as text)."""
    parser, thought, text, calls = chat.parser(inside, tools), "", "", []
    for events in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        for event in events:
            match event:
                case Thought(piece):
                    thought += piece
                case Text(piece):
                    text += piece
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append([name, ""])
                case CallArguments(index, piece):
                    assert index == len(calls) - 1
                    calls[index][1] += piece
    return thought, text, calls


def answers(name: str) -> Iterator[tuple[str, bool, tuple[str, str, list[Any]]]]:
    """(answer, whether the prompt has opened the thought, what is to be made of it)."""
    one = FAMILIES[name]
    yield one.said + "Hello é🎉\n\n{x}", False, ("", "Hello é🎉\n\n{x}", [])
    if one.calls:
        first, both = ["f", ARGUMENTS], [["f", ARGUMENTS], ["g", {}]]
        yield one.calls[0], False, ("", "", [first])
        yield one.calls[1], False, ("", "", both)
        if one.format not in ("llama3", "harmony", "atem"):
            yield "I look." + one.calls[0], False, ("", "I look.", [first])
    if one.thought:
        opening, closing = one.thought
        for inside in (False, True) if one.format not in ("gemma", "harmony", "atem") else (False,):
            lead = "" if inside else opening
            yield lead + "why\n\nso" + closing + one.said + "yes", inside, ("why\n\nso", "yes", [])
            if one.calls:
                yield lead + "I call" + closing + one.calls[0], inside, ("I call", "", [first])


def test_answers_are_parsed_however_they_are_cut(family: tuple[str, Tokenizer, ChatFormat]) -> None:
    """Between all characters, and at each single place: nothing is lost, no half mark is shown."""
    name, _, chat = family
    for answer, inside, (thought, text, calls) in answers(name):
        whole = run(chat, [answer], inside)
        assert (*whole[:2], [[n, json.loads(a)] for n, a in whole[2]]) == (thought, text, calls), answer
        for at in range(1, len(answer)):
            assert run(chat, [answer[:at], answer[at:]], inside) == whole, (answer, at)
        assert run(chat, list(answer), inside) == whole, answer


def test_an_answer_that_is_cut_off_shows_no_mark(family: tuple[str, Tokenizer, ChatFormat]) -> None:
    """Wherever max_tokens ends it: calls and thoughts are beginnings of the whole ones, and text holds no half mark."""
    name, _, chat = family
    for answer, inside, (thought, text, calls) in answers(name):
        for at in range(len(answer)):
            parser, shown = chat.parser(inside, TOOLS), ""
            events = parser.feed(answer[:at])
            shown = "".join(event.text for event in events if isinstance(event, Text))
            assert (text + "\n").startswith(shown), (answer[:at], shown)
            got = run(chat, [answer[:at]], inside)
            assert thought.startswith(got[0].rstrip("\n")) or got[0].startswith(thought)
            assert len(got[2]) <= len(calls)
            assert not got[2] or len(got[2]) < len(calls) or (text + "\n").startswith(got[1]), (
                answer[:at],
                got,
            )
            assert [n for n, _ in got[2]] == [n for n, _ in calls[: len(got[2])]]


MARKS_IN_STRINGS = {
    "hermes": '{"s": "</tool_call> <tool_call> [TOOL_CALLS] </think>"}',
    "llama3": '{"s": "</tool_call> ; {\\"name\\": \\"g\\"}"}',
    "granite": '{"s": "<|tool_call|>[{ ]"}',
    "mistral-list": '{"s": "[TOOL_CALLS] ] }"}', "mistral": '{"s": "[TOOL_CALLS]g[ARGS]{}"}',
    "deepseek": '{"s": "<｜tool▁call▁end｜> ``` }"}', "deepseek-v3.1": '{"s": "<｜tool▁calls▁end｜>"}',
    "harmony": '{"s": "<|end|> <|call|>"}', "kimi": '{"s": "<|tool_call_end|>"}', "json": '{"s": "</TOOLCALL>]"}',
    "qwen-xml": "</parameter>\n<parameter> </function>", "glm": "</arg_value> <arg_key", "glm-4.7": "</tool_call> x",
    "minimax": "</parameter></x>", "seed": "</parameter></x> </function>",
    "deepseek-v3.2": "</｜DSML｜parameter></x>", "deepseek-v4": "</｜DSML｜invoke> x",
    "lfm2": '"<|tool_call_end|> )], g("', "atem": "</atem:parameter></x> </atem:invoke>",
    "cohere": '{"s": "<|END_ACTION|> <|START_RESPONSE|> ]"}',
}  # fmt: skip


def test_marks_inside_of_arguments_are_the_arguments(family: tuple[str, Tokenizer, ChatFormat]) -> None:
    name, _, chat = family
    one = FAMILIES[name]
    if one.calls is None or one.format == "gemma":
        return
    value = MARKS_IN_STRINGS[one.format]
    written = {"{": WRITTEN, '"': STRING}.get(value[0], RAW)
    answer = one.calls[0].replace(written, value)
    want = {"{": lambda: json.loads(value)["s"], '"': lambda: json.loads(value)}.get(
        value[0], lambda: value
    )()
    for pieces in ([answer], list(answer)):
        thought, text, [[called, arguments]] = run(chat, pieces)
        assert (thought, text, called, json.loads(arguments)["s"]) == ("", "", "f", want)


BOTH = [["f", "{}"], ["g", "{}"]]
HERMES = {  # bad answers in the most common notation: text, calls with arguments as they are told
    "marks that are talked about": ("<tool_call> begins a call", "<tool_call> begins a call", []),
    "no name": ('<tool_call>\n{"a": 1}\n</tool_call>', '<tool_call>\n{"a": 1}\n</tool_call>', []),
    "arguments first": ('<tool_call>{"arguments": {"s": "x"}, "name": "f"}</tool_call>', "", [["f", '{"s": "x"}']]),
    "arguments in a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"s\\": 1}"}</tool_call>', "", [["f", '{"s": 1}']]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    "arguments are null": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    "as OpenAI writes it": (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', "", [["f", "{}"]]),
    "two joined": (
        '<tool_call>{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}</tool_call>', "", BOTH),
    "a mark forgotten": (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}', "", BOTH),
    "nested marks": ('<tool_call><tool_call>{"name": "f"}</tool_call></tool_call>', "<tool_call>", [["f", "{}"]]),
    "braces forgotten": ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>!', "!", [["f", '{"a": [1]}']]),
    "a quote forgotten": (
        '<tool_call>{"name": "f", "arguments": {"a": "b\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>', "",
        [["f", '{"a": "b\\n"}'], ["g", "{}"]]),
    "a line break in a string": ('<tool_call>{"name": "f", "arguments": {"a": "b\nc"}}', "", [["f", '{"a": "b\\nc"}']]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [["f", '{"a": "b']]),
    "cut in the name": ('so <tool_call>{"name": "f', 'so <tool_call>{"name": "f', []),
    "text behind": ('<tool_call>{"name": "f"}</tool_call>\n\nand more', "\n\nand more", [["f", "{}"]]),
    "white space only": ("  \n", "  \n", []),
    # Qwen2.5-Coder of 1.5B forgets its marks
    "a fence for marks": (
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "s": "x"\n  }\n}\n```', "", [["f", '{\n    "s": "x"\n  }']]),
    "a fence without a language": ('```\n{"name": "f", "arguments": {}}\n```\n', "", [["f", "{}"]]),
    "no marks at all": ('\n{"name": "f", "arguments": {"s": 1}}', "", [["f", '{"s": 1}']]),
    "two in a fence": ('```json\n{"name": "f"}\n{"name": "g"}\n```', "", BOTH),
    "a fence, then marks": (
        '```json\n{"name": "f"}\n```\n<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", BOTH),
    "a fence with another object": ('```json\n{"a": 1}\n```\nso', '```json\n{"a": 1}\n```\nso', []),
    "a fence with a tool that is none": ('```json\n{"name": "h"}\n```', '```json\n{"name": "h"}\n```', []),
    "a fence of another language": ("```python\n{}\n```", "```python\n{}\n```", []),
    "a fence that is cut": ("``", "``", []),
    "a fence behind text": (
        'like so: ```json\n{"name": "f"}\n```', 'like so: ```json\n{"name": "f"}\n```', []),
    "an object that is no call, then marks": (
        '{"a": 1} <tool_call>{"name": "x", "arguments": {}}</tool_call>', '{"a": 1} ', [["x", "{}"]]),
}  # fmt: skip


@pytest.mark.parametrize("bad", HERMES)
def test_bad_calls_lose_nothing(bad: str) -> None:
    answer, text, calls = HERMES[bad]
    chat = named("hermes")
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))):
        assert run(chat, pieces) == ("", text, calls), pieces


PHI4 = (  # in short how llama.cpp's template of Phi-4-mini writes calls; the package of the others does not have it
    "{% for t in tools or [] %}<|tool|>{{ t.function | tojson }}<|/tool|>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<|tool_call|>{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|end|>{% endfor %}<|assistant|>"
)


def test_objects_between_marks_of_a_templates_own_are_calls() -> None:
    tokenizer = Tokenizer(gemma_style(), {}, template=PHI4)
    chat = format_of(tokenizer)
    assert (chat.name, chat.needs, chat.marks) == ("json", Needs(), ("<|tool_call|>", "<|/tool_call|>"))
    one, two = (
        '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>',
        '<|tool_call|>[{"name": "g"}]<|/tool_call|>',
    )
    for pieces in ([one + two], list(one + two)):
        assert run(chat, pieces) == ("", "", BOTH)
    ChatTemplate.of(tokenizer).close()


LFM2 = {  # bad answers and other spellings: text, calls
    "as its template writes it": (
        """[f(s='it's "x", or (y)', n=5, o={'k': True})]""", "",
        [["f", """{"s": "it's \\"x\\", or (y)", "n": 5, "o": {"k": true}}"""]]),
    "a line break": ("[f(s='a\nb')]", "", [["f", '{"s": "a\\nb"}']]),
    "white space and no list": ("f( s = 'x' , n = 5 )", "", [["f", '{"s": "x", "n": 5}']]),
    "JSON": ('[{"name": "f", "arguments": {"s": "x"}}, {"name": "g", "arguments": {}}]', "",
        [["f", '{"s": "x"}'], ["g", "{}"]]),
    "a text without quotes": ("[f(s=x y, n=True)]", "", [["f", '{"s": "x y", "n": true}']]),
    "two joined": ("[f()g()]", "", BOTH), "two lists": ("[f()]<|tool_call_end|><|tool_call_start|>[g()]", "", BOTH),
    "no name": ("[(s=1)]", "<|tool_call_start|>[(s=1)]<|tool_call_end|>", []),
    "nested marks": ("<|tool_call_start|>[f()]<|tool_call_end|>", "<|tool_call_start|>", [["f", "{}"]]),
    "arguments without names": ("[f('x')]", "'x')]<|tool_call_end|>", [["f", "{}"]]),
}  # fmt: skip


@pytest.mark.parametrize("bad", LFM2)
def test_calls_of_lfm2_in_other_spellings(bad: str) -> None:
    inner, text, calls = LFM2[bad]
    answer, chat = f"<|tool_call_start|>{inner}<|tool_call_end|>", named("lfm2")
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(len(answer)))):
        assert run(chat, pieces) == ("", text, calls), pieces


def test_calls_of_lfm2_that_are_cut_keep_what_they_have() -> None:
    whole = "<|tool_call_start|>[f(s='ab', n=5)]"
    cut = [run(named("lfm2"), [whole[:at]])[2] for at in range(len(whole))]
    assert cut[whole.index("ab") + 1] == [["f", '{"s": "a']]
    assert cut[whole.index("n=5") + 3] == [["f", '{"s": "ab", "n": 5']]


def test_deep_arguments_thoughts_without_end_and_answers_in_json() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    calls = run(named("hermes"), [f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>'])[2]
    assert calls == [["f", deep]]
    value = "[" * 5000 + "]" * 5000
    xml = f"<tool_call>\n<function=f>\n<parameter=o>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(run(named("qwen-xml"), [xml])[2][0][1]) == {"o": value}
    section, end = "<｜DSML｜function_calls>", "</｜DSML｜invoke></｜DSML｜function_calls>"
    for said, read in (
        ('string="false">"x"', "x"),
        ('string="true">"x"', '"x"'),
        ('string="false">5', "5"),
        (">x", "x"),
    ):
        mark = said if said[0] == ">" else " " + said
        dsml = f'{section}<｜DSML｜invoke name="f"><｜DSML｜parameter name="s"{mark}</｜DSML｜parameter>{end}'
        for pieces in ([dsml], list(dsml)):
            assert json.loads(run(named("deepseek-v3.2"), pieces)[2][0][1]) == {"s": read}
    endless = "<think>\n" + "hm <think> </thin\n" * 2000
    assert run(named("hermes"), [endless]) == ("hm <think> </thin\n" * 2000, "", [])
    for said_as_json in (
        '{"name": "Bob", "age": 3}',
        '{"name": "h", "parameters": {}}',
        '{"x": 1}',
        "{",
        '{"name"',
    ):
        assert run(named("llama3"), list(said_as_json)) == ("", said_as_json, [])
    assert run(named("harmony"), ["no channel at all"]) == ("", "no channel at all", [])
    for chat in map(named, NAMES):
        assert run(chat, [""]) == ("", "", [])
    with pytest.raises(UsageError, match="use auto or one of plain, gemma, harmony"):
        named("qwen")


@pytest.mark.parametrize("name", NAMES)
def test_garbage_of_marks_is_parsed_alike_however_it_is_cut(name: str) -> None:
    rng, chat = random.Random(name), named(name)
    for _ in range(25):
        bits = [
            *chat.marks,
            "{",
            "}",
            '"',
            '"name": ',
            "f",
            '"arguments": ',
            ":",
            ",",
            "\n",
            "<",
            "[",
            "function=f>",
        ]
        text = "".join(rng.choices(bits, k=30))
        whole = run(chat, [text])
        assert run(chat, list(text)) == whole, (name, text)
        for _ in range(6):
            at = sorted(rng.choices(range(len(text)), k=3))
            pieces = [text[: at[0]], text[at[0] : at[1]], text[at[1] : at[2]], text[at[2] :]]
            assert run(chat, pieces) == whole, (name, pieces)


def sample(tokenizer: Tokenizer, constraint: Any, seed: int) -> str:
    """Random allowed tokens up to an end; what closes things is preferred once the text is long."""
    rng, out = random.Random(seed), []
    for _ in range(1500):
        mask = constraint.masks([])[0]
        if mask is None:  # a thought, which is free
            token = rng.choice(tokenizer.encode("why </think>"[rng.randrange(5) :], add_bos=False))
        else:
            allowed = np.flatnonzero(mask).tolist()
            if 1 in allowed:
                return tokenizer.decode(out, skip_special=False)
            ends = [
                i for i in allowed if tokenizer.token_text(i) in '"}],<>/' or tokenizer.token_text(i) in FAST
            ]
            token = rng.choice(ends if ends and (len(out) > 50 or rng.random() < 0.3) else allowed)
        constraint.commit([token])
        out.append(token)
    raise AssertionError("it did not end: " + tokenizer.decode(out, skip_special=False)[:300])


FAST = {m for family in FAMILIES.values() for m in (*family.special, *family.added)} | set(
    "\u010aparmetknsol="
)


def fits(name: str, arguments: Any) -> bool:
    if name == "g":
        return arguments == {}
    known = set(arguments) <= {"s", "n", "o"} and isinstance(arguments.get("s"), str)
    return known and 0 <= arguments.get("n", 0) <= 99 and set(arguments.get("o", {})) <= {"k"}


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "no tokens"])
@pytest.mark.parametrize("name", [name for name, one in FAMILIES.items() if one.calls])
def test_forced_calls_are_written_in_the_models_own_notation(name: str, marks: bool) -> None:
    """Whatever is sampled is calls that fit their schemas; the family's own calls are allowed, behind a thought too."""
    tokenizer = tokenizer_of(name, marks)
    chat, one = format_of(tokenizer), FAMILIES[name]
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,))
    grammars = Grammars.of(tokenizer, vocabulary, chat, 20.0)
    try:
        for seed in range(2):
            most = 1 + seed % 2
            text = sample(tokenizer, grammars.compile_call(TOOLS, most)(), seed)
            thought, rest, calls = run(chat, [text])
            assert (thought, rest.strip()) == ("", ""), text
            assert 1 <= len(calls) <= most
            assert all(fits(called, json.loads(arguments)) for called, arguments in calls), text
        leads: list[tuple[Lead, str]] = [("none", "")]
        if one.thought:
            opening, closing = one.thought
            leads += [("may", opening + "so" + closing), ("may", "")]
            leads += [("open", "so" + closing)] if one.format not in ("gemma", "harmony", "atem") else []
        simple = simplest(one.calls[0], one.format)
        for lead, before in leads:
            for make, answers in (
                (grammars.compile_call({"f": F}, 1, lead), [simple]),
                (
                    grammars.compile_either("json", '{"type":"object"}', {"f": F}, 1, lead),
                    [simple, one.said + "{}"],
                ),
                (grammars.compile("json", '{"type":"object"}', lead), [one.said + "{}"]),
            ):
                for answer in answers:
                    ids = [*tokenizer.encode(before + answer, add_bos=False), 1]
                    masks = make().masks(ids)
                    wrong = [
                        i
                        for i, (m, t) in enumerate(zip(masks, ids, strict=False))
                        if m is not None and not m[t]
                    ]
                    assert not wrong, (
                        lead,
                        before + answer,
                        tokenizer.decode(ids[: wrong[0]], skip_special=False),
                    )
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def simplest(answer: str, format: str) -> str:
    """A call with a short text, without what ends a turn: grammars hold lengths and leave the end to the model."""
    short = '{"s": "x"}'
    if RAW in answer:
        answer = answer.replace(RAW, "x")
    return answer.replace(WRITTEN, short).replace(STRING, '"x"').removesuffix("<|call|>")


@pytest.mark.parametrize("name", [name for name, one in FAMILIES.items() if one.calls])
def test_strict_tools_leave_text_free_and_hold_calls(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat, one = format_of(tokenizer), FAMILIES[name]
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,))
    grammars = Grammars.of(tokenizer, vocabulary, chat, 20.0)
    assert one.calls is not None
    try:
        make = grammars.compile_strict({"f": F})
        good = simplest(one.calls[0], one.format)
        bad = (
            good.replace('"n": 5', '"n": 500')
            .replace('"x"', '"far too long"')
            .replace("\nx\n", "\nfar too long\n")
        )
        bad = bad.replace(">x<", ">far too long<")
        said = one.said + "Just <text>."
        for answer, allowed in ((good, True), (said, True), (bad, False)):
            ids = [*tokenizer.encode(answer, add_bos=False), 1]
            masks = make().masks(ids)
            held = all(m is None or bool(m[t]) for m, t in zip(masks, ids, strict=False))
            assert held == allowed, answer
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def test_a_vocabulary_that_cannot_write_a_grammar_is_refused() -> None:
    backend = Backend(models.BPE({"<eos>": 0, "y": 1, "e": 2, "s": 3}, []))
    backend.add_special_tokens(["<eos>"])
    backend.decoder = decoders.ByteLevel()
    grammars = Grammars(Vocabulary(backend.to_str(), 4, (0,)), {}, 20.0, named("hermes"))
    try:
        with pytest.raises(UsageError, match="cannot write what the grammar asks for"):
            grammars.compile_call(TOOLS, 1)
        constraint = grammars.compile("regex", "yes!")()
        constraint.commit([1, 2, 3])
        with pytest.raises(GrammarFailed, match="cannot write what the grammar asks for"):
            constraint.masks([])
    finally:
        grammars.close()


def test_a_template_that_cannot_be_tried_out_is_plain_chat_and_says_so() -> None:
    tokenizer = Tokenizer(gemma_style(), {}, template="{{ raise_exception('never') }}")
    assert format_of(tokenizer).described.startswith(
        "taken for plain chat: the chat template cannot be tried out"
    )
    tokenizer.format, tokenizer.chat_format = None, "mistral"
    assert format_of(tokenizer).described == "format mistral (thoughts, tool calls)"
    assert format_of(Tokenizer(gemma_style(), {})).described == "format plain"
    ChatTemplate.of(tokenizer).close()
