// The conversation that is open: asks, stops, edits, keeps. `running` answers go on while another one is looked at.

import { withTexts } from "./attached.js";
import { copy, keep, kept, make } from "./dom.js";
import { ask, askAgain, countTokens, endStream, newStreamId, ServerError } from "./stream.js";
import { AnswerView, editor, userTurn } from "./thread.js";
import { firstThatFits, messages, newAnswer, newConversation, startOf, surelyFits, withOthers } from "./turns.js";

const ALTERNATIVES = 5; // tokens that are asked for in the place of each, where tokens are shown
const DRAW = 60, SAVE = 3000; // ms from one time to the next while an answer is written

export class Chat {
  #parts; #on; #store; #settings; #running = new Map(); #view = null; #editing = -1; #trays = new Map(); #leaving = false;
  conversation = newConversation();
  model = null; // the server's card of it
  tray = null; // pictures and sound of the next message

  /** `parts`: {thread, turns, empty, system, systemText, prompt, send, stop, tip, told}. `on`: {changed, race, offer, server, say, asTokens} */
  constructor(parts, on, store, settings) {
    this.#parts = parts;
    this.#on = on;
    this.#store = store;
    this.#settings = settings;
    parts.thread.addEventListener("click", (event) => this.#act(event));
    parts.systemText.addEventListener("input", () => { this.conversation.system = parts.systemText.value; });
    parts.systemText.addEventListener("change", () => this.#save(this.conversation));
    parts.prompt.addEventListener("input", () => { this.#fitPrompt(); this.#keepDraft(); });
  }

  get busy() { return this.#running.has(this.conversation); }
  isRunning(id) { return [...this.#running.keys()].some((one) => one.id === id); }

  async openById(id) {
    const found = [...this.#running.keys()].find((one) => one.id === id) ?? (await this.#store.get(id));
    this.open(found ?? newConversation());
    return Boolean(found);
  }

  open(conversation) {
    if (this.tray) this.#trays.set(this.conversation.id, [this.tray.media, this.tray.texts]);
    this.conversation = conversation;
    this.#editing = -1;
    keep("open", conversation.turns.length ? conversation.id : "", "sessionStorage");
    this.#parts.systemText.value = conversation.system;
    this.#parts.system.open = false;
    this.#parts.prompt.value = kept(this.#draftName(), "sessionStorage") ?? "";
    this.tray?.set(...(this.#trays.get(conversation.id) ?? [[], []]));
    this.#fitPrompt();
    this.draw();
    this.#parts.thread.scrollTop = this.#parts.thread.scrollHeight;
    this.#on.changed();
  }

  draw() {
    const { turns, first } = this.conversation;
    const { busy } = this;
    const drawn = turns.flatMap((turn, i) => {
      const cut = i === first && first > 0 ? [make("p", { class: "cut", role: "note" }, `The context of ${this.model?.max_model_len ?? ""} tokens is full: the model no longer sees what is above.`)] : [];
      if (i === this.#editing) return [...cut, editor(turn, i, (text) => this.#edited(i, text))];
      if (turn.role === "user") return [...cut, userTurn(turn, i, busy)];
      const view = new AnswerView(turn, i, this.#how(i));
      if (busy && i === turns.length - 1) this.#view = view;
      return [...cut, view.element];
    });
    const near = this.#nearEnd();
    this.#parts.turns.replaceChildren(...drawn);
    this.#parts.empty.hidden = turns.length > 0;
    this.#parts.send.hidden = busy;
    this.#parts.stop.hidden = !busy;
    if (near) this.#toEnd();
  }

  /** The text of the prompt as the next message. It stays there if the server cannot take it now. */
  async send() {
    const text = this.#parts.prompt.value;
    if (!(text.trim() || this.tray?.media?.length || this.tray?.texts.length) || this.busy) return undefined;
    if (this.tray?.reading) return this.#on.say(`${this.tray.reading} is still being read. Send your message once it is there.`);
    const { conversation } = this;
    const state = await this.#on.server();
    if (state !== "ready") {
      this.#on.say(state === "lost" ? "The server cannot be reached. Your text is kept: send it again once the server is back." : `The server is ${state}. Your text is kept: send it once the server is ready.`);
      return undefined;
    }
    if (conversation !== this.conversation || this.busy) return undefined;
    keep(this.#draftName(), "", "sessionStorage");
    this.#parts.prompt.value = "";
    this.#fitPrompt();
    const { media = [], texts = [] } = this.tray ?? {};
    this.tray?.set([], []);
    conversation.turns.push({ role: "user", content: withTexts(text, texts), ...(media.length ? { media } : {}) });
    return this.#answer(conversation);
  }

  stop(conversation = this.conversation) { this.#running.get(conversation)?.abort(); }

  /** Stop, and wait until nothing more is written into it. */
  async #ended(conversation) {
    this.stop(conversation);
    while (this.#running.has(conversation)) await new Promise((resolve) => setTimeout(resolve, 10));
  }

  /** Take a conversation away; resolves with it, null if it was not there. */
  async remove(id) {
    const found = [this.conversation, ...this.#running.keys()].find((one) => one.id === id) ?? (await this.#store.get(id));
    if (found) await this.#ended(found); // else its answer would be kept, and the conversation with it
    await this.#store.remove(id);
    return found;
  }

  editLast() {
    const at = this.conversation.turns.findLastIndex((turn) => turn.role === "user");
    if (at >= 0 && !this.busy) this.#edit(at);
  }

  async #answer(conversation, goesOn = null) {
    const turn = goesOn ?? newAnswer(this.model.id);
    Object.assign(turn, { finish: "", error: "", report: null, note: "", stream: startOf(turn, newStreamId()) });
    if (!goesOn) conversation.turns.push(turn);
    await this.#run(conversation, turn, (signal) => this.#asked(conversation, turn, signal));
  }

  /** Go on with an answer that this tab was reading when it was loaded again. Without the server's help it stays interrupted. */
  async resume(id) {
    const conversation = id === this.conversation.id ? this.conversation : await this.#store.get(id);
    const turn = conversation?.turns.at(-1);
    if (!turn?.stream || this.#running.has(conversation)) return;
    const written = kept(`written ${id}`, "sessionStorage") ?? "";
    keep(`written ${id}`, "", "sessionStorage");
    if (written.length > turn.content.length) Object.assign(turn, { content: written, steps: [] });
    turn.finish = "";
    await this.#run(conversation, turn, (signal) => askAgain(turn.stream.id, signal));
  }

  /** The page is going away: what is being written is kept as it is, and is no failure. */
  leave() {
    this.#leaving = true;
    for (const { id, turns } of this.#running.keys()) keep(`written ${id}`, turns.at(-1).content, "sessionStorage"); // the store is too slow
  }

  async #run(conversation, turn, chunks) {
    const controller = new AbortController();
    this.#running.set(conversation, controller);
    this.#keepRunning();
    keep("open", this.conversation.id, "sessionStorage");
    this.draw();
    this.#toEnd();
    this.#on.changed();
    await this.#save(conversation); // so that even a page that dies now has the question
    const error = await this.#read(conversation, turn, chunks(controller.signal)).catch((failure) => failure);
    if (this.#leaving) return;
    if (error) this.#failed(turn, error);
    delete turn.stream;
    this.#running.delete(conversation);
    this.#keepRunning();
    if (conversation === this.conversation) {
      this.draw();
      this.#parts.told.textContent = turn.error ? "" : turn.finish === "stopped" ? "Stopped." : "The answer is complete.";
    }
    await this.#save(conversation);
    this.#on.changed();
  }

  #failed(turn, error) {
    if (error.name === "AbortError") {
      turn.finish = "stopped";
      endStream(turn.stream.id);
    } else if (error.code === "no_stream") turn.finish = "interrupted";
    else Object.assign(turn, { finish: "error", error: sentence(error) });
    if (!(error instanceof ServerError) && error.name !== "AbortError") console.error(error);
    if (error.lost) this.#on.server();
  }

  /** The chunks of an answer that is asked for now. */
  async* #asked(conversation, turn, signal) {
    const asked = this.#settings.request();
    const about = { ...conversation, turns: turn.content ? conversation.turns : conversation.turns.slice(0, -1) };
    const first = await this.#fit(about, asked, signal);
    if (first !== conversation.first) {
      conversation.first = first;
      if (conversation === this.conversation) this.draw();
    }
    turn.stream.begun = Date.now();
    const body = { model: this.model.id, ...asked, messages: messages(about, first), speculation: { ...asked.speculation, trace: true },
      ...(this.#on.asTokens() ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}) };
    yield* ask(body, signal, turn.stream.id);
  }

  async #read(conversation, turn, chunks) {
    const { stream } = turn;
    let begun = false, drawn = 0, saved = performance.now(), pause = DRAW, ended = "stop";
    for await (const chunk of chunks) {
      if (!begun) { // what was stored of it comes again
        begun = true;
        Object.assign(turn, { content: stream.content, thoughts: stream.thoughts, steps: stream.steps <= turn.steps.length ? turn.steps.slice(0, stream.steps) : [] });
      }
      const choice = chunk.choices[0];
      turn.content += choice?.delta?.content ?? "";
      turn.thoughts += choice?.delta?.reasoning_content ?? "";
      if (chunk.paceline) turn.steps.push(withOthers(chunk.paceline, choice?.logprobs?.content));
      if (chunk.usage) turn.used = chunk.usage.total_tokens;
      if (chunk.warnings) turn.note = chunk.warnings.join("; ");
      turn.seconds = stream.seconds + (Date.now() - stream.begun) / 1000;
      if (chunk.speculation) turn.report = { ...chunk.speculation, seconds: stream.seconds + chunk.speculation.seconds };
      const now = performance.now();
      if (now - drawn > pause && conversation === this.conversation) {
        this.#grow();
        drawn = performance.now();
        pause = Math.max(DRAW, 5 * (drawn - now)); // a long text is drawn less often
      }
      if (now - saved > SAVE) { saved = now; this.#save(conversation); }
      ended = choice?.finish_reason ?? ended;
    }
    turn.finish = ended;
  }

  async #fit(conversation, asked, signal) {
    const context = this.model.max_model_len;
    if (!context) return conversation.first; // a model that is loaded with its first request
    if (conversation.first === 0 && surelyFits(messages(conversation), context, asked.max_tokens)) return 0;
    const options = { model: this.model.id, chat_template_kwargs: asked.chat_template_kwargs };
    return firstThatFits(conversation, context, asked.max_tokens, (first) =>
      countTokens({ ...options, messages: messages(conversation, first) }, signal));
  }

  #grow() {
    const near = this.#nearEnd();
    this.#view?.draw();
    if (near) this.#toEnd();
  }

  #act(event) {
    const from = event.target.closest("[data-act]");
    if (!from) return;
    const index = Number(from.closest("[data-index]")?.dataset.index);
    const turn = this.conversation.turns[index];
    if (from.dataset.act === "copy-code") copy(from.closest(".code").querySelector("code").textContent, from);
    else if (!turn) return;
    else if (from.dataset.act === "copy") copy(turn.content, from);
    else if (this.busy) return;
    else if (from.dataset.act === "edit") this.#edit(index);
    else if (from.dataset.act === "again") this.#again(index);
    else if (from.dataset.act === "continue") this.#answer(this.conversation, turn);
    else if (from.dataset.act === "race") this.#race(index);
  }

  /** What this answer was asked, as the model saw it. */
  #race(index) {
    const { conversation } = this;
    this.#on.race(messages({ ...conversation, turns: conversation.turns.slice(0, index) }, conversation.first));
  }

  #again(index) {
    this.#cutAt(index, "The answer is written again.");
    this.#answer(this.conversation);
  }

  #edit(index) {
    this.#editing = index;
    this.draw();
  }

  #edited(index, text) {
    const turn = this.conversation.turns[index];
    this.#editing = -1;
    if (text === null || (text === turn.content && turn.role === "assistant")) {
      this.draw();
      this.#parts.turns.querySelector(`[data-index="${index}"] [data-act="edit"]`)?.focus();
    } else if (turn.role === "user") {
      this.#cutAt(index, "The conversation goes on from the edited message.");
      this.conversation.turns.push({ ...turn, content: text });
      this.#parts.prompt.focus();
      this.#answer(this.conversation);
    } else {
      Object.assign(turn, { content: text, steps: [], report: null, finish: "stop", error: "", note: "edited" });
      this.draw();
      this.#save(this.conversation);
    }
  }

  /** Take the turns from `index` on away, which can be undone. */
  #cutAt(index, said) {
    const { conversation } = this;
    const before = structuredClone({ turns: conversation.turns, first: conversation.first });
    conversation.turns = conversation.turns.slice(0, index);
    if (conversation.first >= index) conversation.first = 0;
    this.#on.offer(said, async () => {
      await this.#ended(conversation);
      Object.assign(conversation, before);
      if (conversation === this.conversation) this.draw();
      await this.#save(conversation);
    });
  }

  async #save(conversation) {
    if (!conversation.turns.length) return;
    const { id } = conversation;
    await this.#store.put(conversation, !this.#running.has(conversation));
    if (conversation === this.conversation && conversation.id !== id) {
      keep("open", conversation.id, "sessionStorage");
      this.#on.say("Another tab has changed this conversation: this one is kept beside it.");
    }
    this.#on.changed();
  }

  /** Another tab has changed a conversation. */
  async changedElsewhere(id) {
    if (id !== this.conversation.id || this.busy || this.#editing >= 0) return;
    const found = await this.#store.get(id);
    if (found && id === this.conversation.id && !this.busy) this.open(found);
  }

  #how(index) {
    return {
      asTokens: this.#on.asTokens(), busy: this.busy, last: index === this.conversation.turns.length - 1,
      context: this.model?.max_model_len ?? Infinity, tip: this.#parts.tip, told: this.#parts.told,
    };
  }

  #draftName() { return `draft ${this.conversation.turns.length ? this.conversation.id : "new"}`; }
  #keepRunning() { keep("running", [...this.#running.keys()].map((one) => one.id).join(" "), "sessionStorage"); }
  #keepDraft() { keep(this.#draftName(), this.#parts.prompt.value, "sessionStorage"); }

  setPrompt(text) {
    this.#parts.prompt.value = text;
    this.#fitPrompt();
    this.#keepDraft();
    this.#parts.prompt.focus();
  }

  #fitPrompt() {
    const { prompt } = this.#parts;
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  #nearEnd() {
    const { thread } = this.#parts;
    return thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
  }

  #toEnd() { this.#parts.thread.scrollTop = this.#parts.thread.scrollHeight; }
}

/** An error as a sentence of its own. */
function sentence(error) {
  const text = error.message || String(error);
  return `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}
