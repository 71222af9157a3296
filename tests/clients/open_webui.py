"""What Open WebUI sends to an OpenAI-compatible connection: python open_webui.py http://127.0.0.1:8000/v1 KEY MODEL

From its source (backend/open_webui/routers/openai.py and tasks.py): the list of models, a streamed chat, the task that
names a conversation. Its `metadata` is taken out before the request leaves it.
"""

import json
import sys

import httpx2

base, key, model = sys.argv[1:4]
headers = {
    "Authorization": f"Bearer {key}", "Content-Type": "application/json", "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "admin", "X-OpenWebUI-Chat-Id": "c1",
}  # fmt: skip
client = httpx2.Client(headers=headers, timeout=300)
listed = client.get(f"{base}/models").json()
assert model in [one["id"] for one in listed["data"]]

talk = [
    {"role": "system", "content": "Answer in one short sentence."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of Australia?"}]},
]
body = {
    "stream": True,
    "model": model,
    "messages": talk,
    "temperature": 0,
    "stream_options": {"include_usage": True},
}
text, usage = "", None
with client.stream("POST", f"{base}/chat/completions", json=body) as reply:
    assert reply.headers["content-type"].startswith("text/event-stream")
    for line in reply.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line[6:])
            text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
            usage = chunk.get("usage") or usage
assert "Canberra" in text, text
assert usage is not None
assert usage["completion_tokens"] > 0

task = (
    "### Task:\nGenerate a concise, 3-5 word title summarizing the chat history.\n### Output:\nJSON format: "
    '{ "title": "your concise title here" }\n### Chat History:\n<chat_history>\nUSER: What is the capital of Australia?\n'
    f"ASSISTANT: {text}\n</chat_history>"
)
title = client.post(
    f"{base}/chat/completions",
    json={
        "model": model,
        "messages": [{"role": "user", "content": task}],
        "stream": False,
        "max_completion_tokens": 60,
    },
).json()
assert title["choices"][0]["message"]["content"].strip()
assert title.get("warnings") is None
print("open-webui passed:", text.strip(), "| title:", title["choices"][0]["message"]["content"].strip()[:60])
