"""/v1/embeddings, /api/embed and /api/embeddings over the fake engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from server.fake_engine import HIDDEN, FakeEngine, make_tokenizer
from server.serving import Served, served

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer()), max_texts=4, max_inputs=20) as made:
        yield made


def vector(s: Served, text: str) -> np.ndarray:
    return s.engine.vector(s.engine.tokenizer.encode(text))


def test_texts_and_tokens_in_openais_shape(s: Served) -> None:
    made = s.post(PATH, input="hello").json()
    assert (made["object"], made["model"], len(made["data"])) == ("list", "fake", 1)
    assert np.array_equal(np.float32(made["data"][0]["embedding"]), vector(s, "hello"))
    tokens = len(s.engine.tokenizer.encode("hello"))
    assert made["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert s.engine.last_params is not None
    assert s.engine.last_params.pooling == "last"
    ids = s.engine.tokenizer.encode("hello")
    for given in (ids, [ids], ["hello"]):
        assert s.post(PATH, input=given).json()["data"] == made["data"]


def test_more_texts_than_the_queue_takes(s: Served) -> None:
    texts = [f"text {i}" for i in range(20)]
    made = s.post(PATH, input=texts).json()["data"]
    assert [one["index"] for one in made] == list(range(20))
    for one, text in zip(made, texts, strict=True):
        assert np.array_equal(np.float32(one["embedding"]), vector(s, text))


def test_base64_and_dimensions(s: Served) -> None:
    plain = np.float32(s.post(PATH, input="a").json()["data"][0]["embedding"])
    packed = s.post(PATH, input="a", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), plain)
    short = np.float32(s.post(PATH, input="a", dimensions=5).json()["data"][0]["embedding"])
    assert np.allclose(short, plain[:5] / np.linalg.norm(plain[:5]), atol=1e-6)


def test_openais_own_client(s: Served) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="fake", input=["a", "b"])  # asks for base64
    assert np.array_equal(np.float32(made.data[1].embedding), vector(s, "b"))


def test_ollamas_two_paths(s: Served) -> None:
    made = s.post("/api/embed", input=["a", "b"], keep_alive="5m").json()
    assert [
        np.array_equal(np.float32(v), vector(s, t)) for v, t in zip(made["embeddings"], "ab", strict=True)
    ]
    assert made["prompt_eval_count"] == 2 * len(s.engine.tokenizer.encode("a"))
    one = s.post("/api/embed", input="a", dimensions=3).json()["embeddings"]
    assert [len(v) for v in one] == [3]
    older = s.post("/api/embeddings", prompt="a").json()
    assert np.array_equal(np.float32(older["embedding"]), vector(s, "a"))
    assert s.post("/api/embed").json()["embeddings"] == []


def test_long_texts(s: Served) -> None:
    text, most = "a" * 600, s.engine.max_len - 1
    assert s.post(PATH, input=text).json()["error"]["code"] == "context_length_exceeded"
    assert s.post("/api/embed", input=text, truncate=False).status_code == 400
    ids = s.engine.tokenizer.encode(text)
    assert s.post("/api/embed", input=text).status_code == 200
    assert s.engine.last_prompt == ids[:most]
    s.post(PATH, input="abcdef", truncate_prompt_tokens=2)
    assert s.engine.last_prompt == s.engine.tokenizer.encode("abcdef")[-2:]
    s.post(PATH, input=text, truncate_prompt_tokens=-1)
    assert s.engine.last_prompt == ids[-most:]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {}, "input"),
        (PATH, {"input": []}, "input"),
        (PATH, {"input": [[]]}, "input"),
        (PATH, {"input": ["a"] * 21}, "input"),
        (PATH, {"input": [10**6]}, "input"),
        (PATH, {"input": ["a", 1]}, "input"),
        (PATH, {"input": {"text": "a"}}, "input"),
        (PATH, {"input": "\ud800"}, "input"),
        (PATH, {"input": "a", "dimensions": HIDDEN + 1}, "dimensions"),
        (PATH, {"input": "a", "dimensions": 0}, "dimensions"),
        (PATH, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be(s: Served, path: str, body: dict[str, Any], param: str) -> None:
    answer = s.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param
    for bad in ({"input": [1]}, {"input": "a", "dimensions": -1}):
        assert s.post("/api/embed", **bad).status_code == 400
    assert s.post("/api/embeddings").status_code == 400
