/** Export and import of conversations: JSON, which can be imported, and Markdown. */

import { el } from "../shared/dom.js";
import { freshId, shownPath } from "./tree.js";

const FORMAT = "nano-inference-chats";
const ROLES = ["user", "assistant"];
const PARTS = ["text", "python", "python_output"];
const FINISHES = ["stop", "length", "context", "stopped", "repetition", "interrupted", "error", "abort"];
const FIGURES = ["tokens", "first", "speed", "prompt", "cached"];

/** Return conversations with their messages as the text of a JSON file. */
export function asJson(entries) {
  return JSON.stringify({ format: FORMAT, version: 1, chats: entries }, null, 1);
}

/** Return the shown messages of a conversation as Markdown. */
export function asMarkdown({ conversation, messages }) {
  const system = conversation.system.trim() ? [`> ${conversation.system.trim().replaceAll("\n", "\n> ")}`] : [];
  const heading = ({ role }) => (role === "user" ? "You" : "Answer");
  const turns = shownPath(conversation, messages).map((one) => `## ${heading(one)}\n\n${one.text}`);
  return `${[`# ${conversation.title}`, ...system, ...turns].join("\n\n")}\n`;
}

/**
 * Return the conversations of a JSON file, with new ids, so that they replace no others. Throws an `Error` naming what
 * is wrong with the file.
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new Error(`the file has no format "${FORMAT}"`);
  return file.chats.map((chat, index) => withNewIds(checked(chat, index)));
}

function checked(chat, index) {
  const { conversation, messages } = chat ?? {};
  const isGood = typeof conversation?.title === "string" && typeof conversation.system === "string"
    && Array.isArray(messages) && messages.every(isMessage);
  if (!isGood) throw new Error(`chats[${index}] is not a conversation with messages`);
  return { conversation, messages };
}

function isMessage(one) {
  return typeof one?.id === "string" && ROLES.includes(one.role) && typeof one.text === "string"
    && (one.parent === null || typeof one.parent === "string") && Array.isArray(one.tokens) && one.tokens.every(isToken)
    && (one.parts === null || (Array.isArray(one.parts) && one.parts.every(isPart)))
    && Array.isArray(one.versions) && one.versions.every(isSpan);
}

function isPart(part) {
  return PARTS.includes(part?.type) && typeof part.text === "string";
}

function isSpan(span) {
  return typeof span?.version === "string" && Number.isInteger(span.start) && Number.isInteger(span.end);
}

function isToken(one) {
  return Array.isArray(one) && isChoice(one) && Array.isArray(one[4]) && one[4].every(isChoice);
}

/** Return true for a token's id, text and log-probability (null if unknown). */
function isChoice(one) {
  return Array.isArray(one) && Number.isInteger(one[0]) && typeof one[1] === "string"
    && (one[2] === null || Number.isFinite(one[2]));
}

function numberOr(value, other) {
  return Number.isFinite(value) ? value : other;
}

/** Return a file's message with only the checked fields. */
function cleaned(one) {
  const { text, role, parts, tokens, versions, stats, sample, error } = one;
  const isSample = Number.isInteger(sample?.index) && Number.isInteger(sample.of);
  const figures = stats && Object.fromEntries(FIGURES.map((name) => [name, numberOr(stats[name], null)]));
  return {
    text, role, parts, tokens, versions,
    stats: figures || null,
    seed: numberOr(one.seed, null),
    sample: isSample ? { index: sample.index, of: sample.of } : null,
    finish: FINISHES.includes(one.finish) ? one.finish : "interrupted",
    error: typeof error === "string" ? error : null,
    created: numberOr(one.created, 0),
  };
}

/** Return a conversation and its messages with new ids. */
function withNewIds({ conversation, messages }) {
  const ids = new Map(messages.map((one) => [one.id, freshId()]));
  const id = freshId();
  const old = Object.entries(conversation.chosen ?? {});
  const chosen = old.map(([key, value]) => [ids.get(key) ?? "root", ids.get(value) ?? null]);
  return {
    conversation: {
      id, title: conversation.title.slice(0, 200), named: true, system: conversation.system, compared: null,
      created: numberOr(conversation.created, Date.now()), updated: Date.now(), chosen: Object.fromEntries(chosen),
    },
    messages: messages.map((one) => (
      { ...cleaned(one), id: ids.get(one.id), parent: ids.get(one.parent) ?? null, conversation: id })),
  };
}

/** Download a text as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Return a conversation's title as a file name, without suffix. */
export function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}
