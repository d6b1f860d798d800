/** How answers are drawn: what the user has set, kept in this browser; what is not set is the server's own default. */

import { byId, el } from "../shared/dom.js";
import { readKept, writeKept } from "../shared/keep.js";
import { showPresets } from "./presets.js";
import { chatDefaults } from "./stream.js";

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

const MOST_SAMPLES = 8;
const MAX_SEED = Number.MAX_SAFE_INTEGER;

/** Return a number held to its bounds, whole where its steps are; null for what is none. */
function bounded(text, low, high, step) {
  const value = text === null || String(text).trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(value)) return null;
  const held = Math.max(low, Math.min(high, value));
  return step === 1 ? Math.round(held) : held;
}

/** Owns the settings. */
export class Settings {
  constructor() {
    let kept = {};
    try {
      kept = JSON.parse(readKept(SETTINGS_KEY) ?? "{}") ?? {};
    } catch {
      // what is kept is no JSON: nothing is set
    }
    this.take(kept);
  }

  /** Set what was kept or written, held to its bounds. */
  take({ sampling = {}, seed = null, samples = 1, system = "", details = true }) {
    this.sampling = {};
    for (const [name, , low, high, step] of FIELDS) {
      const value = bounded(sampling?.[name] ?? null, low, high, step);
      if (value !== null) this.sampling[name] = value;
    }
    this.seed = bounded(seed, 0, MAX_SEED, 1);
    this.samples = bounded(samples, 1, MOST_SAMPLES, 1) ?? 1;
    this.system = String(system);
    this.details = Boolean(details);
  }

  /** Keep them. */
  save() {
    const { sampling, seed, samples, system, details } = this;
    writeKept(SETTINGS_KEY, JSON.stringify({ sampling, seed, samples, system, details }));
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
  const fallbacks = { ...OWN_DEFAULTS, ...info?.sampling_defaults, ...chatDefaults(info) };
  byId("sampling").replaceChildren(...FIELDS.map(([name, label, low, high, step, hint]) =>
    numberField(name, label, low, high, step, hint, settings.sampling[name], fallbacks[name])));
  const source = info?.chat_defaults_source;
  byId("defaults-source").textContent = source
    ? `A field left empty has the value shown in grey. Temperature, top-p, top-k and min-p: ${source}.` : "";
  byId("system").value = conversation.system;
  showPresets();
  byId("seed").value = settings.seed ?? "";
  byId("samples").value = settings.samples;
  byId("samples").max = Math.min(MOST_SAMPLES, info?.max_n ?? MOST_SAMPLES);
  byId("details").checked = settings.details;
}

/** Take over what the form says; return the conversation's system prompt. */
export function readSettings(settings) {
  settings.take({
    sampling: Object.fromEntries(FIELDS.map(([name]) => [name, byId(`set-${name}`).value])),
    seed: byId("seed").value,
    samples: byId("samples").value,
    system: byId("system").value,
    details: byId("details").checked,
  });
  settings.save();
  return settings.system;
}

/** Forget what is set: the server's defaults hold again. The system prompt stays. */
export function resetSettings(settings) {
  Object.assign(settings, { sampling: {}, seed: null, samples: 1, details: true });
  settings.save();
}
