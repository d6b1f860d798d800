/** The dashboard: connects its parts, polls the server and shows the results. */

import { byId, el } from "../shared/dom.js";
import { address } from "../shared/server.js";
import { startTheme, toggleTheme } from "../shared/theme.js";
import { Chart } from "./chart.js";
import { clockText, joined } from "./format.js";
import { askForKey, startKeyDialog } from "../shared/key.js";
import { readFacts, readServer } from "./server_state.js";
import { CHARTS, factsOf, TILES } from "./panels.js";
import { Poller } from "./poller.js";
import { History, sumOf } from "./window.js";

const POLL_MS = 2000;
const HISTORY_SECONDS = 600;
const STATES = {
  connecting: ["Connecting", "soft", ""],
  live: ["Live", "good", ""],
  loading: ["Loading", "warn", "The model is being loaded. This page updates automatically."],
  halted: ["Halted", "warn", "A trainer has halted the engine; requests wait until it resumes."],
  draining: ["Draining", "warn", "The server rejects new requests and finishes the running ones."],
  dead: ["Engine failed", "bad", "The engine has failed. Restart the server."],
  locked: ["Key needed", "warn", "The server needs an API key."],
  unreachable: ["Unreachable", "bad", "The server does not answer. This page retries automatically."],
  refused: ["Refused", "bad", ""],
};

const charts = CHARTS.map((spec) => new Chart(spec));
const tiles = TILES.map(makeTile);
const metricsHistory = new History(HISTORY_SECONDS);
const poller = new Poller(poll, POLL_MS);
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

async function poll(signal) {
  try {
    const result = await readServer(signal);
    if (["live", "halted"].includes(result.state)) await updateInfo(result.scrape, signal);
    if (!signal.aborted) show(result);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

/** Read the model's facts if they are unknown, or if the server was restarted. */
async function updateInfo(scrape, signal) {
  const isKnown = page.info !== null && metricsHistory.latest?.gauges.started === scrape.gauges.started;
  if (!isKnown) page.info = await readFacts("/info", signal);
}

function show({ state, message = "", scrape = null, load = null }) {
  page.load = load;
  if (scrape !== null) {
    noteWeights(metricsHistory.latest, scrape);
    metricsHistory.add(scrape);
    page.readAt = Date.now();
  }
  if (state === "locked") {
    poller.stop();
    askForKey();
  }
  showState(state, message);
  showValues();
}

/** Record the time of a change of the weights. */
function noteWeights(before, now) {
  const [old, current] = [before?.gauges.weights ?? null, now.gauges.weights];
  if (old !== null && current !== null && old !== current) page.weightsSince = current === 0 ? null : Date.now();
}

function showState(state, message) {
  page.state = state;
  const [name, kind, text] = page.isPaused ? ["Paused", "soft", ""] : STATES[state];
  const readAt = page.readAt === null ? "" : `Read at ${clockText(page.readAt)}.`;
  byId("state").textContent = name;
  byId("state").className = `state ${kind}`;
  byId("state-text").textContent = state === "refused" ? `The server returned: ${message}.` : text;
  byId("read-at").textContent = readAt;
  byId("enter-key").hidden = state !== "locked";
}

function showValues() {
  const now = page.isPaused ? metricsHistory.latest?.at ?? 0 : performance.now() / 1000;
  const span = { ...page.span, now };
  const points = metricsHistory.since(now - span.length);
  for (const chart of charts) chart.draw(points, span);
  if (metricsHistory.latest === null) return;
  const point = metricsHistory.points.at(-1);
  // Until the page has been open for the whole window, its counts start when it was opened.
  const isWhole = now - metricsHistory.points[0].at >= span.length - POLL_MS / 1000;
  span.words = isWhole ? `in ${span.name}` : "since this page was opened";
  const view = { ...page, span, scrape: metricsHistory.latest, point, sums: sumOf(points) };
  for (const tile of tiles) showTile(tile, view);
  byId("model").textContent = metricsHistory.latest.model ?? "";
  byId("facts").replaceChildren(...factsOf(page.info, metricsHistory.latest)
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

/** Poll only while the page is visible and not paused. */
function updatePolling() {
  if (page.isPaused || document.hidden) poller.stop();
  else poller.start();
}

function pause() {
  page.isPaused = !page.isPaused;
  byId("pause").setAttribute("aria-pressed", String(page.isPaused));
  byId("pause").textContent = page.isPaused ? "Resume" : "Pause";
  showState(page.state, "");
  updatePolling();
}

function chooseWindow(event) {
  page.span = { length: Number(event.target.value), name: event.target.dataset.name };
  showValues();
}

startTheme();
startKeyDialog(updatePolling);
byId("chat").href = address("/");
byId("tiles").append(...tiles.map((tile) => tile.node));
byId("charts").append(...charts.map((chart) => chart.node));
byId("pause").addEventListener("click", pause);
byId("enter-key").addEventListener("click", askForKey);
byId("theme").addEventListener("click", toggleTheme);
byId("windows").addEventListener("change", chooseWindow);
document.addEventListener("visibilitychange", () => { if (page.state !== "locked") updatePolling(); });
showValues();
updatePolling();
