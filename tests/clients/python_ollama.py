"""Ollama's own Python client against a running server: python python_ollama.py http://127.0.0.1:8000 KEY MODEL"""

import sys

from ollama import Client, ResponseError

base, key, model = sys.argv[1:4]
client = Client(host=base, headers={"Authorization": f"Bearer {key}"})
TALK = [{"role": "user", "content": "def parse(self, text):"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


assert model in [one.model for one in client.list().models]
options = {"seed": 1, "num_predict": 16, "temperature": 0}
whole = client.chat(model, TALK, options=options)
streamed = list(client.chat(model, TALK, options=options, stream=True))
assert "".join(part.message.content for part in streamed) == whole.message.content
assert streamed[-1].done
assert streamed[-1].eval_count == whole.eval_count > 0
print("chat", whole.done_reason, whole.eval_count, whole.eval_duration)
text = client.generate(model, "import os", raw=True, options=options)
assert text.response
assert text.done
schema = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
print("format", client.chat(model, TALK, format=schema, options=options).message.content)
print("tools", client.chat(model, TALK, tools=[add], options=options).message.tool_calls)
try:
    client.chat(model, [{"role": "user", "content": "x", "images": [b"1"]}])
    raise AssertionError("no error")
except ResponseError as error:
    print(error.status_code, error.error)
    if "images" not in error.error:
        raise
print("ollama-python passed")
