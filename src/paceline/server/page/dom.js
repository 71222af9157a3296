// The few helpers that every part of the page uses.

/** An element with attributes and children; a child that is a string becomes text, never HTML. */
export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const button = (text, attributes = {}) => make("button", { type: "button", ...attributes }, text);

/** A small value of the browser's, null where it has none or refuses. `area` is localStorage or sessionStorage. */
export function kept(name, area = "localStorage") {
  try { return globalThis[area].getItem(`paceline ${name}`); } catch { return null; }
}

export function keep(name, value, area = "localStorage") {
  try {
    if (value) globalThis[area].setItem(`paceline ${name}`, value);
    else globalThis[area].removeItem(`paceline ${name}`);
  } catch { /* the page works without */ }
}

/** The same for what is written as JSON: null if it is broken. */
export function keptJson(name) {
  try { return JSON.parse(kept(name)); } catch { return null; }
}

/** Copy a text and say so on the button. The clipboard's own API is there on https and localhost only. */
export async function copy(text, from) {
  const before = from.dataset.before ??= from.textContent;
  from.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => { from.textContent = before; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", { class: "visually-hidden" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

export function download(name, text, kind) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
