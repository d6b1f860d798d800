/** Conversations kept in this browser (IndexedDB); in memory only, which `isKept` tells, where that is not allowed. */

const DATABASE = "nano-inference";

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
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

/** Owns the database. */
export class Store {
  constructor(database) {
    this.database = database;
  }

  /** Open it. */
  static async open() {
    try {
      return new Store(await openDatabase());
    } catch {
      return new Store(null);
    }
  }

  /** Whether what is saved outlives the page. */
  get isKept() {
    return this.database !== null;
  }

  /** Return all conversations. */
  async conversations() {
    return this.database ? done(this.#objects("conversations", "readonly").getAll()) : [];
  }

  /** Return a conversation's messages. */
  async messages(conversation) {
    if (!this.database) return [];
    return done(this.#objects("messages", "readonly").index("conversation").getAll(conversation));
  }

  /** Write conversations and messages as they are now. */
  async save(conversations, messages = []) {
    if (!this.database) return;
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    for (const one of conversations) transaction.objectStore("conversations").put(one);
    for (const one of messages) transaction.objectStore("messages").put(one);
    await finished(transaction);
  }

  /** Delete a conversation and its messages. */
  async remove(conversation, messages) {
    if (!this.database) return;
    const transaction = this.database.transaction(["conversations", "messages"], "readwrite");
    transaction.objectStore("conversations").delete(conversation.id);
    for (const one of messages) transaction.objectStore("messages").delete(one.id);
    await finished(transaction);
  }

  #objects(name, mode) {
    return this.database.transaction(name, mode).objectStore(name);
  }
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}
