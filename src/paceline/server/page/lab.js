// Raw completion and the race: one prompt, its text in colour, and the numbers of it.

import { button, copy, keep, kept, keptJson } from "./dom.js";
import { Meter, showFigures, showPositions, showSteps } from "./meters.js";
import { Race } from "./race.js";
import { ask } from "./stream.js";
import { draftedBy } from "./thread.js";
import { TokenView } from "./tokens.js";
import { checkedSteps, ending } from "./turns.js";

const $ = (id) => document.getElementById(id);
const LENGTH = 256; // tokens, where no length is set: a base model may never end
export const QUESTIONS = ["Explain speculative decoding in three sentences.", "Write a haiku about a quiet server room.", "Write a Python function that merges two sorted lists."];
const BEGINNINGS = {
  class: 'class Connection:\n    """A connection to a server."""\n\n    def __init__(self, host, port, timeout=None):\n        self.host = host\n        self.port = port',
  function: 'def read_config(path):\n    """Read a configuration file and return its sections."""',
  prose: "The lighthouse had been dark for eleven years when",
};

export class Lab {
  #running = null; #settings; #server; #view; #race; #text = null; #talk = [];
  name = "write";
  model = null;

  /** `server()` resolves with the server's state, and looks anew. */
  constructor(settings, server) {
    this.#settings = settings;
    this.#server = server;
    this.#view = new TokenView($("tokens"), $("tip"), $("told"));
    this.#race = new Race({
      lanes: $("lanes"), proof: $("proof"),
      views: { plain: new TokenView($("plain-tokens"), $("tip"), $("told")), fast: new TokenView($("fast-tokens"), $("tip"), $("told")) },
      figures: { plain: $("plain-figure"), fast: $("fast-figure") },
    });
    $("lab-prompt").value = kept("prompt") ?? "";
    $("lab-prompt").addEventListener("input", () => keep("prompt", $("lab-prompt").value));
    $("form").addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    $("lab-stop").addEventListener("click", () => this.stop());
    $("lab-prompt").addEventListener("keydown", (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key === "Enter") { event.preventDefault(); this.run(); }
    });
    $("copy-text").addEventListener("click", () => copy(this.#whole, $("copy-text")));
    $("go-on").addEventListener("click", () => { this.setPrompt(this.#whole); this.run(); });
    this.#restore();
  }

  show(name) {
    this.name = name;
    $("run").textContent = name === "write" ? "Write" : "Start the race";
    const asks = name === "race" && this.model?.chat;
    $("lab-prompt").placeholder = asks ? "A message to answer" : "A text to go on with";
    $("samples").replaceChildren(...(asks ? QUESTIONS.map((text) => [text, text]) : Object.entries(BEGINNINGS)).map(([label, text]) => {
      const made = button(label);
      made.addEventListener("click", () => this.setPrompt(text));
      return made;
    }));
  }

  /** Race the answer to the last of these messages. */
  race(messages) {
    this.#talk = messages;
    this.setPrompt(messages.at(-1).content);
    this.run();
  }

  setPrompt(text) {
    $("lab-prompt").value = text;
    keep("prompt", text);
    $("lab-prompt").focus();
  }

  stop() { this.#running?.abort(); }

  async run() {
    const prompt = $("lab-prompt").value;
    if (this.#running) return;
    this.#fail("");
    if (!prompt) return this.#fail("Write a text to go on with first, or choose an example.");
    this.#running = new AbortController();
    $("lab-stop").hidden = false;
    $("run").disabled = true;
    document.body.dataset.running = "true";
    try {
      const state = await this.#server();
      if (state !== "ready") throw new Error(state === "lost" ? "The server cannot be reached: try again once it is back." : `The server is ${state}: try again once it is ready.`);
      if (this.name === "write") await this.#write(prompt);
      else await this.#compete(prompt);
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(error.message);
      if (error.lost) this.#server();
    } finally {
      this.#running = null;
      $("lab-stop").hidden = true;
      $("run").disabled = false;
      delete document.body.dataset.running;
    }
  }

  #body() {
    const asked = this.#settings.request();
    return { model: this.model.id, max_tokens: LENGTH, ...asked, speculation: { ...asked.speculation, trace: true } };
  }

  async #write(prompt) {
    const meter = new Meter();
    const text = this.#text = { prompt, content: "", steps: [], report: null, finish: "", seconds: 0, used: 0 };
    this.#view.clear(prompt);
    $("note").textContent = $("why").textContent = "";
    $("after").hidden = true;
    let drawn = 0;
    try {
      await stream({ ...this.#body(), prompt }, this.#running.signal, (chunk) => {
        if (chunk.paceline) { meter.add(chunk.paceline); text.steps.push(chunk.paceline); this.#view.add(chunk.paceline); }
        text.content += chunk.choices[0]?.text ?? "";
        if (chunk.speculation) meter.report = text.report = chunk.speculation;
        if (chunk.usage) text.used = chunk.usage.total_tokens;
        text.finish = chunk.choices[0]?.finish_reason ?? text.finish;
        if (performance.now() - drawn < 80) return;
        drawn = performance.now();
        this.#figures(meter);
      });
    } catch (error) {
      text.finish = error.name === "AbortError" ? "stopped" : "interrupted";
      throw error;
    } finally {
      this.#ended(meter);
      keep("text", JSON.stringify(text));
    }
  }

  #ended(meter) {
    this.#view.flush();
    this.#figures(meter);
    $("note").textContent = draftedBy(this.#text.report);
    $("why").textContent = ending(this.#text, this.model?.max_model_len ?? Infinity);
    $("after").hidden = !this.#text.steps.length;
  }

  #figures(meter) {
    showFigures($("figures"), meter);
    showPositions($("positions"), meter);
    showSteps($("steps"), meter);
  }

  /** The text of the last visit, if it is whole. */
  #restore() {
    const before = keptJson("text");
    const steps = checkedSteps(before?.steps);
    const meter = new Meter();
    if (steps.length && [before.prompt, before.content].every((part) => typeof part === "string")) {
      this.#text = { ...before, steps };
      meter.report = before.report;
      this.#view.clear(before.prompt);
      for (const step of steps) { meter.add(step); this.#view.add(step); }
      this.#ended(meter);
    } else this.#figures(meter);
  }

  get #whole() { return this.#text.prompt + this.#text.content; }

  async #compete(prompt) {
    const together = document.querySelector("[name=mode]:checked").value === "together";
    const seed = Math.floor(Math.random() * 2 ** 31); // one for both lanes
    const talk = this.#talk.at(-1)?.content === prompt ? this.#talk : [{ role: "user", content: prompt }]; // unless it was changed
    const asked = this.model.chat ? { messages: talk } : { prompt };
    $("race-hint").textContent = `Same ${this.model.chat && talk.length > 1 ? "conversation" : "prompt"}, same seed; the lower lane drafts.`;
    await this.#race.run({ seed, ...this.#body(), ...asked }, together, async (body, onStep, onReport) => {
      let reason = null;
      await stream(body, this.#running.signal, (chunk) => {
        if (chunk.paceline) onStep(chunk.paceline);
        if (chunk.speculation) onReport(chunk.speculation);
        reason = chunk.choices[0]?.finish_reason ?? reason;
      });
      return reason;
    }, asked.prompt ?? "");
  }

  #fail(message) {
    $("error").textContent = message;
    $("error").hidden = !message;
  }
}

async function stream(body, signal, on) {
  for await (const chunk of ask(body, signal)) on(chunk);
}
