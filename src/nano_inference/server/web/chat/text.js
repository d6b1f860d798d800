/** The text pane: the model continues a text, without a chat template. */

import { byId } from "../shared/dom.js";
import { readStored, writeStored } from "../shared/storage.js";
import { completionBody, writeAnswers } from "./stream.js";
import { TokenView, closeAlternatives } from "./tokens.js";
import { newMessage } from "./tree.js";

const TEXT_KEY = "nano-inference.text";

/** Owns the field and the running request. `page`: info(), settings, started(), failed(error), figures(message). */
export class TextPane {
  constructor(page) {
    this.page = page;
    this.control = null;
    this.message = null;
    this.before = "";
    this.view = null;
    this.field = byId("text-field");
    this.field.value = readStored(TEXT_KEY) ?? "";
    const on = (id, listener) => byId(id).addEventListener("click", listener);
    on("text-go", () => this.#continue());
    on("text-stop", () => this.stop());
    on("text-undo", () => this.#undo());
    on("text-show", () => this.#showTokens(this.view === null));
    this.field.addEventListener("input", () => this.#forget());
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#continue();
    });
    addEventListener("pagehide", () => writeStored(TEXT_KEY, this.field.value));
  }

  get isShown() {
    return document.body.classList.contains("texting");
  }

  /** Show the text pane instead of the conversation, or the conversation again. */
  show(isShown) {
    document.body.classList.toggle("texting", isShown);
    byId("text").hidden = !isShown;
    byId("text-open").setAttribute("aria-pressed", String(isShown));
    this.update();
  }

  /** Show the current state of buttons and figures. */
  update() {
    const isBusy = this.control !== null;
    const hasTokens = Boolean(this.message?.tokens.length);
    this.field.readOnly = isBusy;
    byId("text-stop").hidden = !isBusy;
    byId("text-go").hidden = isBusy;
    byId("text-go").disabled = !this.page.info() || !this.field.value;
    byId("text-undo").disabled = isBusy || !this.message;
    byId("text-show").disabled = !hasTokens;
    byId("text-figures").textContent = this.message ? this.page.figures(this.message) : "";
    this.view?.update();
  }

  /** True while a continuation is generated. */
  get isBusy() {
    return this.control !== null;
  }

  /** Stop the continuation. */
  stop() {
    this.control?.abort();
  }

  /** Replace the selection by a text, unless a request is running. */
  insert(text) {
    if (this.control) return;
    this.field.setRangeText(text);
    this.#forget();
  }

  /** Discard the tokens of the last continuation, because the user has changed the text. */
  #forget() {
    this.message = null;
    this.#showTokens(false);
  }

  #undo() {
    this.field.value = this.before;
    this.#forget();
    this.field.focus();
  }

  #showTokens(isShown) {
    closeAlternatives();
    this.view = isShown && this.message ? new TokenView(this.message, {
      branch: (message, index, token) => this.#branch(index, token), isBusy: () => this.control !== null,
    }) : null;
    byId("text-tokens").replaceChildren(...(this.view ? [this.view.node] : []));
    byId("text-tokens").hidden = this.view === null;
    byId("text-show").setAttribute("aria-pressed", String(this.view !== null));
    this.update();
  }

  /** Replace a token by another one, drop the text after it, and continue. */
  #branch(index, [, text]) {
    const kept = this.message.tokens.slice(0, index).map((token) => token[1]).join("");
    this.field.value = this.before + kept + text;
    this.#continue();
  }

  async #continue() {
    if (this.control || byId("text-go").disabled) return;
    const { page } = this;
    const hadTokens = this.view !== null;
    page.started();
    this.control = new AbortController();
    this.before = this.field.value;
    this.message = newMessage({ id: null }, null, "assistant");
    this.#showTokens(hadTokens);
    byId("text-stop").focus();
    try {
      const body = completionBody(page.info(), this.before, page.settings);
      await writeAnswers(body, [this.message], this.control.signal, () => this.#showProgress());
    } catch (error) {
      if (!this.control.signal.aborted) page.failed(error);
    }
    this.message.finish ??= "stopped";
    this.control = null;
    writeStored(TEXT_KEY, this.field.value);
    this.update();
    if (document.activeElement === document.body) byId("text-go").focus();
  }

  #showProgress() {
    this.field.value = this.before + this.message.text;
    this.field.scrollTop = this.field.scrollHeight;
    this.update();
  }
}
