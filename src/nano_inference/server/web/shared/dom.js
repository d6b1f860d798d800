/** Creates elements without HTML source: all texts become text nodes. */

/**
 * Create an element. `attributes`: any attribute by name, true for an empty value, false or null to omit it; `on` maps
 * events to listeners. Children are nodes or texts; null is omitted.
 */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}
