"""Ask a running server with the OpenAI client: `paceline serve` first, then this file with its address."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model, prompt="def parse(", max_tokens=32, temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)

# a field of ours: never draft for this request; the text is the same
plain = client.completions.create(
    model=model,
    prompt="def parse(",
    max_tokens=32,
    temperature=0,
    extra_body={"speculation": {"drafter": "none"}},
)
print("\n---\n" + plain.choices[0].text)
