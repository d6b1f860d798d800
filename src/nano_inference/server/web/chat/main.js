/** The chat page: connects its parts. */

import { byId, el } from "../shared/dom.js";
import { readStored, writeStored } from "../shared/storage.js";
import { ServerError, apiKey, setApiKey } from "../shared/server.js";
import { startTheme, toggleTheme } from "../shared/theme.js";
import { Attachments } from "./attach.js";
import { Chat } from "./chat.js";
import { copyText } from "./clipboard.js";
import { asJson, asMarkdown, download, fileName, fromJson } from "./files.js";
import { sentences } from "./facts.js";
import { drawIcons } from "./icons.js";
import { reachServer } from "./link.js";
import { MessageList, figures } from "./messages.js";
import { ContextMeter } from "./meter.js";
import { ModelPicker } from "./models.js";
import { listenToPresets } from "./presets.js";
import { Settings, readSettings, resetSettings, showSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Speech } from "./speech.js";
import { openStore } from "./store.js";
import { TextPane } from "./text.js";
import { toast } from "./toast.js";
import { closeAlternatives, placeAlternatives } from "./tokens.js";

const OPEN_KEY = "nano-inference.open";
const NEAR_END = 60;
const KEY_FORM = /^[\x21-\x7e]+$/;
const NO_TEMPLATE = "This model has no chat template: it continues texts and cannot chat.";
const LOADING = "The model is being loaded…";
const NEEDS_KEY = "This server needs a key. It is stored for this tab only.";
/** Matches touch screens; `hover` does not, because some phones report a pointer that can hover. */
const TOUCH = matchMedia("(pointer: coarse)");

/** Owns the page. */
class ChatPage {
  constructor(store) {
    this.settings = new Settings();
    this.chat = new Chat(store, this.settings, this.#view());
    this.meter = new ContextMeter(this.chat);
    this.sidebar = new Sidebar(this.chat, this.#sidebarActions());
    this.list = new MessageList(byId("messages"), this.#messageActions());
    this.text = new TextPane(this.#textActions());
    this.attachments = new Attachments(() => { this.#countDraft(); this.#follow(); }, this.text);
    this.picker = new ModelPicker(byId("models"), () => this.#switchModel());
    this.connecting = null;
    this.failures = [];
    this.isReady = false;
    this.isFollowing = true;
    this.speeches = new Map();
    this.hasShownStorageError = false;
    byId("not-kept").hidden = store.isPersistent;
  }

  #view() {
    return {
      list: () => this.sidebar.show(),
      path: () => this.#showPath(),
      message: (message) => this.#showProgress(message),
      failed: (error, message, conversation) => this.#showFailure(error, message, conversation),
      busy: (isBusy) => this.#showBusy(isBusy),
      storageFailed: (error) => this.#showStorageError(error),
    };
  }

  #textActions() {
    return {
      info: () => (this.isReady ? this.chat.info : null),
      settings: this.settings,
      figures,
      started: () => this.#closeFailures(),
      failed: (error) => this.#showFailure(error, null),
    };
  }

  #sidebarActions() {
    return {
      open: async (conversation) => {
        this.#showText(false);
        await this.chat.open(conversation);
        this.#closeSidebar();
        byId("draft").focus();
      },
      rename: (conversation, title) => this.chat.rename(conversation, title),
      remove: (conversation) => this.#remove(conversation),
      textOf: async (conversation) => {
        const { messages } = await this.chat.entryOf(conversation);
        return messages.map((one) => one.text).join("\n");
      },
    };
  }

  #messageActions() {
    const { chat } = this;
    const follow = (work) => (...values) => { this.isFollowing = true; return work(...values); };
    return {
      copy: copyText,
      rendered: () => this.#follow(),
      isBusy: () => chat.isBusy || !this.isReady,
      messages: () => chat.messages,
      edit: follow((message, text) => chat.edit(message, text)),
      regenerate: follow((message) => chat.regenerate(message)),
      resume: follow((message) => chat.resume(message)),
      branch: follow((...values) => chat.branch(...values)),
      step: (message, by) => chat.step(message, by),
      compare: (message) => chat.compare(message),
      show: (message) => chat.show(message),
      pinSeed: (seed) => this.#pinSeed(seed),
    };
  }

  /** Show the stored conversations, then wait for the server. */
  async start() {
    this.#listen();
    this.#showBusy(false);
    await this.chat.load(readStored(OPEN_KEY)).catch((error) => this.#showStorageError(error));
    await this.connect();
  }

  /** Wait until the server is ready; ask for a key if it needs one. */
  async connect() {
    this.isReady = false;
    this.#showBusy(this.chat.isBusy);
    let hasWaited = false;
    this.connecting?.abort(); // the user may have chosen another model while one was being loaded
    this.connecting = new AbortController();
    const { signal } = this.connecting;
    const onWaiting = (text) => { hasWaited = true; this.#showBanner(text); };
    try {
      this.chat.info = await reachServer(onWaiting, this.picker.wanted, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) this.#askForKey(error);
      else this.#showBanner(error.message);
      return;
    }
    this.isReady = true;
    byId("enter-key").hidden = true;
    byId("model").textContent = this.chat.info.model;
    this.picker.show(this.chat.info);
    if (hasWaited) this.#closeFailures();
    this.#showText(this.text.isShown || !this.chat.info.chats);
    this.#showPath();
    this.#showBusy(this.chat.isBusy);
    if (document.activeElement === document.body && !this.text.isShown) this.#focusDraft();
  }

  /** Load the chosen model. Until then nothing is sent: a request about the former model would load that one again. */
  #switchModel() {
    this.chat.info = null;
    this.#showBanner(LOADING);
    this.connect();
  }

  #askForKey(error) {
    byId("key-text").textContent = apiKey() === null ? NEEDS_KEY : `${error.message}.`;
    byId("key-field").value = "";
    this.#showBanner("This server needs an API key.");
    byId("enter-key").hidden = false;
    if (!byId("key").open) byId("key").showModal();
  }

  /** Show the text pane or the conversation; with a model that cannot chat, a banner above the conversation. */
  #showText(isShown) {
    this.text.show(isShown);
    if (this.isReady) this.#showBanner(isShown || this.chat.info.chats ? null : NO_TEMPLATE);
  }

  #showBanner(text) {
    byId("banner").hidden = text === null;
    if (byId("banner").textContent !== (text ?? "")) byId("banner").textContent = text ?? "";
  }

  #showPath() {
    const { chat } = this;
    const { path } = chat;
    writeStored(OPEN_KEY, chat.current.id);
    byId("title").textContent = chat.current.title;
    document.title = `${chat.current.title} · nano-inference`;
    byId("empty").hidden = path.length > 0;
    this.list.show(path, chat.messages, chat.current.compared ?? null);
    this.#countDraft();
    this.#follow();
  }

  #showProgress(message) {
    this.list.update(message);
    if (message.sample?.index) return; // a screen reader reads only the first of several samples
    if (!this.speeches.has(message.id)) this.speeches.set(message.id, new Speech(message));
    this.speeches.get(message.id).update();
  }

  #showFailure(error, message, conversation) {
    const retry = () => this.chat.tryAgain(message, conversation);
    if (error instanceof ServerError && error.status === 401) this.#askForKey(error);
    if (error.status === 0 && message) { // the answer is marked as interrupted, and the banner names the reason
      this.connect();
      return;
    }
    this.failures.push(toast(error.message, { isError: true, action: message && { label: "Try again", run: retry } }));
    if (error.status === 0 || error.status === 503) this.connect();
  }

  /** Close the error messages: the server is back, or a new answer has started. */
  #closeFailures() {
    for (const close of this.failures.splice(0)) close();
  }

  #showStorageError(error) {
    if (this.hasShownStorageError) return; // every later save fails as well
    this.hasShownStorageError = true;
    const text = `This browser cannot store the conversation (${error.name}). Export it before you close the page.`;
    toast(text, { isError: true });
  }

  #showBusy(isBusy) {
    if (isBusy) this.#closeFailures();
    this.text.update();
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
    byId("models").disabled = isBusy;
    byId("send").disabled = !this.isReady || this.chat.info?.chats === false;
  }

  /** Scroll to the end while an answer grows, unless the user has scrolled away from it. */
  #follow() {
    const scroll = byId("scroll");
    if (this.isFollowing) scroll.scrollTop = scroll.scrollHeight;
    byId("to-end").hidden = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
  }

  #pinSeed(seed) {
    this.settings.seed = seed;
    this.settings.save();
    toast(`Seed ${seed} is used from now on.`, { action: { label: "Use new seeds", run: () => this.#unpinSeed() } });
  }

  #unpinSeed() {
    this.settings.seed = null;
    this.settings.save();
  }

  async #remove(conversation) {
    try {
      const restore = await this.chat.remove(conversation);
      toast(`Deleted “${conversation.title}”.`, { action: { label: "Undo", run: restore } });
    } catch (error) {
      this.#showStorageError(error);
    }
  }

  #send() {
    const text = this.attachments.withFiles(byId("draft").value.trim());
    if (!text || byId("send").disabled || this.chat.isBusy) return;
    byId("draft").value = "";
    this.attachments.clear();
    this.#fitDraft();
    this.isFollowing = true;
    this.chat.send(text);
    this.#focusDraft();
  }

  /** Focus the message field after its button was hidden, except on touch screens, where the keyboard would open. */
  #focusDraft() {
    if (!TOUCH.matches) byId("draft").focus();
  }

  #fitDraft() {
    const draft = byId("draft");
    draft.style.height = "auto";
    draft.style.height = `${Math.min(draft.scrollHeight + 2, innerHeight * 0.4)}px`;
    this.#countDraft();
  }

  #countDraft() {
    this.meter.update(this.attachments.withFiles(byId("draft").value));
  }

  #newChat() {
    this.chat.create();
    this.#closeSidebar();
    this.#showText(this.chat.info?.chats === false);
    byId(this.text.isShown ? "text-field" : "draft").focus();
  }

  #openSidebar() {
    document.body.classList.add("side-open");
    byId("veil").hidden = false;
  }

  #closeSidebar() {
    document.body.classList.remove("side-open");
    byId("veil").hidden = true;
  }

  #listen() {
    const on = (id, event, listener) => byId(id).addEventListener(event, listener);
    on("composer", "submit", (event) => { event.preventDefault(); this.#send(); });
    on("draft", "input", () => this.#fitDraft());
    on("draft", "keydown", (event) => this.#onDraftKey(event));
    on("empty", "click", ({ target }) => {
      if (!target.matches("button")) return;
      byId("draft").value = target.textContent;
      this.#fitDraft();
      this.#focusDraft();
    });
    on("stop", "click", () => { this.chat.stop(); this.#focusDraft(); });
    on("new-chat", "click", () => this.#newChat());
    on("open-sidebar", "click", () => this.#openSidebar());
    on("close-sidebar", "click", () => this.#closeSidebar());
    on("veil", "click", () => this.#closeSidebar());
    on("enter-key", "click", () => byId("key").showModal());
    on("theme", "click", () => toggleTheme());
    on("text-open", "click", () => {
      this.#closeSidebar();
      this.#showText(!this.text.isShown);
      byId("text-field").focus(); // without effect while it is hidden
    });
    on("help-open", "click", () => byId("help").showModal());
    on("to-end", "click", () => { this.isFollowing = true; this.#follow(); });
    on("scroll", "scroll", () => this.#onScroll());
    this.#listenToDialogs(on);
    listenToPresets();
    const showKeys = () => { byId("search").placeholder = TOUCH.matches ? "Search" : "Search (Ctrl+K)"; };
    TOUCH.addEventListener("change", showKeys);
    showKeys();
    addEventListener("keydown", (event) => this.#onKey(event));
    addEventListener("pointerdown", (event) => {
      if (!event.target.closest("#alternatives, .token")) closeAlternatives();
    });
  }

  #listenToDialogs(on) {
    on("model", "click", () => this.#showFacts());
    on("settings-open", "click", () => this.#openSettings());
    on("reset", "click", () => this.#resetSettings());
    on("settings", "submit", () => this.#applySettings());
    on("settings", "input", () => { this.isEdited = true; });
    on("settings", "cancel", () => this.#offerSettings());
    on("export", "click", () => { byId("export-choice").returnValue = ""; byId("export-choice").showModal(); });
    on("export-choice", "close", () => this.#export(byId("export-choice").returnValue));
    on("export-all", "click", () => this.#exportAll());
    on("import", "click", () => byId("file").click());
    on("file", "change", () => this.#import());
    on("key", "close", () => this.#useKey(byId("key-field").value));
  }

  #onScroll() {
    const { scrollHeight, scrollTop, clientHeight } = byId("scroll");
    this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END;
    byId("to-end").hidden = this.isFollowing;
    placeAlternatives();
  }

  #onDraftKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !TOUCH.matches) {
      event.preventDefault();
      this.#send();
    }
    if (event.key === "ArrowUp" && byId("draft").value === "" && !this.chat.isBusy && this.isReady) {
      event.preventDefault();
      this.list.editLast();
    }
  }

  #onKey(event) {
    const isCommand = event.ctrlKey || event.metaKey;
    const isTyping = event.target.matches?.("input, textarea, select");
    const press = (run) => { event.preventDefault(); run(); };
    if (document.querySelector("dialog[open]") || event.isComposing) return;
    if (isCommand && event.key.toLowerCase() === "k") press(() => { this.#openSidebar(); byId("search").focus(); });
    else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") press(() => this.#newChat());
    else if (event.key === "Escape") this.#escape();
    else if (event.key === "?" && !isTyping) press(() => byId("help").showModal());
    else if (event.key === "/" && !isTyping) press(() => byId("draft").focus());
  }

  #escape() {
    if (closeAlternatives() && !this.chat.isBusy && !this.text.isBusy) return;
    if (document.body.classList.contains("side-open")) this.#closeSidebar();
    else (this.text.isShown ? this.text : this.chat).stop();
  }

  #useKey(text) {
    const key = text.trim();
    if (!key) return;
    if (!KEY_FORM.test(key)) {
      toast("A key must contain only ASCII characters and no spaces.", { isError: true });
      return;
    }
    setApiKey(key);
    this.#closeFailures();
    this.connect();
  }

  #resetSettings() {
    resetSettings(this.settings);
    showSettings(this.settings, this.chat.info, this.chat.current);
  }

  #openSettings() {
    showSettings(this.settings, this.chat.info, this.chat.current);
    this.isEdited = false;
    byId("settings").showModal();
  }

  /** Apply the settings on submit, because the dialog's `close` event comes a frame later. */
  #applySettings() {
    this.chat.setSystem(readSettings(this.settings));
    this.#countDraft();
  }

  /** Say that Esc discarded changes; the form keeps them until it is opened again. */
  #offerSettings() {
    if (!this.isEdited) return;
    this.isEdited = false;
    const run = () => { if (!this.isEdited) this.#applySettings(); };
    toast("The changed settings were discarded.", { action: { label: "Apply them", run } });
  }

  #showFacts() {
    byId("facts").replaceChildren(...sentences(this.chat.info).map((one) => el("li", {}, one)));
    byId("about").showModal();
  }

  async #export(kind) {
    if (!kind) return;
    const entry = await this.chat.entryOf(this.chat.current);
    const name = fileName(this.chat.current.title);
    if (kind === "json") download(`${name}.json`, asJson([entry]), "application/json");
    else download(`${name}.md`, asMarkdown(entry), "text/markdown");
  }

  async #exportAll() {
    const all = await Promise.all(this.chat.conversations.map((one) => this.chat.entryOf(one)));
    download("chats.json", asJson(all), "application/json");
  }

  async #import() {
    const [file] = byId("file").files;
    byId("file").value = "";
    try {
      const entries = fromJson(await file.text());
      await this.chat.add(entries);
      toast(`${entries.length} imported.`);
    } catch (error) {
      toast(`Not imported: ${error.message}.`, { isError: true });
    }
  }
}

function startPage() {
  openStore().then((store) => new ChatPage(store).start());
}

startTheme();
drawIcons();
// Paint the page before starting; a hidden tab has no animation frames.
if (document.hidden) startPage();
else requestAnimationFrame(() => setTimeout(startPage));
