/** How answers are drawn: what the user has set, kept in this browser; what is not set is the server's own default. */

import { byId, el } from "../shared/dom.js";

const SETTINGS_KEY = "nano-inference.settings";

/** Name in a request, label, lowest, highest, step. */
const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any", "0 always takes the likeliest token"],
  ["top_p", "Top-p", 0.01, 1, "any", "the likeliest tokens that have this share together"],
  ["top_k", "Top-k", 0, 1000000, 1, "this many likeliest tokens; 0 takes all"],
  ["min_p", "Min-p", 0, 1, "any", "tokens with this share of the likeliest one's probability"],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, "any", "1 is off"],
  ["presence_penalty", "Presence penalty", -2, 2, "any", "0 is off"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any", "0 is off"],
  ["max_tokens", "Longest answer", 1, 1000000, 1, "tokens"],
];
const OWN_DEFAULTS = { presence_penalty: 0, frequency_penalty: 0, max_tokens: "all the room there is" };

/** Owns the settings. */
export class Settings {
  constructor() {
    const kept = JSON.parse(localStorage.getItem(SETTINGS_KEY) ?? "{}");
    this.sampling = kept.sampling ?? {};
    this.seed = kept.seed ?? null;
    this.samples = kept.samples ?? 1;
    this.system = kept.system ?? "";
    this.details = kept.details ?? true;
  }

  /** Keep them. */
  save() {
    const { sampling, seed, samples, system, details } = this;
    localStorage.setItem(SETTINGS_KEY, JSON.stringify({ sampling, seed, samples, system, details }));
  }
}

function numberField(name, label, low, high, step, hint, value, fallback) {
  const input = el("input", {
    id: `set-${name}`, name, type: "number", min: low, max: high, step, inputmode: "decimal",
    "aria-describedby": `hint-${name}`, placeholder: fallback === undefined ? "server's default" : String(fallback),
  });
  input.value = value ?? "";
  return el("div", { class: "field" },
    el("label", { for: input.id }, label), input, el("small", { id: `hint-${name}` }, hint));
}

/** Fill the form with what is set, and with the server's defaults as placeholders. */
export function showSettings(settings, info, conversation) {
  const fallbacks = { ...OWN_DEFAULTS, ...info?.sampling_defaults };
  byId("sampling").replaceChildren(...FIELDS.map(([name, label, low, high, step, hint]) =>
    numberField(name, label, low, high, step, hint, settings.sampling[name], fallbacks[name])));
  byId("system").value = conversation.system;
  byId("seed").value = settings.seed ?? "";
  byId("samples").value = settings.samples;
  byId("samples").max = Math.min(8, info?.max_n ?? 8);
  byId("details").checked = settings.details;
}

/** Take over what the form says; return the conversation's system prompt. */
export function readSettings(settings) {
  settings.sampling = {};
  for (const [name] of FIELDS) {
    const text = byId(`set-${name}`).value.trim();
    if (text !== "") settings.sampling[name] = Number(text);
  }
  const seed = byId("seed").value.trim();
  settings.seed = seed === "" ? null : Number(seed);
  settings.samples = Math.max(1, Number(byId("samples").value) || 1);
  settings.details = byId("details").checked;
  settings.system = byId("system").value;
  settings.save();
  return settings.system;
}

/** Forget what is set: the server's defaults hold again. The system prompt stays. */
export function resetSettings(settings) {
  Object.assign(settings, { sampling: {}, seed: null, samples: 1, details: true });
  settings.save();
}
