// Ties the page together: form, tabs, and what runs at the moment.

import { Meter, showFigures, showPositions, showSteps } from "./meters.js";
import { Race } from "./race.js";
import { about, ask } from "./stream.js";
import { startTheme } from "./theme.js";
import { TokenView } from "./tokens.js";

const $ = (id) => document.getElementById(id);
// They end where a token can end: this model's newlines carry the next line's indentation.
const SAMPLES = {
  class: 'class Connection:\n    """A connection to a server."""\n\n    def __init__(self, host, port, timeout=None):\n        self.host = host\n        self.port = port',
  function: 'def read_config(path):\n    """Read a configuration file and return its sections."""',
  test: "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n        self.parser = Parser()\n\n    def test_empty(self):",
};
let model = null;
let running = null;
let view = "write";

const writeView = new TokenView($("tokens"), $("tip"), $("told"));
const race = new Race({
  lanes: $("lanes"), proof: $("proof"),
  views: { plain: new TokenView($("plain-tokens"), $("tip")), fast: new TokenView($("fast-tokens"), $("tip")) },
  figures: { plain: $("plain-figure"), fast: $("fast-figure") },
});

function number(id, fallback) {
  const value = $(id).valueAsNumber;
  return Number.isFinite(value) ? value : fallback;
}

function request() {
  const prompt = $("prompt").value;
  const speculation = { trace: true };
  if ($("drafter").value) speculation.drafter = $("drafter").value;
  const length = $("draft-tokens").value;
  if (length) speculation.draft_tokens = length === "auto" ? "auto" : Number(length);
  const body = {
    model: model.id, max_tokens: number("max-tokens", 200), temperature: number("temperature", 0.7),
    seed: number("seed", 1), speculation,
  };
  const chat = $("endpoint").value === "chat";
  return { ...body, ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }) };
}

/** Stream one request, handing over its steps; resolves with the finish reason. */
async function stream(body, onStep, signal, onReport = () => {}) {
  let reason = null;
  for await (const chunk of ask(body, signal)) {
    if (chunk.paceline) onStep(chunk.paceline);
    reason = chunk.choices[0]?.finish_reason ?? reason;
    if (chunk.speculation) onReport(chunk.speculation);
  }
  return reason;
}

async function write(body, signal) {
  const meter = new Meter();
  writeView.clear(body.prompt ?? "");
  let drawn = 0;
  const draw = (always) => {
    if (!always && performance.now() - drawn < 80) return;
    drawn = performance.now();
    showFigures($("figures"), meter);
    showPositions($("positions"), meter);
    showSteps($("steps"), meter);
  };
  $("note").textContent = "";
  try {
    await stream(body, (step) => { meter.add(step); writeView.add(step); draw(false); }, signal, (report) => {
      meter.report = report;
      const used = Object.entries(report.drafters).map(([kind, steps]) => `${kind} in ${steps} ${steps === 1 ? "step" : "steps"}`).join(", ");
      $("note").textContent = used ? `Drafted by ${used}.` : report.reason ? `Nothing was drafted: ${report.reason}.` : "";
    });
  } finally {
    writeView.flush();
    draw(true);
  }
}

async function run() {
  if (running || !model) return;
  running = new AbortController();
  const { signal } = running;
  $("error").hidden = true;
  $("stop").hidden = false;
  $("run").disabled = true;
  document.body.dataset.running = "true";
  try {
    const body = request();
    if (view === "write") await write(body, signal);
    else {
      const together = document.querySelector("[name=mode]:checked").value === "together";
      await race.run(body, together, (each, onStep, onReport) => stream(each, onStep, signal, onReport), body.prompt ?? "");
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      $("error").textContent = error.message;
      $("error").hidden = false;
    }
  } finally {
    running = null;
    $("stop").hidden = true;
    $("run").disabled = false;
    delete document.body.dataset.running;
  }
}

function choose(name) {
  view = name;
  for (const other of ["write", "race"]) {
    $(other).hidden = other !== name;
    $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  $("run").textContent = name === "write" ? "Write" : "Start the race";
}

function summarise() {
  const drafter = $("drafter").value || "server’s drafter";
  $("settings-summary").textContent = `${drafter} · temperature ${$("temperature").value} · ${$("max-tokens").value} tokens · seed ${$("seed").value}`;
}

async function connect() {
  try {
    const { state, model: card } = await about();
    model = card;
    $("state").dataset.state = state;
    $("state-text").textContent = state === "ready" ? card.id : `${card.id} is ${state}`;
    if (state !== "ready") return setTimeout(connect, 700);
    for (const kind of card.drafters ?? []) $("drafter").add(new Option(kind, kind));
  } catch (error) {
    $("state").dataset.state = "failed";
    $("state-text").textContent = "the server cannot be reached";
    setTimeout(connect, 2000);
  }
}

function start() {
  startTheme($("theme"));
  for (let n = 0; n <= 16; n++) $("draft-tokens").add(new Option(String(n), String(n)));
  for (const [name, text] of Object.entries(SAMPLES)) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
    button.addEventListener("click", () => { $("prompt").value = text; $("prompt").focus(); });
    $("samples").append(button);
  }
  $("prompt").value = SAMPLES.class;
  $("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  $("form").addEventListener("input", summarise);
  $("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "Enter") { event.preventDefault(); run(); }
    if (event.key === "Escape") running?.abort();
  });
  for (const name of ["write", "race"]) {
    $(`tab-${name}`).addEventListener("click", () => choose(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = name === "write" ? "race" : "write";
      choose(other);
      $(`tab-${other}`).focus();
    });
  }
  if (location.hash === "#race") choose("race");
  const idle = new Meter();
  showFigures($("figures"), idle);
  showPositions($("positions"), idle);
  showSteps($("steps"), idle);
  summarise();
  connect();
}

start();
