/** Shows how full the context is, counted by the server's tokenizer shortly after the last change. */

import { byId } from "../shared/dom.js";
import { ask } from "../shared/server.js";
import { asRequest } from "./tree.js";

const COUNT_MS = 300;
const WARN_SHARE = 0.8;

/** Owns the meter and the timer of the next count. */
export class ContextMeter {
  constructor(chat) {
    this.chat = chat;
    this.timer = null;
    this.turn = 0;
  }

  /** Count again after a short delay. */
  update(draft) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#count(draft), COUNT_MS);
  }

  async #count(draft) {
    const { chat } = this;
    const turn = (this.turn += 1);
    if (!chat.info?.chats || chat.isBusy) return;
    const path = chat.path.at(-1)?.role === "user" ? chat.path.slice(0, -1) : chat.path;
    const messages = asRequest(chat.current.system, [...path, { role: "user", text: draft || " ", parts: null }]);
    try {
      const { count } = await (await ask("/tokenize", { body: { model: chat.info.model, messages } })).json();
      if (turn === this.turn) this.#show(count);
    } catch {
      byId("meter").classList.add("unknown"); // a missing count needs no error message
    }
  }

  #show(used) {
    const { context } = this.chat.info;
    const left = context - used;
    byId("meter").classList.remove("unknown");
    byId("meter-bar").max = context;
    byId("meter-bar").value = Math.min(used, context);
    byId("meter-text").textContent = `${used.toLocaleString("en")} of ${context.toLocaleString("en")} tokens`;
    const isNear = used > WARN_SHARE * context;
    byId("meter").classList.toggle("near", isNear);
    byId("meter-warning").hidden = !isNear;
    byId("meter-warning").textContent = left > 1
      ? `Only ${left.toLocaleString("en")} tokens are left for the answer. A new chat starts empty.`
      : "This is longer than the model's context and would be rejected. Shorten it, or start a new chat.";
  }
}
