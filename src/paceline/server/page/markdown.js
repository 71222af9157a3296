// Markdown as elements. `marked` takes the text apart; no HTML is ever made of it, so none can be smuggled in.

import { coloured } from "./coloured.js";
import { make } from "./dom.js";
import { EXTENSIONS, formula } from "./formula.js";
import { Marked } from "./vendor/marked.js";

const PROTOCOLS = ["http:", "https:", "mailto:"];
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", copy: "©" };
const PLAIN = { strong: "strong", em: "em", del: "del", blockquote: "blockquote", paragraph: "p" };

const READER = new Marked({ gfm: true, breaks: true, extensions: EXTENSIONS });

/** The elements of a text. HTML in it is shown as it is written, pictures as links. */
export function markdown(text) {
  try {
    return blocks(READER.lexer(text));
  } catch { // nested so deep that the stack is full
    return [make("p", { class: "as-is" }, text)];
  }
}

const blocks = (tokens) => (tokens ?? []).flatMap(element);

function element(token) {
  switch (token.type) {
    case "space": case "def": case "checkbox": return [];
    case "br": return [make("br")];
    case "hr": return [make("hr")];
    case "formula": return [formula(token)];
    case "heading": return [make(`h${Math.min(6, token.depth + 2)}`, {}, ...blocks(token.tokens))];
    case "code": return [codeBlock(token)];
    case "codespan": return [make("code", {}, token.text)];
    case "list": return [list(token)];
    case "table": return [make("div", { class: "wide" }, table(token))];
    case "link": return [link(token.href, blocks(token.tokens))];
    case "image": return [link(token.href, [token.text || "picture"])];
    case "html": return token.block ? [make("p", { class: "as-is" }, token.text.trimEnd())] : [token.text];
    case "text": return token.tokens ? blocks(token.tokens) : [decoded(token.text)];
    default: return PLAIN[token.type] ? [make(PLAIN[token.type], {}, ...blocks(token.tokens))] : [token.text ?? token.raw];
  }
}

/** A link if it leads to the web or to a mailbox, else what it would show. */
function link(href, children) {
  let url = null;
  try { url = new URL(href); } catch { /* relative, or none at all */ }
  if (!url || !PROTOCOLS.includes(url.protocol)) return make("span", {}, ...children);
  return make("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function codeBlock({ text, lang }) {
  const name = (lang ?? "").trim().split(/\s/)[0].slice(0, 20);
  return make("div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, name || "code"),
      make("button", { type: "button", "data-act": "copy-code", "aria-label": `Copy the ${name} code` }, "Copy")),
    make("pre", { tabindex: "0" }, make("code", {}, ...coloured(text, name))));
}

function list({ ordered, start, items }) {
  const rows = items.map((item) => make("li", { class: item.task && "task" },
    ...(item.task ? [make("input", { type: "checkbox", disabled: true, checked: item.checked })] : []), ...blocks(item.tokens)));
  return make(ordered ? "ol" : "ul", { start: ordered && start > 1 && start }, ...rows);
}

function table({ header, rows }) {
  const row = (cells, name) => make("tr", {}, ...cells.map((cell) => make(name, { class: cell.align && `to-${cell.align}` }, ...blocks(cell.tokens))));
  return make("table", {}, make("thead", {}, row(header, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,6}));/g, (whole, decimal, hex, name) => {
    if (name) return NAMED[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}
