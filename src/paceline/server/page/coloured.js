// Code in colours. `highlight.js` finds out what is what; its tree becomes elements of ours, so no HTML is made of a text.

import { make } from "./dom.js";
import library from "./vendor/highlight.js";

const MOST = 30000; // letters; an answer is drawn many times while it is written

/** The children of a code element: its text in spans, or as it is where the language is not known. */
export function coloured(text, language) {
  if (text.length > MOST || !library.getLanguage(language)) return [text];
  try {
    return nodes(library.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);
  } catch {
    return [text];
  }
}

const nodes = ({ children }) => children.map((child) => (typeof child === "string" ? child
  : make("span", { class: child.scope && `hl-${child.scope.split(".")[0]}` }, ...nodes(child))));
