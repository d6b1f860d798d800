/** Saving while an answer is written: soon, but never so often that it takes more than a few percent of the time. */

import { keptKeys, readKept, writeKept } from "../shared/keep.js";
import { freshId } from "./tree.js";

const SOON_MS = 400;
const SAVE_SHARE = 20;
const UNSAVED = "nano-inference.unsaved.";

/** Owns the timer of the next save, and what it will save. `onLost(error)` is told when the browser keeps nothing. */
export class Saver {
  constructor(store, onLost) {
    this.store = store;
    this.onLost = onLost;
    this.waiting = new Map();
    this.timer = null;
    this.pause = SOON_MS;
    addEventListener("pagehide", () => this.#leave());
  }

  /** Save now. What cannot be kept is told of, and stays on the page. */
  async save(conversation, messages = []) {
    const waiting = messages.map((one) => [one.id, this.waiting.get(one.id)]);
    await this.#write([conversation], messages);
    this.#saved(waiting);
  }

  /** Save a message that has grown a little later, with others that grow meanwhile. */
  saveSoon(conversation, message) {
    this.waiting.set(message.id, { conversation, message });
    this.timer ??= setTimeout(() => this.#flush(), this.pause);
  }

  /** Do not save what waits of a conversation. */
  forget(conversation) {
    for (const [id, one] of this.waiting) if (one.conversation === conversation) this.waiting.delete(id);
  }

  async #flush() {
    clearTimeout(this.timer);
    this.timer = null;
    const waiting = [...this.waiting];
    if (!waiting.length) return;
    const [began, all] = [performance.now(), waiting.map(([, one]) => one)];
    await this.#write([...new Set(all.map((one) => one.conversation))], all.map((one) => one.message));
    this.#saved(waiting);
    this.pause = Math.max(SOON_MS, SAVE_SHARE * (performance.now() - began));
  }

  /** What was written waits no longer, unless it has grown since; until then a page that goes takes it along. */
  #saved(waiting) {
    for (const [id, one] of waiting) if (this.waiting.get(id) === one) this.waiting.delete(id);
  }

  async #write(conversations, messages) {
    try {
      await this.store.save(conversations, messages);
    } catch (error) {
      this.onLost(error);
    }
  }

  /** Leave what is not saved where it can be left at once: a database is not waited for when a page goes. */
  #leave() {
    const messages = [...this.waiting.values()].map((one) => one.message);
    if (messages.length) writeKept(UNSAVED + freshId(), JSON.stringify(messages));
  }

  /** Save what pages left behind when they went. */
  async recover() {
    for (const key of keptKeys(UNSAVED)) {
      const left = JSON.parse(readKept(key) ?? "[]");
      writeKept(key, null);
      for (const message of left) await this.store.complete(message).catch(this.onLost);
    }
  }
}
