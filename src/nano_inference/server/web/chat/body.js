/** An answer's body on the page, rendered at most twenty times a second while it grows, less often if slow. */

import { el } from "../shared/dom.js";
import { MarkdownView } from "./markdown.js";
import { segmentsOf } from "./segments.js";

const RENDER_MS = 50;
/** The pause after a rendering is this multiple of its time, so that rendering takes a quarter of the time. */
const RENDER_SHARE = 3;

/** Shows the segments of one answer. */
export class AnswerBody {
  constructor(message, onCopy, onRendered) {
    this.message = message;
    this.onCopy = onCopy;
    this.onRendered = onRendered;
    this.node = el("div", { class: "body" });
    this.views = [];
    this.timer = null;
    this.pause = RENDER_MS;
    this.#render();
  }

  /** Show additions soon, and the end of the answer at once. */
  update() {
    if (this.message.finish !== null) this.#render();
    else this.timer ??= setTimeout(() => this.#render(), this.pause);
  }

  #render() {
    clearTimeout(this.timer);
    this.timer = null;
    const { text, parts, finish } = this.message;
    const state = `${text.length} ${parts?.length} ${finish}`;
    if (state === this.state) return;
    this.state = state;
    const startedAt = performance.now();
    const isComplete = finish !== null;
    const segments = segmentsOf(this.message);
    segments.forEach((segment, index) => this.#show(segment, index, isComplete || index < segments.length - 1));
    for (const view of this.views.splice(segments.length)) view.node.remove();
    this.pause = Math.max(RENDER_MS, RENDER_SHARE * (performance.now() - startedAt));
    this.onRendered();
  }

  #show(segment, index, isComplete) {
    if (this.views[index]?.kind !== segment.kind) {
      for (const view of this.views.splice(index)) view.node.remove();
      this.views.push({ kind: segment.kind, ...makeView(segment.kind, this.onCopy) });
      this.node.append(this.views[index].node);
    }
    this.views[index].show(segment, isComplete);
  }
}

function makeView(kind, onCopy) {
  if (kind === "call") return callView();
  if (kind === "thought") return thoughtView();
  const view = new MarkdownView(onCopy);
  let shown = null;
  const show = ({ text }, isComplete) => {
    if (shown?.text === text && shown.isComplete === isComplete) return;
    view.show(text, isComplete);
    shown = { text, isComplete };
  };
  return { node: view.node, show };
}

/** Shows a call as expression → result; expanded, it explains which part was forced. */
function callView() {
  const expression = el("code", { class: "expression" });
  const result = el("code", { class: "result forced" });
  const note = el("p", {});
  const node = el("details", { class: "call" },
    el("summary", {}, el("span", { class: "call-name" }, "calculator "), expression, " → ", result), note);
  const show = (segment) => {
    expression.textContent = segment.text;
    result.textContent = segment.result ?? (segment.open ? "…" : "no result");
    note.textContent = segment.result === null
      ? "The model wrote the expression. There is no result."
      : "The model wrote the expression. The underlined result was forced by the calculator, not sampled: its " +
        "tokens have mask 0 and no probability.";
  };
  return { node, show };
}

function thoughtView() {
  const label = el("summary", {});
  const text = el("div", { class: "thought-text" });
  const node = el("details", { class: "thought" }, label, text);
  const show = (segment) => {
    label.textContent = segment.open ? "Thinking…" : "Thoughts";
    if (text.textContent !== segment.text) text.textContent = segment.text;
  };
  return { node, show };
}
