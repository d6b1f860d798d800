/** Stores conversations in this browser's IndexedDB, or in memory if that is not available (`isPersistent`). */

const DATABASE = "nano-inference";

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  return done(request);
}

/** Return the browser's database, or a store in memory. */
export async function openStore() {
  try {
    return new Store(await openDatabase());
  } catch {
    return new MemoryStore();
  }
}

/** Owns the database. */
class Store {
  constructor(database) {
    this.database = database;
    this.isPersistent = true;
  }

  /** Return all conversations. */
  async conversations() {
    return done(this.#objects("conversations", "readonly").getAll());
  }

  /** Return a conversation's messages. */
  async messages(conversation) {
    return done(this.#objects("messages", "readonly").index("conversation").getAll(conversation));
  }

  /** Write conversations and messages. Rejects if the browser has no space. */
  async save(conversations, messages = []) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    for (const one of conversations) transaction.objectStore("conversations").put(one);
    for (const one of messages) transaction.objectStore("messages").put(one);
    await finished(transaction);
  }

  /**
   * Write what a closed page had not stored, unless it was deleted or the database has something newer. `created`: ids
   * of conversations that had never been stored.
   */
  async recover({ conversations = [], messages = [], created = [] }) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    const [stored, storedMessages] = [transaction.objectStore("conversations"), transaction.objectStore("messages")];
    for (const one of conversations) {
      const old = await done(stored.get(one.id));
      if (old ? (old.saved ?? 0) <= one.saved : created.includes(one.id)) stored.put(one);
    }
    for (const one of messages) {
      const isDeleted = await done(stored.getKey(one.conversation)) === undefined;
      const old = await done(storedMessages.get(one.id)) ?? { finish: null, tokens: [] };
      if (!isDeleted && old.finish === null && old.tokens.length <= one.tokens.length) storedMessages.put(one);
    }
    await finished(transaction);
  }

  /** Delete a conversation and its messages. */
  async remove(conversation, messages) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    transaction.objectStore("conversations").delete(conversation.id);
    for (const one of messages) transaction.objectStore("messages").delete(one.id);
    await finished(transaction);
  }

  #objects(name, mode) {
    return this.database.transaction(name, mode).objectStore(name);
  }
}

/** The same interface, in memory. */
class MemoryStore {
  constructor() {
    this.isPersistent = false;
    this.conversationById = new Map();
    this.messageById = new Map();
  }

  async conversations() {
    return [...this.conversationById.values()];
  }

  async messages(conversation) {
    return [...this.messageById.values()].filter((one) => one.conversation === conversation);
  }

  async save(conversations, messages = []) {
    for (const one of conversations) this.conversationById.set(one.id, one);
    for (const one of messages) this.messageById.set(one.id, one);
  }

  async recover() {
    // nothing in memory outlives the page
  }

  async remove(conversation, messages) {
    this.conversationById.delete(conversation.id);
    for (const one of messages) this.messageById.delete(one.id);
  }
}
