/** Looks again and again, one look after the other, until it is told to stop. */
export class Poller {
  #look;
  #wait;
  #timer = null;
  #stopping = null;

  /** `look` is called with an AbortSignal and is called again `wait` milliseconds after its end. */
  constructor(look, wait) {
    this.#look = look;
    this.#wait = wait;
  }

  /** Look now, and go on. */
  start() {
    this.stop();
    this.#stopping = new AbortController();
    this.#round(this.#stopping.signal);
  }

  /** Look no more; a look under way is given up. */
  stop() {
    clearTimeout(this.#timer);
    this.#stopping?.abort();
  }

  async #round(signal) {
    await this.#look(signal);
    if (!signal.aborted) this.#timer = setTimeout(() => this.#round(signal), this.#wait);
  }
}
