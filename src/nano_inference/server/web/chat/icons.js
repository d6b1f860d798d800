/** Icons, as stroked paths on a grid of 16 by 16. Screen readers ignore them; their buttons have labels. */

import { el } from "../shared/dom.js";

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  chart: "M3 13V8M8 13V3M13 13V6",
  clip: "M12.5 7 7.6 12a2.5 2.5 0 0 1-3.6-3.5l5-5a1.7 1.7 0 0 1 2.4 2.4L6.7 10.6",
  close: "M4 4l8 8M12 4l-8 8",
  compare: "M2 3h5v10H2zM9 3h5v10H9z",
  copy: "M6 6h7.5v7.5H6zM3.5 10h-1V2.5H10v1",
  down: "M8 3v10M4 9l4 4 4-4",
  edit: "M3 13l.7-3L11 2.7 13.3 5 6 12.3zM9.5 4.2l2.3 2.3",
  export: "M8 2v8M5 7l3 3 3-3M3 13.5h10",
  help: "M5.5 6a2.5 2.5 0 1 1 3.6 2.2C8.3 8.6 8 9 8 10M8 12.7v.3",
  import: "M8 10V2M5 5l3-3 3 3M3 13.5h10",
  left: "M10 3 5 8l5 5",
  menu: "M2 4h12M2 8h12M2 12h12",
  play: "M5 3l8 5-8 5z",
  plus: "M8 3v10M3 8h10",
  redo: "M13 8a5 5 0 1 1-1.5-3.6L13 6M13 2v4H9",
  right: "M6 3l5 5-5 5",
  send: "M8 13V3M4 7l4-4 4 4",
  settings: "M2 5h5M11 5h3M2 11h3M9 11h5M7 5a2 2 0 1 0 4 0 2 2 0 1 0-4 0M5 11a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  stop: "M4 4h8v8H4z",
  text: "M2 4h12M2 8h12M2 12h7",
  theme: "M8 2a6 6 0 1 0 0 12A6 6 0 1 0 8 2v12M10.5 3v10M12.5 4.5v7",
  tokens: "M2 4h6v3H2zM10 4h4v3h-4zM2 9h3v3H2zM7 9h7v3H7z",
  trash: "M3 4.5h10M6 4V2.5h4V4M4.5 4.5l.5 9h6l.5-9",
  undo: "M3 3v4h4M3 7a5.2 5.2 0 1 1 .6 4",
};

/** Return the SVG element of an icon. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("class", "icon");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** Return a button with only an icon, whose label is also its tooltip. */
export function iconButton(name, label, listener, attributes = {}) {
  const names = { "aria-label": label, title: label };
  return el("button", { type: "button", class: "quiet", ...names, on: { click: listener }, ...attributes }, icon(name));
}

/** Add the icons of the page's elements with `data-icon`, and their labels as tooltips. */
export function drawIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) {
    node.prepend(icon(node.dataset.icon));
    node.title ||= node.getAttribute("aria-label") ?? "";
  }
}
