/** Short messages at the edge of the page, with an optional action. */

import { byId, el } from "../shared/dom.js";
import { iconButton } from "./icons.js";

const STAY_MS = 8000;

/** Show a message for 8 seconds, an error until it is closed. `action`: {label, run}. Return a function to close it. */
export function toast(text, { isError = false, action = null } = {}) {
  const close = () => node.remove();
  const act = action && el("button", { type: "button", on: { click: () => { close(); action.run(); } } }, action.label);
  const end = iconButton("close", "Close", close);
  const [name, role] = isError ? ["toast bad", "alert"] : ["toast", "status"];
  const node = el("div", { class: name, role }, el("span", {}, text), act, end);
  byId("toasts").append(node);
  if (!isError) setTimeout(close, STAY_MS);
  return close;
}
