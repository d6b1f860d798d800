/** Calls an asynchronous function repeatedly, with a pause after each call, until it is stopped. */
export class Poller {
  #poll;
  #pauseMs;
  #timer = null;
  #control = null;

  /** `poll` receives an AbortSignal, and is called again `pauseMs` milliseconds after its end. */
  constructor(poll, pauseMs) {
    this.#poll = poll;
    this.#pauseMs = pauseMs;
  }

  /** Poll now and repeatedly. */
  start() {
    this.stop();
    this.#control = new AbortController();
    this.#run(this.#control.signal);
  }

  /** Stop polling, and abort a running call. */
  stop() {
    clearTimeout(this.#timer);
    this.#control?.abort();
  }

  async #run(signal) {
    await this.#poll(signal);
    if (!signal.aborted) this.#timer = setTimeout(() => this.#run(signal), this.#pauseMs);
  }
}
