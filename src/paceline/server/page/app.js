// Ties the page together: views, the list of conversations, and what the server is doing.

import { Chat } from "./chat.js";
import { button, download, keep, kept, make } from "./dom.js";
import { Lab, QUESTIONS } from "./lab.js";
import { Tray } from "./pictures.js";
import { Settings } from "./settings.js";
import { Store } from "./store.js";
import { about, countTokens } from "./stream.js";
import { startTheme } from "./theme.js";
import { asJson, asMarkdown, fromJson, messages, newConversation, title } from "./turns.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["chat", "write", "race"];
const WATCH = 5000, SEEK = 1500; // ms from one look at the server to the next, while it answers and while it does not

let view = "chat", card = null, state = "connecting", timer = 0;
const store = new Store();
const settings = new Settings($("settings-form"), () => {
  $("settings-count").textContent = settings?.count ? ` · ${settings.count}` : "";
});
const lab = new Lab(settings, look);
const chat = new Chat({
  thread: $("thread"), turns: $("turns"), empty: $("empty"), system: $("system"), systemText: $("system-text"), prompt: $("prompt"),
  send: $("send"), stop: $("stop"), tip: $("tip"), told: $("told"),
}, {
  changed: list, say: (text) => notice(text), offer: (text, undo) => notice(text, undo), server: look, asTokens: () => $("as-tokens").checked,
  race: (messages) => { choose("race"); lab.race(messages); },
}, store, settings);

/** Tokens of one picture or clip: those of a message with it, less those of one without. */
async function tokensOf(one) {
  const [withIt, without] = await Promise.all([[one], []].map((media) => countTokens({
    model: card.id, messages: messages({ system: "", turns: [{ role: "user", content: "x", media }] }) })));
  return withIt - without;
}
chat.tray = new Tray($("tray"), (text) => notice(text), () => card?.modalities ?? [], tokensOf);

/** Ask the server how it is, show it, and resolve with the state: ready, loading, draining, ... or lost. */
async function look() {
  clearTimeout(timer);
  try {
    const now = await about();
    offerModels(now.models.map(({ id }) => id));
    const model = now.models.find(({ id }) => id === $("model").value) ?? now.models[0];
    const other = JSON.stringify(model) !== JSON.stringify(card);
    state = now.state;
    if (other) useModel(model);
  } catch {
    state = "lost";
  }
  $("state").dataset.state = state === "ready" ? "ready" : state === "lost" ? "failed" : "loading";
  $("state-text").hidden = state === "ready" && !$("model").hidden; // which says it already
  $("state-text").textContent = state === "ready" ? card.id : state === "lost" ? "not reachable" : `${card.id} is ${state}`;
  clearTimeout(timer); // another look may have ended meanwhile
  timer = setTimeout(() => (document.hidden ? null : look()), state === "ready" ? WATCH : SEEK);
  return state;
}

/** A choice where the server has several models; the one that was chosen before stays chosen. */
function offerModels(names) {
  const select = $("model");
  select.hidden = names.length < 2;
  if ([...select.options].map((one) => one.value).join("\n") === names.join("\n")) return;
  const chosen = [select.value, kept("model")].find((name) => names.includes(name));
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  select.value = chosen ?? names[0];
}

function useModel(model) {
  card = chat.model = lab.model = model;
  settings.use(model);
  $("tab-chat").hidden = model.chat === false;
  const reads = ["image", "audio"].filter((kind) => model.modalities?.includes(kind));
  $("prompt").placeholder = `Message ${model.id}`;
  $("model-name").textContent = model.id;
  if (view !== "chat") lab.show(view);
  if (view === "chat" && model.chat === false) choose("write");
}

function choose(name, focus = false) {
  view = name;
  for (const other of VIEWS) {
    $(other).hidden = other !== name;
    $(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    $(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  $("lab").hidden = name === "chat";
  $("open-side").hidden = name !== "chat";
  if (name !== "chat") lab.show(name);
  if (focus) $(`tab-${name}`).focus();
  history.replaceState(null, "", `#${name}`);
}

async function list() {
  const wanted = $("search").value.trim();
  const heads = await (wanted ? store.search(wanted) : store.heads());
  $("none-found").hidden = !wanted || heads.length > 0;
  const { conversation } = chat;
  $("list").replaceChildren(...heads.map((head) => {
    const current = head.id === conversation.id;
    const open = button(head.title, { class: "open", "data-id": head.id, "aria-current": current ? "true" : null });
    if (chat.isRunning(head.id)) open.append(make("span", { class: "writes", "aria-label": "is being written" }));
    return make("li", {}, open, button("×", { class: "remove", "data-remove": head.id, "aria-label": `Delete the conversation: ${head.title}`, title: "Delete" }));
  }));
  $("export").hidden = !conversation.turns.length;
  $("unkept").hidden = !store.trouble;
  $("unkept").textContent = store.trouble ? `Conversations are not kept here after this page is closed: ${store.trouble}.` : "";
  document.title = conversation.turns.length ? `${title(conversation)} · paceline` : "paceline";
}

async function remove(id) {
  const gone = await chat.remove(id);
  if (gone === chat.conversation) chat.open(newConversation());
  else list();
  $("new").focus();
  notice("The conversation is deleted.", gone && (async () => { await store.put(gone); chat.open(gone); }));
}

let noticeTimer = 0;
function notice(text, undo = null) {
  clearTimeout(noticeTimer);
  const close = () => { $("notice").hidden = true; };
  const parts = [make("span", {}, text)];
  if (undo) {
    const back = button("Undo", { class: "link" });
    back.addEventListener("click", () => { close(); undo(); });
    parts.push(back);
  }
  const away = button("×", { class: "close", "aria-label": "Close this message" });
  away.addEventListener("click", close);
  $("notice").replaceChildren(...parts, away);
  $("notice").hidden = false;
  noticeTimer = setTimeout(close, 12000);
}

function side(open) {
  document.body.dataset.side = open ? "open" : "closed";
  $("open-side").setAttribute("aria-expanded", String(open));
  const covers = matchMedia("(max-width: 860px)").matches;
  $("side").inert = !open;
  document.querySelector(".talk").inert = open && covers;
  if (open && covers) $("new").focus();
}

function listen() {
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); chat.send(); });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); chat.send(); }
    if (event.key === "ArrowUp" && !$("prompt").value) { event.preventDefault(); chat.editLast(); }
  });
  $("attached").addEventListener("change", async () => { await chat.tray.add([...$("attached").files]); $("attached").value = ""; $("prompt").focus(); });
  $("prompt").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) { event.preventDefault(); chat.tray.add(files); }
  });
  for (const name of ["dragover", "drop"]) {
    $("chat").addEventListener(name, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      if (name === "drop") chat.tray.add([...event.dataTransfer.files]);
    });
  }
  $("model").addEventListener("change", () => { keep("model", $("model").value); look(); });
  $("stop").addEventListener("click", () => { chat.stop(); $("prompt").focus(); });
  let searching = 0;
  $("search").addEventListener("input", () => { clearTimeout(searching); searching = setTimeout(list, 150); });
  $("new").addEventListener("click", () => begin(newConversation()));
  $("list").addEventListener("click", async ({ target }) => {
    const { id, remove: gone } = target.closest("button")?.dataset ?? {};
    if (gone) return remove(gone);
    if (!id) return undefined;
    if (!(await chat.openById(id))) { await store.remove(id); notice("This conversation cannot be read any more: it is taken off the list."); list(); }
    return closeIfCovering();
  });
  $("as-tokens").checked = kept("tokens") === "on";
  const legend = () => { $("legend").hidden = !$("as-tokens").checked; $("prompt-hint").hidden = $("as-tokens").checked; };
  legend();
  $("as-tokens").addEventListener("change", () => { keep("tokens", $("as-tokens").checked ? "on" : ""); legend(); chat.draw(); });
  for (const text of QUESTIONS) {
    const made = button(text, { class: "starter" });
    made.addEventListener("click", () => { chat.setPrompt(text); chat.send(); });
    $("starters").append(made);
  }
  $("export-markdown").addEventListener("click", () => download(fileName("md"), asMarkdown(chat.conversation), "text/markdown"));
  $("export-json").addEventListener("click", () => download(fileName("json"), asJson(chat.conversation, settings.sampling()), "application/json"));
  $("import").addEventListener("change", () => readIn($("import")));
  $("open-side").addEventListener("click", () => side(document.body.dataset.side !== "open"));
  $("close-side").addEventListener("click", () => { side(false); $("open-side").focus(); });
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("close-settings").addEventListener("click", () => $("settings").close());
  $("settings-form").addEventListener("submit", (event) => { event.preventDefault(); $("settings").close(); });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || $("settings").open) return;
    if ($("side").contains(document.activeElement) && matchMedia("(max-width: 860px)").matches) { side(false); $("open-side").focus(); }
    else if (view === "chat") chat.stop();
    else lab.stop();
  });
  for (const name of VIEWS) {
    $(`tab-${name}`).addEventListener("click", () => choose(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const there = VIEWS.filter((other) => !$(`tab-${other}`).hidden);
      if (step) choose(there[(there.indexOf(name) + step + there.length) % there.length], true);
    });
  }
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $(view === "chat" ? "prompt" : "lab-prompt").focus(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  addEventListener("online", look);
  addEventListener("pagehide", () => chat.leave());
}

function begin(conversation) {
  chat.open(conversation);
  closeIfCovering();
  $("prompt").focus();
}

function closeIfCovering() {
  if (matchMedia("(max-width: 860px)").matches) side(false);
}

const fileName = (ending) => `${title(chat.conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation"}.${ending}`;

async function readIn(input) {
  const file = input.files[0];
  input.value = "";
  if (!file) return;
  try {
    const conversation = fromJson(await file.text());
    await store.put(conversation);
    begin(conversation);
  } catch (error) {
    notice(`${file.name}: ${error.message}.`);
  }
}

async function start() {
  startTheme($("theme"));
  listen();
  side(!matchMedia("(max-width: 860px)").matches);
  if (VIEWS.includes(location.hash.slice(1))) choose(location.hash.slice(1));
  await store.open((id) => { chat.changedElsewhere(id); list(); });
  const before = kept("open", "sessionStorage");
  if (!before || !(await chat.openById(before))) chat.open(newConversation());
  for (const id of (kept("running", "sessionStorage") ?? "").split(" ").filter(Boolean)) chat.resume(id);
  document.body.dataset.started = "true";
  if (view === "chat") $("prompt").focus();
  look();
}

start();
