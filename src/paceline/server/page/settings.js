// What a request says about sampling and speculation. A field that is left empty is the model's own.

import { keep, keptJson } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const UNSAID = { max_tokens: "as many as fit", seed: "random" };
const WORDS = ["stop", "thinking", "drafter", "draft_tokens"];

export class Settings {
  #form; #changed;

  constructor(form, changed) {
    this.#form = form;
    this.#changed = changed;
    for (let n = 0; n <= 16; n++) this.#field("draft_tokens").add(new Option(String(n), String(n)));
    const before = keptJson("settings");
    for (const name of [...NUMBERS, ...WORDS]) {
      if (before && typeof before[name] === "string") this.#field(name).value = before[name];
    }
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("reset", () => setTimeout(() => this.#keep()));
  }

  /** Show what this model would do with fields that are empty, and what it can be asked for. */
  use(card) {
    for (const [name, row] of Object.entries(card.settings ?? {})) {
      const field = NUMBERS.includes(name) ? this.#field(name) : null;
      if (!field) continue;
      if (row.low !== null) field.min = row.low;
      if (row.high !== null) field.max = row.high;
      field.placeholder = row.default ?? UNSAID[name] ?? "";
      if (name === "top_k" && row.default === 0) field.placeholder = "off";
    }
    this.#field("thinking").closest("label").hidden = !card.thinking;
    const drafter = this.#field("drafter"), wanted = drafter.value || keptJson("settings")?.drafter;
    drafter.replaceChildren(new Option("the server’s choice", ""), ...(card.drafters ?? []).map((kind) => new Option(kind, kind)));
    drafter.value = (card.drafters ?? []).includes(wanted) ? wanted : "";
    this.#changed();
  }

  /** The fields of a request. */
  request() {
    const out = this.sampling();
    if (this.#value("thinking") && !this.#field("thinking").closest("label").hidden) out.chat_template_kwargs = { enable_thinking: this.#value("thinking") === "on" };
    const length = this.#value("draft_tokens");
    if (this.#value("drafter")) out.speculation = { drafter: this.#value("drafter") };
    if (length) out.speculation = { ...out.speculation, draft_tokens: length === "auto" ? "auto" : Number(length) };
    return out;
  }

  /** What has been set of the sampling. */
  sampling() {
    const out = {};
    for (const name of NUMBERS) {
      const value = this.#field(name).valueAsNumber;
      if (Number.isFinite(value)) out[name] = value;
    }
    const stop = this.#value("stop").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
    return stop.length ? { ...out, stop } : out;
  }

  /** How many fields are not the model's own. */
  get count() { return [...NUMBERS, ...WORDS].filter((name) => this.#value(name) !== "").length; }

  #field(name) { return this.#form.elements[name]; }
  #value(name) { return this.#field(name).value.trim(); }

  #keep() {
    keep("settings", this.count ? JSON.stringify(Object.fromEntries([...NUMBERS, ...WORDS].map((name) => [name, this.#field(name).value]))) : "");
    this.#changed();
  }
}
