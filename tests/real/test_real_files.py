"""What needs models of real size: greedy texts beside transformers', a hole filled, a tool called, texts with drafts.

    python recipes/real/fetch.py && ./scripts/test -m real

The comparison with transformers also needs `accelerate`, which its reader of GGUF files imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import httpx2 as httpx
import pytest
import torch

from paceline import LLM, SamplingParams
from real_models import fetched

pytestmark = pytest.mark.real
SMALL, LARGE, GEMMA = (
    "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "qwen2.5-coder-1.5b-instruct-q4_k_m",
    "gemma-3-270m-q4_k_m",
)
TEXT = "def merge(a: list[int], b: list[int]) -> list[int]:\n"
OFF = 0.01  # nats: what two float32 implementations may differ by, with weights of 4 to 8 bits


@pytest.mark.parametrize("name", [SMALL, GEMMA, LARGE])
def test_greedy_texts_are_those_of_transformers_on_the_same_weights(name: str) -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    from transformers import AutoModelForCausalLM

    path = fetched(name)
    with LLM(str(path), drafter="none", activations="float32", max_model_len=256, profile_dir=None) as llm:
        (ours,) = llm.generate([TEXT], SamplingParams(max_tokens=24, temperature=0, logprobs=1))
        (plain,) = llm.generate([TEXT], SamplingParams(max_tokens=24, temperature=0))
    assert plain.token_ids == ours.token_ids
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    prompt, written = ours.prompt_token_ids, ours.token_ids
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *written]])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1)
    best = scores.topk(2).values
    sure = best[:, 0] - best[:, 1] > 2 * OFF
    assert sure.sum() > 16
    assert logits.argmax(-1)[sure].tolist() == torch.tensor(written)[sure].tolist()
    told = torch.tensor([one.raw for one in ours.logprobs])
    chosen = scores.gather(1, torch.tensor(written)[:, None])[:, 0]
    torch.testing.assert_close(told, chosen, rtol=0, atol=OFF)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_pair_writes_what_the_target_writes_alone(temperature: float) -> None:
    target, drafter = fetched(LARGE), fetched(SMALL)
    asked = [[{"role": "user", "content": f"Write a Python function that {what}."}] for what in
             ("reverses a list", "counts words", "finds primes up to n")]  # fmt: skip
    params = SamplingParams(max_tokens=48, temperature=temperature, top_p=0.95, seed=5)
    texts = []
    with LLM(str(target), drafter=str(drafter), draft_tokens=4, max_model_len=512, profile_dir=None) as llm:
        for name in ("none", "model", "ngram"):
            done = llm.chat(asked, replace(params, drafter=name))
            texts.append([one.token_ids for one in done])
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of a server with the pair."""
    command = "import sys; from paceline.cli import main; sys.argv[:] = ['paceline', *sys.argv[1:]]; main()"
    options = (
        "--drafter",
        str(fetched(SMALL)),
        "--port",
        "0",
        "--max-model-len",
        "1024",
        "--model-name",
        "pair",
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", str(fetched(LARGE)), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        try:
            address = next(line.split()[-1] for line in server.stdout if "is ready on" in line)
            with httpx.Client(base_url=address, timeout=300) as made:
                yield made
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_a_hole_is_filled(client: httpx.Client) -> None:
    body = {
        "model": "pair", "prompt": "def add(a, b):\n    return ", "suffix": "\n\nprint(add(1, 2))\n",
        "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"].strip() == "a + b"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_tool_is_called_with_what_its_schema_asks(client: httpx.Client) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
    body = {
        "model": "pair", "messages": [{"role": "user", "content": "How warm is it in Paris, in celsius?"}],
        "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "temperature": 0,
    }  # fmt: skip
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "unit": "celsius"}


def test_an_answer_is_held_by_a_schema(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["name", "year"],
        "additionalProperties": False,
    }
    body = {
        "model": "pair", "max_tokens": 60, "temperature": 0,
        "messages": [{"role": "user", "content": "Who made Python, and in which year was it released? JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }  # fmt: skip
    found = json.loads(
        client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    )
    assert "Guido" in found["name"]
    assert isinstance(found["year"], int)
