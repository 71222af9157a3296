// Formulas as MathML, which browsers draw themselves. KaTeX is fetched with the first one.

import { make } from "./dom.js";

const BLOCK = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\]) *(?:\n|$)/;
const INLINE = /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?![\s$])((?:\\.|[^$\\\n])*?[^\s\\$])\$(?![\d$]))/;
const MOST = 4000; // letters

/** What `marked` needs to find them: $a$ that no prices are, $$a$$, \(a\) and \[a\]. */
export const EXTENSIONS = [
  { name: "formula", level: "block", start: (text) => at(text, /(?:^|\n) {0,3}(?:\$\$|\\\[)/), tokenizer: (text) => token(BLOCK.exec(text), true) },
  { name: "formula", level: "inline", start: (text) => at(text, /\$|\\\(|\\\[/), tokenizer: (text) => token(INLINE.exec(text), false) },
];

const at = (text, what) => { const found = text.search(what); return found < 0 ? undefined : found; };

function token(found, display) {
  if (!found || found[0].length > MOST) return undefined;
  const text = found.slice(1).find((part) => part !== undefined).trim();
  return { type: "formula", raw: found[0], text, display: display || /^\$\$|^\\\[/.test(found[0]) };
}

/** An element that shows the formula as it is written until KaTeX is there, and where KaTeX cannot read it. */
export function formula({ text, display, raw }) {
  const shown = make("span", { class: display ? "formula display" : "formula" }, raw.trim());
  if (globalThis.katex) draw(shown, text, display);
  else import("./vendor/katex.js").then(() => draw(shown, text, display), () => {});
  return shown;
}

function draw(shown, text, displayMode) {
  const before = shown.textContent;
  try {
    globalThis.katex.render(text, shown, { displayMode, output: "mathml", trust: false, maxSize: 20, maxExpand: 200 });
  } catch {
    shown.textContent = before;
  }
}
