/**
 * Renders formulas as MathML by Temml, with which it is one file that the chat page loads when a formula comes.
 *
 * Hostile TeX is bounded: nothing is trusted, a formula may define no macros, and both its length and the number of
 * expansions have limits. What cannot be rendered stays as it was written.
 */

const LONGEST = 2000;
const OPTIONS = { throwOnError: true, maxExpand: 500, maxSize: [30, 300], errorColor: "currentcolor" };
/** With definitions 4,000 characters were ten seconds of work and 14 MB. */
const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re)?newcommand|providecommand)(?![a-z])/i;
const ONLY_MATHML = {
  USE_PROFILES: { mathMl: true }, ADD_ATTR: ["class", "data-style"], FORBID_ATTR: ["href", "id", "xlink:href"],
  FORBID_TAGS: ["mglyph", "maction"], ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
/** The policy allows no style attributes; these properties are set one by one instead. */
const STYLES = /^(?:color|background-color|border(?:-\w+)?|padding(?:-\w+)?|text-align|font-weight|width|math-depth)$/;
const PLAIN_VALUE = /^[#\w.% -]+$/;

function applyStyle(node) {
  for (const rule of node.dataset.style.split(";")) {
    const [name, value = ""] = rule.split(":");
    if (STYLES.test(name) && PLAIN_VALUE.test(value)) node.style.setProperty(name, value);
  }
  delete node.dataset.style;
}

/** Render the formula whose source an element shows, its delimiters included. */
function showFormula(node) {
  const source = node.textContent;
  const size = /^\$(?!\$)/.test(source) ? 1 : 2;
  const tex = source.slice(size, -size).trim();
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
