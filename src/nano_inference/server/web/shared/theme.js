/** Light and dark theme: the system's setting until the user chooses one. */

import { readStored, writeStored } from "./storage.js";

const THEME_KEY = "nano-inference.theme";

function systemTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Return the chosen theme, else the system's. */
export function currentTheme() {
  return readStored(THEME_KEY) ?? systemTheme();
}

/** Apply the current theme, and follow the system's changes until the user chooses. */
export function startTheme() {
  const show = () => { document.documentElement.dataset.theme = currentTheme(); };
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}

/** Change to the other theme, store the choice, and return the new theme. */
export function toggleTheme() {
  const next = currentTheme() === "dark" ? "light" : "dark";
  writeStored(THEME_KEY, next === systemTheme() ? null : next);
  document.documentElement.dataset.theme = next;
  return next;
}
