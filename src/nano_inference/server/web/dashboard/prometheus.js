/** Parses the text format of Prometheus. */

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", '"': '"', "\\": "\\" };

/** Return the series of a text: a Map of names to samples, each `{labels, value}`. */
export function parseMetrics(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (found === null) continue;
    const [, name, labels = "", value] = found;
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels: labelsOf(labels), value: numberOf(value) });
  }
  return series;
}

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (whole, char) => ESCAPED[char] ?? whole);
  }
  return labels;
}

function numberOf(text) {
  return Number(text.replace(/^([+-]?)Inf$/, "$1Infinity"));
}

/** Return the sum of a name's samples with these labels, null if there are none. */
export function total(series, name, labels = {}) {
  const wanted = Object.entries(labels);
  const values = (series.get(name) ?? [])
    .filter((sample) => wanted.every(([key, value]) => sample.labels[key] === value))
    .map((sample) => sample.value);
  return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0);
}

/**
 * Return a histogram, null if there is none: `bounds`, the ascending upper bounds of its buckets, the last Infinity;
 * and `counts`, the number of observations up to each bound. Series with different other labels are summed.
 */
export function histogramOf(series, name) {
  const byBound = new Map();
  for (const { labels, value } of series.get(`${name}_bucket`) ?? []) {
    const bound = numberOf(labels.le ?? "NaN");
    byBound.set(bound, (byBound.get(bound) ?? 0) + value);
  }
  if (byBound.size === 0) return null;
  const bounds = [...byBound.keys()].sort((a, b) => a - b);
  return { bounds, counts: bounds.map((bound) => byBound.get(bound)) };
}
