"""Whatever third parties write: nothing but our own errors, in one line, within 5 s and 500 MB. Under a minute in all.

Lines of `generate` are in tests/cli/test_generate.py. Each input is a good one with one or two values changed.
"""

from __future__ import annotations

import copy
import json
import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layouts import model, write
from paceline.checkpoints.defaults import read_defaults
from paceline.cli import main
from paceline.errors import LoadError, PacelineError
from paceline.files import read_json
from paceline.hub.resolve import bundled
from paceline.models.config import parse_target
from paceline.models.families.gemma4.config import parse_assistant
from paceline.models.inspection import inspect
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

MOST_SECONDS, MOST_KB = 5.0, 500 * 1024
few = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HOSTILE: list[Any] = [
    10**400, -(10**400), float("inf"), float("nan"), 2**63, -1, 0, 0.5, 1e30, 1e-320, True, None, "", "x", "\ud800",
    "\0", "9" * 5000, "sliding_attention", [], {}, [[]], [None], {"": 1}, {"a": None}, [10**400], [{}], ["\ud800"],
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within, of a list's first two."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for i in range(min(len(value), 2)):
            yield from places(value[i], (*at, i))


def changed(base: Any) -> st.SearchStrategy[Any]:
    """`base` with one or two of its values, or itself, replaced by something hostile."""
    spots = [at for at in places(base) if at]

    def put(changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
        made = copy.deepcopy(base)
        for at, value in changes:
            place = made
            with suppress(TypeError, KeyError, IndexError):  # the first change took its place away
                for key in at[:-1]:
                    place = place[key]
                if isinstance(place, dict if isinstance(at[-1], str) else list):
                    place[at[-1]] = copy.deepcopy(value)
        return made

    change = st.tuples(st.sampled_from(spots), st.sampled_from(HOSTILE))
    return st.lists(change, min_size=1, max_size=2).map(put) | st.sampled_from(HOSTILE)


def bounded(run: Callable[[], object]) -> None:
    """`run` may raise an error of ours, in one short line."""
    begin, said = time.monotonic(), ""
    try:
        run()
    except PacelineError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
    assert time.monotonic() - begin < MOST_SECONDS


@pytest.fixture(autouse=True, scope="module")
def growth() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KB


REAL = json.loads((Path(__file__).parents[1] / "real/data/e2b_config.json").read_text(encoding="utf-8"))
PLAIN = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16} | {
    "num_key_value_heads": 2, "max_position_embeddings": 512, "intermediate_size": 64, "eos_token_id": [1],
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "sliding_window": 8,
    "use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"],
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
}  # fmt: skip
CONFIGS = [REAL, *(read_json(bundled(role) / "config.json") for role in ("target", "assistant", "draft"))] + [
    {"model_type": kind, **PLAIN} for kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
]


@settings(few, max_examples=1200)
@given(st.sampled_from(CONFIGS).flatmap(changed))
def test_configs(raw: Any) -> None:
    if isinstance(raw, dict):  # read_json refuses anything else
        bounded(lambda: parse_target(raw))
        bounded(lambda: parse_assistant(raw))


TARGET = bundled("target")
FILES = {
    "config.json": read_json(TARGET / "config.json"),
    "generation_config.json": {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": [1], "do_sample": True},
    "tokenizer_config.json": read_json(TARGET / "tokenizer_config.json"),
    "model.safetensors.index.json": read_json(TARGET / "model.safetensors.index.json"),
    "processor_config.json": {"chat_template": {"default": "x"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = model(tmp_path_factory.mktemp("fuzz") / "gemma")
    (made / "chat_template.jinja").unlink()
    return made


@settings(few, max_examples=100)
@given(st.sampled_from(sorted(FILES)).flatmap(lambda name: st.tuples(st.just(name), changed(FILES[name]))))
def test_files_of_a_folder(folder: Path, case: tuple[str, Any]) -> None:
    name, raw = case
    before = (folder / name).read_bytes() if (folder / name).exists() else None
    write(folder / name, raw if isinstance(raw, str) and "\ud800" not in raw else json.dumps(raw))
    try:
        bounded(lambda: inspect(folder))
        bounded(lambda: read_defaults(folder))
        if name in ("tokenizer_config.json", "generation_config.json", "processor_config.json"):
            bounded(lambda: Tokenizer.load(folder))
    finally:
        (folder / name).unlink()
        if before is not None:
            (folder / name).write_bytes(before)


TOKENIZER = read_json(TARGET / "tokenizer.json") or {}
SMALL = TOKENIZER | {"model": TOKENIZER["model"] | {"merges": TOKENIZER["model"]["merges"][:3]}}


def test_a_tokenizer_that_would_end_the_process(tmp_path: Path) -> None:
    """Found here: the library panics twice at a prefix of pieces that cuts a character, and aborts."""
    write(tmp_path / "tokenizer.json", SMALL | {"model": SMALL["model"] | {"continuing_subword_prefix": "x"}})
    with pytest.raises(LoadError, match="has a continuing_subword_prefix, which no supported model has"):
        Tokenizer.load(tmp_path)


@settings(few, max_examples=60)
@given(changed({k: v for k, v in SMALL.items() if k != "post_processor"}))
def test_tokenizers(tmp_path: Path, raw: Any) -> None:
    write(tmp_path / "tokenizer.json", json.dumps(raw))

    def use() -> None:
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.decode(tokenizer.encode("def f(x): wörld <bos> 😀"))

    bounded(use)


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    grammars = grammars_of(make_tokenizer())
    with served(FakeEngine(make_tokenizer()), grammars=grammars) as server:
        yield server
    grammars.close()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "fake", "prompt": "hello", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "seed": 1, "n": 1, "stop": ["x"], "logit_bias": {"5": 1.0}, "logprobs": 1, "echo": False, "stop_token_ids": [3],
        "stream": False, "prediction": {"type": "content", "content": "ab"}, "repetition_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 0, "speculation": {"draft_tokens": 2},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                     {"role": "assistant", "content": None, "tool_calls": [
                         {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                     {"role": "tool", "content": "x", "tool_call_id": "1"}],
        "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 1, "tool_choice": "auto", "stream": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}, "keep_alive": -1,
    },
}  # fmt: skip


@settings(few, max_examples=400)
@given(st.sampled_from(sorted(BODIES)).flatmap(lambda path: st.tuples(st.just(path), changed(BODIES[path]))))
def test_bodies(s: Served, caplog: pytest.LogCaptureFixture, case: tuple[str, Any]) -> None:
    path, body = case
    text = json.dumps(body).replace("Infinity", "1e400")
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        answer = s.client.post(path, content=text, headers={"Content-Type": "application/json"})
    assert time.monotonic() - begin < MOST_SECONDS
    assert not [record for record in caplog.records if record.exc_info]
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert len(answer.json()["error"]["message"]) < 1000


NUMBERS = ("9" * 401, "9" * 5000, "1e400", "-1e400", "nan", "-" + "9" * 30)
OPTIONS = (
    ("run", "x", "--cache-memory"), ("run", "x", "--threads"), ("run", "x", "-t"), ("run", "x", "-n"),
    ("run", "x", "--seed"),
    ("run", "x", "--max-batch"), ("run", "x", "--draft-tokens"), ("serve", "--draft-tokens"),
    ("serve", "--max-batch"),
    ("serve", "--stream-interval"), ("check", "--seconds"), ("check", "--tokens"), ("check", "--json"),
    ("bench", "--within"),
    ("bench", "--seconds"), ("train", "--data", "x", "--out", "y", "--lr"),
    ("train", "--data", "x", "--out", "y", "--seed"),
    ("train", "--data", "x", "--out", "y", "--threads"), ("quantize", "--to", "int8", "--out"),
)  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS, ids=" ".join)
def test_numbers_on_the_command_line(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in NUMBERS:
        monkeypatch.setattr("sys.argv", ["paceline", *option, number, "--target", "no/such/folder"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (2, 4)
        assert "Traceback" not in capsys.readouterr().err


PIECES = st.sampled_from([
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if m %}", "{% else %}", "{% endif %}", "hello",
    "{{ messages | tojson }}", "{{ 9 ** 9 ** 9 }}", "{% set x = 'a' * 99999 %}", "{{ x * 99999 }}",
    "{{ m['content'] }}",
    "{% macro f() %}", "{{ f() }}", "{% endmacro %}", "{{ ().__class__ }}", "{{ range(10**400) }}",
    "{{ raise_exception(x) }}",
    "{{ 1 / 0 }}", "{% include 'x' %}", "{% import 'x' as y %}", "{{ namespace(a=1).b.c }}",
    "{{ strftime_now('%Y' * 9999) }}",
    "{% set ns = namespace(x=[1]) %}", "{% set ns.x = ns.x + ns.x %}", "{% for i in range(99999) %}",
    "{{ x.format(x) }}",
    "{{ loop.index }}", "{% break %}", "{# ", " #}", "{{", "}}", "{%", "%}", "\ud800", "\0", "{% raw %}",
    "{{ self.x() }}",
    "{% call f() %}", "{% filter upper %}", "{{ '%9999999d' % 1 }}", "{{ {}[[]] }}", "{{ none.x.y }}",
    "{{ 1e400 | int }}",
])  # fmt: skip


@settings(few, max_examples=30)
@given(st.lists(PIECES, min_size=1, max_size=8).map("".join))
def test_templates(capfd: pytest.CaptureFixture[str], source: str) -> None:
    def use() -> None:
        template = ChatTemplate(source, {"bos_token": "<bos>"}, timeout=2.0)
        try:
            template.render([{"role": "user", "content": "hi"}])
        finally:
            template.close()

    bounded(use)
    assert "Traceback" not in capfd.readouterr().err
