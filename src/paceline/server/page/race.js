// The same prompt and seed without and with speculation, and the proof that both texts are equal.

import { make } from "./dom.js";
import { Meter } from "./meters.js";
import { sha256OfIds } from "./sha256.js";

const LANES = [["plain", "Plain"], ["fast", "With speculation"]];

export class Race {
  #lanes; #proof; #views; #figures;

  constructor({ lanes, proof, views, figures }) {
    this.#lanes = lanes;
    this.#proof = proof;
    this.#views = views;
    this.#figures = figures;
    this.#draw();
  }

  /** Run both; `stream(request, onStep, onReport)` resolves with the finish reason. Neither finds its prompt computed. */
  async run(request, together, stream, prompt) {
    this.#draw();
    this.#proof.hidden = true;
    const runs = LANES.map(([kind]) => ({ kind, meter: null, reason: null }));
    const start = async (run) => {
      run.meter = new Meter();
      const speculation = run.kind === "plain" ? { drafter: "none", trace: true } : request.speculation;
      run.reason = await stream({ ...request, speculation, cache_prompt: false }, (step) => {
        run.meter.add(step);
        this.#views[run.kind].add(step);
        this.#show(run, request.max_tokens);
      }, (report) => { run.meter.report = report; });
      this.#show(run, request.max_tokens, true);
    };
    LANES.forEach(([kind]) => this.#views[kind].clear(prompt));
    if (together) await Promise.all(runs.map(start));
    else for (const run of runs) await start(run);
    this.#prove(runs, together);
  }

  #draw() {
    this.#lanes.replaceChildren(...LANES.map(([kind, name]) => {
      this.#figures[kind].textContent = "";
      return make("div", { class: `lane ${kind}`, "data-lane": kind },
        make("span", {}, name), make("div", { class: "rail" }, make("div", { class: "run" })), make("output"));
    }));
  }

  #show(run, most, over = false) {
    const lane = this.#lanes.querySelector(`[data-lane="${run.kind}"]`);
    const share = over ? 1 : Math.min(1, run.meter.ids.length / most);
    lane.querySelector(".run").style.width = `${100 * share}%`;
    lane.querySelector("output").textContent = `${run.meter.seconds.toFixed(2)} s · ${run.meter.speed.toFixed(0)} tokens/s`;
    this.#figures[run.kind].textContent = `${run.meter.ids.length} tokens in ${run.meter.steps} steps`;
  }

  #prove([plain, fast], together) {
    const hashes = [plain, fast].map((run) => sha256OfIds(run.meter.ids));
    const same = hashes[0] === hashes[1] && plain.meter.text === fast.meter.text && plain.reason === fast.reason;
    const ratio = plain.meter.seconds / fast.meter.seconds;
    const verdict = make("strong", { class: same ? null : "bad" },
      same ? `Equal, token by token: ${plain.meter.ids.length} of ${plain.meter.ids.length}` : fast.meter.report?.lossy ? "The texts differ: this server verifies by a lossy rule" : "The texts differ");
    const speed = make("p", {}, `With speculation it took ${fast.meter.seconds.toFixed(2)} s instead of ${plain.meter.seconds.toFixed(2)} s`
      + ` by the engine's clock: ${ratio.toFixed(2)} times as fast, ${fast.meter.perStep.toFixed(2)} tokens per step`
      + `${together ? " (both shared the machine)" : ""}.`);
    const rows = [["SHA-256, plain", hashes[0]], ["SHA-256, speculation", hashes[1]], ["Token ids begin", plain.meter.ids.slice(0, 16).join(" ")]];
    const table = make("table", {}, ...rows.map(([name, value]) =>
      make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, make("code", {}, value)))));
    this.#proof.replaceChildren(verdict, speed, table);
    this.#proof.dataset.equal = String(same);
    this.#proof.hidden = false;
  }
}
