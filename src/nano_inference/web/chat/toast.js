/** Short messages at the edge of the page, with something to do about them. */

import { byId, el } from "../shared/dom.js";
import { iconButton } from "./icons.js";

const STAY_MS = 8000;

/** Show a message for a while; an error stays until it is closed. `action`: {label, run}. Return what closes it. */
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
