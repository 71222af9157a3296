// Draws turns. What its buttons do is told by `data-act`; the chat listens for that on the whole thread.

import { button, make } from "./dom.js";
import { markdown } from "./markdown.js";
import { Meter, showPositions, showSteps } from "./meters.js";
import { shown } from "./pictures.js";
import { TokenView } from "./tokens.js";
import { ending, figures } from "./turns.js";

const act = (name, text, label) => button(text, { "data-act": name, class: "act", "aria-label": label });

export function userTurn(turn, index, busy) {
  return make("article", { class: "turn user", "data-index": index, "aria-label": "You" },
    make("div", { class: "said" }, ...shown(turn.media ?? []), turn.content),
    make("div", { class: "acts" }, ...(busy ? [] : [act("edit", "Edit", "Edit this message"), act("copy", "Copy", "Copy this message")])));
}

/** An answer, which can grow: `step` and then `draw` for what has come, until it is drawn anew as a whole. */
export class AnswerView {
  #turn; #how; #body = make("div"); #facts = make("summary"); #thoughts = null; #tokens = null; #shown = 0;

  /** `how`: {asTokens, busy, last, context, model, tip, told} */
  constructor(turn, index, how) {
    this.#turn = turn;
    this.#how = how;
    const running = turn.finish === "";
    this.element = make("article", { class: "turn answer", "data-index": index, "aria-label": "Answer", "aria-busy": String(running) });
    if (turn.thoughts || running) this.#thoughts = this.#thoughtsOf();
    if (how.asTokens && (turn.steps.length || running)) {
      this.#body = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "The answer by tokens. Arrow keys move from token to token.", "aria-describedby": how.told.id });
      this.#tokens = new TokenView(this.#body, how.tip, how.told);
    } else this.#body.className = "prose";
    this.element.append(...[this.#thoughts, this.#body].filter(Boolean), ...this.#below(running));
    this.draw();
  }

  draw() {
    const { content, thoughts, steps, finish } = this.#turn;
    if (this.#thoughts) {
      this.#thoughts.hidden = !thoughts;
      this.#thoughts.lastChild.textContent = thoughts;
      this.#thoughts.firstChild.textContent = finish === "" && !content ? "Thinking…" : "Thoughts";
    }
    if (this.#tokens) {
      for (; this.#shown < steps.length; this.#shown++) this.#tokens.add(steps[this.#shown]);
      this.#tokens.flush();
    } else if (content || finish) replaceChanged(this.#body, markdown(content));
    else this.#body.replaceChildren(make("p", { class: "waiting" }, thoughts ? "" : "…"));
    const why = ending(this.#turn, this.#how.context);
    this.#facts.replaceChildren(...(steps.length ? [figures(this.#turn)] : []), ...(steps.length && why ? [" · "] : []), ...(why ? [make("span", { class: "why" }, why)] : []));
  }

  #thoughtsOf() {
    return make("details", { class: "thoughts" }, make("summary", {}, "Thoughts"), make("div"));
  }

  #below(running) {
    const { content, error, finish, note } = this.#turn;
    const { busy, last } = this.#how;
    const cut = last && content && !busy && ["length", "stopped", "interrupted", "error"].includes(finish);
    const out = [];
    if (error) {
      out.push(make("div", { class: "error", role: "alert" }, make("p", {}, error),
        ...(busy || !last ? [] : [button("Try again", { "data-act": "again", class: "secondary" })])));
    }
    if (note) out.push(make("p", { class: "note" }, note));
    out.push(make("div", { class: "acts" }, this.#details(running),
      ...(busy ? [] : [
        ...(cut ? [act("continue", "Continue", "Continue this answer")] : []),
        act("again", "Regenerate", "Regenerate this answer"), act("edit", "Edit", "Edit this answer"),
        act("copy", "Copy", "Copy this answer"), act("race", "Race", "Race this answer with and without speculation"),
      ])));
    return out;
  }

  /** How fast it was; opened, how the drafts were taken. */
  #details(running) {
    const { steps } = this.#turn;
    if (running || !steps.length) return make("span", { class: "facts" }, this.#facts = make("span"));
    const details = make("details", { class: "facts" }, this.#facts);
    details.addEventListener("toggle", () => {
      if (details.childElementCount === 1) details.append(this.#charts());
      if (details.open) details.lastChild.scrollIntoView({ block: "nearest" });
    });
    return details;
  }

  #charts() {
    const { steps, report } = this.#turn;
    const meter = new Meter(), positions = make("figure"), lengths = make("figure");
    for (const step of steps) meter.add(step);
    showPositions(positions, meter);
    showSteps(lengths, meter);
    return make("div", { class: "charts" },
      make("h4", {}, "Acceptance by position"), positions, make("h4", {}, "Tokens per step"), lengths,
      make("p", { class: "note" }, draftedBy(report)));
  }
}

/** Put `fresh` into the box, leaving what is the same: so a selection in it lives on while the text grows. */
function replaceChanged(box, fresh) {
  fresh.forEach((child, i) => {
    const node = typeof child === "string" ? document.createTextNode(child) : child;
    const old = box.childNodes[i];
    if (!old) box.append(node);
    else if (!old.isEqualNode(node)) old.replaceWith(node);
  });
  while (box.childNodes.length > fresh.length) box.lastChild.remove();
}

/** Who drafted, or why nothing was drafted. */
export function draftedBy(report) {
  if (!report) return "";
  const used = Object.entries(report.drafters ?? {}).map(([kind, steps]) => `${kind} in ${steps} ${steps === 1 ? "step" : "steps"}`).join(", ");
  return used ? `Drafted by ${used}.` : report.reason ? `Nothing was drafted: ${report.reason}.` : "";
}

/** A turn that is being edited: `done(text)`, or `done(null)` to leave it as it was. */
export function editor(turn, index, done) {
  const area = make("textarea", { "aria-label": "Edit the text", rows: String(Math.min(14, turn.content.split("\n").length + 1)) });
  const save = button(turn.role === "user" ? "Send" : "Save", { class: "primary" });
  const cancel = button("Cancel", { class: "secondary" });
  area.value = turn.content;
  save.addEventListener("click", () => area.value.trim() && done(area.value));
  cancel.addEventListener("click", () => done(null));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); done(null); }
    const sends = event.ctrlKey || event.metaKey || (turn.role === "user" && !event.shiftKey && !event.isComposing);
    if (event.key === "Enter" && sends) { event.preventDefault(); save.click(); }
  });
  const made = make("article", { class: `turn editing`, "data-index": index }, area,
    make("div", { class: "row" }, ...(turn.role === "user" ? [make("p", { class: "hint" }, "What follows is written anew.")] : []), cancel, save));
  requestAnimationFrame(() => { area.focus(); area.setSelectionRange(area.value.length, area.value.length); });
  return made;
}
