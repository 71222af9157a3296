// Talks to the server: streams as async generators of parsed events, questions as promises.

/** `lost`: the server is gone or cannot be reached, which may pass. `code`: the server's own word for what is wrong. */
export class ServerError extends Error {
  constructor(message, lost = false, code = "") {
    super(message);
    this.lost = lost;
    this.code = code;
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

const STREAM = "X-Paceline-Stream"; // by its id an answer is read again, after this page was loaded anew

export const newStreamId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Ask for a stream; yields chunks until [DONE]. Throws ServerError with the server's own words. */
export async function* ask(request, signal, id = "") {
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  yield* chunks(await post(path, { ...request, stream: true, stream_options: { include_usage: true } }, signal, id ? { [STREAM]: id } : {}));
}

/** The chunks of an answer that was asked for with an id, from its first one. Throws ServerError if the server has it no more. */
export async function* askAgain(id, signal) {
  yield* chunks(await answered(fetch("stream", { headers: { [STREAM]: id }, signal })));
}

/** Nobody wants the rest of an answer. */
export const endStream = (id) => fetch("stream", { method: "DELETE", headers: { [STREAM]: id }, keepalive: true }).catch(() => {});

async function* chunks(response) {
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

const post = (path, body, signal, headers = {}) => answered(fetch(path, {
  method: "POST", headers: { "Content-Type": "application/json", ...headers }, body: JSON.stringify(body), signal,
}));

async function answered(asked) {
  const response = await asked.catch((error) => { throw told(error, "the server cannot be reached"); });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(answer?.error?.message ?? `the server answered ${response.status}`, response.status === 503, answer?.error?.code);
}

const told = (error, message) => (error.name === "AbortError" ? error : new ServerError(message, true));
