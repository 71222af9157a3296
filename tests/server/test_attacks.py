"""What one request can do to others: 45 hostile bodies beside a running stream, each refused or answered, none read
on the event loop. How long others wait is measured by recipes/attacks/hostile.py, not here.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.errors import UsageError
from paceline.server import bodies
from paceline.server.errors import ApiError
from paceline.server.logprobs import Entries
from paceline.server.paths import usual
from paceline.server.schema import ChatRequest, CompletionRequest
from paceline.server.tokens import TokenizeRequest
from paceline.text.backend import most_characters
from paceline.text.grammar import Grammars
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

USER = [{"role": "user", "content": "hello"}]


def recipe() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "recipes" / "attacks" / "hostile.py"
    spec = importlib.util.spec_from_file_location("hostile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostile"] = module
    spec.loader.exec_module(module)
    return module


HOSTILE = recipe()
BODIES = HOSTILE.bodies()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = grammars_of(make_tokenizer(), timeout=2.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def s(grammars: Grammars) -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer(), delay=0.001), grammars=grammars) as server:
        yield server


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Which threads have read large bodies, encoded long texts and read schemas."""
    seen: dict[str, set[str]] = {}

    def note(where: Any, name: str, large: Any) -> None:
        real = getattr(where, name)

        def noting(*args: Any, **named: Any) -> Any:
            if large(*args):
                seen.setdefault(name, set()).add(threading.current_thread().name)
            return real(*args, **named)

        monkeypatch.setattr(where, name, noting)

    note(bodies, "read", lambda model, raw: len(raw) > 2**14)
    note(Tokenizer, "encode", lambda self, text, *more: len(text) > 2**14)
    note(Tokenizer, "decode", lambda self, ids, *more: len(ids) > 2**14)
    note(Grammars, "hold", lambda *args: True)
    return seen


@pytest.mark.parametrize("body", BODIES, ids=[body.name for body in BODIES])
def test_a_hostile_body_harms_only_its_own_request(s: Served, places: dict[str, set[str]], body: Any) -> None:
    loop = next(t.name for t in threading.enumerate() if t.name.startswith("Thread-") and "run" in t.name)
    fields = {
        "model": "fake",
        "prompt": "one",
        "max_tokens": 300,
        "seed": 3,
        "stream": True,
        "ignore_eos": True,
    }
    alone = s.client.post("/v1/completions", json=fields).text
    with s.client.stream("POST", "/v1/completions", json=fields) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        status, answer = HOSTILE.send(s.url, body)
        assert s.client.get("/health").status_code == 200
        beside = [first, *lines]
    assert status in (200, 400, 413, 415), answer
    found = json.loads(answer)
    if status != 200:
        said = found["error"] if isinstance(found["error"], str) else found["error"]["message"]
        assert len(said) < 500
        assert "\n" not in said
    assert _text_of(beside) == _text_of(alone.splitlines())
    assert s.settled(lambda: s.worker.load().texts == 0)
    for name, threads in places.items():
        assert loop not in threads, name


def _text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


# A1


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": [[1], *[["a"]] * 1000]}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatRequest, {"messages": USER, "tools": [1] * 1000}),
        (ChatRequest, {"messages": USER, "logit_bias": dict.fromkeys(map(str, range(1000)), "a")}),
        (ChatRequest, {"messages": USER, "stop": [None] * 1000}),
        (TokenizeRequest, {"messages": [{}] * 1000}),
    ],
)
def test_one_error_of_a_list_is_enough(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(RequestValidationError) as caught:
        bodies.read(model, json.dumps(fields).encode())
    assert len(caught.value.errors()) < 12


def test_lists_are_counted_outside_of_texts() -> None:
    text = '\\"{[,' * 100_000
    bodies.check_counts(json.dumps({"prompt": text}).encode())
    bodies.check_counts(json.dumps({"a": "x\\", "prompt": "{" * 100_000}).encode())
    bodies.check_counts(json.dumps({"prompt": list(range(1_000_000))}).encode())
    for wrong in ({"a": "\\", "b": [[]] * 40_000}, {"b": [{}] * 40_000}, {"a": '"', "b": [1] * 1_100_000}):
        with pytest.raises(ApiError) as caught:
            bodies.check_counts(json.dumps(wrong).encode())
        assert caught.value.status == 400
        assert caught.value.code == "too_many_items"


# A3, A7


def test_a_prompt_is_refused_by_its_length_before_it_is_encoded(
    s: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    for path, fields in (
        ("/v1/completions", {"prompt": "a" * 30_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 30_000}]}),
    ):
        answer = s.post(path, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["a" * 3000, "für 🎉 naïve" * 300, "<bos>" * 100, "\n\n" * 1500, ""])
def test_the_least_number_of_tokens_is_never_too_large(text: str) -> None:
    tokenizer = make_tokenizer()
    assert 0 <= tokenizer.least(text) <= len(tokenizer.encode(text))
    assert tokenizer.least("a" * 5000) > 400


def test_of_a_tokenizer_that_leaves_text_out_nothing_is_foreseen() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))  # every other letter has no token at all
    assert most_characters(backend) is None


def backtracking() -> Tokenizer:
    made = json.loads(make_tokenizer()._backend.to_str())
    backend = Backend.from_str(json.dumps(made))
    split = pre_tokenizers.Split(Regex(r"(x|x|xx)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return Tokenizer(backend, {"eos_token": "<eos>"}, eos=[1])


@pytest.mark.parametrize("length", [60, 5000])
def test_a_regular_expression_that_backtracks_is_an_error_of_the_request(length: int) -> None:
    with served(FakeEngine(backtracking())) as s:
        text = "x" * min(length, 400) + "y" * (length - 400)
        for path, fields in (
            ("/v1/completions", {"prompt": text + "y"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text + "y"}]}),
            ("/tokenize", {"prompt": text + "y"}),
        ):
            answer = s.post(path, **fields)
            assert answer.status_code == 400, path
            assert "gives up on this text" in answer.json()["error"]["message"] or length > 512
        assert s.post("/v1/completions", prompt="y", max_tokens=2).status_code == 200


# A6, C8, C9


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 30\r\n",
        "POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
        "GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    ],
)
def test_two_ways_to_say_how_long_a_body_is_are_refused(s: Served, head: str) -> None:
    import socket

    body = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", s.port), 10) as link:
        link.sendall(f"{head}Host: localhost\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        answer = b""
        while piece := link.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1  # what follows in the pipe is no request


@pytest.mark.parametrize("kind", ["gzip", "deflate", "identity"])
def test_a_packed_body_is_read(s: Served, kind: str) -> None:
    plain = json.dumps({"model": "fake", "prompt": "one", "max_tokens": 3, "seed": 1}).encode()
    packed = {"gzip": gzip.compress(plain), "deflate": zlib.compress(plain), "identity": plain}[kind]
    headers = {"Content-Type": "application/json", "Content-Encoding": kind}
    answer = s.client.post("/v1/completions", content=packed, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["choices"] == s.client.post(
        "/v1/completions", content=plain, headers={"Content-Type": "application/json"}
    ).json()["choices"]  # fmt: skip


def test_packed_bodies_are_bounded_and_others_refused(s: Served) -> None:
    bomb = gzip.compress(bytes(40 * 2**20))
    for kind, data, status in (
        ("gzip", bomb, 413), ("gzip", gzip.compress(b"{}" * 50) * 200, 400), ("gzip", bomb[:100], 400),
        ("deflate", b"nonsense", 400), ("zstd", b"x", 415), ("br", b"x", 415), ("gzip, gzip", b"x", 415),
    ):  # fmt: skip
        headers = {"Content-Type": "application/json", "Content-Encoding": kind}
        answer = s.client.post("/v1/completions", content=data, headers=headers)
        assert answer.status_code == status, (kind, answer.text)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"), ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/v1/models", "/v1/models"), ("/v1/api/chat", "/api/chat"), ("//health", "//health"), ("/", "/"),
        ("/docs/", "/docs/"),
    ],
)  # fmt: skip
def test_paths_of_base_addresses_that_are_half_right(path: str, route: str) -> None:
    assert usual(path) == route


def test_such_paths_are_answered_and_need_their_key() -> None:
    with served(FakeEngine(make_tokenizer()), keys=("secret",)) as s:
        for path in ("//v1/completions", "/v1/v1/completions", "/v1/completions/"):
            assert s.client.post(s.url + path, json={"prompt": "a", "max_tokens": 1}).status_code == 200
            assert (
                s.client.post(s.url + path, json={"prompt": "a"}, headers={"Authorization": "x"}).status_code
                == 401
            )


# A2, C1, C2


def test_many_options_of_one_of_are_told_apart(grammars: Grammars) -> None:
    many = {"oneOf": [{"const": f"k{i}"} for i in range(1500)]}
    assert len(grammars.hold({"": many})[""]["anyOf"]) == 1500
    twice = {"oneOf": [{"const": f"k{i % 700}"} for i in range(1500)]}
    with pytest.raises(UsageError, match="oneOf has options that can fit at the same time"):
        grammars.hold({"": twice})
    named = [
        {"type": "object", "properties": {"kind": {"const": i}, "x": {}}, "required": ["kind"]}
        for i in range(500)
    ]
    assert len(grammars.hold({"": {"oneOf": named}})[""]["anyOf"]) == 500
    unnamed = [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(500)]
    with pytest.raises(UsageError, match="more than 64 options that no property tells apart"):
        grammars.hold({"": {"oneOf": unnamed}})
    with pytest.raises(UsageError, match=r"^tool: "):
        grammars.hold({"tool": {"type": "array"}}, arguments=True)


LARGE = 725653563933458433
IDS = {
    "type": "object",
    "properties": {"id": {"const": LARGE}, "kind": {"enum": [2**64 + 1, "x"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"const": LARGE}, [str(LARGE)], [str(LARGE - 1), "725653563933458400"]),
        ({"const": -(10**40)}, [str(-(10**40))], ["-1"]),
        ({"enum": [LARGE, LARGE + 1, None]}, [str(LARGE + 1), "null"], [str(LARGE - 1), str(LARGE + 2)]),
        (IDS, [f'{{"id": {LARGE}, "kind":{2**64 + 1}}}', f'{{"id":{LARGE},"kind":"x"}}'],
         [f'{{"id":{LARGE - 1},"kind":"x"}}', f'{{"kind":"x","id":{LARGE}}}', f'{{"id":{LARGE}}}']),
        ({"type": "array", "items": {"$ref": "#/$defs/K"}, "minItems": 1, "maxItems": 2, "$defs": {"K": IDS}},
         [f'[{{"id":{LARGE},"kind":"x"}}]'], ["[]", "[1]"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         [str(2**63 - 1), "-9223372036854774784", "0"], [str(2**63)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
        ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**60 + 1},
         [str(2**53 + 2), str(2**60)], [str(2**53), str(2**60 + 1), str(2**60 + 2)]),
        ({"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}, ["null", "7"], [str(2**63)]),
        ({"type": "number", "minimum": -(2**63), "maximum": 2**63 - 1}, ["1.5", "-7"], [str(2**63)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [False, True])
def test_integers_are_exact_at_any_size(
    grammars: Grammars, schema: dict[str, Any], texts: list[str], others: list[str], beside: bool
) -> None:
    held = json.dumps(grammars.hold({"": schema})[""])
    if beside:
        make = grammars.compile_either("json", held, {"f": {}}, 1)
    else:
        make = grammars.compile("json", held)
    for text, fits in [*((text, True) for text in texts), *((text, False) for text in others)]:
        assert _is_taken(make(), text) is fits, text


def _is_taken(constraint: Any, text: str) -> bool:
    for token in make_tokenizer().encode(text, add_bos=False):
        mask = constraint.masks([])[0]
        if not mask[token]:
            return False
        constraint.commit([token])
    return bool(constraint.masks([])[0][1])


def test_arguments_of_a_tool_keep_large_integers(grammars: Grammars) -> None:
    tools = grammars.hold({"f": IDS}, arguments=True)
    grammars.compile_call(tools, 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"a": {"const": LARGE}}},
        {"allOf": [{"const": LARGE}, {"type": "integer"}]},
    ],
)
def test_a_large_integer_where_none_can_be_held_is_refused_by_name(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"integers over 2\*\*53 are not held beside"):
        grammars.compile("json", json.dumps(grammars.hold({"": schema})[""]))


@pytest.mark.parametrize("form", ["response_format", "guided_json", "format"])
def test_the_answer_is_the_number_that_was_asked_for(s: Served, form: str) -> None:
    schema = {"type": "object", "properties": {"id": {"const": LARGE}}, "required": ["id"]}
    given = (
        {"type": "json_schema", "json_schema": {"schema": schema}} if form == "response_format" else schema
    )
    answer = s.post("/v1/chat/completions", messages=USER, max_tokens=300, **{form: given})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"id": LARGE}


# C19


@pytest.mark.parametrize(
    "prompt",
    [
        "<|turn>user\nhi",
        "<bos><|turn>user\nhi",
        "<bos>hi",
        "a<eos>b",
        "hi",
        "für 🎉",
        "<bos><bos>a",
        "<|turn>",
    ],
)
def test_each_offset_of_an_echo_is_where_its_token_stands(s: Served, prompt: str) -> None:
    for bos in ("<bos>", "<|turn>"):  # some models begin every text with the mark of a turn
        tokenizer = make_tokenizer()
        tokenizer.bos_id, tokenizer.adds_bos = tokenizer.token_id(bos), True
        ids = tokenizer.encode(prompt)
        shown = Entries(tokenizer).echo([*ids], prompt)
        begun = ids[0] == tokenizer.bos_id and not prompt.startswith(bos)
        at = 0
        for entry, offset in shown[begun:]:
            piece = tokenizer.piece(int(entry), skip_special=False)
            assert piece in prompt[offset : offset + len(piece)].encode(), (prompt, bos, offset)
            assert offset >= at
            at = offset
