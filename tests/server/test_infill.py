"""What stands between two texts: `suffix` of completions and of Ollama, llama.cpp's /infill, in the model's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from paceline.text.infill import Infill
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

MARKS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
}
TEXT = "/v1/completions"


def tokenizer_with(marks: tuple[str, ...], adds_bos: bool = False) -> Tokenizer:
    backend = make_tokenizer()._backend
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(
        backend, {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": adds_bos}, eos=[1]
    )


@pytest.fixture(scope="module", params=MARKS)
def s(request: pytest.FixtureRequest) -> Iterator[tuple[Served, tuple[str, ...]]]:
    engine = FakeEngine(tokenizer_with(MARKS[request.param]), script="    return 1\n")
    with served(engine) as made:
        yield made, MARKS[request.param]


def prompt(s: Served) -> str:
    return s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)


def test_a_suffix_stands_in_the_models_own_tokens(s: tuple[Served, tuple[str, ...]]) -> None:
    served_, (before, behind, middle, *_) = s
    made = served_.post(TEXT, prompt="def f():\n", suffix="\nprint(f())", max_tokens=60)
    assert made.json()["choices"][0]["text"] == "    return 1\n"
    assert prompt(served_) == f"{before}def f():\n{behind}\nprint(f()){middle}"
    served_.post(TEXT, prompt=f"a{middle}", suffix=f"{before}b", max_tokens=1)
    ids = served_.engine.last_prompt
    assert [ids.count(served_.engine.tokenizer.token_id(mark)) for mark in (before, behind, middle)] == [
        1,
        1,
        1,
    ]
    assert served_.engine.last_params is not None
    assert {served_.engine.tokenizer.token_id(mark) for mark in (before, middle)} <= {
        *served_.engine.last_params.stop_token_ids
    }
    raw = {"prompt": "def f():\n", "suffix": "\nx", "stream": False}
    assert served_.post("/api/generate", **raw).json()["response"] == "    return 1\n"
    assert prompt(served_) == f"{before}def f():\n{behind}\nx{middle}"


def test_llama_cpps_infill(s: tuple[Served, tuple[str, ...]]) -> None:
    served_, (before, behind, middle, *more) = s
    body: dict[str, Any] = {
        "input_prefix": "def f():\n",
        "input_suffix": "\nx",
        "prompt": "  ",
        "n_predict": 60,
    }
    extra = [{"filename": "a.py", "text": "y = 1"}]
    made = served_.post("/infill", **body, input_extra=extra).json()
    assert (made["content"], made["stop"], made["stop_type"]) == ("    return 1\n", True, "eos")
    text = prompt(served_)
    assert text.endswith(f"{before}def f():\n  {behind}\nx{middle}")
    assert ("a.py\ny = 1" in text) == bool(more), "other files are for models that know files"
    assert made["tokens_evaluated"] == len(served_.engine.last_prompt)
    lines = served_.post("/infill", **body, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(e["content"] for e in events) == "    return 1\n"
    assert [e["stop"] for e in events] == [False] * (len(events) - 1) + [True]
    assert served_.post("/infill", **body | {"n_predict": 2}).json()["stop_type"] == "limit"


def test_it_begins_with_bos_where_the_tokenizer_says_so() -> None:
    tokenizer = tokenizer_with(MARKS["starcoder"], adds_bos=True)
    infill = Infill.of(tokenizer)
    assert infill is not None
    assert infill.prompt("a", "b")[0] == tokenizer.bos_id
    assert Infill.of(make_tokenizer()) is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": ["a", "b"], "suffix": "c"}, "suffix"),
        (TEXT, {"prompt": "a", "suffix": "c", "echo": True}, "suffix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ],
)  # fmt: skip
def test_what_cannot_be(
    s: tuple[Served, tuple[str, ...]], path: str, body: dict[str, Any], param: str
) -> None:
    answer = s[0].post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
