/**
 * Converts Markdown to elements: marked parses, highlight.js colours code, DOMPurify removes unknown elements.
 *
 * Three layers of protection: HTML in an answer is shown as text, the result is sanitized, and the page's policy blocks
 * inline scripts.
 */

import { el } from "../shared/dom.js";
import { formulaExtensions, showFormulas } from "./math.js";

const TAGS = ["p", "br", "strong", "em", "del", "code", "pre", "span", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li",
  "blockquote", "table", "thead", "tbody", "tr", "th", "td", "hr", "a"];
const CLEAN = {
  ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "class", "start", "align"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
  ADD_URI_SAFE_ATTR: ["start", "align"], ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, RETURN_DOM_FRAGMENT: true,
};

function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (char) => names[char]);
}

function highlighted(code, language) {
  return hljs.getLanguage(language) ? hljs.highlight(code, { language, ignoreIllegals: true }).value : escaped(code);
}

/** Return a parser whose headings start below the page's headings and never skip a level. */
function makeParser(isGrowing) {
  let level = 1;
  const renderer = {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) => {
      const language = (lang ?? "").match(/^[\w+#-]*/)[0].toLowerCase();
      return `<pre><code class="language-${language}">${highlighted(text, language)}</code></pre>`;
    },
    heading({ tokens, depth }) {
      level = Math.min(6, level + 1, depth + 1);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  };
  const formula = (source, tag, kind) => `<${tag} class="${kind}">${escaped(source)}</${tag}>`;
  return new marked.Marked({ gfm: true, renderer, extensions: formulaExtensions(isGrowing, formula) });
}

function finishLinks(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
}

function finishCode(fragment, onCopy) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = code?.className.replace("language-", "") ?? "";
    pre.tabIndex = 0;
    const click = () => onCopy(code.textContent);
    const copy = el("button", { class: "quiet", type: "button", on: { click } }, "Copy code");
    const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
    const block = el("div", { class: "code" }, head);
    pre.replaceWith(block);
    block.append(pre);
  }
}

function finishTables(fragment) {
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
}

/** Renders a growing text: complete blocks are kept, only the last one is rendered again. */
export class MarkdownView {
  constructor(onCopy) {
    this.node = el("div", { class: "markdown" });
    this.onCopy = onCopy;
    this.isComplete = false;
    this.#reset();
  }

  #reset() {
    this.text = "";
    this.kept = 0;
    this.parser = makeParser(() => !this.isComplete);
    this.tail = el("div", { class: "block" });
    this.node.replaceChildren(this.tail);
  }

  /** Show a text; `isComplete` if no text will follow. A text that cannot be parsed as Markdown is shown unchanged. */
  show(text, isComplete) {
    try {
      this.#show(text.replaceAll("\r\n", "\n"), isComplete);
    } catch {
      this.node.replaceChildren(el("pre", { class: "said", tabindex: "0" }, text)); // nested too deep
      this.text = null;
    }
  }

  #show(text, isComplete) {
    this.isComplete = isComplete;
    if (this.text === null || !text.startsWith(this.text) || isComplete) this.#reset();
    this.text = text;
    const tokens = this.parser.lexer(text.slice(this.kept));
    const last = isComplete ? tokens.length : lastOpen(tokens);
    for (const token of tokens.slice(0, last)) {
      this.kept += token.raw.length;
      if (token.type !== "space") this.node.insertBefore(this.#block([token], tokens.links), this.tail);
    }
    this.#showTail(tokens.slice(last), tokens.links);
  }

  /** Show the last, incomplete block. Code, which may be long, is only appended to, without colours. */
  #showTail(tokens, links) {
    const [first] = tokens;
    const code = this.tail.firstChild?.matches?.(".code.open") ? this.tail.querySelector("code") : null;
    if (first?.type === "code" && code && first.text.startsWith(code.textContent)) {
      code.append(first.text.slice(code.textContent.length));
    } else if (first?.type === "code") {
      const pre = el("pre", { tabindex: "0" }, el("code", {}, first.text));
      const head = el("div", { class: "code-head" }, el("span", {}, (first.lang ?? "").slice(0, 40) || "text"));
      this.tail.replaceChildren(el("div", { class: "code open" }, head, pre));
    } else {
      this.tail.replaceChildren(...(tokens.length ? this.#block(tokens, links).childNodes : []));
    }
  }

  #block(tokens, links) {
    const block = el("div", { class: "block" });
    const fragment = DOMPurify.sanitize(this.parser.parser(Object.assign([...tokens], { links })), CLEAN);
    finishLinks(fragment);
    finishCode(fragment, this.onCopy);
    finishTables(fragment);
    showFormulas(fragment);
    block.append(fragment);
    return block;
  }
}

/** Return the index of the last block, which more text may change. */
function lastOpen(tokens) {
  let last = tokens.length - 1;
  while (last > 0 && tokens[last].type === "space") last -= 1;
  return Math.max(0, last);
}
