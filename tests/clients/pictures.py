"""Pictures, by clients, against a running server: python pictures.py http://127.0.0.1:8000/v1 KEY MODEL sees CLIENT...

CLIENT: openai, litellm, langchain, llm, ollama, or requests, which are those of Open WebUI and of Ollama's program. Of a
model that sees each answer is that of the plain request and not that without the picture. With `blind` in place of `sees`
the model reads text only, and has to answer 400 and name the part.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx2

base, key, model, sees = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "sees"
root = base.removesuffix("/v1")
http = httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=300)


def png() -> bytes:
    """48 x 32: stripes of colour."""
    rows = b"".join(
        b"\0" + b"".join(bytes((x * 5, y * 7, (x ^ y) * 4)) for x in range(48)) for y in range(32)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 48, 32, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


RAW = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{RAW}"
SAID = "What is in this picture?"
PART = {"type": "image_url", "image_url": {"url": URL}}
TALK = [{"role": "user", "content": [{"type": "text", "text": SAID}, PART]}]
FIRST = [{"role": "user", "content": [PART, {"type": "text", "text": SAID}]}]  # the picture before its text


def asked(messages: list[dict[str, object]]) -> str:
    reply = http.post(
        f"{base}/chat/completions",
        json={"model": model, "messages": messages, "temperature": 0, "max_tokens": 12},
    )
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def by_openai(talk: list[dict[str, object]]) -> str:
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=base, api_key=key, max_retries=0, timeout=300)
    try:
        done = client.chat.completions.create(model=model, messages=talk, temperature=0, max_tokens=12)
    except BadRequestError as error:
        return f"400 {error.param}"
    assert done.usage.prompt_tokens_details.model_dump()["image_tokens"] > 0
    parts = [
        {"type": "input_text", "text": SAID},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    message = [{"role": "user", "content": parts}]
    made = client.responses.create(model=model, input=message, temperature=0, max_output_tokens=12)
    assert made.output_text == done.choices[0].message.content
    return str(done.choices[0].message.content)


def by_litellm(talk: list[dict[str, object]]) -> str:
    import litellm

    common = {
        "model": f"openai/{model}",
        "api_base": base,
        "api_key": key,
        "max_tokens": 12,
        "temperature": 0,
    }
    try:
        return str(litellm.completion(messages=talk, **common).choices[0].message.content)
    except litellm.BadRequestError as error:
        return f"400 {error}"


def by_langchain(talk: list[dict[str, object]]) -> str:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from openai import BadRequestError

    chat = ChatOpenAI(model=model, base_url=base, api_key=key, max_tokens=12, temperature=0)
    standard = {"type": "image", "base64": RAW, "mime_type": "image/png"}
    try:
        said = chat.invoke([HumanMessage(content=[{"type": "text", "text": SAID}, standard])]).content
    except BadRequestError as error:
        return f"400 {error.param}"
    assert said == chat.invoke([HumanMessage(content=talk[0]["content"])]).content
    return str(said)


def by_llm(talk: list[dict[str, object]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path, listed = Path(folder) / "x.png", Path(folder) / "extra-openai-models.yaml"
        path.write_bytes(png())
        listed.write_text(f"- model_id: local\n  model_name: {model}\n  api_base: {base}\n  vision: true\n")
        command = ["llm", "-m", "local", "--no-stream", "-o", "max_tokens", "12", "-o", "temperature", "0",
                   "--key", key, SAID, "-a", str(path)]  # fmt: skip
        done = subprocess.run(
            command, env=os.environ | {"LLM_USER_PATH": folder}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        return done.stderr.replace("Error code: 400", "400")
    return done.stdout.removesuffix("\n")


def by_ollama(talk: list[dict[str, object]]) -> str:
    from ollama import Client, ResponseError

    client = Client(host=root, headers={"Authorization": f"Bearer {key}"})
    options = {"num_predict": 12, "temperature": 0}
    try:
        done = client.chat(model, [{"role": "user", "content": SAID, "images": [png()]}], options=options)
    except ResponseError as error:
        return f"{error.status_code} {error.error}"
    assert "vision" in client.show(model).capabilities
    generated = client.generate(model, SAID, images=[png()], options=options)
    assert generated.response == done.message.content
    return str(done.message.content)


def by_requests(talk: list[dict[str, object]]) -> str:
    """Open WebUI's, streamed; then Ollama's, which has pictures before the text."""
    body = {"stream": True, "model": model, "messages": talk, "temperature": 0, "max_tokens": 12,
            "stream_options": {"include_usage": True}}  # fmt: skip
    text = ""
    with http.stream("POST", f"{base}/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            return f"{reply.status_code} {json.loads(reply.read())['error']['param']}"
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                text += "".join(one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"])
    message = {"role": "user", "content": SAID, "images": [RAW]}
    options = {"num_predict": 12, "temperature": 0}
    made = http.post(
        f"{root}/api/chat", json={"model": model, "messages": [message], "options": options, "stream": False}
    )
    assert made.json()["message"]["content"] == asked(FIRST), made.text
    return text


CLIENTS: dict[str, Callable[[list[dict[str, object]]], str]] = {
    "openai": by_openai, "litellm": by_litellm, "langchain": by_langchain, "llm": by_llm, "ollama": by_ollama,
    "requests": by_requests,
}  # fmt: skip
for name in sys.argv[5:]:
    got = CLIENTS[name](TALK)
    if sees:
        wanted = asked(FIRST if name == "ollama" else TALK)
        assert got.strip() == wanted.strip() != asked([{"role": "user", "content": SAID}]).strip(), (
            got,
            wanted,
        )
    else:
        assert "400" in got, got
        assert "content.1" in got or "content.0" in got or "images" in got, got
    print(name, "passed:", repr(got)[:90])
