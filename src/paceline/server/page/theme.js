// Light or dark: the system's choice until the button is used.

import { keep, kept } from "./dom.js";

export function startTheme(button) {
  const root = document.documentElement;
  const stored = kept("theme");
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  button?.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    keep("theme", root.dataset.theme);
  });
}
