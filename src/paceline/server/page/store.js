// Conversations in IndexedDB. Where the browser has none, or it is broken, they last as long as the page, and it says so.

import { checked, newId, title } from "./turns.js";

const HEADS = "heads", WHOLE = "conversations";
const PATIENCE = 4000; // ms until a store that does not answer counts as broken

export class Store {
  #db = null; #memory = new Map(); #channel = null;
  trouble = ""; // why nothing is kept, if so

  /** `changed(id)` is called when another tab has changed a conversation. */
  async open(changed = () => {}) {
    try {
      this.#db = await opened();
      this.#db.onclose = () => this.#lost("the browser closed its store");
      this.#db.onversionchange = () => this.#db.close();
      this.#channel = new BroadcastChannel("paceline");
      this.#channel.onmessage = ({ data }) => { this.#memory.delete(data); changed(data); };
    } catch (error) {
      this.#lost(error?.message || "the browser refuses its store");
    }
  }

  /** {id, title, updated} of all conversations, the newest first. */
  async heads() {
    const found = new Map();
    for (const head of await this.#ask(HEADS, (heads) => heads.getAll(), [])) {
      if (typeof head?.id === "string" && typeof head.title === "string") found.set(head.id, { ...head, updated: Number(head.updated) || 0 });
    }
    for (const one of this.#memory.values()) found.set(one.id, headOf(one));
    return [...found.values()].sort((a, b) => b.updated - a.updated);
  }

  /** The heads of conversations in which all the words stand, in whatever case. */
  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = (await this.#ask(WHOLE, (whole) => whole.getAll(), [])).map(checked).filter((one) => one && !this.#memory.has(one.id));
    const said = ({ system, turns }) => [system, ...turns.map((turn) => turn.content)].join("\n").toLowerCase();
    return [...kept, ...this.#memory.values()].filter((one) => { const all = said(one); return words.every((word) => all.includes(word)); })
      .map(headOf).sort((a, b) => b.updated - a.updated);
  }

  /** A conversation, null if it is not there or cannot be read. */
  async get(id) {
    return this.#memory.get(id) ?? checked(await this.#ask(WHOLE, (whole) => whole.get(id), null));
  }

  /**
   * Keep it. If another tab has changed it meanwhile, this one becomes a conversation of its own, and nothing is lost.
   * `tell`: other tabs, which is not done while an answer is written.
   */
  async put(conversation, tell = true) {
    conversation.updated = Date.now();
    this.#memory.set(conversation.id, conversation);
    await this.#guard(async (db) => {
      const change = db.transaction([HEADS, WHOLE], "readwrite");
      const before = await answered(change.objectStore(WHOLE).get(conversation.id));
      if (before && before.revision !== conversation.revision) {
        this.#memory.delete(conversation.id);
        conversation.id = newId();
        this.#memory.set(conversation.id, conversation);
      }
      conversation.revision += 1;
      change.objectStore(WHOLE).put(conversation);
      change.objectStore(HEADS).put(headOf(conversation));
      await finished(change);
      this.#memory.delete(conversation.id);
    });
    if (tell) this.#channel?.postMessage(conversation.id);
  }

  async remove(id) {
    this.#memory.delete(id);
    await this.#guard(async (db) => {
      const change = db.transaction([HEADS, WHOLE], "readwrite");
      change.objectStore(HEADS).delete(id);
      change.objectStore(WHOLE).delete(id);
      await finished(change);
    });
    this.#channel?.postMessage(id);
  }

  async #ask(name, question, otherwise) {
    return (await this.#guard((db) => answered(question(db.transaction(name).objectStore(name))))) ?? otherwise;
  }

  async #guard(work) {
    if (!this.#db) return undefined;
    try {
      return await work(this.#db);
    } catch (error) {
      this.trouble = error?.message || "the browser's store has failed";
      return undefined;
    }
  }

  #lost(why) {
    this.#db = null;
    this.trouble = why;
  }
}

const headOf = (conversation) => ({ id: conversation.id, title: title(conversation), updated: conversation.updated });

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("paceline", 1);
    asked.onupgradeneeded = () => { for (const name of [HEADS, WHOLE]) asked.result.createObjectStore(name, { keyPath: "id" }); };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
    setTimeout(() => reject(new Error("the browser's store does not answer")), PATIENCE);
  });
}

const answered = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const finished = (change) => new Promise((resolve, reject) => {
  change.oncomplete = resolve;
  change.onabort = change.onerror = () => reject(change.error);
});
