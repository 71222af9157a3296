// The official Node client against a running server: node node_openai.mjs http://127.0.0.1:8000/v1 KEY MODEL
import OpenAI from "openai";
import assert from "node:assert";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of Australia?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather in a city", parameters: {
  type: "object", properties: { city: { enum: ["London", "Paris", "Tokyo"] } }, required: ["city"] } } }];

const whole = await client.chat.completions.create({ model, messages, max_tokens: 40, temperature: 0 });
assert.match(whole.choices[0].message.content, /Canberra/);
const stream = client.chat.completions.stream({ model, messages, max_tokens: 40, temperature: 0, stream_options: { include_usage: true } });
assert.equal(await stream.finalContent(), whole.choices[0].message.content);
const called = await client.chat.completions.stream({ model, messages: weather, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200, temperature: 0 }).finalMessage();
assert.equal(JSON.parse(called.tool_calls[0].function.arguments).city, "Paris");
const made = await client.responses.create({ model, input: messages, max_output_tokens: 40, temperature: 0 });
assert.equal(made.output_text, whole.choices[0].message.content);
const controller = new AbortController();
let seen = 0;
await assert.rejects(async () => {
  for await (const _ of await client.chat.completions.create({ model, messages, max_tokens: 400, stream: true, ignore_eos: true }, { signal: controller.signal }))
    if (++seen === 3) controller.abort(), controller.signal.throwIfAborted();
});
// a model of another name is answered by the one that is served, and told
const other = await client.chat.completions.create({ model: "nope", messages, max_tokens: 4 });
assert.match(other.warnings[0], /nope/);
console.log("openai-node passed", whole.choices[0].message.content);
