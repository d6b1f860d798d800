/** Sampling settings, stored in this browser; for a setting without a value the server's default applies. */

import { byId, el } from "../shared/dom.js";
import { readStored, writeStored } from "../shared/storage.js";
import { showPresets } from "./presets.js";
import { chatDefaults } from "./stream.js";

const SETTINGS_KEY = "nano-inference.settings";

/** Name in a request, label, minimum, maximum, step, hint. */
const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any", "0 always chooses the most likely token"],
  ["top_p", "Top-p", 0.01, 1, "any", "the most likely tokens with this total probability"],
  ["top_k", "Top-k", 0, 1000000, 1, "number of most likely tokens; 0 for all"],
  ["min_p", "Min-p", 0, 1, "any", "minimum probability, relative to the most likely token"],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, "any", "1 is off"],
  ["presence_penalty", "Presence penalty", -2, 2, "any", "0 is off"],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any", "0 is off"],
  ["max_tokens", "Longest answer", 1, 1000000, 1, "tokens"],
];
const OWN_DEFAULTS = { presence_penalty: 0, frequency_penalty: 0, max_tokens: "as many as fit" };

const MOST_SAMPLES = 8;
const MAX_SEED = Number.MAX_SAFE_INTEGER;

/** Return a number clamped to its bounds, rounded if the step is 1; null if the text is not a number. */
function bounded(text, low, high, step) {
  const value = text === null || String(text).trim() === "" ? NaN : Number(text);
  if (!Number.isFinite(value)) return null;
  const clamped = Math.max(low, Math.min(high, value));
  return step === 1 ? Math.round(clamped) : clamped;
}

/** Owns the settings. */
export class Settings {
  constructor() {
    let stored = {};
    try {
      stored = JSON.parse(readStored(SETTINGS_KEY) ?? "{}") ?? {};
    } catch {
      // invalid JSON counts as no settings
    }
    this.assign(stored);
  }

  /** Set all values, clamped to their bounds. */
  assign({ sampling = {}, seed = null, samples = 1, system = "", details = true }) {
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

  /** Store the settings in this browser. */
  save() {
    const { sampling, seed, samples, system, details } = this;
    writeStored(SETTINGS_KEY, JSON.stringify({ sampling, seed, samples, system, details }));
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

/** Fill the form with the settings, and with the server's defaults as placeholders. */
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

/** Read the settings from the form; return the conversation's system prompt. */
export function readSettings(settings) {
  settings.assign({
    sampling: Object.fromEntries(FIELDS.map(([name]) => [name, byId(`set-${name}`).value])),
    seed: byId("seed").value,
    samples: byId("samples").value,
    system: byId("system").value,
    details: byId("details").checked,
  });
  settings.save();
  return settings.system;
}

/** Clear all settings except the system prompt, so that the server's defaults apply. */
export function resetSettings(settings) {
  Object.assign(settings, { sampling: {}, seed: null, samples: 1, details: true });
  settings.save();
}
