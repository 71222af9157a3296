// The official Node client against a running server: node node_openai.mjs http://127.0.0.1:8000/v1 KEY MODEL
import OpenAI from "openai";
import assert from "node:assert";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "def parse(self, text):" }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: {
  type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] } } }];

const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, seed: 1 });
const stream = client.chat.completions.stream({ model, messages, max_tokens: 16, seed: 1, stream_options: { include_usage: true } });
assert.equal(await stream.finalContent(), whole.choices[0].message.content);
const called = await client.chat.completions.stream({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200, seed: 1 }).finalMessage();
console.log("tool", JSON.parse(called.tool_calls[0].function.arguments));
const controller = new AbortController();
let seen = 0;
await assert.rejects(async () => {
  for await (const _ of await client.chat.completions.create({ model, messages, max_tokens: 400, stream: true, ignore_eos: true }, { signal: controller.signal }))
    if (++seen === 3) controller.abort(), controller.signal.throwIfAborted();
});
await assert.rejects(client.chat.completions.create({ model: "nope", messages }), (e) => e.status === 404);
console.log("openai-node passed", whole.usage.completion_tokens);
