/** Operations on conversations: owns the stored ones, the open one, and the running requests for answers. */

import { Saver } from "./saver.js";
import { chatDefaults, requestBody, writeAnswers } from "./stream.js";
import { Tabs } from "./tabs.js";
import { asRequest, choose, newConversation, newMessage, pathTo, shownPath, siblingsOf, titleOf } from "./tree.js";

/** Return a random seed of 32 bits, which every JSON parser represents exactly. */
function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/**
 * Owns all conversations. `view` has callbacks for changes: `list()`, `path()` (other messages are shown),
 * `message(one)` (a message has grown or ended), `failed(error, message, conversation)`, `busy(isBusy)`,
 * `storageFailed(error)`.
 */
export class Chat {
  constructor(store, settings, view) {
    this.store = store;
    this.settings = settings;
    this.view = view;
    this.info = null;
    this.conversations = [];
    this.current = newConversation(settings.system);
    this.messages = [];
    this.running = new Map();
    this.busyElsewhere = new Set();
    this.saver = new Saver(store, (error) => view.storageFailed(error));
    this.tabs = new Tabs({
      changed: (id) => this.#changedElsewhere(id),
      removed: (id) => this.#removedElsewhere(id),
      writing: (id) => this.#startedElsewhere(id),
      ended: (id) => this.#endedElsewhere(id),
      asking: (id) => { if (this.running.has(id)) this.tabs.post("writing", id); },
      stop: (id) => this.running.get(id)?.control.abort(),
    });
    addEventListener("pagehide", () => { for (const id of this.running.keys()) this.tabs.post("ended", id); });
  }

  /** Read the stored conversations and show the one that was open last. */
  async load(openId) {
    await this.saver.recover();
    await this.#readList();
    const wanted = this.conversations.find((one) => one.id === openId);
    if (wanted) await this.open(wanted);
    else this.view.path();
    this.view.list();
  }

  async #readList() {
    const known = new Map([this.current, ...this.conversations].map((one) => [one.id, one]));
    const stored = await this.store.conversations();
    this.conversations = stored.map((one) => Object.assign(known.get(one.id) ?? one, one));
    this.conversations.sort((a, b) => b.updated - a.updated);
  }

  /** Show a conversation. Unfinished answers without a running request, in any tab, are marked as interrupted. */
  async open(conversation) {
    this.current = conversation;
    const work = this.running.get(conversation.id);
    const messages = work?.messages ?? await this.store.messages(conversation.id);
    if (this.current !== conversation) return;
    this.messages = messages;
    const isOpen = work !== undefined || this.busyElsewhere.has(conversation.id);
    for (const one of messages) if (one.finish === null && !isOpen) one.finish = "interrupted";
    if (work === undefined) this.tabs.post("asking", conversation.id);
    this.#changed();
  }

  /** Open a new conversation, which is stored with its first message. */
  create() {
    this.current = newConversation(this.settings.system);
    this.messages = [];
    this.#changed();
  }

  #changed() {
    this.view.list();
    this.view.path();
    this.view.busy(this.isBusy);
  }

  async #changedElsewhere(id) {
    await this.#readList();
    if (this.current.id === id && !this.running.has(id)) await this.open(this.current);
    else this.view.list();
  }

  #removedElsewhere(id) {
    this.conversations = this.conversations.filter((one) => one.id !== id);
    if (this.current.id === id) this.create();
    this.view.list();
  }

  #startedElsewhere(id) {
    if (this.busyElsewhere.has(id)) return;
    this.busyElsewhere.add(id);
    this.tabs.onUnlock(id, () => { if (this.busyElsewhere.has(id)) this.#endedElsewhere(id); });
    if (this.current.id === id && !this.running.has(id)) this.open(this.current);
  }

  #endedElsewhere(id) {
    this.busyElsewhere.delete(id);
    this.#changedElsewhere(id);
  }

  /** True while an answer of the open conversation is generated, in this or another tab. */
  get isBusy() {
    return this.running.has(this.current.id) || this.busyElsewhere.has(this.current.id);
  }

  /** The shown messages. */
  get path() {
    return shownPath(this.current, this.messages);
  }

  /** Send a user message after the last shown message. */
  async send(text) {
    await this.#sendMessage(this.path.at(-1)?.id ?? null, text);
  }

  /** Send another version of a message; the old one remains. */
  async edit(message, text) {
    await this.#sendMessage(message.parent, text);
  }

  async #sendMessage(parent, text) {
    await this.#work(async (work) => {
      const { conversation, messages } = work;
      const message = newMessage(conversation, parent, "user", text);
      messages.push(message);
      choose(conversation, message);
      if (!conversation.named && parent === null) conversation.title = titleOf(text);
      if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
      await this.saver.save(conversation, [message]);
      await this.#answer(work, message);
    });
  }

  /** Generate answers to a message, as many as the setting `samples`. */
  async #answer(work, message) {
    const samples = Math.min(this.settings.samples, this.info.max_n);
    const seed = this.settings.seed ?? freshSeed();
    const answers = Array.from({ length: samples }, (_, index) => {
      const answer = newMessage(work.conversation, message.id, "assistant");
      answer.created += index;
      return Object.assign(answer, { seed, sample: { index, of: samples } });
    });
    work.conversation.compared = samples > 1 ? message.id : null;
    await this.#write(work, answers, { seed, samples });
  }

  /** Generate another version of an answer; the old one remains. */
  async regenerate(message) {
    await this.#work((work) => this.#answer(work, work.messages.find((one) => one.id === message.parent)));
  }

  /** Continue a stopped or truncated answer from its exact tokens. */
  async resume(message) {
    await this.#work(async (work) => {
      const given = message.tokens.map(([id]) => id);
      Object.assign(message, { finish: null, error: null, numGiven: given.length });
      const options = { seed: message.seed, given: given.length ? given : null, echo: true };
      await this.#write(work, [message], { ...options, sample: message.sample?.index ?? 0 });
    });
  }

  /** Generate a new answer that starts with another's tokens before an index and an alternative at the index. */
  async branch(message, index, [id, text, logprob]) {
    await this.#work(async (work) => {
      const answer = newMessage(work.conversation, message.parent, "assistant");
      const top = message.tokens[index][4];
      answer.tokens = [...message.tokens.slice(0, index), [id, text, logprob, 0, top, 1]];
      Object.assign(answer, { seed: message.seed, sample: message.sample, numGiven: index + 1 });
      answer.versions = spansUpTo(message.versions, index);
      work.conversation.compared = null;
      const given = answer.tokens.map((token) => token[0]);
      const options = { seed: message.seed, given, echo: true, sample: message.sample?.index ?? 0 };
      if (this.info.end_token_ids.includes(id)) Object.assign(options, { given: given.slice(0, -1), isOver: true });
      await this.#write(work, [answer], options);
    });
  }

  /** Run a request for answers in the open conversation, unless one is running or the server is not available. */
  async #work(run) {
    const { id } = this.current;
    if (this.isBusy || !this.info?.chats) return;
    const control = new AbortController();
    const work = { conversation: this.current, messages: this.messages, control, answers: [] };
    this.running.set(id, work);
    this.view.busy(true);
    this.tabs.begin(id);
    let failure = null;
    try {
      await run(work);
    } catch (error) {
      failure = this.#finishFailed(work, error);
    } finally {
      for (const answer of work.answers) answer.finish ??= "interrupted";
      if (!work.isGone) await this.saver.save(work.conversation, work.answers);
      this.running.delete(id); // only now, so that the next request finds the lock released
      this.tabs.end(id);
      if (this.current === work.conversation) this.#changed();
      else this.view.list();
    }
    if (failure) this.view.failed(...failure); // only now, so that "Try again" works at once
  }

  async #write(work, answers, options) {
    const { conversation, messages, control } = work;
    work.answers = answers;
    const sampling = { ...chatDefaults(this.info), ...this.settings.sampling };
    for (const one of answers) {
      one.sampling = sampling;
      if (!messages.includes(one)) messages.push(one);
    }
    choose(conversation, answers[0]);
    conversation.updated = Date.now();
    if (this.current === conversation) this.#changed();
    await this.saver.save(conversation, answers);
    this.tabs.post("changed", conversation.id);
    const path = pathTo(messages, messages.find((one) => one.id === answers[0].parent));
    const { details } = this.settings;
    const body = requestBody(this.info, asRequest(conversation.system, path), sampling, { ...options, details });
    const onProgress = (message) => this.#onProgress(conversation, message);
    if (!options.isOver || options.given.length) {
      await writeAnswers(body, answers, control.signal, onProgress, Boolean(options.isOver));
    }
    if (options.isOver) answers[0].finish = "stop";
  }

  #onProgress(conversation, message) {
    this.saver.saveSoon(conversation, message);
    if (this.current === conversation) this.view.message(message);
  }

  /** Set `finish` and `error` of unfinished answers; return the arguments for `view.failed`, null if stopped. */
  #finishFailed({ conversation, answers, control }, error) {
    const isStopped = control.signal.aborted;
    const open = answers.filter((one) => one.finish === null);
    for (const answer of open) {
      answer.finish = isStopped ? "stopped" : error.status === 0 ? "interrupted" : "error";
      answer.error = answer.finish === "error" ? error.message : null;
    }
    return !isStopped && (open.length || !answers.length) ? [error, open[0] ?? null, conversation] : null;
  }

  /** Stop the running request of the open conversation; the answers keep their text. */
  stop() {
    const { id } = this.current;
    if (this.busyElsewhere.has(id)) this.tabs.post("stop", id);
    this.running.get(id)?.control.abort();
  }

  /** Repeat a failed request, after opening its conversation. */
  async tryAgain(message, conversation) {
    if (this.current !== conversation) await this.open(conversation);
    const found = this.messages.find((one) => one.id === message?.id);
    if (found) await (found.tokens.length ? this.resume(found) : this.regenerate(found));
  }

  /** Show the version of a message that is `by` versions after it (before it if negative). */
  async step(message, by) {
    const all = siblingsOf(this.messages, message);
    await this.show(all[(all.indexOf(message) + by + all.length) % all.length]);
  }

  /** Show only one version of a message. */
  async show(message) {
    choose(this.current, message);
    this.current.compared = null;
    this.view.path();
    await this.#save(this.current);
  }

  /** Show all versions of an answer side by side, or only one again. */
  async compare(message) {
    this.current.compared = this.current.compared === message.parent ? null : message.parent;
    this.view.path();
    await this.#save(this.current);
  }

  /** Rename a conversation. */
  async rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    this.view.list();
    this.view.path();
    await this.#save(conversation);
  }

  /** Set the open conversation's system prompt. */
  async setSystem(system) {
    this.current.system = system;
    if (this.conversations.includes(this.current)) await this.#save(this.current);
  }

  async #save(conversation) {
    await this.saver.save(conversation);
    this.tabs.post("changed", conversation.id);
  }

  /** Delete a conversation; return a function that restores it. */
  async remove(conversation) {
    const work = this.running.get(conversation.id);
    if (work) work.isGone = true; // the end of its request must not save it again
    work?.control.abort();
    this.saver.forget(conversation);
    const messages = await this.store.messages(conversation.id);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await this.store.remove(conversation, messages);
    this.tabs.post("removed", conversation.id);
    if (this.current === conversation) this.create();
    this.view.list();
    return () => this.add([{ conversation, messages }]);
  }

  /** Add conversations, imported or restored, and open the last of them. Rejects if they cannot be stored. */
  async add(entries) {
    for (const { conversation, messages } of entries) {
      await this.store.save([conversation], messages);
      this.conversations.push(conversation);
      this.tabs.post("changed", conversation.id);
    }
    this.conversations.sort((a, b) => b.updated - a.updated);
    if (entries.length) await this.open(entries.at(-1).conversation);
  }

  /** Return a conversation with all its messages, for export. */
  async entryOf(conversation) {
    const messages = conversation === this.current ? this.messages : await this.store.messages(conversation.id);
    return { conversation, messages };
  }
}

function spansUpTo(versions, end) {
  return versions.filter((one) => one.start < end).map((one) => ({ ...one, end: Math.min(one.end, end) }));
}
