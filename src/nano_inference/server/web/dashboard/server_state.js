import { ask, ServerError } from "../shared/server.js";
import { readScrape } from "./scrape.js";

/** Reads the server's state: metrics, load and health. */

const TIMEOUT_MS = 10000;

async function read(path, signal) {
  const response = await ask(path, { signal: AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]) });
  const at = performance.now() / 1000;
  try {
    return { text: await response.text(), at };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the connection was lost");
  }
}

/** Return the JSON of an optional path, null after an error. */
export async function readFacts(path, signal) {
  try {
    return JSON.parse((await read(path, signal)).text);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return null;
  }
}

/**
 * Return the server's `state` ("live", "loading", "halted", "draining", "dead", "locked", "unreachable" or "refused");
 * the `message` of an error; the `scrape`, if there is one; and the answer of /load or null. Throws `AbortError`.
 */
export async function readServer(signal) {
  try {
    const { text, at } = await read("/metrics", signal);
    const scrape = readScrape(text, at);
    if (scrape.model === null) return { state: "loading", scrape };
    if (scrape.gauges.up === 0) return { state: "dead", scrape };
    const [load, health] = await Promise.all([readFacts("/load", signal), readFacts("/health", signal)]);
    const running = scrape.gauges.halted === 1 ? "halted" : "live";
    return { state: health?.status === "draining" ? "draining" : running, scrape, load };
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    return { state: stateOf(error), message: error.message };
  }
}

function stateOf(error) {
  const states = { 0: "unreachable", 401: "locked", 502: "unreachable", 503: "loading", 504: "unreachable" };
  return error.code === "engine_dead" ? "dead" : states[error.status] ?? "refused";
}
