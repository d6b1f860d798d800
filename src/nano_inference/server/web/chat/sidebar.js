/** The list of conversations: open, search, rename, delete. */

import { byId, el } from "../shared/dom.js";
import { iconButton } from "./icons.js";

const SEARCH_MS = 120;
const DAY_MS = 86400000;

/** Return the heading for a conversation's last change, such as "Yesterday". */
function groupOf(time) {
  const days = Math.ceil((new Date().setHours(0, 0, 0, 0) - time) / DAY_MS);
  if (days < 1) return "Today";
  if (days < 2) return "Yesterday";
  if (days < 8) return "Previous 7 days";
  if (days < 31) return "Previous 30 days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

/** Owns the list. `actions`: open, rename, remove, textOf (returns a promise of a conversation's text). */
export class Sidebar {
  constructor(chat, actions) {
    this.chat = chat;
    this.actions = actions;
    this.timer = null;
    this.texts = new Map();
    this.rows = new Map();
    this.headings = new Map();
    byId("search").addEventListener("input", () => this.#searchSoon());
    byId("search").addEventListener("keydown", (event) => this.#onKey(event));
  }

  #searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.show(), SEARCH_MS);
  }

  /** End the search on Escape, without further effects of the key. */
  #onKey(event) {
    if (event.key !== "Escape" || !byId("search").value) return;
    event.preventDefault();
    event.stopPropagation();
    byId("search").value = "";
    this.show();
  }

  /** Show the conversations that match the search, all of them without one. */
  async show() {
    if (byId("chats").querySelector("input")) return; // a conversation is being renamed; its end calls `show`
    const wanted = byId("search").value.trim().toLowerCase();
    const all = this.chat.conversations;
    const found = wanted ? await this.#found(wanted, all) : all;
    if (wanted !== byId("search").value.trim().toLowerCase()) return;
    arrange(byId("chats"), this.#grouped(found));
    byId("no-chats").hidden = found.length > 0;
    byId("no-chats").textContent = wanted ? "Nothing found." : "No conversations yet.";
  }

  /** Return the conversations' rows, newest first, with a heading before each group. */
  #grouped(conversations) {
    const latestFirst = conversations.toSorted((a, b) => b.updated - a.updated);
    const groups = Map.groupBy(latestFirst, (one) => groupOf(one.updated));
    return [...groups].flatMap(([name, group]) => {
      if (!this.headings.has(name)) this.headings.set(name, el("li", {}, el("h2", {}, name)));
      return [this.headings.get(name), ...group.map((one) => this.#rowOf(one))];
    });
  }

  async #found(wanted, all) {
    const texts = await Promise.all(all.map((one) => this.#textOf(one)));
    return all.filter((one, index) => `${one.title}\n${texts[index]}`.toLowerCase().includes(wanted));
  }

  /** Return a conversation's text, cached until its next change. */
  async #textOf(conversation) {
    const key = `${conversation.id} ${conversation.updated}`;
    if (!this.texts.has(key)) this.texts.set(key, await this.actions.textOf(conversation));
    return this.texts.get(key);
  }

  /** Return a conversation's row; an unchanged row is reused, so that a click in progress is not lost. */
  #rowOf(conversation) {
    const isOpen = conversation === this.chat.current;
    const { id, title } = conversation;
    const known = this.rows.get(id);
    if (known?.conversation === conversation && known.title === title && known.isOpen === isOpen) return known.row;
    const row = this.#row(conversation, isOpen);
    this.rows.set(id, { conversation, title, isOpen, row });
    return row;
  }

  #row(conversation, isOpen) {
    const open = el("button", {
      type: "button", class: "chat-name", title: conversation.title, "aria-current": isOpen ? "true" : null,
      on: { click: () => this.actions.open(conversation) },
    }, conversation.title);
    const small = (name, label, listener) =>
      iconButton(name, `${label} ${conversation.title}`, listener, { title: label });
    const row = el("li", { class: isOpen ? "open" : "" }, open, el("span", { class: "row-actions" },
      small("edit", "Rename", () => this.#rename(conversation, row)),
      small("trash", "Delete", () => this.actions.remove(conversation))));
    return row;
  }

  #rename(conversation, row) {
    const field = el("input", { "aria-label": "Name of the conversation", maxlength: 200 });
    field.value = conversation.title;
    let isOver = false;
    const end = (title) => {
      if (isOver) return;
      isOver = true;
      field.remove();
      if (title) this.actions.rename(conversation, title);
      else this.show();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(field.value.trim());
      if (event.key === "Escape") { event.stopPropagation(); end(null); }
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    this.rows.delete(conversation.id);
    row.replaceChildren(field);
    field.select();
  }
}

/** Make a list contain these rows, in this order, without touching rows already in place. */
function arrange(list, rows) {
  const wanted = new Set(rows);
  for (const row of [...list.children]) if (!wanted.has(row)) row.remove();
  rows.forEach((row, index) => {
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
}
