import { el } from "../shared/dom.js";
import { clockText, joined, marked, NO_VALUE } from "./format.js";
import { marksTo, nearest, pathThrough, timeMarks } from "./scale.js";

/** Line charts in SVG: scaled to the available width, readable by pointer, by arrow keys and as a table. */

const HEIGHT = 172;
const EDGE = { left: 52, right: 14, top: 10, bottom: 22 };
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/**
 * One chart. `spec`: `id`; `title`; `note`, a description; `lines`, each `{name, read}`, where `read` returns a point's
 * value or null; `show`, which converts a value to `[number, unit]`; `top`, the fixed end of the axis, if any; `least`,
 * the smallest step of the axis.
 */
export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.points = [];
    this.span = { now: 0, length: 60, name: "" };
    this.chosen = null;
    this.width = 400;
    this.plot = svg("svg", { role: "img", tabindex: "0", height: HEIGHT, class: "plot" });
    this.clock = el("span", { class: "at" }, "now");
    this.liveRegion = el("span", { class: "sr-only", "aria-live": "polite" });
    this.values = spec.lines.map(() => el("data", { value: "" }, NO_VALUE[0]));
    this.body = el("tbody");
    this.table = this.#makeTable();
    this.node = this.#makeFigure();
    this.#listen();
    new ResizeObserver(([entry]) => this.#resize(entry.contentRect.width)).observe(this.plot);
  }

  /** Draw points (see window.js); `span`: `now` and `length` in seconds, and the `name` of the length. */
  draw(points, span) {
    this.points = points;
    this.span = span;
    this.#redraw();
  }

  #makeFigure() {
    const { id, title, note } = this.spec;
    const legend = this.spec.lines.map((line, index) => (
      el("li", {}, swatch(index), `${line.name} `, this.values[index])));
    const onToggle = { toggle: () => this.#fillTable() };
    return el("figure", { id },
      el("figcaption", {}, el("h2", {}, title), this.clock),
      this.plot, el("ul", { class: "legend" }, ...legend), this.liveRegion,
      el("details", { on: onToggle }, el("summary", {}, "Values"), el("p", {}, note), this.table));
  }

  #makeTable() {
    const heads = ["Time", ...this.spec.lines.map((line) => line.name)].map((name) => el("th", { scope: "col" }, name));
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.body);
    const label = `Values: ${this.spec.title}`;
    return el("div", { class: "rows", role: "region", tabindex: "0", "aria-label": label }, table);
  }

  #listen() {
    const on = (name, listener) => this.plot.addEventListener(name, listener);
    on("pointermove", (event) => this.#choose({ part: this.#partAt(event.clientX) }));
    on("pointerleave", () => this.#choose(null));
    on("focus", () => { if (this.plot.matches(":focus-visible")) this.#step(0); });
    on("blur", () => this.#choose(null));
    on("keydown", (event) => this.#onKey(event));
  }

  #onKey(event) {
    const ends = { Home: -Infinity, End: Infinity, ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") this.#choose(null);
    if (!(event.key in ends)) return;
    event.preventDefault();
    this.#step(ends[event.key]);
  }

  /** Choose the point `by` points after the current one, and announce it to screen readers. */
  #step(by) {
    const from = this.points.indexOf(this.#chosenPoint() ?? this.points.at(-1));
    const point = this.points[Math.min(Math.max(from + by, 0), this.points.length - 1)];
    if (point === undefined) return;
    this.#choose({ at: point.at });
    this.liveRegion.textContent = `${this.clock.textContent}: ${this.#sentence(point)}`;
  }

  #choose(chosen) {
    this.chosen = chosen;
    this.#redraw();
  }

  /** Return the point chosen by pointer or keys, null if there is none. */
  #chosenPoint() {
    if (this.chosen === null) return null;
    return nearest(this.points, this.chosen.at ?? this.span.now - this.span.length * (1 - this.chosen.part));
  }

  /** Return a pointer position as a fraction of the time window, from 0 to 1. */
  #partAt(clientX) {
    const inside = this.width - EDGE.left - EDGE.right;
    return (clientX - this.plot.getBoundingClientRect().left - EDGE.left) / inside;
  }

  #resize(width) {
    if (width > 0 && width !== this.width) {
      this.width = width;
      this.#redraw();
    }
  }

  #x(at) {
    return EDGE.left + (this.width - EDGE.left - EDGE.right) * (1 - (this.span.now - at) / this.span.length);
  }

  #redraw() {
    const { lines, show, top, least } = this.spec;
    const highest = Math.max(0, ...this.points.flatMap((point) => lines.map((line) => line.read(point) ?? 0)));
    const marks = marksTo(top ?? highest, least);
    const y = (value) => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * (value / marks.at(-1));
    const chosen = this.#chosenPoint();
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.setAttribute("aria-label", this.#summary());
    this.plot.replaceChildren(
      ...marks.map((value) => this.#valueMark(y(value), marked(show(value)))),
      ...timeMarks(this.span.length).map(([ago, text]) => this.#timeMark(ago, text)),
      ...lines.map((line, index) => this.#line(line, index, y)),
      ...(chosen === null ? [] : this.#cross(chosen, y)),
    );
    this.#showValues(chosen);
    if (this.node.querySelector("details").open) this.#fillTable();
  }

  #valueMark(y, text) {
    return svg("g", {}, svg("line", { class: "grid", x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }),
      svg("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, text));
  }

  #timeMark(ago, text) {
    const [anchor, x] = ago === 0 ? ["end", 6] : ["middle", 0];
    return svg("text", { x: this.#x(this.span.now - ago) + x, y: HEIGHT - 5, "text-anchor": anchor }, text);
  }

  #line(line, index, y) {
    const path = pathThrough(this.points.map((point) => {
      const value = line.read(point);
      return [this.#x(point.at), value === null ? null : y(value), point.isApart];
    }));
    return svg("path", { class: `line line-${index}`, d: path });
  }

  #cross(point, y) {
    const x = this.#x(point.at);
    const dots = this.spec.lines.map((line, index) => [line.read(point), index]).filter(([value]) => value !== null);
    return [svg("line", { class: "cross", x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      ...dots.map(([value, index]) => svg("circle", { class: `dot line-${index}`, cx: x, cy: y(value), r: 4 }))];
  }

  /** Show the values of the chosen point, else of the latest, in the legend. */
  #showValues(chosen) {
    const point = chosen ?? this.points.at(-1);
    this.clock.textContent = chosen === null ? "now" : this.#timeOf(chosen);
    this.spec.lines.forEach((line, index) => {
      const value = point === undefined ? null : line.read(point);
      this.values[index].value = value ?? "";
      this.values[index].textContent = joined(this.spec.show(value));
    });
  }

  #timeOf(point) {
    return clockText(Date.now() - performance.now() + point.at * 1000);
  }

  #sentence(point) {
    return this.spec.lines.map((line) => `${line.name} ${joined(this.spec.show(line.read(point)))}`).join(", ");
  }

  /** Return a description for screen readers. */
  #summary() {
    const values = this.points.length === 0 ? "no values yet" : `now ${this.#sentence(this.points.at(-1))}`;
    return `${this.spec.title}, last ${this.span.name}: ${values}. Use the arrow keys for other times.`;
  }

  #fillTable() {
    const cells = (point) => this.spec.lines.map((line) => el("td", {}, joined(this.spec.show(line.read(point)))));
    const rows = this.points.map((point) => el("tr", {}, el("td", {}, this.#timeOf(point)), ...cells(point)));
    this.body.replaceChildren(...rows.reverse());
  }
}

function swatch(index) {
  return svg("svg", { class: "swatch", width: 20, height: 8, "aria-hidden": "true" },
    svg("path", { class: `line line-${index}`, d: "M1 4L19 4" }));
}
