"""The official Python client against a running server: python python_openai.py http://127.0.0.1:8000/v1 KEY MODEL"""

import json
import sys
from typing import Literal

from openai import APIStatusError, AuthenticationError, OpenAI
from pydantic import BaseModel

base, key, model = sys.argv[1:4]
client = OpenAI(base_url=base, api_key=key, max_retries=0, timeout=300)
TALK = [{"role": "user", "content": "What is the capital of Australia?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["London", "Paris", "Tokyo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False}}}  # fmt: skip


class Person(BaseModel):
    name: Literal["Ada Lovelace", "Alan Turing"]
    age: int


assert client.models.list().data[0].id == model
answer = client.chat.completions.create(
    model=model, messages=TALK, n=2, temperature=0, max_tokens=40, logit_bias={"5": -1}, logprobs=True, top_logprobs=2,
    prediction={"type": "content", "content": "The capital of Australia is Sydney."},
)  # fmt: skip
assert len(answer.choices) == 2
assert all("Canberra" in choice.message.content for choice in answer.choices)
assert len(answer.choices[0].logprobs.content) > 0
assert answer.usage.completion_tokens_details.rejected_prediction_tokens is not None
print("chat", answer.usage.completion_tokens, answer.speculation)

chunks = list(client.chat.completions.create(
    model=model, messages=TALK, seed=1, max_tokens=16, stream=True, stream_options={"include_usage": True}
))  # fmt: skip
assert chunks[-1].choices == []
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
whole = client.chat.completions.create(model=model, messages=TALK, seed=1, max_tokens=16)
assert streamed == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens > 0
print("stream", len(chunks))

text = client.completions.create(model=model, prompt="import os", max_tokens=8, echo=True, logprobs=1, seed=2)
assert text.choices[0].text.startswith("import os")

ADA = [
    {"role": "system", "content": "Extract the name and the age."},
    {"role": "user", "content": "Write this as JSON: name Ada Lovelace, age 36"},
]
parsed = client.chat.completions.parse(
    model=model, messages=ADA, response_format=Person, max_tokens=400, temperature=0
)
assert parsed.choices[0].message.parsed == Person(name="Ada Lovelace", age=36), parsed.choices[
    0
].message.parsed

called = client.chat.completions.create(
    model=model, messages=WEATHER, temperature=0, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    max_tokens=200,
)  # fmt: skip
call = called.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments) == {"city": "Paris", "days": 3}, call.function.arguments
again = client.chat.completions.create(
    model=model, max_tokens=8,
    messages=[*WEATHER, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}],
)  # fmt: skip
print("tool", call.function, again.choices[0].finish_reason)

with client.chat.completions.stream(
    model=model, messages=WEATHER, temperature=0, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    max_tokens=200,
) as stream:  # fmt: skip
    kinds = {event.type for event in stream}
    final = stream.get_final_completion()
assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
print("streamed tool", sorted(kinds))

made = client.responses.create(model=model, input=TALK, max_output_tokens=16, extra_body={"seed": 1})
assert made.output_text == whole.choices[0].message.content
with client.responses.stream(model=model, input=TALK, max_output_tokens=16, extra_body={"seed": 1}) as stream:
    ended = list(stream)[-1]
assert ended.response.output_text == made.output_text
flat = {"type": "function", **TOOL["function"], "strict": False}
asked = client.responses.create(
    model=model, input=WEATHER, tools=[flat], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200,
    temperature=0,
)  # fmt: skip
(call,) = asked.output
assert call.arguments == called.choices[0].message.tool_calls[0].function.arguments
output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
back = client.responses.create(model=model, input=[*WEATHER, call, output], tools=[flat], max_output_tokens=8)
print("responses", ended.type, call.name, back.status, back.usage.output_tokens)

for ask, status in (
    (lambda: client.models.retrieve("nope"), 404),
    (lambda: client.chat.completions.create(model=model, messages=TALK, n=999), 400),
):
    try:
        ask()
        raise AssertionError("no error")
    except APIStatusError as error:
        print(status, error.message[:80])
        if error.status_code != status:
            raise
if key != "none":
    try:
        OpenAI(base_url=base, api_key="wrong").models.list()
        raise AssertionError("no error")
    except AuthenticationError as error:
        print("401", error.message[:60])
print("openai-python passed")
