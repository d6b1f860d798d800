/** Copies texts, also over plain HTTP, where browsers have no clipboard object. */

import { el } from "../shared/dom.js";
import { toast } from "./toast.js";

/** Copy a text and show the result as a toast. */
export async function copyText(text) {
  const isCopied = navigator.clipboard
    ? await navigator.clipboard.writeText(text).then(() => true, () => false)
    : copyBySelection(text);
  toast(isCopied ? "Copied." : "The browser does not allow this page to copy.");
}

function copyBySelection(text) {
  const field = el("textarea", { class: "sr-only", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
