/**
 * Renders formulas as MathML with Temml. Bundled with Temml as one file, which the chat page loads for a formula.
 *
 * Against hostile TeX, no command is trusted, macro definitions are rejected, and length and number of expansions are
 * limited. A formula that cannot be rendered keeps its source text.
 */

const LONGEST = 2000;
const OPTIONS = { throwOnError: true, maxExpand: 500, maxSize: [30, 300], errorColor: "currentcolor" };
/** Macro definitions: with them, 4,000 characters took ten seconds and 14 MB. */
const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re)?newcommand|providecommand)(?![a-z])/i;
const ONLY_MATHML = {
  USE_PROFILES: { mathMl: true }, ADD_ATTR: ["class", "data-style"], FORBID_ATTR: ["href", "id", "xlink:href"],
  FORBID_TAGS: ["mglyph", "maction"], ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
/** The page's policy forbids style attributes; these properties are set individually instead. */
const STYLES = /^(?:color|background-color|border(?:-\w+)?|padding(?:-\w+)?|text-align|font-weight|width|math-depth)$/;
const PLAIN_VALUE = /^[#\w.% -]+$/;

function applyStyle(node) {
  for (const rule of node.dataset.style.split(";")) {
    const [name, value = ""] = rule.split(":");
    if (STYLES.test(name) && PLAIN_VALUE.test(value)) node.style.setProperty(name, value);
  }
  delete node.dataset.style;
}

/** Render the formula whose source, including delimiters, is the text of an element. */
function showFormula(node) {
  const source = node.textContent;
  const size = /^\\begin/.test(source) ? 0 : /^\$(?!\$)/.test(source) ? 1 : 2;
  const tex = source.slice(size, source.length - size).trim();
  if (tex.length > LONGEST || DEFINES.test(tex)) return;
  const displayMode = node.classList.contains("display");
  let markup;
  try {
    markup = temml.renderToString(tex, { ...OPTIONS, displayMode });
  } catch {
    return;
  }
  const rendered = DOMPurify.sanitize(markup.replaceAll(' style="', ' data-style="'), ONLY_MATHML);
  rendered.querySelectorAll("[data-style]").forEach(applyStyle);
  if (displayMode) node.tabIndex = 0;
  node.replaceChildren(rendered);
}

window.showFormula = showFormula;
