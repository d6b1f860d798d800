/**
 * Conversations as trees: each message except the first has a parent, editing and regenerating add siblings, and
 * `chosen` maps a parent to the shown child. Only `choose` changes its arguments.
 *
 * A conversation: {id, title, named, created, updated, system, chosen: {parent: child}}; `saved`: when it was last
 * written into the database.
 * A message: {id, conversation, parent, role, text, parts, tokens, versions, stats, seed, sample, finish, error,
 * created}. A token is [id, text, logprob, forced, alternatives], an alternative [id, text, logprob].
 * `finish`: null while the answer is generated, then "stop", "length" (max_tokens), "context" (full), "stopped",
 * "repetition", "interrupted", "abort" or "error".
 */

const ROOT = "root";

/** Return a random id; `crypto.randomUUID` is not available over plain HTTP. */
export function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Return an empty conversation. */
export function newConversation(system = "") {
  const now = Date.now();
  return { id: freshId(), title: "New chat", named: false, created: now, updated: now, system, chosen: {} };
}

/** Return a new message with a parent's id (null for a first message). */
export function newMessage(conversation, parent, role, text = "") {
  return {
    id: freshId(), conversation: conversation.id, parent, role, text, parts: null, tokens: [], versions: [],
    stats: null, seed: null, sample: null, finish: role === "user" ? "stop" : null, error: null, created: Date.now(),
  };
}

function oldestFirst(a, b) {
  return a.created - b.created || (a.id < b.id ? -1 : 1);
}

/** Return the children of a message (null: the first messages), oldest first. */
export function childrenOf(messages, parent) {
  return messages.filter((one) => one.parent === parent).sort(oldestFirst);
}

/** Return all versions of a message, including itself. */
export function siblingsOf(messages, message) {
  return childrenOf(messages, message.parent).filter((one) => one.role === message.role);
}

/** Make a message the shown version among its siblings. */
export function choose(conversation, message) {
  conversation.chosen[message.parent ?? ROOT] = message.id;
}

/** Return the shown messages, first to last. */
export function shownPath(conversation, messages) {
  const path = [];
  const byParent = groupByParent(messages);
  for (let parent = null; byParent.has(parent);) {
    const children = byParent.get(parent);
    const next = children.find((one) => one.id === conversation.chosen[parent ?? ROOT]) ?? children.at(-1);
    path.push(next);
    parent = next.id;
  }
  return path;
}

/** Return messages by their parent, oldest first. A message without its parent counts as a first message. */
function groupByParent(messages) {
  const ids = new Set(messages.map((one) => one.id));
  const groups = new Map();
  for (const one of [...messages].sort(oldestFirst)) {
    const parent = ids.has(one.parent) ? one.parent : null;
    if (!groups.has(parent)) groups.set(parent, []);
    groups.get(parent).push(one);
  }
  return groups;
}

/** Return the messages from the first to `message`, inclusive. */
export function pathTo(messages, message) {
  const byId = new Map(messages.map((one) => [one.id, one]));
  const path = [];
  for (let one = message; one; one = byId.get(one.parent)) path.unshift(one);
  return path;
}

/** Return a conversation's title from its first line. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 100 ? `${line.slice(0, 99)}…` : line || "New chat";
}

/** Return the messages of a request. The parts of an answer contain the calculator's calls unchanged. */
export function asRequest(system, path) {
  const turns = path.map(({ role, text, parts }) => (parts ? { role, content: text, parts } : { role, content: text }));
  return system.trim() ? [{ role: "system", content: system }, ...turns] : turns;
}
