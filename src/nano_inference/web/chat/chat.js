/** What can be done with conversations: owns those that are kept, the one that is open, and answers under way. */

import { Saver } from "./saver.js";
import { requestBody, writeAnswers } from "./stream.js";
import { asRequest, choose, newConversation, newMessage, pathTo, shownPath, siblingsOf, titleOf } from "./tree.js";

/** A seed that every JSON reader keeps exactly. */
function freshSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

/**
 * Owns all conversations. `view` is told what changes: `list()`, `path()` (other messages are shown), `message(one)`
 * (it has grown or ended), `failed(error, message)`, `busy(isBusy)`.
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
    this.saver = new Saver(store);
  }

  /** Read what is kept; show the conversation that was open last. */
  async load(openId) {
    await this.saver.recover();
    this.conversations = (await this.store.conversations()).sort((a, b) => b.updated - a.updated);
    const wanted = this.conversations.find((one) => one.id === openId);
    if (wanted) await this.open(wanted);
    else this.view.path();
    this.view.list();
  }

  /** Show a conversation. What nobody writes any more was interrupted. */
  async open(conversation) {
    this.current = conversation;
    const live = this.running.get(conversation.id)?.messages ?? [];
    const kept = await this.store.messages(conversation.id);
    if (this.current !== conversation) return;
    this.messages = kept.map((one) => live.find((other) => other.id === one.id) ?? one);
    for (const one of this.messages) {
      if (one.finish === null && !live.includes(one)) one.finish = "interrupted";
    }
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

  /** Whether an answer of the open conversation is under way. */
  get isBusy() {
    return this.running.has(this.current.id);
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
    const message = newMessage(this.current, parent, "user", text);
    this.messages.push(message);
    choose(this.current, message);
    if (!this.current.named && parent === null) this.current.title = titleOf(text);
    if (!this.conversations.includes(this.current)) this.conversations.unshift(this.current);
    await this.saver.save(this.current, [message]);
    await this.answer(message);
  }

  /** Answer a message of the user: one new answer, or as many as the settings say. */
  async answer(message) {
    const samples = this.settings.samples;
    const seed = this.settings.seed ?? freshSeed();
    const answers = Array.from({ length: samples }, (_, index) => {
      const answer = newMessage(this.current, message.id, "assistant");
      answer.created += index;
      return Object.assign(answer, { seed, sample: { index, of: samples } });
    });
    this.messages.push(...answers);
    choose(this.current, answers[0]);
    if (samples > 1) this.current.compared = message.id;
    await this.#write(answers, pathTo(this.messages, message), { seed, samples });
  }

  /** Draw another answer in an answer's place; both stay. */
  async regenerate(message) {
    await this.answer(this.messages.find((one) => one.id === message.parent));
  }

  /** Go on with an answer that was stopped or cut off, from its very tokens. */
  async goOn(message) {
    const begun = message.tokens.map(([id]) => id);
    Object.assign(message, { finish: null, error: null, begun: begun.length });
    const parent = this.messages.find((one) => one.id === message.parent);
    const wishes = { seed: message.seed, begun: begun.length ? begun : null, echo: true };
    await this.#write([message], pathTo(this.messages, parent), wishes);
  }

  /** Begin a new answer with the tokens of another up to an index, then an alternative; let the model go on. */
  async branch(message, index, [id, text, logprob]) {
    const answer = newMessage(this.current, message.parent, "assistant");
    const top = message.tokens[index][4];
    answer.tokens = [...message.tokens.slice(0, index), [id, text, logprob, 0, top, 1]];
    Object.assign(answer, { seed: message.seed, begun: index + 1, versions: spansUpTo(message.versions, index) });
    this.messages.push(answer);
    choose(this.current, answer);
    this.current.compared = null;
    const parent = this.messages.find((one) => one.id === message.parent);
    const begun = answer.tokens.map((token) => token[0]);
    const wishes = { seed: message.seed, begun, echo: true };
    if (this.info.end_token_ids.includes(id)) Object.assign(wishes, { begun: begun.slice(0, -1), isOver: true });
    await this.#write([answer], pathTo(this.messages, parent), wishes);
  }

  async #write(answers, path, wishes) {
    const conversation = this.current;
    const control = new AbortController();
    this.running.set(conversation.id, { control, messages: answers });
    conversation.updated = Date.now();
    this.#changed();
    await this.saver.save(conversation, answers);
    const { sampling, details } = this.settings;
    const body = requestBody(this.info, asRequest(conversation.system, path), sampling, { ...wishes, details });
    const hasEnough = () => Boolean(wishes.isOver) && answers[0].text !== "";
    try {
      if (!wishes.isOver || wishes.begun.length) {
        await writeAnswers(body, answers, control.signal, (message) => this.#grown(conversation, message), hasEnough);
      }
      if (wishes.isOver) answers[0].finish = "stop";
    } catch (error) {
      this.#ended(conversation, answers, error);
    } finally {
      this.running.delete(conversation.id);
      for (const answer of answers) answer.finish ??= "interrupted";
      await this.saver.save(conversation, answers);
      if (this.current === conversation) this.#changed();
      else this.view.list();
    }
  }

  #grown(conversation, message) {
    this.saver.saveSoon(conversation, message);
    if (this.current === conversation) this.view.message(message);
  }

  /** Note on the answers that are not whole why they ended. */
  #ended(conversation, answers, error) {
    const isStopped = error.name === "AbortError";
    for (const answer of answers.filter((one) => one.finish === null)) {
      answer.finish = isStopped ? "stopped" : "error";
      answer.error = isStopped ? null : error.message;
    }
    if (!isStopped && this.current === conversation) this.view.failed(error, answers[0]);
  }

  /** Stop the answers under way; what they have stays. */
  stop() {
    this.running.get(this.current.id)?.control.abort();
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
    await this.saver.save(this.current);
    this.view.path();
  }

  /** Show all versions of an answer side by side, or no longer. */
  async compare(message) {
    this.current.compared = this.current.compared === message.parent ? null : message.parent;
    await this.saver.save(this.current);
    this.view.path();
  }

  /** Give a conversation another name. */
  async rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    await this.saver.save(conversation);
    this.view.list();
    this.view.path();
  }

  /** Set a conversation's system prompt. */
  async setSystem(system) {
    this.current.system = system;
    if (this.conversations.includes(this.current)) await this.saver.save(this.current);
  }

  /** Delete a conversation; return what brings it back. */
  async remove(conversation) {
    this.running.get(conversation.id)?.control.abort();
    const messages = await this.store.messages(conversation.id);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await this.store.remove(conversation, messages);
    if (this.current === conversation) this.create();
    this.view.list();
    return () => this.add([{ conversation, messages }]);
  }

  /** Take conversations in, from a file or from the bin; show the last of them. */
  async add(entries) {
    for (const { conversation, messages } of entries) {
      await this.store.save([conversation], messages);
      this.conversations.push(conversation);
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
