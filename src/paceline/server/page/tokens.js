// A text drawn token by token, coloured by origin; a tip says what was proposed and what was chosen.

import { make } from "./dom.js";

const SHOWN = { "\n": "↵", "\t": "⇥" };
const visible = (piece) => piece.replace(/[\n\t]/g, (c) => SHOWN[c]).replace(/^ +$|^ | $/g, (s) => "·".repeat(s.length)) || "∅";

export class TokenView {
  #box; #tip; #told; #steps = []; #pending = []; #at = -1; #spans = []; #frame = 0;

  constructor(box, tip, told = null) {
    this.#box = box;
    this.#tip = tip;
    this.#told = told;
    box.addEventListener("mouseover", (event) => this.#over(event.target));
    box.addEventListener("mouseout", () => this.#hide());
    box.addEventListener("keydown", (event) => this.#key(event));
    box.addEventListener("blur", () => this.#mark(-1));
  }

  clear(prompt = "") {
    cancelAnimationFrame(this.#frame);
    this.#box.textContent = "";
    this.#steps = []; this.#pending = []; this.#spans = []; this.#at = -1; this.#frame = 0;
    this.#hide();
    if (prompt) this.#box.append(element("span", "prompt-echo", prompt));
  }

  /** Add one step: {pieces, origins, proposed_pieces, proposed, tokens}. Drawn with the next frame. */
  add(step) {
    this.#steps.push(step);
    const kept = step.origins.filter((origin) => origin === "draft").length;
    step.kept = kept;
    step.pieces.forEach((piece, i) => {
      const span = document.createElement("span");
      const overruled = step.origins[i] !== "draft" && kept < step.proposed.length;
      span.className = `t ${step.origins[i] === "draft" ? "kept" : overruled ? "overruled" : "own"}`;
      span.textContent = piece;
      span.dataset.step = this.#steps.length - 1;
      span.dataset.index = i;
      this.#pending.push(span);
    });
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.#frame = 0;
    const near = this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < 60;
    this.#box.append(...this.#pending);
    this.#spans.push(...this.#pending);
    this.#pending = [];
    if (near) this.#box.scrollTop = this.#box.scrollHeight;
  }

  #over(target) {
    if (target.dataset?.step !== undefined) this.#show(target);
  }

  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 }[event.key];
    if (event.key === "Escape") this.#mark(-1);
    if (!move || !this.#spans.length) return;
    event.preventDefault();
    this.#mark(Math.max(0, Math.min(this.#spans.length - 1, this.#at + move)));
  }

  #mark(at) {
    this.#spans[this.#at]?.classList.remove("now");
    this.#at = at;
    if (at < 0) return this.#hide();
    this.#spans[at].classList.add("now");
    this.#spans[at].scrollIntoView({ block: "nearest" });
    this.#show(this.#spans[at]);
  }

  #show(span) {
    const step = this.#steps[span.dataset.step];
    const index = Number(span.dataset.index);
    const drafted = step.origins[index] === "draft";
    const overruled = !drafted && step.kept < step.proposed.length;
    const what = drafted ? "Drafted, and the target agreed" : overruled ? "The target overruled the draft"
      : step.proposed.length ? "All drafted tokens kept; this one is the target’s extra" : "The target’s own, nothing was drafted";
    const lines = [element("p", "what", `${what}`)];
    if (step.proposed.length) {
      const chips = step.proposed_pieces.map((piece, i) =>
        element("span", `chip ${i < step.kept ? "kept" : i === step.kept ? "dropped" : "unread"}`, visible(piece)));
      lines.push(element("p", "label", `The drafter proposed ${step.proposed.length}, ${step.kept} kept`), group(chips));
    }
    const chosen = step.pieces.map((piece, i) => element("span", `chip ${step.origins[i] === "draft" ? "kept" : "own"}`, visible(piece)));
    lines.push(element("p", "label", `Step ${Number(span.dataset.step) + 1} wrote`), group(chosen));
    const others = step.others?.[index] ?? [];
    if (others.length) lines.push(element("p", "label", "What could have stood here"), table(others, step.pieces[index]));
    this.#tip.replaceChildren(...lines);
    this.#tip.hidden = false;
    this.#place(span.getBoundingClientRect());
    if (this.#told && this.#at >= 0) {
      const proposed = step.proposed.length ? `; proposed: ${step.proposed_pieces.map(visible).join(" ")}` : "";
      this.#told.textContent = `${visible(step.pieces[index])}: ${what}${proposed}`;
    }
  }

  #place(at) {
    const { width, height } = this.#tip.getBoundingClientRect();
    const below = at.bottom + height + 12 < innerHeight;
    this.#tip.style.left = `${Math.max(12, Math.min(at.left, innerWidth - width - 12))}px`;
    this.#tip.style.top = `${below ? at.bottom + 6 : Math.max(6, at.top - height - 6)}px`;
  }

  #hide() { this.#tip.hidden = true; }
}

const element = (name, kind, text) => make(name, { class: kind }, text);
/** Tokens with their chances, the one that was written in bold. */
const table = (others, written) => make("table", { class: "others" }, ...others.map(([piece, chance]) =>
  make("tr", { class: piece === written && "written" }, element("td", "", visible(piece)), element("td", "to-right", `${(100 * chance).toFixed(1)} %`))));
const group = (children) => make("div", { class: "chips" }, ...children);
