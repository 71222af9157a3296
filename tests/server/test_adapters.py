"""Adapters over HTTP: by the model's name as in vLLM, by `lora` as in llama.cpp; what is not there is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.config import EngineConfig
from paceline.errors import UsageError
from paceline.server.loading import load
from paceline.server.service import Service
from server.serving import Served, served

PROMPT = "Once upon a time there was"


def write_adapter(folder: Path, seed: int) -> Path:
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(6):
        at = f"base_model.model.model.layers.{i}.mlp.down_proj"
        tensors[f"{at}.lora_A.weight"] = torch.randn(4, 512, generator=g) * 0.3
        tensors[f"{at}.lora_B.weight"] = torch.randn(256, 4, generator=g) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        name: str(write_adapter(folder / str(seed), seed)) for seed, name in enumerate(("sql", "org/law"))
    }
    return EngineConfig.of({"adapters": made, "drafter": "ngram"})


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Served]:
    def loaded(service: Service) -> Any:
        return load(config, service, lambda line: None)

    with served(load=loaded) as made:
        yield made


def complete(server: Served, status: int = 200, path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 16, **more}
    done = server.client.post(path, json=body)
    assert done.status_code == status, done.text
    return dict(done.json())


def text_of(server: Served, **more: Any) -> str:
    return str(complete(server, **more)["choices"][0]["text"])


def test_every_way_to_name_one_writes_the_same(server: Served) -> None:
    plain, sql, law = text_of(server), text_of(server, model="sql"), text_of(server, model="org/law")
    assert len({plain, sql, law}) == 3
    for said in (
        "sql",
        {"sql": 1},
        {"sql": 1.0},
        [{"id": 0, "scale": 1.0}],
        [{"id": "sql"}],
        [{"id": 0, "scale": 1}],
    ):
        assert text_of(server, lora=said) == sql
    assert text_of(server, adapter="org/law") == law
    for said in ([], {}, [{"id": 0, "scale": 0.0}], None):
        assert text_of(server, lora=said) == plain
    half = text_of(server, lora=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}])
    assert half == text_of(server, lora={"org/law": 0.5, "sql": 0.5})
    assert half not in (sql, law)


def test_an_answer_says_which_and_what_was_kept_of_drafts(server: Served) -> None:
    done = complete(server, model="sql")
    assert done["model"] == "sql"
    assert complete(server)["model"] == "fake"
    assert done["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 0


def test_all_doors_take_the_name(server: Served) -> None:
    talk = [{"role": "user", "content": PROMPT}]
    for path, more in (
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 12}),
        ("/v1/messages", {"messages": talk, "max_tokens": 12}),
        ("/v1/responses", {"input": talk, "max_output_tokens": 12}),
        ("/completion", {"prompt": PROMPT, "n_predict": 12}),
        ("/api/chat", {"messages": talk, "stream": False, "options": {"num_predict": 12}}),
    ):
        said = [
            {
                k: v
                for k, v in server.client.post(path, json={"model": name, **more}).json().items()
                if k != "id"
            }
            for name in ("fake", "sql")
        ]
        assert said[1]["model"] == "sql", path
        parts = [
            json.dumps({k: one.get(k) for k in ("choices", "content", "output", "message")}) for one in said
        ]
        assert parts[0] != parts[1], path


def test_embeddings_are_of_the_adapter_that_the_model_names(server: Served) -> None:
    def vector(path: str, name: str, **more: Any) -> Any:
        said = server.client.post(path, json={"model": name, "input": PROMPT, **more}).json()
        return said["data"][0]["embedding"] if "data" in said else said["embeddings"][0]

    for path in ("/v1/embeddings", "/api/embed"):
        assert vector(path, "fake") != vector(path, "sql") != vector(path, "org/law")


def test_the_lists_name_them(server: Served) -> None:
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert list(cards) == ["fake", "sql", "org/law"]
    assert cards["sql"]["parent"] == "fake"
    assert "parent" not in cards["fake"]
    assert server.client.get("/v1/models/org/law").status_code == 200
    assert server.client.get("/lora-adapters").json() == [
        {"id": 0, "path": "sql", "scale": 0.0},
        {"id": 1, "path": "org/law", "scale": 0.0},
    ]


@pytest.mark.parametrize(
    ("more", "status", "line"),
    [
        ({"lora": "nosuch"}, 400, "no adapter 'nosuch' is loaded: there is 0: sql, 1: org/law"),
        ({"lora": [{"id": 2}]}, 400, "no adapter 2 is loaded"),
        ({"lora": "x" * 129}, 400, ""),
        ({"lora": "x" * 128}, 400, "no adapter 'xxx"),
        ({"lora": [{"id": 0}, {"id": "sql"}]}, 400, "is there twice"),
        ({"lora": {"sql": 101}}, 400, "lora"),
        ({"lora": {"sql": True}}, 400, ""),
        ({"lora": [{"id": 0, "scale": 101}]}, 400, ""),
        ({"lora": [{"id": -1}]}, 400, ""),
        ({"lora": [{"id": 0}] * 17}, 400, ""),
        ({"lora": 3}, 400, ""),
        ({"model": "sql", "lora": "org/law"}, 400, "name adapters in one place"),
        ({"model": "nosuch"}, 404, "use 'fake' or 'sql' or 'org/law'"),
        ({"lora_request": {"name": "sql"}}, 400, "lora_request"),
    ],
)  # fmt: skip
def test_refused(server: Served, more: dict[str, Any], status: int, line: str) -> None:
    said = complete(server, status, **more)["error"]["message"]
    assert line in said
    assert len(said) < 500


def test_a_server_without_adapters_refuses_their_names() -> None:
    with served() as made:
        said = complete(made, 400, lora="sql")["error"]["message"]
        assert "no adapter 'sql' is loaded: there is none, see --adapters" in said
        assert complete(made, model="nosuch")["warnings"]


def test_an_adapter_is_not_named_as_the_model_is(config: EngineConfig) -> None:
    with served() as made:
        made.service.model = "sql"
        with pytest.raises(UsageError, match="an adapter is named sql, as the model is"):
            load(config, made.service, lambda line: None)
