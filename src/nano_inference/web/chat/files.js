/** Conversations as files: JSON to bring back, Markdown to read. */

import { el } from "../shared/dom.js";
import { freshId, shownPath } from "./tree.js";

const FORMAT = "nano-inference-chats";
const ROLES = ["user", "assistant"];

/** Return conversations with their messages as the text of a JSON file. */
export function asJson(entries) {
  return JSON.stringify({ format: FORMAT, version: 1, chats: entries }, null, 1);
}

/** Return what a conversation shows as Markdown. */
export function asMarkdown({ conversation, messages }) {
  const system = conversation.system.trim() ? [`> ${conversation.system.trim().replaceAll("\n", "\n> ")}`] : [];
  const heading = ({ role }) => (role === "user" ? "You" : "Answer");
  const turns = shownPath(conversation, messages).map((one) => `## ${heading(one)}\n\n${one.text}`);
  return `${[`# ${conversation.title}`, ...system, ...turns].join("\n\n")}\n`;
}

/**
 * Return the conversations of a JSON file, under new ids, so that none replaces another. Throws an `Error` that says
 * what is wrong with the file.
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.chats)) throw new Error(`the file has no format "${FORMAT}"`);
  return file.chats.map((chat, index) => renamed(checked(chat, index)));
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
    && (one.parts === null || (Array.isArray(one.parts) && one.parts.every((part) => typeof part?.text === "string")))
    && Array.isArray(one.versions);
}

function isToken(one) {
  return Array.isArray(one) && Number.isInteger(one[0]) && typeof one[1] === "string" && Array.isArray(one[4]);
}

function renamed({ conversation, messages }) {
  const names = new Map(messages.map((one) => [one.id, freshId()]));
  const name = (id) => names.get(id) ?? null;
  const id = freshId();
  const old = Object.entries(conversation.chosen ?? {});
  const chosen = old.map(([key, value]) => [names.get(key) ?? "root", name(value)]);
  return {
    conversation: {
      id, title: conversation.title.slice(0, 200), named: true, system: conversation.system, compared: null,
      created: Number(conversation.created) || Date.now(), updated: Date.now(), chosen: Object.fromEntries(chosen),
    },
    messages: messages.map((one) => ({
      ...one, id: name(one.id), parent: name(one.parent), conversation: id, created: Number(one.created) || 0,
    })),
  };
}

/** Offer a text as a file to keep. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Return a conversation's name as that of a file. */
export function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}
