// A conversation as data: what is kept of it, what the model sees of it, how it is exported. Nothing here draws.

import { checkedMedia, contentOf, mediaOf } from "./pictures.js";

const KIND = "paceline conversation"; // as `paceline run` writes it by /save: /load reads our export

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

/** `first`: turns before it no longer fit into the context. `revision` is counted by the store. */
export const newConversation = () => ({ id: newId(), revision: 0, updated: Date.now(), system: "", turns: [], first: 0 });

/** An answer that is about to come. `finish` is "" while it is written. */
export const newAnswer = (model) =>
  ({ role: "assistant", content: "", thoughts: "", steps: [], report: null, seconds: 0, used: 0, finish: "", error: "", note: "", model });

/** A conversation as it comes from a store that anything may have written to; null if it is none. */
export function checked(record) {
  if (!isObject(record) || !isText(record.id) || !Array.isArray(record.turns)) return null;
  const turns = record.turns.map((turn) => (Array.isArray(turn?.content) ? { ...turn, ...mediaOf(turn.content) } : turn)).filter((turn) => isObject(turn) && ["user", "assistant"].includes(turn.role) && isText(turn.content));
  return {
    id: record.id, revision: count(record.revision), updated: count(record.updated), system: isText(record.system) ? record.system : "",
    first: Math.min(count(record.first), turns.length), turns: turns.map(checkedTurn),
  };
}

/** Where an answer began that is being written: by that the page goes on with it after it was loaded again. */
export const startOf = ({ content, thoughts, steps, seconds }, id) => ({ id, content, thoughts, steps: steps.length, seconds, begun: Date.now() });

const isStart = (start) => isObject(start) && /^[0-9a-f]{32}$/.test(start.id) && isText(start.content) && isText(start.thoughts)
  && [start.steps, start.seconds, start.begun].every((value) => Number.isFinite(value) && value >= 0);

function checkedTurn(turn) {
  if (turn.role === "user") {
    const media = checkedMedia(turn.media);
    return { role: "user", content: turn.content, ...(media.length ? { media } : {}) };
  }
  const texts = Object.fromEntries(["thoughts", "finish", "error", "note", "model"].map((name) => [name, isText(turn[name]) ? turn[name] : ""]));
  return {
    ...newAnswer(""), ...texts, content: turn.content, finish: texts.finish || "interrupted", steps: checkedSteps(turn.steps),
    report: isObject(turn.report) ? turn.report : null, seconds: Number.isFinite(turn.seconds) ? turn.seconds : 0, used: count(turn.used), ...(isStart(turn.stream) ? { stream: turn.stream } : {}),
  };
}

/** A step with what else could have stood in the place of each of its tokens, [[piece, chance]], where the server tells. */
export function withOthers(step, content) {
  if (content?.length !== step.tokens.length) return step; // thoughts have none
  return { ...step, others: content.map((one) => one.top_logprobs.map(({ token, logprob }) => [token, Math.exp(logprob)])) };
}

const isPair = (pair) => Array.isArray(pair) && isText(pair[0]) && Number.isFinite(pair[1]);
const isOthers = (others) => others === undefined || (Array.isArray(others) && others.every((some) => Array.isArray(some) && some.every(isPair)));

/** The steps of a text if all are whole, else none: then it has no colours. */
export function checkedSteps(steps) {
  const lists = ["tokens", "pieces", "origins", "proposed", "proposed_pieces"];
  const whole = (step) => isObject(step) && lists.every((name) => Array.isArray(step[name]))
    && step.pieces.every(isText) && step.proposed_pieces.every(isText)
    && step.tokens.length === step.pieces.length && step.origins.length === step.pieces.length && isOthers(step.others);
  return Array.isArray(steps) && steps.every(whole) ? steps : [];
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string";
const count = (value) => (Number.isInteger(value) && value > 0 ? value : 0);

export function title(conversation) {
  const asked = conversation.turns.find((turn) => turn.role === "user");
  const line = asked?.content.trim().split("\n")[0] || (asked?.media ?? [])[0]?.name || "";
  const letters = [...line];
  return letters.length > 60 ? `${letters.slice(0, 59).join("")}…` : line || "New chat";
}

const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);

/** What the model is sent: without turns that say nothing, and neighbours of one role joined, as templates want it. */
export function messages({ system, turns }, first = 0) {
  const out = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  for (const turn of turns.slice(first)) {
    const { role } = turn, last = out.at(-1), content = contentOf(turn);
    if (!content.length) continue;
    if (last?.role !== role) out.push({ role, content });
    else if (typeof last.content === "string" && typeof content === "string") last.content += `\n\n${content}`;
    else last.content = [...parts(last.content), ...parts(content)];
  }
  return out;
}

/**
 * The first turn that the model sees. If room is short, so many of the oldest are left out that the next turns fit, too:
 * each time that the beginning changes, all of it has to be computed again. `tokens(first)`: of the prompt from there on.
 */
export async function firstThatFits({ turns, first }, context, wanted, tokens) {
  const room = Math.min(wanted ?? Math.floor(context / 4), Math.floor(context / 2));
  if ((await tokens(first)) + room <= context) return first;
  const starts = turns.flatMap((turn, i) => (turn.role === "user" && i > first ? [i] : []));
  let low = 0, high = starts.length - 1; // the first start whose rest is at most half of the context, else the last one
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if ((await tokens(starts[middle])) <= context / 2) high = middle;
    else low = middle + 1;
  }
  return starts[low] ?? first;
}

/** Whether the prompt fits whatever its tokens are: each is a byte at least, and a template adds little. */
export const surelyFits = (sent, context, wanted) => sent.every(({ content }) => typeof content === "string") &&
  new TextEncoder().encode(JSON.stringify(sent)).length + 64 * sent.length + 512 + (wanted ?? context / 4) <= context;

/** Why an answer ended, if not by itself. */
export function ending(answer, context) {
  if (answer.finish === "stopped") return "stopped";
  if (answer.finish === "interrupted") return "interrupted";
  if (answer.finish !== "length") return "";
  return answer.used >= context ? `the context of ${context} tokens is full` : "length limit reached";
}

/** What an answer took, in words: by the engine's clock once it has told, until then by the page's. */
export function figures({ steps, report, seconds }) {
  const tokens = steps.reduce((sum, step) => sum + step.tokens.length, 0);
  const drafted = steps.reduce((sum, step) => sum + step.proposed.length, 0);
  const accepted = steps.reduce((sum, step) => sum + step.origins.filter((origin) => origin === "draft").length, 0);
  const time = report?.seconds || seconds;
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (time > 0) parts.push(`${(tokens / time).toFixed(tokens / time < 10 ? 1 : 0)} a second`);
  if (drafted) parts.push(`${accepted} of them drafted ahead`, `${drafted - accepted} drafts thrown away`);
  if (report?.lossy) parts.push("by a lossy rule");
  return parts.join(", ");
}

export function asMarkdown(conversation) {
  const parts = [`# ${title(conversation)}`];
  if (conversation.system.trim()) parts.push("## System", conversation.system.trim());
  for (const turn of conversation.turns) {
    parts.push(`## ${turn.role === "user" ? "User" : turn.model || "Assistant"}`, ...(turn.media ?? []).map((one) => `*${one.name || "a picture"}*`), turn.content);
  }
  return `${parts.join("\n\n")}\n`;
}

/** A message as /load of `paceline run` reads it. */
const saved = ({ role, content }) => ({ role, content: typeof content === "string" ? content : content.map((part) => (
  part.type === "image_url" ? { type: "image", image: part.image_url.url }
    : part.type === "input_audio" ? { type: "audio", audio: `data:audio/wav;base64,${part.input_audio.data}` } : part)) });

export const asJson = (conversation, settings) =>
  `${JSON.stringify({ kind: KIND, system: conversation.system.trim() || null, settings, messages: messages({ ...conversation, system: "" }).map(saved) }, null, 1)}\n`;

/** Of an exported file, or one of /save. Throws if it is neither. */
export function fromJson(text) {
  let saved = null;
  try { saved = JSON.parse(text); } catch { /* said below */ }
  const made = saved?.kind === KIND ? checked({ ...newConversation(), system: saved.system ?? "", turns: saved.messages }) : null;
  if (!made?.turns.length) throw new Error("this file is no saved conversation: choose one that was exported as JSON");
  for (const turn of made.turns) if (turn.role === "assistant") turn.finish = "stop";
  return made;
}
