/** The token view: an answer's tokens, coloured by probability, with their alternatives. */

import { byId, el } from "../shared/dom.js";

const STEPS = [0.9, 0.7, 0.5, 0.3, 0.1];
const LEGEND = ["≥ 90 %", "70", "50", "30", "10", "below"];
const PAGE = 2000;
/** Tokens that the settings exclude have log-probabilities below this. */
const IMPOSSIBLE = -9000;

function probability(logprob) {
  return logprob === null ? null : Math.exp(logprob);
}

function percent(logprob) {
  const share = 100 * probability(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

/** Return a token's visible text; its id if it has no text. */
function visible(text, id) {
  if (text === "") return `⟨${id}⟩`;
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

/** Return true if a token without an id can be chosen by its text: the text consists of whole characters. */
function isText(text) {
  return text !== "" && !text.includes("\ufffd");
}

function classOf([, , logprob, forced, , taken]) {
  if (forced) return "token forced";
  const chance = probability(logprob);
  const step = chance === null ? "none" : `p${STEPS.filter((limit) => chance < limit).length}`;
  return `token ${step}${taken ? " taken" : ""}`;
}

function describe([id, text, logprob, forced]) {
  const shown = JSON.stringify(text || `token ${id}`);
  return forced ? `${shown}, forced` : logprob === null ? shown : `${shown}, ${percent(logprob)}`;
}

/** Shows the tokens of one message. One token is in the tab order; arrow keys move the focus. */
export class TokenView {
  constructor(message, { branch, isBusy }) {
    this.message = message;
    this.onTake = branch;
    this.isBusy = isBusy;
    this.shown = 0;
    this.list = el("div", {
      class: "tokens", role: "group", "aria-label": "Tokens of the answer; arrow keys move, Enter shows alternatives",
      on: {
        click: (event) => this.#open(event.target.closest(".token"), true),
        pointerover: (event) => event.pointerType === "mouse" && this.#open(event.target.closest(".token"), false),
        focusin: (event) => this.#onFocus(event),
        keydown: (event) => this.#onKey(event),
      },
    });
    const legend = el("p", { class: "legend", "aria-hidden": "true" }, "probability ",
      ...LEGEND.map((text, step) => el("span", { class: `token p${step}` }, text)),
      el("span", { class: "token forced" }, "forced"));
    this.more = el("button", { type: "button", hidden: true, on: { click: () => this.#grow(PAGE) } }, "More tokens");
    this.node = el("div", { class: "token-view" }, legend, this.list, this.more);
    this.limit = PAGE;
    this.update();
  }

  /** Show the tokens added since the last call. */
  update() {
    const { tokens } = this.message;
    const end = Math.min(tokens.length, this.limit);
    const fresh = [];
    for (; this.shown < end; this.shown += 1) fresh.push(this.#button(tokens[this.shown], this.shown));
    this.list.append(...fresh);
    this.more.hidden = tokens.length <= this.limit;
  }

  #grow(by) {
    this.limit += by;
    this.update();
  }

  #button(token, index) {
    // A span, because a button does not break at a newline inside a token.
    return el("span", {
      role: "button", class: classOf(token), "data-index": index, tabindex: index ? "-1" : "0",
      "aria-label": describe(token),
    }, visible(token[1], token[0]));
  }

  /** Show the alternatives of a focused token, unless the focus returns from them. */
  #onFocus({ target, relatedTarget }) {
    if (!byId("alternatives").contains(relatedTarget)) this.#open(target.closest(".token"), false);
  }

  #onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const focused = event.target.closest(".token");
    if (focused && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      this.#open(focused, true);
      byId("alternatives").querySelector("button:enabled")?.focus();
    }
    if (!(event.key in steps) || !focused) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(this.shown - 1, Number(focused.dataset.index) + steps[event.key]));
    const next = this.list.children[at];
    focused.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #open(button, isPinned) {
    if (button) showAlternatives(this, Number(button.dataset.index), button, isPinned);
  }
}

function showAlternatives(view, index, button, isPinned) {
  const panel = byId("alternatives");
  if (!isPinned && panel.dataset.pinned === "true" && !panel.hidden) return;
  panel.dataset.pinned = String(isPinned);
  panel.replaceChildren(...alternatives(view, index, (token) => {
    closeAlternatives();
    view.onTake(view.message, index, token);
  }));
  panel.hidden = false;
  anchorOf()?.removeAttribute("aria-expanded");
  button.setAttribute("aria-expanded", "true");
  placeAlternatives();
}

/** Return the element of the token whose alternatives are shown. */
function anchorOf() {
  return document.querySelector('.token[aria-expanded="true"]');
}

function alternatives({ message, isBusy }, index, onTake) {
  const [id, text, logprob, forced, top] = message.tokens[index];
  const facts = forced ? "forced by the calculator, not sampled"
    : logprob === null ? "log-probabilities were not requested" : `${percent(logprob)} · logprob ${logprob.toFixed(3)}`;
  const head = el("p", {}, el("strong", {}, JSON.stringify(text)), ` token ${id} at ${index} · ${facts}`);
  if (forced || !top.length) return [head];
  const canTake = message.finish !== null && !isBusy();
  const isOwn = (one) => (one[0] === null ? one[1] === text : one[0] === id);
  const rows = top.filter(Array.isArray).map((one) => alternative(one, isOwn(one), canTake, onTake));
  const hint = canTake
    ? "Choose another token to continue the answer from it."
    : "You can choose another token when the answer has ended.";
  return [head, el("ul", {}, ...rows), el("p", { class: "soft" }, hint)];
}

function alternative(token, isOwn, canTake, onTake) {
  const [id, text, logprob] = token;
  const bar = el("meter", { "aria-hidden": "true" });
  bar.value = probability(logprob);
  const button = el("button", {
    type: "button", disabled: isOwn || !canTake || logprob < IMPOSSIBLE || (id === null && !isText(text)),
    "aria-label": `Continue with ${JSON.stringify(text)}, ${percent(logprob)}`,
    on: { click: () => onTake(token) },
  }, el("code", {}, visible(text, id)));
  return el("li", {}, button, bar, el("span", {}, percent(logprob)), el("span", { class: "soft" }, logprob.toFixed(3)));
}

/** Close the panel of alternatives; return true if it was open. The focus returns to its token. */
export function closeAlternatives() {
  const panel = byId("alternatives");
  const wasOpen = !panel.hidden;
  const anchor = anchorOf();
  if (panel.contains(document.activeElement)) anchor?.focus();
  anchor?.removeAttribute("aria-expanded");
  panel.hidden = true;
  panel.dataset.pinned = "false";
  return wasOpen;
}

/** Place the panel below its token, or above it if there is no room; close it if the token is not visible. */
export function placeAlternatives() {
  const panel = byId("alternatives");
  if (panel.hidden) return;
  const at = anchorOf()?.getBoundingClientRect();
  if (!at || at.bottom < 0 || at.top > innerHeight) {
    closeAlternatives();
    return;
  }
  const { width, height } = panel.getBoundingClientRect();
  const below = at.bottom + 6;
  panel.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  panel.style.top = `${below + height < innerHeight ? below : Math.max(8, at.top - height - 6)}px`;
}
