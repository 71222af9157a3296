"""A small task for each client library, which a model of 1.5B parameters can do: is it done, and in what time.

    paceline serve qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --drafter qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
    pip install openai anthropic ollama langchain-openai litellm instructor openai-agents aider-chat pydantic-ai-slim
    python recipes/clients/tasks.py http://127.0.0.1:8000 MODEL [CLIENT ...]

Prompts are short and tools are one. Where the model has to call its tool that is asked for (`tool_choice`): small models
often answer without. The turn after the tool's result is asked without tools: this model would call again, in its text.
What is checked is what came back, not that something came back. Clients that are not installed are said. The exit status
is that of all tasks together.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED = "What is the weather in Paris? Use the tool."
TOLD = "21 degrees and sunny"
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORCED = {"type": "function", "function": {"name": "get_weather"}}
USER = [{"role": "user", "content": ASKED}]
PERSON = "Ada Lovelace was born in 1815."
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 60}


def holds(what: str, text: str | None) -> str:
    """The text, which has to say `what`."""
    assert text is not None
    assert what.lower() in text.lower(), text
    return " ".join(text.split())[:80]


def alike(vectors: list[list[float]]) -> str:
    """Three embeddings, of which the first two are of like texts."""
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert all(math.isclose(sum(x * x for x in v), 1, abs_tol=1e-3) for v in vectors)
    assert near > far, (near, far)
    return f"{len(vectors[0])} numbers, likeness {near:.2f} above {far:.2f}"


TEXTS = ["def add(a, b): return a + b", "def plus(x, y): return x + y", "The cat sleeps on the red sofa."]


def with_openai(base: str, model: str) -> str:
    """A tool is called and its result used; an object of a class; embeddings."""
    from openai import OpenAI
    from pydantic import BaseModel

    client = OpenAI(base_url=f"{base}/v1", api_key="none")
    chat = client.chat.completions
    made = (
        chat.create(model=model, messages=USER, tools=TOOLS, tool_choice=FORCED, **SHORT).choices[0].message
    )
    (call,) = made.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    turns = [*USER, made, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    said = holds("21", chat.create(model=model, messages=turns, **SHORT).choices[0].message.content)

    class Person(BaseModel):
        name: str
        born: int

    parsed = chat.parse(
        model=model, messages=[{"role": "user", "content": PERSON}], response_format=Person, **SHORT
    )
    assert parsed.choices[0].message.parsed == Person(name="Ada Lovelace", born=1815)
    vectors = [one.embedding for one in client.embeddings.create(model=model, input=TEXTS).data]
    return f"{said} | {alike(vectors)}"


def with_anthropic(base: str, model: str) -> str:
    """A tool is called and its result used, the second time as a stream."""
    from anthropic import Anthropic

    client = Anthropic(base_url=base, api_key="none")
    tools = [{"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}]
    asked = {"model": model, "max_tokens": 60, "extra_body": {"temperature": 0}}
    forced = {"type": "tool", "name": "get_weather"}
    made = client.messages.create(messages=USER, tools=tools, tool_choice=forced, **asked)
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOLD}
    turns = [*USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=turns, **asked) as stream:
        return holds("21", "".join(stream.text_stream))


def with_ollama(base: str, model: str) -> str:
    """An object by a schema; embeddings; a tool's result used."""
    from ollama import Client

    client = Client(host=base)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 60}
    made = client.chat(model, [{"role": "user", "content": PERSON}], format=schema, options=options)
    assert json.loads(made.message.content) == {"name": "Ada Lovelace", "born": 1815}
    vectors = [list(one) for one in client.embed(model, TEXTS).embeddings]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [*USER, {"role": "assistant", "tool_calls": [call]},
             {"role": "tool", "tool_name": "get_weather", "content": TOLD}]  # fmt: skip
    said = client.chat(model, turns, options=options).message.content
    return f"{holds('21', said)} | {alike(vectors)}"


def with_langchain(base: str, model: str) -> str:
    """An object of a class, and a tool that is called."""
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        born: int

    chat = ChatOpenAI(model=model, base_url=f"{base}/v1", api_key="none", temperature=0, max_tokens=60)
    assert chat.with_structured_output(Person).invoke(PERSON) == Person(name="Ada Lovelace", born=1815)
    (call,) = chat.bind_tools(TOOLS, tool_choice="get_weather").invoke(ASKED).tool_calls
    assert call["args"] == {"city": "Paris"}
    return f"Ada Lovelace, 1815 | {call['name']} {call['args']}"


def with_litellm(base: str, model: str) -> str:
    """A tool is called and its result used."""
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{base}/v1", "api_key": "none", **SHORT}
    made = litellm.completion(messages=USER, tools=TOOLS, tool_choice=FORCED, **asked).choices[0].message
    (call,) = made.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    turns = [*USER, made.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    return holds("21", litellm.completion(messages=turns, **asked).choices[0].message.content)


def with_instructor(base: str, model: str) -> str:
    """An object of a class, by a tool and by a schema."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        born: int

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{base}/v1", api_key="none"), mode=mode)
        person = client.chat.completions.create(
            model=model,
            response_model=Person,
            messages=[{"role": "user", "content": PERSON}],
            max_retries=0,
            **SHORT,
        )
        assert (person.name, person.born) == ("Ada Lovelace", 1815), (mode, person)
    return str(person)


def with_pydantic_ai(base: str, model: str) -> str:
    """An agent's answer as an object of a class, which is a tool that has to be called."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        """A person."""

        name: str
        born: int

    provider = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=Person, model_settings=dict(SHORT))
    made = agent.run_sync(PERSON).output
    assert made == Person(name="Ada Lovelace", born=1815)
    return str(made)


def with_openai_agents(base: str, model: str) -> str:
    """An agent calls its tool, which is asked for, and its answer is what the tool said."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    called: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return TOLD

    client = AsyncOpenAI(base_url=f"{base}/v1", api_key="none")
    agent = Agent(
        name="weather",
        instructions="Answer in one sentence.",
        tools=[get_weather],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(
            temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False
        ),
        tool_use_behavior="stop_on_first_tool",
    )
    made = asyncio.run(Runner.run(agent, ASKED, max_turns=4)).final_output
    assert called == ["Paris"], called
    return holds("21", made)


def with_aider(base: str, model: str) -> str:
    """A bug in a file is mended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calc.py"
        file.write_text("def add(a, b):\n    return a - b\n")
        env = {**os.environ, "OPENAI_API_BASE": f"{base}/v1", "OPENAI_API_KEY": "none", "HOME": folder}
        command = ["aider", "--model", f"openai/{model}", "--edit-format", "whole", "--no-git", "--yes-always",
                   "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-stream",
                   "--map-tokens", "0", "--message", "add must add its arguments. Mend it.", "calc.py"]  # fmt: skip
        subprocess.run(
            command, cwd=folder, env=env, check=True, capture_output=True, stdin=subprocess.DEVNULL
        )
        return holds("return a + b", file.read_text())


def with_open_webui(base: str, model: str) -> str:
    """Its requests: models, a streamed chat, a title."""
    script = HERE.parents[1] / "tests" / "clients" / "open_webui.py"
    done = subprocess.run(
        [sys.executable, str(script), f"{base}/v1", "none", model],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout.strip()[:80]


TASKS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "openai": ("openai", with_openai),
    "anthropic": ("anthropic", with_anthropic),
    "ollama": ("ollama", with_ollama),
    "langchain": ("langchain-openai", with_langchain),
    "litellm": ("litellm", with_litellm),
    "instructor": ("instructor", with_instructor),
    "pydantic-ai": ("pydantic-ai-slim", with_pydantic_ai),
    "openai-agents": ("openai-agents", with_openai_agents),
    "aider": ("aider-chat", with_aider),
    "open-webui": ("httpx2", with_open_webui),
}  # name -> its distribution, its task


def version_of(name: str, distribution: str) -> str | None:
    if name == "aider":
        if shutil.which("aider") is None:
            return None
        done = subprocess.run(["aider", "--version"], capture_output=True, text=True, check=False)
        return done.stdout.split()[-1] if done.stdout else "unknown"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument(
        "clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(TASKS)}; all, if none is named"
    )
    asked = parser.parse_args()
    if unknown := [name for name in asked.clients if name not in TASKS]:
        parser.error(f"there is no {unknown[0]}: name some of {', '.join(TASKS)}")
    failed = 0
    for name in asked.clients or TASKS:
        distribution, task = TASKS[name]
        version = version_of(name, distribution)
        if version is None:
            print(f"{name:14} not installed: pip install {distribution}", flush=True)
            continue
        begin = time.monotonic()
        try:
            seen = task(asked.url.rstrip("/"), asked.model)
        except Exception as error:  # noqa: BLE001  the next client has its turn
            failed += 1
            seen = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name:14} {version:10} {time.monotonic() - begin:6.1f} s  {seen}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
