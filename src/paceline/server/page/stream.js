// Talks to the server: one streamed completion at a time, as an async generator of parsed events.

export class ServerError extends Error {}

/** Split server-sent events out of text that arrives in pieces of any size. */
export class EventSplitter {
  #rest = "";

  push(text) {
    this.#rest += text;
    const parts = this.#rest.split(/\r?\n\r?\n/);
    this.#rest = parts.pop();
    return parts.map((part) => part.split(/\r?\n/).filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5).trimStart()).join("\n")).filter(Boolean);
  }
}

/** Ask for a stream; yields chunks until [DONE]. Throws ServerError with the server's own words. */
export async function* ask(request, signal) {
  const path = request.messages ? "/v1/chat/completions" : "/v1/completions";
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `the server answered ${response.status}`);
  }
  const splitter = new EventSplitter();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  while (true) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("the stream ended early");
    for (const data of splitter.push(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}

/** What the server is and can do; throws while it cannot be reached. */
export async function about() {
  const health = await (await fetch("/health")).json();
  const models = await (await fetch("/v1/models")).json();
  return { state: health.status, model: models.data[0] };
}
