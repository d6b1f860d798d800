/** The conversation on the page: its messages with their buttons, and answers side by side. */

import { el } from "../shared/dom.js";
import { AnswerBody } from "./body.js";
import { icon, iconButton } from "./icons.js";
import { TokenView, closeAlternatives } from "./tokens.js";
import { siblingsOf } from "./tree.js";

const PAUSE_MS = 50;
const ENDINGS = {
  length: "The answer reached its token limit.",
  context: "The model's context is full.",
  stopped: "Stopped.",
  repetition: "Stopped: the answer repeats itself.",
  interrupted: "This answer was interrupted.",
  abort: "The server aborted this answer.",
  error: "This answer failed:",
};

/** Return the name of the focused button if it is inside a node, else null. */
function nameOf(focused, within) {
  const isInside = within.contains(focused) && focused !== within;
  return isInside ? focused.getAttribute("aria-label") ?? focused.textContent : null;
}

/** Focus the button of that name, which replaces the formerly focused one, else `other`. */
function focusNamed(within, name, other) {
  if (name === null) return;
  const buttons = [...within.querySelectorAll("button:enabled")];
  (buttons.find((one) => nameOf(one, within) === name) ?? other).focus({ preventScroll: true });
}

const ICONS = {
  Copy: "copy", Edit: "edit", Regenerate: "redo", "Try again": "redo", Continue: "play", Tokens: "tokens",
  Compare: "compare",
};

function button(label, listener, attributes = {}) {
  const drawn = label in ICONS ? icon(ICONS[label]) : null;
  return el("button", { type: "button", class: "quiet", on: { click: listener }, ...attributes }, drawn, label);
}

/** Return an answer's figures as one line of text. */
export function figures({ stats, tokens }) {
  if (!stats) return "";
  const parts = [`${tokens.length} tokens`];
  if (stats.speed !== null) parts.push(`${stats.speed.toFixed(1)} tokens/s`);
  if (stats.first !== null) parts.push(`first after ${stats.first.toFixed(2)} s`);
  return parts.join(" · ");
}

/** Return an answer's details as pairs of a name and a text. */
function detailsOf({ stats, sample, versions, sampling }) {
  const numbers = [...new Set(versions.map((one) => one.version))];
  const set = Object.entries(sampling ?? {}).map(([name, value]) => `${name.replaceAll("_", "-")} ${value}`);
  return [
    ["Prompt", stats && stats.prompt !== null && `${stats.prompt} tokens, ${stats.cached ?? 0} of them cached`],
    ["Sample", sample?.of > 1 && `${sample.index + 1} of ${sample.of}`],
    ["Settings", set.join(", ")],
    ["Weights", numbers.join(" → ")],
  ].filter(([, text]) => text);
}

const SEED = {
  class: "link", title: "Use this seed for the next answers; with the same settings it gives the same answer",
};

/** Shows one message. `actions` are the functions of its buttons. */
class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.tokens = null;
    this.content = el("div", { class: "content" });
    this.foot = el("div", { class: "foot" });
    const name = message.role === "user" ? "You" : "Answer";
    const attributes = { class: `message ${message.role}`, "data-id": message.id, "aria-label": name, tabindex: "-1" };
    this.node = el("article", attributes, this.content, this.foot);
    this.body = message.role === "user" ? null : new AnswerBody(message, actions.copy, actions.rendered);
    this.content.append(this.body?.node ?? el("div", { class: "body said" }, message.text));
    this.#showFoot();
  }

  /** Show the message's current state. */
  update() {
    this.body?.update();
    this.tokens?.update();
    this.#showFoot();
  }

  /** Show the current buttons and figures. */
  #showFoot() {
    const { message, actions } = this;
    const key = JSON.stringify([message.finish, actions.isBusy(), this.tokens !== null, this.#siblings()]);
    if (key !== this.key) {
      const buttons = message.role === "user" ? this.#userButtons() : this.#answerButtons();
      this.figures = el("span", {});
      this.facts = el("dl", {});
      const lines = message.role === "user" ? [] : [this.#ending(), this.#figuresLine()];
      const actionLine = el("div", { class: "actions" }, ...this.#stepper(), ...buttons);
      const name = nameOf(document.activeElement, this.foot);
      this.foot.replaceChildren(...lines.filter(Boolean), actionLine);
      focusNamed(this.foot, name, this.node);
      this.key = key;
    }
    if (message.role !== "user") this.#showFigures();
    this.node.setAttribute("aria-busy", String(message.finish === null));
  }

  #showFigures() {
    this.figures.textContent = figures(this.message);
    const facts = detailsOf(this.message);
    const { seed } = this.message;
    if (seed !== null) facts.push(["Seed", button(String(seed), () => this.actions.pinSeed(seed), SEED)]);
    const key = JSON.stringify(facts.map((one) => one.map(String)));
    if (this.facts.dataset.key === key) return;
    this.facts.dataset.key = key;
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  #figuresLine() {
    const remember = ({ target }) => { this.isDetailed = target.open; };
    const more = el("details", { open: this.isDetailed, on: { toggle: remember } },
      el("summary", {}, "Details"), this.facts);
    return el("div", { class: "figures" }, this.figures, " ", more);
  }

  #ending() {
    const { finish, error } = this.message;
    if (!(finish in ENDINGS)) return null;
    return el("p", { class: finish === "error" ? "ending bad" : "ending" }, ENDINGS[finish], error ? ` ${error}` : "");
  }

  #siblings() {
    const all = siblingsOf(this.actions.messages(), this.message);
    return [all.indexOf(this.message) + 1, all.length];
  }

  #stepper() {
    const [at, count] = this.#siblings();
    if (count < 2) return [];
    const step = (by) => () => this.actions.step(this.message, by);
    return [el("span", { class: "stepper", role: "group", "aria-label": "Versions" },
      iconButton("left", "Previous version", step(-1)), el("span", {}, `${at}/${count}`),
      iconButton("right", "Next version", step(1)))];
  }

  #userButtons() {
    const isBusy = this.actions.isBusy();
    return [
      button("Copy", () => this.actions.copy(this.message.text)),
      button("Edit", () => this.edit(), { disabled: isBusy }),
    ];
  }

  #answerButtons() {
    const { message, actions } = this;
    if (message.finish === null) return [];
    const isBusy = actions.isBusy();
    const [, count] = this.#siblings();
    // A text without known tokens cannot be continued.
    const canResume = message.finish !== "stop" && (message.tokens.length > 0 || message.text === "");
    const isOpen = String(this.tokens !== null);
    return [
      button("Copy", () => actions.copy(message.text)),
      button(message.finish === "error" && !message.tokens.length ? "Try again" : "Regenerate",
        () => actions.regenerate(message), { disabled: isBusy }),
      canResume ? button("Continue", () => actions.resume(message), { disabled: isBusy }) : null,
      message.tokens.length ? button("Tokens", () => this.toggleTokens(), { "aria-pressed": isOpen }) : null,
      count > 1 ? button("Compare", () => actions.compare(message), { class: "quiet compare" }) : null,
    ];
  }

  /** Switch between the text and the token view. */
  toggleTokens() {
    this.tokens = this.tokens ? null : new TokenView(this.message, this.actions);
    closeAlternatives();
    this.content.replaceChildren(this.tokens?.node ?? this.body.node);
    this.#showFoot();
    this.foot.querySelector("[aria-pressed]")?.focus();
  }

  /** Replace the message by a field to edit it. */
  edit() {
    const field = el("textarea", { rows: 3, "aria-label": "Edit your message" });
    field.value = this.message.text;
    const send = () => field.value.trim() && this.actions.edit(this.message, field.value.trim());
    const leave = () => {
      this.content.replaceChildren(el("div", { class: "body said" }, this.message.text));
      this.foot.hidden = false;
      this.foot.querySelectorAll("button")[1]?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.content.replaceChildren(field, el("div", { class: "actions" },
      button("Send", send, { class: "primary" }), button("Cancel", leave)));
    this.foot.hidden = true;
    field.focus();
  }
}

/** Owns the list of messages on the page. */
export class MessageList {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.views = new Map();
    this.timers = new Map();
  }

  /** Show these messages; `compared` is the id of the message whose answers are side by side, or null. */
  show(path, messages, compared) {
    closeAlternatives();
    const shown = new Map();
    const nodes = path.map((message) => {
      if (compared !== null && message.parent === compared && message.role === "assistant") {
        return this.#columns(siblingsOf(messages, message), shown);
      }
      return this.#view(message, shown).node;
    });
    this.views = shown;
    // Nodes that are inserted again lose a click in progress and the selection.
    const { children } = this.node;
    const isSame = nodes.length === children.length && nodes.every((one, index) => one === children[index]);
    if (!isSame) this.#replace(nodes);
    for (const view of shown.values()) view.update();
  }

  /** Replace the messages on the page; the focus moves from a message to the one that replaces it. */
  #replace(nodes) {
    const at = [...this.node.children].findIndex((one) => one.contains(document.activeElement));
    const name = at < 0 ? null : nameOf(document.activeElement, this.node.children[at]);
    this.node.replaceChildren(...nodes);
    if (nodes[at]) focusNamed(nodes[at], name, nodes[at]);
  }

  #view(message, shown) {
    const known = this.views.get(message.id);
    const view = known?.message === message ? known : new MessageView(message, this.actions);
    shown.set(message.id, view);
    return view;
  }

  #columns(answers, shown) {
    const columns = answers.map((message, index) => {
      const keep = button("Use this one", () => this.actions.show(message), { class: "" });
      return el("div", { class: "column" },
        el("div", { class: "column-head" }, el("strong", {}, `${index + 1} of ${answers.length}`), keep),
        this.#view(message, shown).node);
    });
    return el("section", { class: "columns", "aria-label": "Answers side by side", tabindex: "0" }, ...columns);
  }

  /** Show a message that has grown, at most twenty times a second, or its end, at once. */
  update(message) {
    const { id, finish } = message;
    if (finish === null && this.timers.has(id)) return;
    clearTimeout(this.timers.get(id));
    this.timers.delete(id);
    const later = () => {
      this.timers.delete(id);
      this.update(message);
    };
    if (finish === null) this.timers.set(id, setTimeout(later, PAUSE_MS));
    this.views.get(id)?.update();
  }

  /** Edit the last shown user message. */
  editLast() {
    [...this.views.values()].filter((view) => view.message.role === "user").at(-1)?.edit();
  }
}
