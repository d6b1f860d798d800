/** What a screen reader is told of an answer that is being written: whole sentences, not single tokens. */

import { byId, el } from "../shared/dom.js";

const SENTENCE = /(?:[^.!?\n]|[.!?]+(?![.!?\s]))*(?:[.!?]+(?=\s)|\n+)/y;
const KEEP = 20;

/** Reads one answer out, sentence by sentence, into the page's polite live region. */
export class Speech {
  constructor(message) {
    this.message = message;
    this.at = 0;
  }

  /** Say the sentences that are whole; all of the rest when the answer has ended. */
  update() {
    const { text, finish } = this.message;
    SENTENCE.lastIndex = this.at;
    for (let found; (found = SENTENCE.exec(text));) {
      this.at = SENTENCE.lastIndex;
      say(found[0]);
    }
    if (finish === null) return;
    say(text.slice(this.at));
    this.at = text.length;
  }
}

function say(sentence) {
  if (!sentence.trim()) return;
  const region = byId("spoken");
  region.append(el("p", {}, sentence.trim()));
  while (region.children.length > KEEP) region.firstChild.remove();
}
