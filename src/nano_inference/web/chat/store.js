/** Conversations kept in this browser (IndexedDB); while the page is open only, which `isKept` tells, without that. */

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

/** Return where conversations are kept: the browser's database, or this page's memory. */
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
    this.isKept = true;
  }

  /** Return all conversations. */
  async conversations() {
    return done(this.#objects("conversations", "readonly").getAll());
  }

  /** Return a conversation's messages. */
  async messages(conversation) {
    return done(this.#objects("messages", "readonly").index("conversation").getAll(conversation));
  }

  /** Write conversations and messages as they are now. Rejects when the browser has no room. */
  async save(conversations, messages = []) {
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    for (const one of conversations) transaction.objectStore("conversations").put(one);
    for (const one of messages) transaction.objectStore("messages").put(one);
    await finished(transaction);
  }

  /** Write a message that a page left behind, unless it is gone, or somebody has written more of it since. */
  async complete(message) {
    const objects = this.#objects("messages", "readwrite");
    const kept = await done(objects.get(message.id));
    if (kept && kept.finish === null && kept.tokens.length <= message.tokens.length) await done(objects.put(message));
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

/** The same in memory. */
class MemoryStore {
  constructor() {
    this.isKept = false;
    this.all = new Map();
    this.texts = new Map();
  }

  async conversations() {
    return [...this.all.values()];
  }

  async messages(conversation) {
    return [...this.texts.values()].filter((one) => one.conversation === conversation);
  }

  async save(conversations, messages = []) {
    for (const one of conversations) this.all.set(one.id, one);
    for (const one of messages) this.texts.set(one.id, one);
  }

  async complete() {
    // nothing outlives the page, so none left anything behind
  }

  async remove(conversation, messages) {
    this.all.delete(conversation.id);
    for (const one of messages) this.texts.delete(one.id);
  }
}
