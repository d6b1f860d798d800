/** Elements without HTML texts: everything that comes from elsewhere becomes a text node. */

/**
 * Make an element. `attributes`: `class`, `data-…`, any attribute; `on` holds listeners by event; true and false
 * switch an attribute on and off. Children are nodes or texts; null leaves one out.
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

/** Return the element with an id. */
export function byId(id) {
  return document.getElementById(id);
}
