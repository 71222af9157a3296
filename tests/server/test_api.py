"""The two endpoints over real sockets: shapes, parameters, streaming, and that speculation changes no text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served() as server:
        yield server


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The final message, as clients put it together."""
    message: dict[str, Any] = {
        "content": "",
        "reasoning_content": "",
        "tool_calls": {},
        "finish_reason": None,
    }
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                entry = message["tool_calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                entry["name"] += call["function"].get("name", "")
                entry["arguments"] += call["function"].get("arguments", "")
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def test_completion_shape(s: Served) -> None:
    body = s.post("/v1/completions", prompt="hello", max_tokens=20, seed=1).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["prompt_tokens"] == 6
    report = body["speculation"]
    assert report["drafted"] >= report["accepted"] > 0
    assert report["tokens_per_step"] > 1
    assert report["seed"] == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_and_whole_answers_are_equal(s: Served, path: str, n: int) -> None:
    body: dict[str, Any] = {"max_tokens": 40, "seed": 7, "n": n}
    body |= {"prompt": "hello"} if path == "/v1/completions" else {"messages": USER}
    whole = s.post(path, **body).json()
    chunks = events(s.post(path, **body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    for i in range(n):
        if path == "/v1/completions":
            text = "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i)
            assert text == whole["choices"][i]["text"]
        else:
            assert joined(chunks, i)["content"] == whole["choices"][i]["message"]["content"]
    assert all(chunk["id"] and chunk["model"] for chunk in chunks)
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


SPECULATION: list[dict[str, Any] | None] = [
    None, {"drafter": "none"}, {"drafter": "mtp"}, {"draft_tokens": 0}, {"draft_tokens": 1}, {"draft_tokens": 8},
    {"draft_tokens": "auto"}, {"verify": "match"},
]  # fmt: skip
PARAMETERS: list[dict[str, Any]] = [
    {}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"logit_bias": {"20": -5, "30": 3.5}},
    {"stop": "self"}, {"stop": ["\n", "print"]}, {"logprobs": True, "top_logprobs": 3}, {"n": 2},
    {"ignore_eos": True}, {"min_tokens": 5}, {"stop_token_ids": [40]},
]  # fmt: skip


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: "+".join(p) or "plain")
def test_every_parameter_with_every_speculation(s: Served, parameters: dict[str, Any]) -> None:
    answers = []
    for speculation in SPECULATION:
        extra = {} if speculation is None else {"speculation": speculation}
        response = s.post(
            "/v1/chat/completions", messages=USER, max_tokens=40, seed=11, **parameters, **extra
        )
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        answers.append([(c["message"], c["logprobs"], c["finish_reason"]) for c in choices])
    assert all(answer == answers[0] for answer in answers)


def test_sixteen_at_once_give_the_same_as_one_by_one(s: Served) -> None:
    def ask(i: int) -> str:
        body = {"model": "fake", "prompt": f"p{i % 4}", "seed": i, "max_tokens": 60, "n": 2}
        body["speculation"] = {"draft_tokens": i % 5}
        return json.dumps(httpx.post(f"{s.url}/v1/completions", json=body, timeout=60).json()["choices"])

    alone = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_parameters_reach_the_engine(s: Served) -> None:
    s.post(
        "/v1/chat/completions", messages=USER, max_completion_tokens=3, temperature=0.25, top_p=0.5, top_k=-1,
        min_p=0.125, typical_p=0.9, top_n_sigma=2, xtc_probability=0.25, xtc_threshold=0.2, dynatemp_range=0.5,
        dynatemp_exponent=2, temperature_last=True, dry_multiplier=0.8, dry_base=2, dry_allowed_length=3,
        dry_penalty_last_n=64, dry_sequence_breakers=["x", "yz"], penalty_last_n=32, suppress_tokens=[3],
        allowed_token_ids=[5, 7],
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={"5": -100}, stop=["a", "b"],
        mirostat=2, mirostat_tau=3, mirostat_eta=0.2, bad_words=["x y"], banned_strings=["zz"],
        include_stop_str_in_output=True,
        seed=9, n=2, logprobs=True, top_logprobs=2, ignore_eos=True, stop_token_ids=[7], min_tokens=2,
        speculation={"drafter": "mtp", "draft_tokens": 3, "verify": "reject", "typical_epsilon": 0.5},
        prediction={"type": "content", "content": [{"type": "text", "text": "guess"}]},
    )  # fmt: skip
    params = s.engine.last_params
    assert params is not None
    got = {name: getattr(params, name) for name in params.names()}
    assert got == {
        "max_tokens": 3, "min_tokens": 2, "temperature": 0.25, "top_k": 0, "top_p": 0.5, "min_p": 0.125,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": {5: -100.0},
        "typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.25, "xtc_threshold": 0.2, "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0, "temperature_last": True, "dry_multiplier": 0.8, "dry_base": 2.0,
        "dry_allowed_length": 3, "dry_penalty_last_n": 64, "dry_sequence_breakers": ("x", "yz"), "penalty_last_n": 32,
        "bad_token_ids": (3,), "allowed_token_ids": (5, 7), "stop": ("a", "b"), "stop_token_ids": (7,),
        "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "bad_words": ("x y",), "banned_strings": ("zz",),
        "include_stop_str_in_output": True, "pooling": None, "lora": (),
        "ignore_eos": True, "seed": 9, "n": 2, "logprobs": 2, "draft_tokens": 3, "drafter": "mtp",
        "verify": "reject", "typical_epsilon": 0.5, "typical_delta": 0.3, "constraint": None,
        "reference": tuple(s.engine.tokenizer.encode("guess", add_bos=False)),
    }  # fmt: skip


def test_defaults_are_those_of_the_api(s: Served) -> None:
    s.post("/v1/completions", prompt="x")
    assert s.engine.last_params is not None
    assert (s.engine.last_params.max_tokens, s.engine.last_params.temperature) == (16, 0.0)
    assert s.engine.last_params.seed is not None
    s.post("/v1/chat/completions", messages=USER, stop=["\n", " ", "e", "i", "(", "1"])
    assert s.engine.last_params.max_tokens > 400


def test_the_model_s_own_sampling_holds_where_a_request_says_nothing() -> None:
    with served() as s:
        assert s.service.loaded is not None
        s.service.loaded = replace(
            s.service.loaded, sampling={"temperature": 0.7, "top_k": 64, "top_p": 0.95}
        )
        for path, asked in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": USER})):
            s.post(f"/v1/{path}", max_tokens=2, **asked)
            params = s.engine.last_params
            assert (params.temperature, params.top_k, params.top_p) == (0.7, 64, 0.95)
            s.post(f"/v1/{path}", max_tokens=2, temperature=0, top_k=-1, **asked)
            params = s.engine.last_params
            assert (params.temperature, params.top_k, params.top_p) == (0, 0, 0.95)


def test_no_tokens_at_all_and_a_cap_on_output(s: Served) -> None:
    for stream in (False, True):
        answer = s.post("/v1/completions", prompt="abc", max_tokens=0, n=2, stream=stream)
        chunks = events(answer) if stream else [answer.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
            (0, "", "length"),
            (1, "", "length"),
        ]
    with served(max_output=5) as short:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": USER}),
        ):
            for extra in ({"ignore_eos": True}, {"ignore_eos": True, "max_tokens": 300}):
                assert short.post(path, **body, **extra).json()["usage"]["completion_tokens"] == 5


def test_whole_numbers_may_be_written_with_a_point(s: Served) -> None:
    body = {"max_tokens": 5, "top_k": 3, "seed": 1, "speculation": {"draft_tokens": 2}}
    plain = s.post("/v1/completions", prompt=[[20, 30]], **body | {"stop_token_ids": [200]}).json()["choices"]
    pointed = json.loads(re.sub(r"(\d+)", r"\1.0", json.dumps(body | {"stop_token_ids": [200]})))
    assert s.post("/v1/completions", prompt=[[20.0, 30.0]], **pointed).json()["choices"] == plain


def test_the_schema_says_what_is_refused(s: Served) -> None:
    document = s.client.get("/openapi.json").json()
    assert document["info"]["description"].startswith(
        "OpenAI's chat completions"
    )  # U13: no docstring of ours
    schemas = document["components"]["schemas"]
    chat, completion = schemas["ChatRequest"], schemas["CompletionRequest"]
    assert {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]} in chat["allOf"][0][
        "anyOf"
    ]
    assert chat["properties"]["top_logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 20}
    assert chat["properties"]["logprobs"]["anyOf"][0] == {"type": "boolean"}
    assert completion["properties"]["logprobs"]["anyOf"][0]["maximum"] == 20
    size = s.engine.tokenizer.vocab_size
    assert completion["properties"]["prompt"]["anyOf"][2]["items"]["exclusiveMaximum"] == size
    numeral = re.compile(chat["properties"]["logit_bias"]["anyOf"][0]["propertyNames"]["pattern"])
    assert [i for i in range(3000) if numeral.search(str(i))] == list(range(size))
    for fields in (chat["properties"], completion["properties"]):
        assert fields["n"]["anyOf"][0]["maximum"] == 16
        assert fields["stop"]["anyOf"][1]["maxItems"] == 64
        assert "enum" not in fields["model"]["anyOf"][0]
    with served(strict=True) as strict:
        schemas = strict.client.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["ChatRequest"]["properties"]["model"]["anyOf"][0]["enum"] == ["fake"]


def test_prompts_of_all_kinds(s: Served) -> None:
    for prompt, count in (("ab", 1), (["ab", "c"], 2), ([20, 30], 1), ([[20, 30], [40]], 2)):
        body = s.post("/v1/completions", prompt=prompt, max_tokens=5, seed=1, n=2).json()
        assert [c["index"] for c in body["choices"]] == list(range(count * 2))
        assert body["usage"]["completion_tokens"] == 5 * 2 * count


def test_echo_and_prompt_logprobs(s: Served) -> None:
    whole = s.post("/v1/completions", prompt="naïve", max_tokens=4, seed=1, echo=True, logprobs=2).json()[
        "choices"
    ][0]
    plain = s.post("/v1/completions", prompt="naïve", max_tokens=4, seed=1).json()["choices"][0]
    assert whole["text"] == "naïve" + plain["text"]
    entries = whole["logprobs"]
    assert entries["token_logprobs"][0] is None
    assert entries["top_logprobs"][0] is None
    assert len({len(entries[name]) for name in entries}) == 1
    assert len(entries["tokens"]) == 1 + 6 + 4  # begin of text, six bytes, four new ones
    assert all(value <= 0 for value in entries["token_logprobs"][1:])
    assert "bytes:\\xc3" in entries["tokens"]
    chunks = events(
        s.post("/v1/completions", prompt="naïve", max_tokens=4, seed=1, echo=True, logprobs=2, stream=True)
    )
    streamed = [t for chunk in chunks for c in chunk["choices"] for t in c["logprobs"]["tokens"]]
    assert streamed == entries["tokens"]
    only = s.post("/v1/completions", prompt=[[20, 30, 40]], max_tokens=0, echo=True, logprobs=1).json()
    assert len(only["choices"][0]["logprobs"]["tokens"]) == 3
    assert only["usage"]["completion_tokens"] == 0


def test_chat_logprobs_have_bytes(s: Served) -> None:
    body = s.post(
        "/v1/chat/completions", messages=USER, max_tokens=30, seed=1, logprobs=True, top_logprobs=2
    ).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == body["usage"]["completion_tokens"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="ignore") == body["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_prediction_is_counted(s: Served) -> None:
    ask = {"messages": USER, "max_tokens": 30, "seed": 1}
    text = s.post("/v1/chat/completions", **ask).json()["choices"][0]["message"]["content"]
    body = s.post("/v1/chat/completions", **ask, prediction={"type": "content", "content": text})
    details = body.json()["usage"]["completion_tokens_details"]
    report = body.json()["speculation"]
    assert details["accepted_prediction_tokens"] == report["accepted"] > 0
    assert details["rejected_prediction_tokens"] == 0, "what the engine proposed besides is not of the text"
    assert s.engine.last_params is not None
    assert s.engine.last_params.drafter == "ngram"


def test_continuous_usage_and_trace(s: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        s.post("/v1/completions", prompt="x", max_tokens=30, seed=3, stream=True, stream_options=options,
               speculation={"trace": True})
    )  # fmt: skip
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 30
    traces = [chunk["paceline"] for chunk in chunks if "paceline" in chunk]
    assert sum(len(trace["tokens"]) for trace in traces) == 30
    text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
    assert "".join(piece for trace in traces for piece in trace["pieces"]).startswith(text.rstrip("\ufffd"))
    for trace in traces:
        assert len(trace["origins"]) == len(trace["tokens"]) == len(trace["pieces"])
        assert len(trace["proposed"]) == len(trace["proposed_pieces"])
        kept = trace["origins"].count("draft")
        assert trace["proposed"][:kept] == trace["tokens"][:kept]


SCRIPT = (
    '<|channel>thought\nHm, the für 🎉.\n<channel|>I call <|tool_call>call:add{a:1,b:<|"|>é🎉<|"|>}<tool_call|>'
    "<|tool_call>call:ping{}<tool_call|>"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "ping")
]


@pytest.mark.parametrize("marks", [True, False], ids=["marks are tokens", "marks are text"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 7, 16])
def test_thinking_and_tools_for_any_deltas(marks: bool, draft_tokens: int) -> None:
    with served(FakeEngine(make_tokenizer(marks), SCRIPT)) as s:
        for seed in range(4):
            body = {
                "messages": USER,
                "seed": seed,
                "tools": TOOLS,
                "speculation": {"draft_tokens": draft_tokens},
            }
            whole = s.post("/v1/chat/completions", **body).json()["choices"][0]
            message = whole["message"]
            assert message["reasoning_content"] == "Hm, the für 🎉.\n"
            assert message["content"] == "I call "
            calls = [
                (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]
            ]
            assert calls == [("add", {"a": 1, "b": "é🎉"}), ("ping", {})]
            assert len({c["id"] for c in message["tool_calls"]}) == 2
            assert whole["finish_reason"] == "tool_calls"
            streamed = joined(events(s.post("/v1/chat/completions", **body, stream=True)))
            assert streamed["reasoning_content"] == message["reasoning_content"]
            assert streamed["content"] == "I call "
            assert [(c["name"], json.loads(c["arguments"])) for c in streamed["tool_calls"].values()] == calls
            assert streamed["finish_reason"] == "tool_calls"


def test_tools_are_text_unless_asked_for() -> None:
    with served(FakeEngine(make_tokenizer(False), SCRIPT)) as s:
        message = s.post("/v1/chat/completions", messages=USER).json()["choices"][0]["message"]
        assert message["content"] == SCRIPT.partition("<channel|>")[2]
        assert "tool_calls" not in message
        off = s.post("/v1/chat/completions", messages=USER, tools=TOOLS, tool_choice="none").json()
        assert off["choices"][0]["message"] == message


def test_thinking_that_the_prompt_opened() -> None:
    with served(FakeEngine(make_tokenizer(), "so<channel|>yes")) as s:
        body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}}
        answer = s.post("/v1/chat/completions", **body).json()
        assert answer["choices"][0]["message"]["reasoning_content"] == "so"
        assert answer["choices"][0]["message"]["content"] == "yes"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_one_call_only_when_calls_may_not_be_parallel() -> None:
    with served(FakeEngine(make_tokenizer(), SCRIPT)) as s:
        answer = s.post("/v1/chat/completions", messages=USER, tools=TOOLS, parallel_tool_calls=False).json()
        assert [c["function"]["name"] for c in answer["choices"][0]["message"]["tool_calls"]] == ["add"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_earlier_calls_reach_the_template_as_objects(s: Served) -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]  # fmt: skip
    assert s.post("/v1/chat/completions", messages=messages, max_tokens=3).status_code == 200
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{bad"  # type: ignore[index]
    assert s.post("/v1/chat/completions", messages=messages, max_tokens=3).status_code == 200


def test_models_metrics_page_and_docs(s: Served) -> None:
    assert s.client.get("/v1/models").json()["data"][0]["id"] == "fake"
    card = s.client.get("/v1/models/fake").json()
    assert card["drafters"] == ["none", "ngram", "mtp"]
    assert (card["chat"], card["thinking"], card["sampling"]) == (True, True, {})
    assert s.client.get("/v1/models/other").status_code == 404
    metrics = s.client.get("/metrics").text
    for name in ("requests_total", "time_to_first_token_seconds_bucket", "inter_token_seconds", "tokens_total",
                 "drafted_tokens_total", "accepted_tokens_total", "tokens_per_step", "draft_length_total",
                 "queue_requests", "engine_steps"):  # fmt: skip
        assert f"paceline_{name}" in metrics
    licences = [
        f"/vendor/{name}-LICENSE.txt"
        for name in ("marked-18.2.1", "highlight-11.12.0", "katex-0.19.1", "pdfjs-5.6.205")
    ]
    for path in (
        "/", "/app.js", "/style.css", "/docs", "/docs.js", "/openapi.json", "/icon.svg", "/vendor/marked.js",
        "/vendor/highlight.js", "/vendor/katex.js", "/vendor/pdf.js", "/vendor/pdf.worker.js", *licences,
    ):  # fmt: skip
        answer = s.client.get(path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "trusted-types 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_one_request_that_fails_touches_no_other() -> None:
    engine = FakeEngine(make_tokenizer(), delay=0.002)
    engine.nan_in = "poison"
    with served(engine) as s:
        alone = s.post("/v1/completions", prompt="good", max_tokens=60, seed=1).json()["choices"]
        out: list[Any] = []
        thread = threading.Thread(
            target=lambda: out.append(
                httpx.post(
                    f"{s.url}/v1/completions",
                    json={"model": "fake", "prompt": "good", "max_tokens": 60, "seed": 1},
                )
            )
        )
        thread.start()
        bad = s.post("/v1/completions", prompt="poison", max_tokens=60)
        assert bad.status_code == 500
        assert "not finite" in bad.json()["error"]["message"]
        streamed = s.post("/v1/completions", prompt="poison", max_tokens=60, stream=True)
        assert streamed.status_code == 500
        thread.join()
        assert out[0].json()["choices"] == alone
