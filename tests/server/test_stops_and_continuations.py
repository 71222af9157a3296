"""Stop strings, predictions, continued texts, and who may ask: as people reported it of servers like this one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import paceline
from paceline.config import EngineConfig
from paceline.core import Delta
from paceline.errors import UsageError
from paceline.server.loading import load
from paceline.server.predicted import Predicted
from paceline.server.settings import ServerConfig
from paceline.text.stream import stop_ids_of
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "g"}}]
DEMO = Path(paceline.__file__).parent / "demo"


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    if not (DEMO / "target" / "config.json").is_file():
        pytest.skip("the demo pair is not here")
    config = EngineConfig(target="demo", threads=1, max_model_len=512, step_tokens=64)
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server
        assert server.service.loaded is not None
        server.service.loaded.grammars.close()


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "no marks"])
@pytest.mark.parametrize(
    "script",
    [
        "<|tool_call>call:g: BEGIN_ARG text", "<|tool_call>", "<|tool_call>call:g", "a <|tool_call>call: no name",
        "<|channel>the answer is 5",
    ],
)  # fmt: skip
def test_a_call_that_never_becomes_one_is_shown_as_it_is(marks: bool, script: str) -> None:
    with served(FakeEngine(make_tokenizer(marks), script)) as s:
        choice = s.post(CHAT, messages=USER, tools=TOOLS).json()["choices"][0]
        assert choice["message"]["content"] == script
        assert choice["finish_reason"] == "stop"
        text = s.post(CHAT, messages=USER, tools=TOOLS, stream=True).text
        deltas = [
            json.loads(part[6:])["choices"][0]["delta"]
            for part in text.split("\n\n")
            if part.startswith("data: {")
        ]
        assert "".join(delta.get("content") or "" for delta in deltas) == script


def test_stop_strings_that_spell_special_tokens_are_ids() -> None:
    tokenizer = make_tokenizer()
    turn = tokenizer.token_id("<turn|>")
    assert stop_ids_of(tokenizer, ["<turn|>", "self", "x", "<nothing|>"]) == {turn}


@pytest.mark.parametrize("drafter", ["none", "ngram", "mtp"])
def test_a_stop_string_that_spells_a_special_token_stops_there(demo: Served, drafter: str) -> None:
    """The bias makes the token certain once four others are out; it has no text that a stop string could match."""
    assert demo.service.loaded is not None
    turn = demo.service.loaded.tokenizer.token_id("<turn|>")
    body: dict[str, Any] = {
        "prompt": "def f(", "max_tokens": 20, "seed": 1, "logit_bias": {str(turn): 100}, "ignore_eos": True,
        "temperature": 0, "speculation": {"drafter": drafter},
    }  # fmt: skip
    free = demo.post(TEXT, **body).json()
    assert free["choices"][0]["finish_reason"] == "length"
    for more in ({"stop": ["<turn|>"]}, {"stop": "<turn|>"}, {"stop": ["never", "<turn|>"]}):
        answer = demo.post(TEXT, **body, **more).json()
        assert answer["choices"][0] | {"text": ""} == {
            "index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}  # fmt: skip
        assert answer["usage"]["completion_tokens"] == 1
    late = demo.post(TEXT, **body, stop="<turn|>", min_tokens=5).json()
    assert late["choices"][0]["finish_reason"] == "stop"
    assert late["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("drafter", ["none", "ngram", "mtp"])
def test_a_stop_string_of_several_tokens_may_hold_special_ones(demo: Served, drafter: str) -> None:
    assert demo.service.loaded is not None
    turn = demo.service.loaded.tokenizer.token_id("<turn|>")
    body: dict[str, Any] = {
        "prompt": "def f(", "max_tokens": 20, "seed": 1, "logit_bias": {str(turn): 100}, "ignore_eos": True,
        "temperature": 0, "speculation": {"drafter": drafter},
    }  # fmt: skip
    answer = demo.post(TEXT, **body, stop="<turn|>" * 3).json()
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("stop", "")
    assert answer["usage"]["completion_tokens"] == 3
    ends = demo.post(TEXT, **body, stop=["x<turn|>", "<turn|>"]).json()
    assert (ends["choices"][0]["finish_reason"], ends["usage"]["completion_tokens"]) == ("stop", 1)


def accepted(s: Served, prediction: str, **more: Any) -> tuple[int, int, int]:
    body = {"messages": USER, "max_tokens": 30, "seed": 4} | more
    answer = s.post(CHAT, **body, prediction={"type": "content", "content": prediction}).json()
    details = answer["usage"]["completion_tokens_details"]
    return (
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
        answer["speculation"]["accepted"],
    )


def test_only_tokens_of_the_prediction_are_counted(s: Served) -> None:
    text = s.post(CHAT, messages=USER, max_tokens=30, seed=4).json()["choices"][0]["message"]["content"]
    kept, _, all_kept = accepted(s, text)
    assert kept == all_kept > 0
    none, rejected, drafted = accepted(s, "zebra quilt umbrella")
    assert (none, rejected) == (0, 0)
    assert drafted > 0
    assert accepted(s, text, speculation={"drafter": "mtp"})[:2] == (0, 0), "it does not read the prediction"
    assert accepted(s, "")[:2] == (0, 0)


def test_a_prediction_of_a_real_pair(demo: Served) -> None:
    body = {"prompt": "class Queue:\n", "max_tokens": 60, "temperature": 0}
    text = demo.post(TEXT, **body).json()["choices"][0]["text"]
    for prediction, some in ((text, True), ("zebra quilt umbrella", False)):
        answer = demo.post(TEXT, **body, prediction={"type": "content", "content": prediction}).json()
        details = answer["usage"]["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"] > 20) == some
        assert some or details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
        assert details["accepted_prediction_tokens"] <= answer["speculation"]["accepted"]


def test_a_stream_says_how_far_its_prompt_is_read(demo: Served) -> None:
    """The second time most of the prompt is in the prefix cache. Nothing of it is said unasked."""
    text = "def f(x):\n    return x\n" * 25
    for path, body, choice in (
        (TEXT, {"prompt": text}, {"index": 0, "text": "", "logprobs": None, "finish_reason": None}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "class " + text}]},
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None},
        ),
    ):
        cached: list[int] = []
        for _ in range(2):
            asked = body | {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
            lines = demo.post(path, **asked, return_progress=True).text.split("\n\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            told = [one["prompt_progress"] for one in events if "prompt_progress" in one]
            usage = events[-1]["usage"]
            total = usage["prompt_tokens"]
            assert [one["choices"] for one in events[: len(told)]] == [[choice]] * len(told), (
                "before any text"
            )
            assert {(one["total"], one["cache"]) for one in told} == {
                (total, usage["prompt_tokens_details"]["cached_tokens"])
            }
            read = [one["processed"] for one in told]
            assert read == sorted(set(read))
            assert read[-1] == total
            assert read[0] > told[0]["cache"]
            assert len(read) == -(-(total - told[0]["cache"]) // 64), "a chunk of 64 tokens each"
            cached.append(told[0]["cache"])
        assert cached[0] < cached[1]
        assert "prompt_progress" not in demo.post(path, **asked).text
    assert demo.service.watchers._wanted == {}


def test_runs_are_found_over_the_borders_of_steps() -> None:
    def delta(tokens: list[int], kept: int, proposed: list[int]) -> Delta:
        origins: list[Any] = ["draft"] * kept + ["target"]
        return Delta("r", 0, "", tokens, origins, proposed)

    counted = Predicted([1, 2, 3, 4, 5, 6])
    counted.push((0, 0), delta([1, 2], 1, [1, 9]))
    assert (counted.accepted, counted.rejected) == (1, 0), "both begin there"
    counted.push((0, 1), delta([2, 3], 1, [2, 3, 4]))
    assert (counted.accepted, counted.rejected) == (2, 2), "a run, not the beginning"
    counted.push((0, 0), delta([3, 4, 8], 2, [3, 4, 5]))
    assert (counted.accepted, counted.rejected) == (4, 3), "goes on from the step before"
    counted.push((0, 0), delta([7, 7], 1, [7, 3]))
    assert (counted.accepted, counted.rejected) == (4, 3)
    short = Predicted([5])
    short.push((0, 0), delta([5, 2], 1, [5, 6]))
    assert (short.accepted, short.rejected) == (1, 0)


TALK = [*USER, {"role": "assistant", "content": "so far "}]


def prompt_of(s: Served, **body: Any) -> str:
    ids = s.client.post("/tokenize", json={"model": "fake", **body}).json()["tokens"]
    text: str = s.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "assistant: so far "), ({"continue_final_message": True}, "assistant: so far "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant: so far "),
        ({"continue_final_message": False}, "assistant: so far \nassistant: "),
        ({"add_generation_prompt": True}, "assistant: so far \nassistant: "),
        ({"continue_final_message": False, "add_generation_prompt": False}, "assistant: so far \n"),
    ],
    ids=str,
)  # fmt: skip
def test_a_trailing_message_of_the_assistant_is_continued(s: Served, more: dict[str, Any], end: str) -> None:
    prompt = prompt_of(s, messages=TALK, **more)
    assert prompt.endswith("user: hello\n" + end)
    answer = s.post(CHAT, messages=TALK, max_tokens=2, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(make_tokenizer().encode(prompt, add_bos=False))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ({"messages": TALK, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": TALK, "continue_final_message": "yes"}, "continue_final_message"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_continued_is_refused(s: Served, body: dict[str, Any], param: str) -> None:
    for path in (CHAT, "/tokenize"):
        answer = s.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_calls_at_the_end_are_not_continued(s: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    prompt = prompt_of(s, messages=[*USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert prompt.endswith("assistant: \nassistant: ")
    assert prompt_of(s, messages=USER, add_generation_prompt=False).endswith("user: hello\n")


def test_tokens_of_texts(s: Served) -> None:
    def ids(**body: Any) -> list[int]:
        answer = s.post("/tokenize", **body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["tokens"]
        assert answer.json()["count"] == len(found)
        assert answer.json()["max_model_len"] == 512
        return found

    bare = make_tokenizer().encode("naïve", add_bos=False)
    assert ids(prompt="naïve") == [2, *bare]
    assert ids(prompt="naïve", add_special_tokens=False) == ids(content="naïve") == bare
    assert ids(content="naïve", add_special=True) == [2, *bare]
    told = s.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert told["token_strs"] == ["<bos>", "a", "b"]
    assert s.post("/detokenize", tokens=[2, *bare]).json() == {
        "prompt": "<bos>naïve",
        "content": "<bos>naïve",
    }
    for path, body, param in (
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"), ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"), ("/detokenize", {}, "tokens"),
    ):  # fmt: skip
        text = json.dumps(body)
        answer = s.client.post(path, content=text, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_version_and_models_without_v1(s: Served) -> None:
    assert s.client.get("/version").json() == {"version": paceline.__version__}
    assert s.client.get("/models").json() == s.client.get("/v1/models").json()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/rerank", "ranking is not what this server does"), ("/v1/threads", "/v1/chat/completions"),
        ("/api/push", "Ollama"), ("/api/pull", "POST /api/chat"), ("/v1/responses/resp_1", "not stored"),
        ("/chat/completions", "ends in /v1"), ("/nowhere", "no such path"), ("/v1", "no such path"),
        ("/v1/audio/speech", "audio is not what"),
    ],
)  # fmt: skip
def test_unknown_paths_name_those_there_are(s: Served, path: str, said: str) -> None:
    for method in ("GET", "POST"):
        answer = s.client.request(method, path, json={})
        assert answer.status_code == 404
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]  # as Ollama's clients read it
        assert said in message
        for known in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"):
            assert known in message


ORIGIN = "http://localhost:3000"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


def cors(answer: httpx.Response) -> dict[str, str]:
    found = {name: value for name, value in answer.headers.items() if name.startswith("access-control")}
    assert "access-control-allow-credentials" not in found
    return found


@pytest.mark.parametrize("allowed", [(ORIGIN, "https://a.example"), ("*",)], ids=["named", "all"])
def test_pages_of_allowed_origins_may_ask(allowed: tuple[str, ...]) -> None:
    shown = "*" if allowed == ("*",) else ORIGIN
    with served(keys=("secret",), cors_origins=allowed) as s:
        ask = httpx.options(s.url + CHAT, headers={"Origin": ORIGIN, **ASKS})
        assert ask.status_code == 204
        told = cors(ask)
        assert told["access-control-allow-origin"] == shown
        assert "POST" in told["access-control-allow-methods"]
        assert told["access-control-allow-headers"] == "authorization,x-stainless-os"
        page = {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"}
        body = {"prompt": "x", "max_tokens": 1}
        fine = s.client.post(TEXT, json=body, headers=page)
        assert (fine.status_code, cors(fine)) == (200, {"access-control-allow-origin": shown})
        without = httpx.post(s.url + TEXT, json=body, headers=page)
        assert (without.status_code, cors(without)) == (401, {"access-control-allow-origin": shown})
        bad = s.client.post(TEXT, json={}, headers=page)
        assert (bad.status_code, cors(bad)) == (400, {"access-control-allow-origin": shown})
        assert s.client.get("/v1/models", headers=page).headers.get("vary") == (
            None if shown == "*" else "Origin"
        )
        odd = httpx.options(
            s.url + CHAT, headers={"Origin": ORIGIN, **ASKS, "Access-Control-Request-Headers": "a b\t;x"}
        )
        assert cors(odd)["access-control-allow-headers"] == "authorization, content-type"
        if shown != "*":
            for origin in ("https://evil.example", "null", ORIGIN + ".evil", "http://localhost:30000"):
                foreign = s.client.post(TEXT, json=body, headers={"Origin": origin})
                assert (foreign.status_code, cors(foreign)) == (403, {})
                assert not cors(httpx.options(s.url + CHAT, headers={"Origin": origin, **ASKS}))
        assert (
            httpx.options(
                s.url + CHAT, headers={"Host": "evil.example", "Origin": ORIGIN, **ASKS}
            ).status_code
            == 421
        )


def test_origins_are_written_as_browsers_do() -> None:
    for origin in (
        "localhost:3000",
        "http://localhost:3000/",
        "http://a/b",
        "",
        "null",
        "HTTP://a",
        "http://a b",
    ):
        with pytest.raises(UsageError, match="cors_origins"):
            ServerConfig(cors_origins=(origin,))
    ServerConfig(
        cors_origins=("*", ORIGIN, "https://a.example", "http://[::1]:8000", "chrome-extension://abc")
    )


def test_the_docs_have_a_line_for_containers(s: Served) -> None:
    message = s.client.get("/v1/models", headers={"Host": "host.docker.internal"}).json()["error"]["message"]
    assert "--allowed-host" in message
    root = Path(__file__).parents[2]
    assert "--allowed-host host.docker.internal" in (root / "docs/server.md").read_text(encoding="utf-8")


def test_a_template_whose_process_dies_costs_one_request(demo: Served) -> None:
    assert demo.service.loaded is not None
    helper = demo.service.loaded.tokenizer.chat._helper
    ask: dict[str, Any] = {"messages": USER, "max_tokens": 1}
    assert demo.post(CHAT, **ask).status_code == 200
    helper._timeout, helper_timeout = 0.5, helper._timeout
    try:
        helper._process.send_signal(signal.SIGSTOP)
        answer = demo.post(CHAT, **ask)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "bad_template"
        assert "too long or too much memory" in answer.json()["error"]["message"]
    finally:
        helper._timeout = helper_timeout
    assert demo.post(CHAT, **ask).status_code == 200
