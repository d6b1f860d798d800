/** What can be done with conversations: owns those that are kept, the one that is open, and answers under way. */

import { Saver } from "./saver.js";
import { chatDefaults, requestBody, writeAnswers } from "./stream.js";
import { Tabs } from "./tabs.js";
import { asRequest, choose, newConversation, newMessage, pathTo, shownPath, siblingsOf, titleOf } from "./tree.js";

/** A seed that every JSON reader keeps exactly. */
function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/**
 * Owns all conversations. `view` is told what changes: `list()`, `path()` (other messages are shown), `message(one)`
 * (it has grown or ended), `failed(error, message, conversation)`, `busy(isBusy)`, `lost(error)` (nothing can be kept).
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
    this.elsewhere = new Set();
    this.saver = new Saver(store, (error) => view.lost(error));
    this.tabs = new Tabs({
      changed: (id) => this.#changedElsewhere(id),
      removed: (id) => this.#removedElsewhere(id),
      writing: (id) => this.#writtenElsewhere(id),
      ended: (id) => this.#endedElsewhere(id),
      asking: (id) => { if (this.running.has(id)) this.tabs.tell("writing", id); },
      stop: (id) => this.running.get(id)?.control.abort(),
    });
    addEventListener("pagehide", () => { for (const id of this.running.keys()) this.tabs.tell("ended", id); });
  }

  /** Read what is kept; show the conversation that was open last. */
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
    const kept = await this.store.conversations();
    this.conversations = kept.map((one) => Object.assign(known.get(one.id) ?? one, one));
    this.conversations.sort((a, b) => b.updated - a.updated);
  }

  /** Show a conversation. What nobody writes any more was interrupted. */
  async open(conversation) {
    this.current = conversation;
    const work = this.running.get(conversation.id);
    const messages = work?.messages ?? await this.store.messages(conversation.id);
    if (this.current !== conversation) return;
    this.messages = messages;
    const isOpen = work !== undefined || this.elsewhere.has(conversation.id);
    for (const one of messages) if (one.finish === null && !isOpen) one.finish = "interrupted";
    if (work === undefined) this.tabs.tell("asking", conversation.id);
    this.#changed();
  }

  /** Begin a new conversation; it is kept from its first message on. */
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

  #writtenElsewhere(id) {
    if (this.elsewhere.has(id)) return;
    this.elsewhere.add(id);
    this.tabs.whenGone(id, () => { if (this.elsewhere.has(id)) this.#endedElsewhere(id); });
    if (this.current.id === id && !this.running.has(id)) this.open(this.current);
  }

  #endedElsewhere(id) {
    this.elsewhere.delete(id);
    this.#changedElsewhere(id);
  }

  /** Whether an answer of the open conversation is under way, here or in another tab. */
  get isBusy() {
    return this.running.has(this.current.id) || this.elsewhere.has(this.current.id);
  }

  /** The messages that are shown. */
  get path() {
    return shownPath(this.current, this.messages);
  }

  /** Send what the user wrote, behind the last message that is shown. */
  async send(text) {
    await this.#say(this.path.at(-1)?.id ?? null, text);
  }

  /** Send another text in a message's place; both stay. */
  async edit(message, text) {
    await this.#say(message.parent, text);
  }

  async #say(parent, text) {
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

  /** One new answer to a message, or as many as the settings say. */
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

  /** Draw another answer in an answer's place; both stay. */
  async regenerate(message) {
    await this.#work((work) => this.#answer(work, work.messages.find((one) => one.id === message.parent)));
  }

  /** Go on with an answer that was stopped or cut off, from its very tokens. */
  async goOn(message) {
    await this.#work(async (work) => {
      const begun = message.tokens.map(([id]) => id);
      Object.assign(message, { finish: null, error: null, begun: begun.length });
      const wishes = { seed: message.seed, begun: begun.length ? begun : null, echo: true };
      await this.#write(work, [message], { ...wishes, sample: message.sample?.index ?? 0 });
    });
  }

  /** Begin a new answer with the tokens of another up to an index, then an alternative; let the model go on. */
  async branch(message, index, [id, text, logprob]) {
    await this.#work(async (work) => {
      const answer = newMessage(work.conversation, message.parent, "assistant");
      const top = message.tokens[index][4];
      answer.tokens = [...message.tokens.slice(0, index), [id, text, logprob, 0, top, 1]];
      Object.assign(answer, { seed: message.seed, sample: message.sample, begun: index + 1 });
      answer.versions = spansUpTo(message.versions, index);
      work.conversation.compared = null;
      const begun = answer.tokens.map((token) => token[0]);
      const wishes = { seed: message.seed, begun, echo: true, sample: message.sample?.index ?? 0 };
      if (this.info.end_token_ids.includes(id)) Object.assign(wishes, { begun: begun.slice(0, -1), isOver: true });
      await this.#write(work, [answer], wishes);
    });
  }

  /** Do what writes answers into the open conversation, unless that is done already, or nobody is there to answer. */
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
      failure = this.#ended(work, error);
    } finally {
      for (const answer of work.answers) answer.finish ??= "interrupted";
      if (!work.isGone) await this.saver.save(work.conversation, work.answers);
      this.running.delete(id); // not before: what begins now must find the lock let go
      this.tabs.end(id);
      if (this.current === work.conversation) this.#changed();
      else this.view.list();
    }
    if (failure) this.view.failed(...failure); // only now: who tries again at once must not find it busy
  }

  async #write(work, answers, wishes) {
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
    this.tabs.tell("changed", conversation.id);
    const path = pathTo(messages, messages.find((one) => one.id === answers[0].parent));
    const { details } = this.settings;
    const body = requestBody(this.info, asRequest(conversation.system, path), sampling, { ...wishes, details });
    const onNews = (message) => this.#grown(conversation, message);
    if (!wishes.isOver || wishes.begun.length) {
      await writeAnswers(body, answers, control.signal, onNews, Boolean(wishes.isOver));
    }
    if (wishes.isOver) answers[0].finish = "stop";
  }

  #grown(conversation, message) {
    this.saver.saveSoon(conversation, message);
    if (this.current === conversation) this.view.message(message);
  }

  /** Note on the answers that are not whole why they ended; return what the user is to be told, or null. */
  #ended({ conversation, answers, control }, error) {
    const isStopped = control.signal.aborted;
    const open = answers.filter((one) => one.finish === null);
    for (const answer of open) {
      answer.finish = isStopped ? "stopped" : "error";
      answer.error = isStopped ? null : error.message;
    }
    return !isStopped && (open.length || !answers.length) ? [error, open[0] ?? null, conversation] : null;
  }

  /** Stop the answers under way; what they have stays. */
  stop() {
    const { id } = this.current;
    if (this.elsewhere.has(id)) this.tabs.tell("stop", id);
    this.running.get(id)?.control.abort();
  }

  /** Try again what failed, wherever the user is by now. */
  async tryAgain(message, conversation) {
    if (this.current !== conversation) await this.open(conversation);
    const found = this.messages.find((one) => one.id === message?.id);
    if (found) await (found.tokens.length ? this.goOn(found) : this.regenerate(found));
  }

  /** Show the version of a message that lies so many places before or behind it. */
  async step(message, by) {
    const all = siblingsOf(this.messages, message);
    await this.show(all[(all.indexOf(message) + by + all.length) % all.length]);
  }

  /** Show one version of a message alone. */
  async show(message) {
    choose(this.current, message);
    this.current.compared = null;
    this.view.path();
    await this.#keep(this.current);
  }

  /** Show all versions of an answer side by side, or no longer. */
  async compare(message) {
    this.current.compared = this.current.compared === message.parent ? null : message.parent;
    this.view.path();
    await this.#keep(this.current);
  }

  /** Give a conversation another name. */
  async rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    this.view.list();
    this.view.path();
    await this.#keep(conversation);
  }

  /** Set the open conversation's system prompt. */
  async setSystem(system) {
    this.current.system = system;
    if (this.conversations.includes(this.current)) await this.#keep(this.current);
  }

  async #keep(conversation) {
    await this.saver.save(conversation);
    this.tabs.tell("changed", conversation.id);
  }

  /** Delete a conversation; return what brings it back. */
  async remove(conversation) {
    const work = this.running.get(conversation.id);
    if (work) work.isGone = true; // what ends later must not bring it back
    work?.control.abort();
    this.saver.forget(conversation);
    const messages = await this.store.messages(conversation.id);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await this.store.remove(conversation, messages);
    this.tabs.tell("removed", conversation.id);
    if (this.current === conversation) this.create();
    this.view.list();
    return () => this.add([{ conversation, messages }]);
  }

  /** Take conversations in, from a file or from the bin; show the last of them. Rejects when they cannot be kept. */
  async add(entries) {
    for (const { conversation, messages } of entries) {
      await this.store.save([conversation], messages);
      this.conversations.push(conversation);
      this.tabs.tell("changed", conversation.id);
    }
    this.conversations.sort((a, b) => b.updated - a.updated);
    if (entries.length) await this.open(entries.at(-1).conversation);
  }

  /** Return a conversation with all its messages, for a file. */
  async whole(conversation) {
    const messages = conversation === this.current ? this.messages : await this.store.messages(conversation.id);
    return { conversation, messages };
  }
}

function spansUpTo(versions, end) {
  return versions.filter((one) => one.start < end).map((one) => ({ ...one, end: Math.min(one.end, end) }));
}
