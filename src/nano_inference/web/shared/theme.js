/** Light and dark: the system's choice until somebody makes one. */

import { readKept, writeKept } from "./keep.js";

const THEME_KEY = "nano-inference.theme";

function systemTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Return the theme that was chosen here, or the system's. */
export function currentTheme() {
  return readKept(THEME_KEY) ?? systemTheme();
}

/** Show the current theme, and follow the system while nobody has chosen. */
export function startTheme() {
  const show = () => { document.documentElement.dataset.theme = currentTheme(); };
  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}

/** Change to the other theme and remember that; return it. */
export function toggleTheme() {
  const next = currentTheme() === "dark" ? "light" : "dark";
  writeKept(THEME_KEY, next === systemTheme() ? null : next);
  document.documentElement.dataset.theme = next;
  return next;
}
