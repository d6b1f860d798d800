/** Saving while an answer is written: soon, but never so often that it takes more than a few percent of the time. */

const SOON_MS = 400;
const SAVE_SHARE = 20;
const UNSAVED_KEY = "nano-inference.unsaved";

/** Owns the timer of the next save, and what it will save. */
export class Saver {
  constructor(store) {
    this.store = store;
    this.waiting = new Map();
    this.timer = null;
    this.pause = SOON_MS;
    addEventListener("pagehide", () => this.#leave());
  }

  /** Save now. */
  async save(conversation, messages = []) {
    for (const one of messages) this.waiting.delete(one.id);
    await this.store.save([conversation], messages);
  }

  /** Save a message that has grown a little later, with others that grow meanwhile. */
  saveSoon(conversation, message) {
    this.waiting.set(message.id, { conversation, message });
    this.timer ??= setTimeout(() => this.#flush(), this.pause);
  }

  async #flush() {
    clearTimeout(this.timer);
    this.timer = null;
    const waiting = [...this.waiting.values()];
    this.waiting.clear();
    if (!waiting.length) return;
    const began = performance.now();
    await this.store.save([...new Set(waiting.map((one) => one.conversation))], waiting.map((one) => one.message));
    this.pause = Math.max(SOON_MS, SAVE_SHARE * (performance.now() - began));
  }

  /** Leave what is not saved where it can be left at once: a database is not waited for when a page goes. */
  #leave() {
    const messages = [...this.waiting.values()].map((one) => one.message);
    if (!messages.length) return;
    try {
      localStorage.setItem(UNSAVED_KEY, JSON.stringify(messages));
    } catch {
      // no room for it: what the database has is all that there is
    }
  }

  /** Save what a page left behind when it went. */
  async recover() {
    const left = localStorage.getItem(UNSAVED_KEY);
    if (left === null) return;
    await this.store.save([], JSON.parse(left));
    localStorage.removeItem(UNSAVED_KEY);
  }
}
