// Live numbers of one text, and the two small bar charts.

import { make } from "./dom.js";

export class Meter {
  constructor() {
    this.ids = []; this.text = ""; this.steps = 0; this.begin = 0; this.last = 0; this.asked = performance.now();
    this.drafted = []; this.kept = []; this.lengths = []; this.report = null;
  }

  /** Count one step of the stream. */
  add(step) {
    this.last = performance.now();
    this.begin ||= this.last;
    this.steps += 1;
    this.ids.push(...step.tokens);
    this.text += step.pieces.join("");
    const kept = step.origins.filter((origin) => origin === "draft").length;
    step.proposed.forEach((_, i) => {
      this.drafted[i] = (this.drafted[i] ?? 0) + 1;
      this.kept[i] = (this.kept[i] ?? 0) + (i < kept ? 1 : 0);
    });
    this.lengths[step.tokens.length] = (this.lengths[step.tokens.length] ?? 0) + 1;
  }

  /** Of the engine once it has told, until then of this page's clock, which also counts the way to the server. */
  get seconds() { return this.report?.seconds || Math.max(this.last - this.asked, 1) / 1000; }
  get speed() {
    if (this.report?.seconds) return this.ids.length / this.report.seconds;
    return this.last > this.begin ? ((this.ids.length - 1) * 1000) / (this.last - this.begin) : 0;
  }
  get perStep() { return this.steps ? this.ids.length / this.steps : 0; }
  get acceptance() {
    const drafted = sum(this.drafted);
    return drafted ? sum(this.kept) / drafted : null;
  }
}

const sum = (list) => list.reduce((a, b) => a + (b ?? 0), 0);

export function showFigures(box, meter) {
  const percent = meter.acceptance === null ? "–" : (100 * meter.acceptance).toFixed(0);
  const entries = [
    ["Tokens per second", meter.speed ? meter.speed.toFixed(meter.speed < 10 ? 1 : 0) : "–", ""],
    ["Tokens per step", meter.steps ? meter.perStep.toFixed(2) : "–", ""],
    ["Drafts kept", percent, percent === "–" ? "" : " %"],
    ["Tokens", String(meter.ids.length), meter.steps ? ` / ${meter.steps} steps` : ""],
  ];
  box.replaceChildren(...entries.map(([name, value, unit]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, unit)))));
}

/** Bars from 0 to 1, one per drafted position. */
export function showPositions(box, meter) {
  const rows = meter.drafted.map((count, i) => [String(i + 1), count ? meter.kept[i] / count : 0, `${Math.round((100 * meter.kept[i]) / count)} %`]);
  box.replaceChildren(rows.length ? bars(rows, "position") : none("No drafts yet"));
}

/** How often a step wrote one, two, … tokens. */
export function showSteps(box, meter) {
  const counts = Array.from(meter.lengths, (n) => n ?? 0).slice(1);
  const most = Math.max(1, ...counts);
  const rows = counts.map((n, i) => [String(i + 1), n / most, String(n)]);
  box.replaceChildren(rows.length ? bars(rows, "tokens in a step", "warm") : none("No steps yet"));
}

function bars(rows, name, tone = "") {
  const height = rows.length * 18;
  const chart = svg("svg", { viewBox: `0 0 270 ${height}`, role: "img", "aria-label": rows.map(([at, , text]) => `${name} ${at}: ${text}`).join(", ") });
  rows.forEach(([label, share, text], i) => {
    const y = i * 18;
    chart.append(
      svg("text", { x: 12, y: y + 12, "text-anchor": "end" }, label),
      svg("rect", { x: 20, y: y + 3, width: 205, height: 11, rx: 3, class: "bar-back" }),
      svg("rect", { x: 20, y: y + 3, width: Math.max(share > 0 ? 2 : 0, 205 * share), height: 11, rx: 3, class: `bar-fill ${tone}` }),
      svg("text", { x: 270, y: y + 12, "text-anchor": "end", class: "value" }, text),
    );
  });
  return chart;
}

function svg(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const none = (text) => make("p", { class: "note" }, text);
