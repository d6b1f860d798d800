/** Saves answers while they are generated; the interval grows so that saving takes at most 5 percent of the time. */

import { readStored, storedKeys, writeStored } from "../shared/storage.js";
import { freshId } from "./tree.js";

const SOON_MS = 400;
const SAVE_SHARE = 20;
const UNSAVED = "nano-inference.unsaved.";

/** Owns the unsaved changes and the timer of their save. Calls `onError(error)` if the browser cannot store them. */
export class Saver {
  constructor(store, onError) {
    this.store = store;
    this.onError = onError;
    this.waiting = new Map();
    this.writes = new Set();
    this.timer = null;
    this.pause = SOON_MS;
    addEventListener("pagehide", () => this.#storeUnsaved());
  }

  /** Save now; after an error the messages stay on the page. */
  async save(conversation, messages = []) {
    const waiting = messages.map((one) => [one.id, this.waiting.get(one.id)]);
    await this.#write([conversation], messages);
    this.#saved(waiting);
  }

  /** Save a message after a short time, together with others that change meanwhile. */
  saveSoon(conversation, message) {
    this.waiting.set(message.id, { conversation, message });
    this.timer ??= setTimeout(() => this.#flush(), this.pause);
  }

  /** Discard a conversation's unsaved messages. */
  forget(conversation) {
    for (const [id, one] of this.waiting) if (one.conversation === conversation) this.waiting.delete(id);
  }

  async #flush() {
    clearTimeout(this.timer);
    this.timer = null;
    const waiting = [...this.waiting];
    if (!waiting.length) return;
    const [startedAt, all] = [performance.now(), waiting.map(([, one]) => one)];
    await this.#write([...new Set(all.map((one) => one.conversation))], all.map((one) => one.message));
    this.#saved(waiting);
    this.pause = Math.max(SOON_MS, SAVE_SHARE * (performance.now() - startedAt));
  }

  /** Remove saved messages from `waiting`, unless they have changed since; until then `pagehide` stores them. */
  #saved(waiting) {
    for (const [id, one] of waiting) if (this.waiting.get(id) === one) this.waiting.delete(id);
  }

  async #write(conversations, messages) {
    const created = conversations.filter((one) => one.saved === undefined).map((one) => one.id);
    const write = { conversations, messages, created };
    for (const one of conversations) one.saved = Date.now();
    this.writes.add(write);
    try {
      await this.store.save(conversations, messages);
    } catch (error) {
      this.onError(error);
    } finally {
      this.writes.delete(write);
    }
  }

  /** Put unsaved changes into localStorage, which is synchronous; a page that closes does not wait for IndexedDB. */
  #storeUnsaved() {
    const waiting = [...this.waiting.values()].map((one) => one.message);
    const writes = [...this.writes];
    const conversations = new Set(writes.flatMap((one) => one.conversations));
    const messages = new Set(writes.flatMap((one) => one.messages).concat(waiting));
    if (!conversations.size && !messages.size) return;
    const created = writes.flatMap((one) => one.created);
    const unsaved = { conversations: [...conversations], messages: [...messages], created };
    writeStored(UNSAVED + freshId(), JSON.stringify(unsaved));
  }

  /** Save what closed pages have put into localStorage. */
  async recover() {
    for (const key of storedKeys(UNSAVED)) {
      const unsaved = JSON.parse(readStored(key) ?? "{}");
      writeStored(key, null);
      await this.store.recover(unsaved).catch(this.onError);
    }
  }
}
