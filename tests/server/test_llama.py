"""llama.cpp's /completion, /props and /healthz over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

SCRIPT = "one two\nthree 🎉 four"


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer(), script=SCRIPT)) as made:
        yield made


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line]


def test_a_completion_in_llama_cpps_fields(s: Served) -> None:
    asked = {"prompt": "hello", "seed": 3, "temperature": 0.5, "repeat_last_n": 64, "return_tokens": True}
    made = s.post("/completion", **asked).json()
    assert (made["content"], made["stop"], made["stop_type"], made["stopping_word"]) == (
        SCRIPT,
        True,
        "eos",
        "",
    )
    assert (made["prompt"], made["has_new_line"], made["truncated"]) == ("hello", True, False)
    ids = s.engine.tokenizer.encode(SCRIPT, add_bos=False)
    assert (made["tokens"], made["tokens_predicted"]) == ([*ids, 1], len(ids) + 1)
    assert made["tokens_evaluated"] == len(s.engine.last_prompt)
    settings, times = made["generation_settings"], made["timings"]
    assert (settings["seed"], settings["temperature"], settings["repeat_last_n"]) == (3, 0.5, 64)
    assert (times["predicted_n"], times["prompt_n"]) == (len(ids) + 1, len(s.engine.last_prompt))
    assert times["draft_n"] >= times["draft_n_accepted"] > 0
    assert s.post("/completion", prompt="hello").json()["tokens"] == []


def test_a_stream_ends_with_the_whole_answer_but_its_text(s: Served) -> None:
    got = events(s.post("/completion", prompt="hello", stream=True, n_probs=2))
    assert [chunk["stop"] for chunk in got] == [False] * (len(got) - 1) + [True]
    assert "".join(chunk["content"] for chunk in got) == SCRIPT
    assert (got[-1]["content"], got[-1]["stop_type"]) == ("", "eos")
    places = [place for chunk in got[:-1] for place in chunk.get("completion_probabilities", ())]
    assert [place["id"] for place in places] == [i for chunk in got[:-1] for i in chunk["tokens"]]
    assert all(len(place["top_logprobs"]) == 2 and place["logprob"] < 0 for place in places)
    whole = s.post("/completion", prompt="hello", n_probs=2).json()
    assert whole["completion_probabilities"] == places
    assert bytes(b for place in places[:-1] for b in place["bytes"]).decode() == SCRIPT


def test_why_it_ended(s: Served) -> None:
    word = s.post("/completion", prompt="a", stop=["zzz", "two"]).json()
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("one ", "word", "two")
    cut = s.post("/completion", prompt="a", n_predict=3).json()
    assert (cut["content"], cut["stop_type"], cut["tokens_predicted"]) == ("one", "limit", 3)


def test_prompts_of_texts_and_tokens(s: Served) -> None:
    tokenizer = s.engine.tokenizer
    ids = tokenizer.encode("b", add_bos=False)
    s.post("/completion", prompt=["a", *ids, "c"])
    assert s.engine.last_prompt == tokenizer.encode("abc")
    s.post("/completion", prompt=ids)
    assert s.engine.last_prompt == ids
    many = s.post("/completion", prompt=["a", "bb"], n_predict=3).json()
    assert [(one["index"], one["prompt"], one["content"]) for one in many] == [
        (0, "a", "one"),
        (1, "bb", "one"),
    ]
    mixed = s.post("/completion", prompt=["a", [*ids, "c"]], n_predict=1, n=2).json()
    assert [one["prompt"] for one in mixed] == ["a", "a", "bc", "bc"]
    streamed = events(s.post("/completion", prompt=["a", "bb"], stream=True))
    for index in (0, 1):
        assert "".join(chunk["content"] for chunk in streamed if chunk["index"] == index) == SCRIPT


def test_only_the_fields_that_are_asked_for(s: Served) -> None:
    wanted = ["content", "timings/predicted_n", "generation_settings/seed", "nothing/there"]
    made = s.post("/completion", prompt="a", n_predict=3, seed=9, response_fields=wanted).json()
    assert made == {"content": "one", "predicted_n": 3, "seed": 9}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"prompt_string": "a"}}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a", -1]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"prompt": [1, "a" * 600]}, "prompt"),
        ({"prompt": "a", "n_probs": 10**6}, "n_probs"),
        ({"prompt": "a", "n_probs": -1}, "n_probs"),
        ({"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "a", "samplers": ["top_k"]}, "samplers"),
    ],
)
def test_what_cannot_be(s: Served, body: dict[str, Any], param: str) -> None:
    answer = s.post("/completion", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_props_and_healthz() -> None:
    with served(FakeEngine(make_tokenizer()), keys=("key",)) as s:
        props = s.client.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == s.engine.max_len
        assert props["default_generation_settings"]["params"]["temperature"] == 0
        assert (props["bos_token"], props["eos_token"]) == ("<bos>", "<eos>")
        assert props["modalities"] == {"vision": False, "audio": False}
        bare = {"Authorization": ""}
        assert s.client.get("/healthz", headers=bare).json() == {"status": "ready"}
        assert s.client.get("/props", headers=bare).status_code == 401
        assert s.client.post("/props", json={}).status_code == 405
        s.worker.state = "loading"
        assert s.client.get("/healthz").status_code == 503
        assert s.client.get("/props").status_code == 503
        s.worker.state = "ready"
