/** Output for screen readers: complete sentences of a growing answer, not single tokens. */

import { byId, el } from "../shared/dom.js";

const SENTENCE = /(?:[^.!?\n]|[.!?]+(?![.!?\s]))*(?:[.!?]+(?=\s)|\n+)/y;
const KEEP = 20;

/** Adds one answer, sentence by sentence, to the page's polite live region. */
export class Speech {
  constructor(message) {
    this.message = message;
    this.at = 0;
  }

  /** Add the new complete sentences; at the end of the answer, all remaining text. */
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
