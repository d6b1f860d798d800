/** Finds formulas in Markdown. Their renderer, `web/formulas`, is a separate file, loaded for the first formula. */

import { byId } from "../shared/dom.js";

const RETRY_LOAD_MS = 30000;
/** The last alternative is an environment without delimiters. */
const OPENS_BLOCK = /^ {0,3}(\\\[|\$\$|\\begin\{[a-z]+\*?\})/i;
/** The length is limited, because each of ten thousand unclosed delimiters would be searched to the end of the text. */
const BLOCK =
  /^ {0,3}(?:\\\[[^]{1,3000}?\\\]|\$\$[^]{1,3000}?\$\$|\\begin\{([a-z]+\*?)\}[^]{1,3000}?\\end\{\1\})[ \t]*(?:\n|$)/i;
const BLOCK_START = /(?<=\n {0,3})(?:\\\[|\$\$|\\begin\{)/;
const INLINE = /^(?:\\\([^]{1,3000}?\\\)|\\\[[^]{1,3000}?\\\]|\$\$[^$]{1,3000}?\$\$)/;
const INLINE_START = /\\[([]|\$/;
const DOLLARS = /^\$(?!\s)([^$\n]*[^$\s\\])\$(?![\w$])/;
/** Limit on the search for the next formula, for which marked asks at every word. */
const LOOK_AHEAD = 1000;

/** Return true if the text between two dollars is a formula, not an amount of money or the name of a variable. */
function isFormula(text) {
  if (/^[a-z]'*$/i.test(text)) return true;
  return /[a-z\d]/i.test(text) && (/^\d/.test(text) ? /[\\^_=]/ : /[\\^_{}=<>+]/).test(text);
}

function inlineFormula(src, before) {
  const found = INLINE.exec(src);
  if (found) return found[0];
  if (/[\w$\\]$/.test(before?.raw ?? "")) return null;
  const dollars = DOLLARS.exec(src);
  return dollars && isFormula(dollars[1]) ? dollars[0] : null;
}

function startOf(src, pattern, end) {
  const at = src.slice(0, end).search(pattern);
  return at >= 0 ? at : end < src.length ? end : undefined;
}

/**
 * Return the extensions of marked for formulas. While a text grows (`isGrowing()`), an unclosed block extends to its
 * end. `render(source, tag, kind)` returns the HTML.
 */
export function formulaExtensions(isGrowing, render) {
  const block = {
    name: "formulaBlock", level: "block",
    start: (src) => startOf(src, BLOCK_START, src.search(/\n\s*\n/) + 1 || src.length),
    tokenizer(src) {
      const opener = OPENS_BLOCK.exec(src)?.[1];
      if (!opener) return undefined;
      const found = BLOCK.exec(src);
      if (found) return { type: "formulaBlock", raw: found[0], kind: "math display" };
      const closer = { "$$": "$$", "\\[": "\\]" }[opener] ?? opener.replace("begin", "end");
      const isOpen = isGrowing() && !src.includes(closer, src.indexOf(opener) + 2);
      return isOpen ? { type: "formulaBlock", raw: src, kind: "math-open" } : undefined;
    },
    renderer: ({ raw, kind }) => render(raw.trim(), "p", kind),
  };
  const inline = {
    name: "formula", level: "inline",
    start: (src) => startOf(src, INLINE_START, LOOK_AHEAD),
    tokenizer(src, tokens) {
      const raw = inlineFormula(src, tokens.at(-1));
      // An unclosed delimiter is not an escape: its backslash is kept.
      const [opener] = /^\\[([]/.exec(src) ?? [];
      if (raw === null) return opener && { type: "text", raw: opener, text: opener };
      return { type: "formula", raw, kind: /^(?:\\\[|\$\$)/.test(raw) ? "math display" : "math" };
    },
    renderer: ({ raw, kind }) => render(raw, "span", kind),
  };
  return [block, inline];
}

/** Owns the load of the renderer; a failed load can be repeated after `RETRY_LOAD_MS`. */
class RendererLoad {
  /** Return a promise of the renderer. */
  get done() {
    if (!this.promise) {
      this.promise = new Promise((resolve, reject) => {
        const script = document.importNode(byId("formulas").content, true).querySelector("script");
        script.addEventListener("load", resolve);
        script.addEventListener("error", reject);
        document.head.append(script);
      });
      this.promise.catch(() => setTimeout(() => { this.promise = null; }, RETRY_LOAD_MS));
    }
    return this.promise;
  }
}

const rendererLoad = new RendererLoad();

/** Render the formulas in a fragment, once the renderer is loaded; until then they show their source. */
export function showFormulas(fragment) {
  for (const node of fragment.querySelectorAll(".math")) {
    if (window.showFormula) window.showFormula(node);
    else rendererLoad.done.then(() => window.showFormula(node), () => {});
  }
}
