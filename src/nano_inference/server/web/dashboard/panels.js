import {
  bytesText, clockText, countText, joined, percentText, rateText, secondsText, spanText,
} from "./format.js";
import { quantile, rate, share } from "./window.js";

/** Definitions of the tiles, charts and facts. */

const QUANTILES = [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]];

function latencyChart(id, title, meaning) {
  const lines = QUANTILES.map(([name, q]) => ({ name, read: (point) => quantile(point.histograms[id], q) }));
  const note = `${meaning} Quantiles between two readings of /metrics, interpolated in the histogram's buckets.`;
  return { id: `chart-${id}`, title, note, lines, show: secondsText };
}

function gauge(name) {
  return (point) => point.gauges[name];
}

/** The charts, in order; see chart.js for the fields. */
export const CHARTS = [
  {
    id: "chart-requests", title: "Requests", show: countText, least: 1,
    note: "Samples that are running, and samples in the queue.",
    lines: [{ name: "running", read: gauge("running") }, { name: "waiting", read: gauge("waiting") }],
  },
  {
    id: "chart-generated", title: "Generated tokens per second", show: rateText,
    note: "Generated tokens of all samples, between two readings of /metrics.",
    lines: [{ name: "generated", read: (point) => rate(point, "generated") }],
  },
  {
    id: "chart-prompt", title: "Prompt tokens per second", show: rateText,
    note: "All prompt tokens, and those found in the prefix cache, counted when their sample ends.",
    lines: [
      { name: "all", read: (point) => rate(point, "prompt") },
      { name: "from the cache", read: (point) => rate(point, "hits") },
    ],
  },
  {
    id: "chart-cache", title: "KV cache", show: percentText, top: 1,
    note: "Fraction of the KV cache in use; fraction of the prompt tokens found in the prefix cache.",
    lines: [
      { name: "in use", read: gauge("kv") },
      { name: "prefix hits", read: (point) => share(point.counts.hits, point.counts.queries) },
    ],
  },
  latencyChart("first", "Time to first token", "From a sample's arrival to its first token."),
  latencyChart("gap", "Inter-token latency", "Between two tokens of a sample."),
  latencyChart("queue", "Time in the queue", "From a sample's arrival until the engine starts it."),
  {
    id: "chart-errors", title: "Errors", show: countText, least: 1,
    note: "Samples preempted for lack of KV cache, aborted by clients, and failed; requests refused. Each point is "
      + "the number since the previous one.",
    lines: ["preempted", "aborted", "failed", "refused"].map((name) => ({ name, read: (point) => point.counts[name] })),
  },
];

function latencyTile(name, label) {
  return {
    id: name, label, show: secondsText,
    read: ({ sums }) => quantile(sums.histograms[name] ?? null, 0.5),
    more: ({ sums }) => QUANTILES.slice(1)
      .map(([part, q]) => `${part}\u00a0${joined(secondsText(quantile(sums.histograms[name] ?? null, q)))}`).join(", "),
  };
}

function rateTile(name, label) {
  return {
    id: name, label, show: (value) => [rateText(value)[0], value === null ? "" : `${rateText(value)[1]}/s`],
    read: ({ point }) => rate(point, name),
    more: ({ scrape, sums, span }) => (
      `${joined(countText(sums.counts[name] ?? null))} ${span.words}; `
      + `${joined(countText(scrape.counters[name]))} in all`),
  };
}

function countTile(name, label) {
  return {
    id: name, label, show: countText,
    read: ({ sums }) => sums.counts[name] ?? null,
    more: ({ scrape, span }) => `${span.words}; ${joined(countText(scrape.counters[name]))} in all`,
  };
}

function gaugeTile(name, label, show, more) {
  return { id: name, label, show, read: ({ scrape }) => scrape.gauges[name], more };
}

/**
 * The tiles, in order: `read` returns the number, `more` the line below it. Their argument has the latest `scrape` and
 * `point`, the `sums` over the window, the window's `span`, the answers of `/info` and `/load` (or null), and
 * `weightsSince`, the time of the weights' last change (milliseconds since 1970, or null).
 */
export const TILES = [
  gaugeTile("running", "Running", countText, ({ info }) => (info === null ? "" : `of at most ${info.max_running}`)),
  gaugeTile("waiting", "Waiting", countText, ({ load }) => (load === null ? "" : `${load.server_load} requests open`)),
  gaugeTile("kv", "KV cache in use", percentText, ({ scrape: { capacity } }) => (
    capacity === null ? "" : `of ${joined(countText(capacity))} tokens`)),
  {
    id: "prefix", label: "Prefix hits", show: percentText,
    read: ({ sums }) => share(sums.counts.hits, sums.counts.queries),
    more: ({ sums }) => `of ${joined(countText(sums.counts.queries ?? null))} tokens`,
  },
  rateTile("generated", "Generated tokens"),
  rateTile("prompt", "Prompt tokens"),
  latencyTile("first", "First token, p50"),
  latencyTile("gap", "Between tokens, p50"),
  countTile("preempted", "Preempted"),
  countTile("aborted", "Aborted"),
  {
    id: "errors", label: "Failed or refused", show: countText,
    read: ({ sums: { counts } }) => (counts.failed ?? null) === null ? null : counts.failed + (counts.refused ?? 0),
    more: ({ sums: { counts } }) => (
      `${joined(countText(counts.failed ?? null))} failed, ${joined(countText(counts.refused ?? null))} refused`),
  },
  gaugeTile("weights", "Weight version", countText, ({ scrape, weightsSince }) => {
    if (weightsSince !== null) return `since ${clockText(weightsSince)}`;
    return scrape.gauges.weights === 0 ? "as loaded" : "updated";
  }),
];

/** Return the model's facts as `[name, text]` pairs, without those that the server does not report. */
export function factsOf(info, scrape) {
  const known = (value, text) => (value === null || value === undefined ? null : text);
  const { started, memory } = scrape.gauges;
  return [
    ["Model", scrape.model ?? info?.model],
    ["Architecture", info?.architecture],
    ["Parameters", known(info?.parameters, info && joined(countText(info.parameters)))],
    ["Layers", info?.layers],
    ["Weights in the file", info?.file_precision],
    ["Computed in", info?.dtype === "auto" ? null : info?.dtype],
    ["Kernels", known(info?.kernels, `${info?.kernels} on ${info?.device}`)],
    ["Context", known(info?.context, info && `${joined(countText(info.context))} tokens`)],
    ["Server", info?.server],
    ["Memory", known(memory, joined(bytesText(memory)))],
    ["Up for", known(started, joined(spanText(Math.max(0, Date.now() / 1000 - started))))],
  ].filter(([, text]) => text !== null && text !== undefined);
}
