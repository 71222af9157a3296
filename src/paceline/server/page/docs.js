// Shows /openapi.json: every route, and the fields of what it takes.

import { startTheme } from "./theme.js";

startTheme(null);
const box = document.getElementById("docs");
const schema = await (await fetch("openapi.json")).json();

function make(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

/** A paragraph in which words between backticks are code. */
function prose(text) {
  const made = make("p", "");
  made.append(...text.split("`").map((part, i) => (i % 2 ? make("code", part) : part)));
  return made;
}

function kindOf(part) {
  if (part.$ref) return part.$ref.split("/").pop();
  if (part.anyOf) return part.anyOf.filter((p) => p.type !== "null").map(kindOf).join(" or ");
  if (part.enum) return part.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (part.const !== undefined) return JSON.stringify(part.const);
  if (part.type === "array") return `list of ${kindOf(part.items ?? {})}`;
  return part.type ?? "anything";
}

function bounds(part) {
  const inner = part.anyOf?.find((p) => p.type !== "null") ?? part;
  const out = [];
  const low = inner.minimum ?? inner.minLength ?? inner.minItems;
  const high = inner.maximum ?? inner.maxLength ?? inner.maxItems;
  if (low !== undefined || high !== undefined) out.push(`${low ?? "…"} to ${high ?? "…"}`);
  if (part.description) out.push(part.description);
  return out.join("; ");
}

function fields(name) {
  const part = schema.components.schemas[name];
  const table = document.createElement("table");
  for (const [field, inner] of Object.entries(part.properties ?? {})) {
    const row = table.insertRow();
    row.insertCell().append(make("code", field), part.required?.includes(field) ? " (needed)" : "");
    row.insertCell().textContent = kindOf(inner);
    row.insertCell().textContent = bounds(inner);
  }
  return table;
}

for (const [path, methods] of Object.entries(schema.paths)) {
  for (const [verb, route] of Object.entries(methods)) {
    const card = make("section", "");
    card.className = "card";
    const title = make("h3", "");
    const mark = make("span", verb.toUpperCase());
    mark.className = "verb";
    title.append(mark, make("code", path));
    card.append(title, prose(route.description ?? ""));
    const body = route.requestBody?.content["application/json"].schema.$ref?.split("/").pop();
    if (body) card.append(fields(body));
    box.append(card);
  }
}
const parts = make("section", "", make("h3", "Parts"));
parts.className = "card";
for (const name of Object.keys(schema.components.schemas)) {
  if (/Request$|Answer$|ErrorBody|ModelCard|ModelList|Health/.test(name)) continue;
  parts.append(make("p", "", make("strong", name)), fields(name));
}
box.append(parts);
