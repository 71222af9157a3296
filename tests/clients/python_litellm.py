"""litellm against a running server: python python_litellm.py http://127.0.0.1:8000/v1 KEY MODEL"""

import sys

import litellm

base, key, model = sys.argv[1:4]
common = {"model": f"openai/{model}", "api_base": base, "api_key": key, "max_tokens": 40, "temperature": 0}
TALK = [{"role": "user", "content": "What is the capital of Australia?"}]
whole = litellm.completion(messages=TALK, **common)
chunks = list(
    litellm.completion(messages=TALK, stream=True, stream_options={"include_usage": True}, **common)
)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == whole.choices[0].message.content
assert "Canberra" in text, text
built = litellm.stream_chunk_builder(chunks)
assert built.usage.completion_tokens == whole.usage.completion_tokens
print("litellm passed", whole.usage.completion_tokens, repr(text))
