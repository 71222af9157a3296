"""What other servers' clients send: done where its meaning is known, told where it is ignored, refused if it is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from families import tokenizer_of
from paceline.chat.road import make_render
from paceline.server.schema import ChatRequest, CompletionRequest, Message, ResponseFormat, Tool, ToolCall
from paceline.server.start import start
from paceline.server.unknown import _CALLED, _CHANGES_TEXT
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
SWITCHES = ("enable_thinking", "thinking", "reasoning")  # what templates call it
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = grammars_of(make_tokenizer())
    yield made
    made.close()


@pytest.fixture(scope="module")
def s(grammars: Grammars) -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer()), grammars=grammars) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with served(strict=True) as server:
        yield server


def body_for(path: str, more: dict[str, Any]) -> dict[str, Any]:
    start: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "hello"}
    return start | {"max_tokens": 4} | more


SILENT: list[dict[str, Any]] = [
    {"model": None}, {"model": ""}, {"cache_prompt": True}, {"cache_prompt": False}, {"skip_special_tokens": True},
    {"keep_alive": None}, {"seed": -1}, {"n_predict": 3}, {"guided_json": None, "structured_outputs": None},
    {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto"},
]  # fmt: skip
SILENT_CHAT: list[dict[str, Any]] = [
    {"functions": None, "function_call": None, "audio": None}, {"function_call": "none"},
    {"reasoning": {"effort": "low"}},
    {"think": False}, {"enable_thinking": True}, {"chat_template_kwargs": {"preserve_thinking": True}},
    {"messages": [{**USER[0], "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"x": 1}}]},
    {"messages": [*USER, {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_details": [{"text": "r"}],
                          "refusal": None, "audio": None, "function_call": None}, *USER]},
    {"tools": [{"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip


@pytest.mark.parametrize("more", SILENT, ids=json.dumps)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_is_done_or_changes_nothing_is_taken(s: Served, path: str, more: dict[str, Any]) -> None:
    answer = s.client.post(path, json=body_for(path, more))
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


@pytest.mark.parametrize("more", SILENT_CHAT, ids=lambda m: "+".join(m))
def test_what_chat_clients_send_is_taken(s: Served, more: dict[str, Any]) -> None:
    answer = s.post(CHAT, **body_for(CHAT, more))
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


def test_suffix_may_be_null_or_empty_and_is_named_where_it_is_not(s: Served) -> None:
    for suffix in (None, ""):
        assert s.post(TEXT, prompt="x", max_tokens=2, suffix=suffix).status_code == 200
    error = s.post(TEXT, prompt="x", suffix="y").json()["error"]
    assert error["param"] == "suffix"
    assert "no tokens for a text between" in error["message"]


WARNED: list[tuple[dict[str, Any], list[str]]] = [
    ({"bogus": 1}, ["bogus"]),
    ({"keep_alive": "5m", "id_slot": 0}, ["keep_alive", "id_slot"]),
    ({"tfs_z": 1, "cfg_scale": 1.0, "bad_words_ids": []}, ["tfs_z", "cfg_scale", "bad_words_ids"]),
    ({"response_format": {"type": "text", "odd": 1}}, ["response_format.odd"]),
    ({"prediction": {"type": "content", "content": "x", "odd": {"deep": [1]}}}, ["prediction.odd"]),
    ({"model": "gpt-4o"}, ["model"]),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("more", "names"), WARNED, ids=[names[0] for _, names in WARNED])
def test_unknown_fields_are_ignored_and_told(
    s: Served, path: str, stream: bool, more: dict[str, Any], names: list[str]
) -> None:
    answer = s.client.post(path, json={"stream": stream} | body_for(path, more))
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
        told = [event["warnings"] for event in events if "warnings" in event]
        assert len(told) == 1, "with the report of the last chunk, once"
        assert "speculation" in next(event for event in events if "warnings" in event)
        warnings = told[0]
    else:
        warnings = answer.json()["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == names


def test_unknown_keys_inside_messages_and_tools(s: Served) -> None:
    messages = [{**USER[0], "id": "m1", "opts": {}}, {"role": "assistant", "content": "a", "id": "m2"}, *USER]
    tools = [{"type": "function", "function": {**FUNCTION, "metadata": {}}, "opts": 1}]
    answer = s.post(CHAT, messages=messages, tools=tools, max_tokens=2)
    assert [w.partition(":")[0] for w in answer.json()["warnings"]] == [
        "messages.id", "messages.opts", "tools.opts", "tools.function.metadata",
    ]  # fmt: skip


def test_the_log_says_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    with served() as s, caplog.at_level(logging.WARNING, logger="paceline.server.unknown"):
        for i in range(3):
            s.post(TEXT, prompt="x", max_tokens=1, bogus=i, other=i)
        for _ in range(2):
            s.client.post(TEXT, json={"prompt": "x", "max_tokens": 1, "model": "gpt-4o"})
        assert len(caplog.records) == 3
        for i in range(1200):
            s.service.unknown._log(f"name {i}", "x")
        assert len(s.service.unknown._logged) == 1000, "strangers cannot fill the memory or the log"
        many = s.post(TEXT, prompt="x", max_tokens=1, **{f"f{i}": 1 for i in range(500)}, **{"x" * 5000: 1})
        assert len(many.json()["warnings"]) == 64


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"bogus": 1}, "bogus"), ({"keep_alive": "5m"}, "keep_alive"),
        ({"messages": [{**USER[0], "id": "x"}]}, "messages.0.id"), ({"model": None}, "model"),
        ({"model": ""}, "model"), ({"model": "gpt-4o"}, "model"),
    ],
    ids=str,
)  # fmt: skip
def test_strict_makes_them_errors(strict: Served, more: dict[str, Any], param: str) -> None:
    answer = strict.post(CHAT, **body_for(CHAT, more))
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
    assert strict.post(CHAT, messages=USER, max_tokens=1, cache_prompt=True).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("tfs_z", 0.5), ("samplers", ["top_k"]), ("guidance_scale", 1.5), ("bad_words_ids", [[5]]),
     ("use_beam_search", True), ("lora_request", {"name": "a"})],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_would_change_the_text_is_held_or_refused(s: Served, path: str, name: str, value: Any) -> None:
    answer = s.client.post(path, json=body_for(path, {name: value}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert "would change the text" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_field_that_would_change_the_text_is_passed_over(s: Served, path: str) -> None:
    """Each of the list, with values that are on and off; and those that have another name here, with that name."""
    fields = ChatRequest.model_fields if path == CHAT else CompletionRequest.model_fields
    for name, off in _CHANGES_TEXT.items():
        if name in fields:
            continue  # it holds here
        values = off if isinstance(off, tuple) else (off,)
        assert s.client.post(path, json=body_for(path, {name: values[0]})).status_code == 200, name
        answer = s.client.post(path, json=body_for(path, {name: "on"}))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    for name, ours in _CALLED.items():
        answer = s.client.post(path, json=body_for(path, {name: 1}))
        assert answer.status_code == 400, name
        assert f"is called {ours} here" in answer.json()["error"]["message"]
        assert ours in fields
    answer = s.client.post(path, json=body_for(path, {"skip_special_tokens": False}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "skip_special_tokens")


def test_what_a_known_field_says_it_does_not_do_changes_no_text() -> None:
    """Of the fields that requests are read with, the ones without an effect are these."""
    silent = {
        name
        for model in (ChatRequest, CompletionRequest, Message, ResponseFormat, Tool, ToolCall)
        for name, field in model.model_fields.items()
        if "ignored" in (field.description or "") or "no effect" in (field.description or "")
    }
    assert silent == {
        "keep_alive", "id_slot",  # where models and slots are kept
        "user", "metadata", "store", "service_tier", "safety_identifier",  # who asks, and how it is billed
        "prompt_cache_key", "prompt_cache_retention", "cache_control",  # prefixes are found by their tokens
        "name", "strict", "index",  # a schema always holds
        "reasoning_details", "provider_specific_fields", "audio", "annotations",  # of old answers, which have a text
        "verbosity",  # a wish that no template here reads
    }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"thinking_budget": 3}, {"thinking_token_budget": 3}, {"thinking_budget_tokens": 3}, {"reasoning_budget": 3},
        {"reasoning": {"max_tokens": 3}}, {"thinking": {"type": "enabled", "budget_tokens": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_a_thought_may_be_bounded(more: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("families/qwen3")
    engine = FakeEngine(tokenizer, "<think>one two three four five six seven eight</think>yes")
    chat = format_of(tokenizer)
    with served(engine, chat=(make_render(tokenizer)[0], chat)) as s:
        whole = s.post(CHAT, messages=USER, max_tokens=200).json()["choices"][0]["message"]
        made = s.post(CHAT, messages=USER, max_tokens=200, **more).json()
        thought = made["choices"][0]["message"]["reasoning_content"]
        assert len(tokenizer.encode(thought, add_bos=False)) == 3
        assert whole["reasoning_content"].startswith(thought)
        assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 3
        free = s.post(CHAT, messages=USER, max_tokens=200, thinking_budget=-1).json()["choices"][0]["message"]
        assert free == whole


def test_a_prompt_may_be_cut_to_its_last_tokens(s: Served) -> None:
    ids = list(range(40, 60))
    for count, kept in ((5, ids[-5:]), (50, ids), (0, ids), (-1, ids)):
        answer = s.post(TEXT, prompt=ids, truncate_prompt_tokens=count, max_tokens=1, echo=True).json()
        assert answer["usage"]["prompt_tokens"] == len(kept)
        assert answer["choices"][0]["text"].startswith(s.engine.tokenizer.decode(kept))
    text = "x y " * 2000
    assert s.post(TEXT, prompt=text, max_tokens=1).status_code == 400
    long = s.post(TEXT, prompt=text, truncate_prompt_tokens=-1, max_tokens=1).json()
    assert long["usage"]["prompt_tokens"] == s.service.loaded.max_len - 1
    assert (
        s.post(TEXT, prompt="x", truncate_prompt_tokens=-2).json()["error"]["param"]
        == "truncate_prompt_tokens"
    )
    chat = s.post(CHAT, messages=USER, truncate_prompt_tokens=5)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_biases_of_llama_cpp(s: Served, path: str) -> None:
    ways: list[dict[str, Any]] = [
        {"logit_bias": [[5, 1.5], [7, False]]}, {"logit_bias": {"5": 1.5, "7": False}},
        {"logit_bias": [[5, 1.5]], "suppress_tokens": [7]}, {"logit_bias": {"5": 1.5}, "bad_token_ids": [7]},
    ]  # fmt: skip
    for way in ways:
        assert s.client.post(path, json=body_for(path, way)).status_code == 200
        assert (s.engine.last_params.logit_bias, s.engine.last_params.bad_token_ids) == ({5: 1.5}, (7,))
    both = {"logit_bias": [[7, False]], "suppress_tokens": [8]}
    assert s.client.post(path, json=body_for(path, both)).status_code == 200
    assert set(s.engine.last_params.bad_token_ids) == {7, 8}
    texts = {"logit_bias": [["xy", 1.5], [5, 2], ["(", False]]}
    assert s.client.post(path, json=body_for(path, texts)).status_code == 200
    x, y, bracket = s.engine.tokenizer.encode("xy(", add_bos=False)
    assert s.engine.last_params.logit_bias == {5: 2.0, x: 1.5, y: 1.5}
    assert s.engine.last_params.bad_token_ids == (bracket,)
    many = [["x", 1]] * 129
    wrong: list[Any] = [
        [["a", True]], [["", 1]], [["a" * 257, 1]], [["a", "b"]], many, [[5]], [5], [[True, 1]],
        [[5, True]], {"x": False}, [[-1, False]], [[10**6, 1]], [[None, 1]],
    ]  # fmt: skip
    for value in wrong:
        answer = s.client.post(path, json=body_for(path, {"logit_bias": value}))
        assert answer.status_code == 400, value
        assert answer.json()["error"]["param"].startswith("logit_bias"), value


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_mirostat_and_words_reach_the_engine(s: Served, path: str) -> None:
    asked = {
        "mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "bad_words": ["x y"], "banned_strings": ["zz"],
        "include_stop_str_in_output": True, "temperature": 0.5,
    }  # fmt: skip
    assert s.client.post(path, json=body_for(path, asked)).status_code == 200
    params = s.engine.last_params
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (2, 3.0, 0.2)
    assert (params.bad_words, params.banned_strings) == (("x y",), ("zz",))
    assert params.include_stop_str_in_output
    wrong: list[tuple[str, Any]] = [
        ("mirostat", 1), ("mirostat", 3), ("mirostat_tau", -1), ("mirostat_eta", 2), ("bad_words", "x"),
        ("bad_words", [""]), ("bad_words", ["a" * 41]), ("bad_words", ["a"] * 65), ("banned_strings", [1]),
        ("banned_strings", [""]), ("include_stop_str_in_output", "yes"),
    ]  # fmt: skip
    for name, value in wrong:
        answer = s.client.post(path, json=body_for(path, {name: value}))
        assert answer.status_code == 400, (name, value)
        assert answer.json()["error"]["param"].split(".")[0] == name


def test_a_stop_string_may_be_shown() -> None:
    with served(FakeEngine(make_tokenizer(), script="one two three")) as s:
        for shown, text in ((True, "one two"), (False, "one ")):
            asked = {"stop": ["zzz", "two"], "include_stop_str_in_output": shown}
            for path in (CHAT, TEXT):
                made = s.client.post(path, json=body_for(path, asked) | {"max_tokens": 60}).json()
                choice = made["choices"][0]
                assert (choice.get("text") or choice["message"]["content"]) == text
                assert choice["finish_reason"] == "stop"


def test_tokens_may_be_forbidden_or_all_others(s: Served) -> None:
    free = s.post(TEXT, prompt="x", max_tokens=8).json()["choices"][0]["text"]
    never = s.engine.tokenizer.encode(free, add_bos=False)[:1]
    for name in ("bad_token_ids", "suppress_tokens", "banned_tokens"):
        assert s.post(TEXT, prompt="x", max_tokens=8, **{name: never}).status_code == 200
        assert s.engine.last_params.bad_token_ids == tuple(never)
        assert s.post(TEXT, prompt="x", **{name: [10**6]}).json()["error"]["param"] == "bad_token_ids"
    assert s.post(TEXT, prompt="x", max_tokens=8, allowed_token_ids=never).status_code == 200
    assert s.engine.last_params.allowed_token_ids == tuple(never)
    wrong = s.post(TEXT, prompt="x", allowed_token_ids=never, bad_token_ids=never)
    assert wrong.json()["error"]["param"] == "allowed_token_ids"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ignore_eos": "no"}, "ignore_eos"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"typical_p": 1.5}, "typical_p"), ({"xtc_probability": -1}, "xtc_probability"), ({"dry_base": 0}, "dry_base"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"), ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"n_predict": "5"}, "n_predict"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": '{"maxLength":' + "9" * 5000 + "}"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"), ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": 'rot ::= "a"'}, "guided_grammar"), ({"grammar": 'root ::= "a'}, "grammar"),
    ({"grammar": "root ::= " + "(" * 30_000}, "grammar"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"), ({"ebnf": "root ::= x"}, "ebnf"),
    ({"response_format": {"type": "json"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "json_object"}, "guided_json": SCHEMA}, "guided_json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"functions": [FUNCTION], "tools": [{"type": "function", "function": FUNCTION}]}, "functions"),
    ({"function_call": {"name": "add"}}, "function_call"),
    ({"functions": [FUNCTION], "function_call": {"name": "other"}}, "function_call"),
    ({"functions": [{"name": "../x"}]}, "functions.0.name"), ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ({"speculation": {"draft_token": 3}}, "speculation.draft_token"), ({"cache_prompt": "no"}, "cache_prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), WRONG, ids=[f"{i}-{param}" for i, (_, param) in enumerate(WRONG)])
def test_wrong_values_of_known_fields_stay_errors(
    s: Served, more: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = s.post(CHAT, **body_for(CHAT, more))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.json()["error"]["message"]) < 500
    assert not [record for record in caplog.records if record.exc_info]


GBNF = {
    'root ::= "ab"': ("ab",), '# yes or no\nroot ::= answer\nanswer ::= "yes" | "no"\n': ("yes", "no"),
    '  root::=[0-3]{2} "."\n': tuple(f"{i}{j}." for i in range(4) for j in range(4)),
    'root ::= pair-a\npair-a ::= "<" (  "x" |\n "y" )+ ">"{1}\nunused ::= "u" ': ("<",),
}  # fmt: skip


@pytest.mark.parametrize("source", GBNF)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_grammars_of_llama_cpp_are_held(s: Served, path: str, source: str) -> None:
    ways: list[dict[str, Any]] = [
        {"grammar": source}, {"guided_grammar": source}, {"structured_outputs": {"grammar": source}},
        {"response_format": {"type": "grammar", "grammar": source}}, {"ebnf": source},
    ]  # fmt: skip
    for i, way in enumerate(ways):
        more = {**way, "max_tokens": 40, "temperature": 1.0, "seed": i}
        answer = s.client.post(path, json=body_for(path, more))
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        if text.startswith("<"):
            assert set(text[1:].rstrip(">")) <= {"x", "y"}
            assert choice["finish_reason"] == "length" or text.endswith(">")
        else:
            assert text in GBNF[source]


def test_a_lark_grammar_may_speak_of_gbnf(s: Served) -> None:
    answer = s.post(TEXT, prompt="x", max_tokens=50, guided_grammar='start: "a ::= b"').json()
    assert answer["choices"][0]["text"] == "a ::= b"


ONE_KEY = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_json": SCHEMA}, dict), ({"guided_json": json.dumps(SCHEMA)}, dict), ({"json_schema": SCHEMA}, dict),
    ({"structured_outputs": {"json": SCHEMA}}, dict), ({"structured_outputs": {"json_object": True}}, dict),
    ({"guided_regex": "[0-9]{3}"}, ("123",)), ({"structured_outputs": {"regex": "[0-9]{3}"}}, ("123",)),
    ({"guided_choice": ["yes", 'n"o']}, ("yes", 'n"o')), ({"structured_outputs": {"choice": ["yes"]}}, ("yes",)),
    ({"guided_choice": ["a\x7f\x07\u2028\\"]}, ("a\x7f\x07\u2028\\",)),
    ({"guided_grammar": 'start: "ab"'}, ("ab",)), ({"grammar": 'start: "ab"'}, ("ab",)),
    ({"structured_outputs": {"grammar": 'start: "ab"'}}, ("ab",)),
    ({"response_format": {"type": "json_object", "schema": ONE_KEY}}, ('{"a":1}',)),
    ({"response_format": {"type": "json_schema", "schema": ONE_KEY, "name": "x", "strict": True}}, ('{"a":1}',)),
    ({"response_format": {"type": "json", "value": ONE_KEY}}, ('{"a":1}',)), ({"format": ONE_KEY}, ('{"a":1}',)),
    ({"response_format": {"type": "json", "value": json.dumps(ONE_KEY)}}, ('{"a":1}',)), ({"format": "json"}, dict),
    ({"response_format": {"type": "regex", "pattern": "ab"}}, ("ab",)), ({"regex": "ab"}, ("ab",)),
    ({"choice": ["ab"]}, ("ab",)),
    ({"response_format": {"type": "regex", "value": "ab"}}, ("ab",)), ({"ebnf": 'start: "ab"'}, ("ab",)),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("more", "wanted"), FORMATS, ids=[json.dumps(more)[:40] for more, _ in FORMATS])
def test_every_way_to_ask_for_a_format_holds(s: Served, path: str, more: dict[str, Any], wanted: Any) -> None:
    answer = s.client.post(path, json={"seed": 3} | body_for(path, {"max_tokens": 200} | more)).json()
    choice = answer["choices"][0]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    if wanted is dict:
        assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)
        assert text.lstrip().startswith("{")
    elif wanted == ("123",):
        assert len(text) == 3
        assert text.isdecimal()
    else:
        assert text in wanted or "".join(text.split()) in wanted


@pytest.mark.parametrize(("path", "field"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"),
                                             (CHAT, "n_predict"), (TEXT, "max_tokens"), (TEXT, "n_predict")])  # fmt: skip
def test_minus_one_is_as_many_as_fit(s: Served, path: str, field: str) -> None:
    body = body_for(path, {"ignore_eos": True})
    del body["max_tokens"]
    answer = s.client.post(path, json=body | {field: -1}).json()
    assert answer["usage"]["total_tokens"] == 512
    assert s.client.post(path, json=body | {field: 3}).json()["usage"]["completion_tokens"] == 3


def test_seed_minus_one_is_drawn_and_told(s: Served) -> None:
    seeds = [s.post(TEXT, prompt="x", max_tokens=9, seed=-1).json() for _ in range(3)]
    told = {answer["speculation"]["seed"] for answer in seeds}
    assert len(told) == 3
    assert -1 not in told
    again = s.post(TEXT, prompt="x", max_tokens=9, seed=seeds[0]["speculation"]["seed"]).json()
    assert again["choices"] == seeds[0]["choices"]


def test_without_cache_prompt_no_prefix_is_shared(s: Served) -> None:
    s.engine.salts.clear()
    for wanted in (True, None, False, False):
        s.post(TEXT, prompt="x", max_tokens=1, cache_prompt=wanted)
    shared, also, alone, other = s.engine.salts
    assert shared == also
    assert len({shared, alone, other}) == 3


@pytest.fixture
def seen(s: Served, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the template is given: (messages, tools, variables) of each request."""
    out: list[Any] = []
    room = s.service.loaded
    assert room is not None

    def render(messages: Any, tools: Any, options: Any) -> str:
        out.append((messages, tools, options))
        return " ".join(["a prompt", *(str(message.get("content")) for message in messages)])

    monkeypatch.setattr(s.service, "loaded", replace(room, chats=replace(room.chats, render=render)))
    return out


def test_reasoning_in_history_is_reasoning_content(s: Served, seen: list[Any]) -> None:
    for more in (
        {"reasoning": "r"},
        {"reasoning_content": "r"},
        {"reasoning_content": "r", "reasoning": "x"},
    ):
        s.post(CHAT, messages=[*USER, {"role": "assistant", "content": "a", **more}, *USER], max_tokens=1)
        assert seen.pop()[0][1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


@pytest.mark.parametrize(
    ("more", "thinking"),
    [
        ({"reasoning": {"effort": "high"}}, True), ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False}}, False), ({"think": True}, True), ({"think": "low"}, True),
        ({"think": False}, False), ({"enable_thinking": False}, False), ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "auto"}}, None),
        ({"reasoning_effort": "none", "think": True}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "think": False}, True), ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_every_way_to_switch_thinking(
    s: Served, seen: list[Any], more: dict[str, Any], thinking: bool | None
) -> None:
    s.post(CHAT, messages=USER, max_tokens=1, **more)
    efforts = {"high": "high", "low": "low", "{'think': True": "medium"}  # gpt-oss has such a switch
    effort = next((effort for word, effort in efforts.items() if word in str(more)), None)
    want = {} if thinking is None else dict.fromkeys(SWITCHES, thinking)
    assert seen.pop()[2] == want | ({} if effort is None else {"reasoning_effort": effort})


def test_other_template_variables_are_handed_on(s: Served, seen: list[Any]) -> None:
    s.post(
        CHAT, messages=USER, max_tokens=1, chat_template_kwargs={"enable_thinking": True, "style": "brief"}
    )
    assert seen.pop()[2] == {"style": "brief"} | dict.fromkeys(SWITCHES, True)


def test_older_functions_in_history_and_in_the_request(s: Served, seen: list[Any]) -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a":1}'}},
        {"role": "function", "name": "add", "content": "2"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "3"},
    ]
    answer = s.post(CHAT, messages=messages, functions=[FUNCTION], max_tokens=1)
    assert answer.status_code == 200, answer.text
    told, tools, _ = seen.pop()
    assert tools == [{"type": "function", "function": FUNCTION}]
    assert told[1]["tool_calls"] == [
        {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert told[2] == {"role": "tool", "name": "add", "content": "2", "tool_call_id": "call_1_0"}
    assert told[3]["tool_calls"][0]["function"]["arguments"] == {"a": 2}


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no marks"])
def test_functions_are_answered_by_function_call(marks: bool) -> None:
    script = 'I call <|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>'
    with served(FakeEngine(make_tokenizer(marks), script)) as s:
        choice = s.post(CHAT, messages=USER, functions=[FUNCTION]).json()["choices"][0]
        assert choice["finish_reason"] == "function_call"
        call = choice["message"]["function_call"]
        assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 1, "b": "x"})
        assert "tool_calls" not in choice["message"]
        text = s.post(CHAT, messages=USER, functions=[FUNCTION], stream=True).text
        deltas = [
            json.loads(part[6:])["choices"][0] for part in text.split("\n\n") if part.startswith("data: {")
        ]
        pieces = [d["delta"]["function_call"] for d in deltas if "function_call" in d["delta"]]
        assert "".join(piece.get("name", "") for piece in pieces) == "add"
        assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"a": 1, "b": "x"}
        assert deltas[-1]["finish_reason"] == "function_call"


def test_forced_functions_fit_their_schema(s: Served) -> None:
    function = {"name": "add", "parameters": SCHEMA}
    answer = s.post(
        CHAT, messages=USER, functions=[function], function_call={"name": "add"}, max_tokens=100
    ).json()
    call = answer["choices"][0]["message"]["function_call"]
    assert call["name"] == "add"
    assert isinstance(json.loads(call["arguments"])["a"], bool)
    off = s.post(CHAT, messages=USER, functions=[function], function_call="none", max_tokens=5)
    assert "function_call" not in off.json()["choices"][0]["message"]


def test_several_names_of_the_model() -> None:
    with served(served_model_names=("alias", "fake", "other/alias")) as s:
        assert [card["id"] for card in s.client.get("/v1/models").json()["data"]] == [
            "fake",
            "alias",
            "other/alias",
        ]
        for name in ("fake", "alias", "other/alias"):
            assert s.client.get(f"/v1/models/{name}").json()["id"] == name
            answer = s.client.post(TEXT, json={"model": name, "prompt": "x", "max_tokens": 1}).json()
            assert "warnings" not in answer
            assert answer["model"] == "fake"


def test_the_first_served_name_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.server import start as module

    seen: list[Any] = []
    monkeypatch.setattr(module, "run", lambda app, *rest: seen.append(app.state.service.names))
    start(None, {"port": 0, "served_model_names": ("a", "b")}, {}, print)
    start(None, {"port": 0, "served_model_names": ("a", "b"), "model_name": "c"}, {}, print)
    assert seen == [("a", "b"), ("c", "a", "b")]
