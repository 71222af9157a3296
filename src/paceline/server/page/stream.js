// Talks to the server: streams as async generators of parsed events, questions as promises.

/** `lost`: the server is gone or cannot be reached, which may pass. */
export class ServerError extends Error {
  constructor(message, lost = false) {
    super(message);
    this.lost = lost;
  }
}

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
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const response = await post(path, { ...request, stream: true, stream_options: { include_usage: true } }, signal);
  const splitter = new EventSplitter();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  while (true) {
    const { value, done } = await reader.read().catch((error) => { throw told(error, "the connection to the server was lost"); });
    if (done) throw new ServerError("the server ended the stream early", true);
    for (const data of splitter.push(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}

/** How many tokens the prompt of a chat has. */
export async function countTokens(request, signal) {
  return (await (await post("tokenize", request, signal)).json()).count;
}

/** What the server is and can do; throws while it cannot be reached. */
export async function about() {
  const [health, models] = await Promise.all(["health", "v1/models"].map(async (path) =>
    (await fetch(path, { signal: AbortSignal.timeout(10000) })).json()));
  return { state: health.status, models: models.data };
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  }).catch((error) => { throw told(error, "the server cannot be reached"); });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(answer?.error?.message ?? `the server answered ${response.status}`, response.status === 503);
}

const told = (error, message) => (error.name === "AbortError" ? error : new ServerError(message, true));
