/** Saved system prompts: built-in ones, and the user's own, stored in this browser. */

import { byId, el } from "../shared/dom.js";
import { readStored, writeStored } from "../shared/storage.js";
import { titleOf } from "./tree.js";

const PRESETS_KEY = "nano-inference.presets";
const BUILT_IN = [
  ["Brief", "Answer in as few words as possible. Leave out greetings and explanations."],
  ["Step by step", "Think step by step. Show each step, and end with the result on a line of its own."],
  ["Programmer", "You are an experienced programmer. Answer with code, then explain it in three sentences."],
  ["Translator", "Translate everything you are sent into English. Answer with the translation alone."],
  ["Teacher", "Explain as to a curious twelve-year-old: short sentences, an everyday example, no jargon."],
];

/** Return the user's own prompts, newest last. */
function ownPrompts() {
  try {
    return JSON.parse(readStored(PRESETS_KEY)).filter((one) => typeof one === "string");
  } catch {
    return [];
  }
}

/** Fill the list, and select the prompt that is in the field. */
export function showPresets() {
  const text = byId("system").value.trim();
  const option = (name, value) => el("option", { value }, name);
  const own = ownPrompts();
  byId("preset").replaceChildren(option("Choose…", ""),
    el("optgroup", { label: "Built in" }, ...BUILT_IN.map((one) => option(...one))),
    own.length ? el("optgroup", { label: "Your own" }, ...own.map((one) => option(titleOf(one), one))) : "");
  byId("preset").value = text;
  if (byId("preset").selectedIndex < 0) byId("preset").value = "";
  byId("preset-delete").hidden = !own.includes(text);
  byId("preset-save").disabled = !text || byId("preset").value !== "";
}

function savePrompts(prompts) {
  writeStored(PRESETS_KEY, JSON.stringify(prompts));
  showPresets();
}

/** Connect the list and its buttons with the field of the system prompt. */
export function listenToPresets() {
  const text = () => byId("system").value.trim();
  byId("system").addEventListener("input", showPresets);
  byId("preset").addEventListener("change", () => {
    byId("system").value = byId("preset").value;
    showPresets();
  });
  byId("preset-save").addEventListener("click", () => savePrompts([...ownPrompts(), text()]));
  byId("preset-delete").addEventListener("click", () => savePrompts(ownPrompts().filter((one) => one !== text())));
}
