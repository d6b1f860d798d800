/** Saving while an answer is written: soon, but never so often that it takes more than a few percent of the time. */

const SOON_MS = 400;
const SAVE_SHARE = 20;

/** Owns the timer of the next save. */
export class Saver {
  constructor(store) {
    this.store = store;
    this.waiting = new Map();
    this.timer = null;
    this.pause = SOON_MS;
    addEventListener("pagehide", () => this.#flush());
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
}
