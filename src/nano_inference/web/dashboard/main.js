/** The dashboard: puts its parts together, and shows what each look at the server gave. */

import { byId, el } from "../shared/dom.js";
import { address } from "../shared/server.js";
import { startTheme, toggleTheme } from "../shared/theme.js";
import { Chart } from "./chart.js";
import { clockText, joined } from "./format.js";
import { askForKey, startKeyDialog } from "./key.js";
import { lookAt, readFacts } from "./look.js";
import { CHARTS, factsOf, TILES } from "./panels.js";
import { Poller } from "./poller.js";
import { History, sumOf } from "./window.js";

const WAIT_MS = 2000;
const KEPT_SECONDS = 600;
const STATES = {
  connecting: ["Connecting", "soft", ""],
  live: ["Live", "good", ""],
  loading: ["Loading", "warn", "The model is being loaded; this page goes on by itself."],
  held: ["Held", "warn", "A trainer holds the engine; requests wait until it goes on."],
  draining: ["Stopping", "warn", "The server takes no more requests and ends those that it has."],
  dead: ["Engine failed", "bad", "The engine has failed and takes no requests until the server is restarted."],
  locked: ["Key needed", "warn", "The server wants an API key."],
  unreachable: ["Unreachable", "bad", "The server does not answer; this page goes on by itself."],
  refused: ["Refused", "bad", ""],
};

const charts = CHARTS.map((spec) => new Chart(spec));
const tiles = TILES.map(makeTile);
const kept = new History(KEPT_SECONDS);
const poller = new Poller(look, WAIT_MS);
const page = {
  state: "connecting", isPaused: false, span: { length: 300, name: "5 min" },
  info: null, load: null, weightsSince: null, readAt: null,
};

function makeTile(spec) {
  const value = el("data", { value: "" });
  const unit = el("span", { class: "unit" });
  const more = el("dd", { class: "more" });
  const node = el("div", { class: "tile", id: `tile-${spec.id}` },
    el("dt", {}, spec.label), el("dd", { class: "value" }, value, unit), more);
  return { spec, node, value, unit, more };
}

async function look(signal) {
  try {
    const seen = await lookAt(signal);
    if (["live", "held"].includes(seen.state)) await updateInfo(seen.scrape, signal);
    if (!signal.aborted) take(seen);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

/** Ask for the model's facts when they are not known, or another process answers. */
async function updateInfo(scrape, signal) {
  const isKnown = page.info !== null && kept.latest?.gauges.started === scrape.gauges.started;
  if (!isKnown) page.info = await readFacts("/info", signal);
}

function take({ state, message = "", scrape = null, load = null }) {
  page.load = load;
  if (scrape !== null) {
    noteWeights(kept.latest, scrape);
    kept.add(scrape);
    page.readAt = Date.now();
  }
  if (state === "locked") {
    poller.stop();
    askForKey();
  }
  showState(state, message);
  showValues();
}

/** Note when the weights are seen to change. */
function noteWeights(before, now) {
  const [old, current] = [before?.gauges.weights ?? null, now.gauges.weights];
  if (old !== null && current !== null && old !== current) page.weightsSince = current === 0 ? null : Date.now();
}

function showState(state, message) {
  page.state = state;
  const [name, kind, text] = page.isPaused ? ["Paused", "soft", ""] : STATES[state];
  const read = page.readAt === null ? "" : `Read at ${clockText(page.readAt)}.`;
  byId("state").textContent = name;
  byId("state").className = `state ${kind}`;
  byId("state-text").textContent = state === "refused" ? `The server says: ${message}.` : text;
  byId("read-at").textContent = read;
  byId("enter-key").hidden = state !== "locked";
}

function showValues() {
  const now = page.isPaused ? kept.latest?.at ?? 0 : performance.now() / 1000;
  const span = { ...page.span, now };
  const points = kept.since(now - span.length);
  for (const chart of charts) chart.draw(points, span);
  if (kept.latest === null) return;
  const point = kept.points.at(-1);
  const view = { ...page, span, scrape: kept.latest, point, sums: sumOf(points) };
  for (const tile of tiles) showTile(tile, view);
  byId("model").textContent = kept.latest.model ?? "";
  byId("facts").replaceChildren(...factsOf(page.info, kept.latest)
    .map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(text)))));
}

function showTile({ spec, value, unit, more }, view) {
  const number = view.scrape.model === null ? null : spec.read(view);
  const [text, name] = spec.show(number);
  value.value = number ?? "";
  value.textContent = name === "%" ? joined([text, name]) : text;
  unit.textContent = name === "%" || name === "" ? "" : `\u00a0${name}`;
  more.textContent = view.scrape.model === null ? "" : spec.more(view);
}

/** Look while somebody watches, and not otherwise. */
function goOn() {
  if (page.isPaused || document.hidden) poller.stop();
  else poller.start();
}

function pause() {
  page.isPaused = !page.isPaused;
  byId("pause").setAttribute("aria-pressed", String(page.isPaused));
  byId("pause").textContent = page.isPaused ? "Go on" : "Pause";
  showState(page.state, "");
  goOn();
}

function chooseWindow(event) {
  page.span = { length: Number(event.target.value), name: event.target.dataset.name };
  showValues();
}

startTheme();
startKeyDialog(goOn);
byId("chat").href = address("/");
byId("tiles").append(...tiles.map((tile) => tile.node));
byId("charts").append(...charts.map((chart) => chart.node));
byId("pause").addEventListener("click", pause);
byId("enter-key").addEventListener("click", askForKey);
byId("theme").addEventListener("click", toggleTheme);
byId("windows").addEventListener("change", chooseWindow);
document.addEventListener("visibilitychange", () => { if (page.state !== "locked") goOn(); });
showValues();
goOn();
