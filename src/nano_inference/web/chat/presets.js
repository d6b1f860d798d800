/** System prompts at hand: a few that come with the page, and the user's own, which this browser keeps. */

import { byId, el } from "../shared/dom.js";
import { readKept, writeKept } from "../shared/keep.js";
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
    const kept = JSON.parse(readKept(PRESETS_KEY));
    return kept.filter((one) => typeof one === "string");
  } catch {
    return [];
  }
}

/** Fill the list; the prompt in the field is the one that is chosen. */
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

function keep(prompts) {
  writeKept(PRESETS_KEY, JSON.stringify(prompts));
  showPresets();
}

/** Let the list and its buttons work on the system prompt's field. */
export function listenToPresets() {
  const text = () => byId("system").value.trim();
  byId("system").addEventListener("input", showPresets);
  byId("preset").addEventListener("change", () => {
    byId("system").value = byId("preset").value;
    showPresets();
  });
  byId("preset-save").addEventListener("click", () => keep([...ownPrompts(), text()]));
  byId("preset-delete").addEventListener("click", () => keep(ownPrompts().filter((one) => one !== text())));
}
