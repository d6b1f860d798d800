/** Changes between scrapes, and their sums over a time window. Times are in seconds. */

/** Longest time between two scrapes, in seconds, for which charts connect their points. */
export const GAP_SECONDS = 10;

/**
 * Return the point of a scrape, given the scrape before (null for the first): its time `at` and `gauges`; the `seconds`
 * since the scrape before; and for that time `counts`, the increases of the counters, and `histograms` of the
 * observations. Unknown values are null.
 */
export function pointBetween(before, now) {
  const isNew = before !== null && hasRestarted(before, now);
  const seconds = before === null ? null : now.at - before.at;
  const change = (how, name, value) => (value === null || before === null ? null : how(name, value));
  const each = (values, how) => (
    Object.fromEntries(Object.entries(values).map(([name, value]) => [name, change(how, name, value)])));
  return {
    at: now.at,
    seconds,
    isApart: seconds === null || seconds > GAP_SECONDS,
    gauges: now.gauges,
    counts: each(now.counters, (name, value) => increase(isNew ? null : before.counters[name], value)),
    histograms: each(now.histograms, (name, value) => added(isNew ? null : before.histograms[name], value)),
  };
}

/** Return true if the server was restarted, and its counters with it, even if they are higher now. */
function hasRestarted(before, now) {
  const [old, current] = [before.gauges.started, now.gauges.started];
  return old !== null && current !== null && old !== current;
}

/**
 * Return the increase of a counter. A counter that fell was reset to 0, as was one without a value before (null), which
 * is the case while the model is loaded.
 */
export function increase(before, now) {
  return before === null || now < before ? now : now - before;
}

/** Return the histogram of the observations between two states of a histogram, with resets as in `increase`. */
export function added(before, now) {
  const fell = before !== null && now.counts.some((count, index) => count < before.counts[index]);
  if (before === null || fell || !haveSameBounds(before, now)) return now;
  return { bounds: now.bounds, counts: now.counts.map((count, index) => count - before.counts[index]) };
}

function haveSameBounds(one, other) {
  return one.bounds.length === other.bounds.length && one.bounds.every((bound, i) => bound === other.bounds[i]);
}

/**
 * Return the quantile `q` (0 to 1) of a histogram, null without observations. As histogram_quantile of Prometheus:
 * linear interpolation inside a bucket; the highest finite bound for the last bucket.
 */
export function quantile(histogram, q) {
  if (histogram === null) return null;
  const { bounds, counts } = histogram;
  const rank = q * counts.at(-1);
  if (!(counts.at(-1) > 0)) return null;
  const index = counts.findIndex((count) => count >= rank);
  const [lower, below] = index === 0 ? [0, 0] : [bounds[index - 1], counts[index - 1]];
  if (bounds[index] === Infinity) return index === 0 ? null : lower;
  const inside = counts[index] - below;
  return inside > 0 ? lower + ((bounds[index] - lower) * (rank - below)) / inside : lower;
}

/** Return a point's count per second, null if unknown. */
export function rate(point, name) {
  const count = point.counts[name] ?? null;
  return count === null || !(point.seconds > 0) ? null : count / point.seconds;
}

/** Return the ratio of two numbers, null if one is missing or `whole` is 0. */
export function share(part, whole) {
  return part === null || part === undefined || !(whole > 0) ? null : part / whole;
}

/** Return the sums over points: `counts` and `histograms`, null if no point has a value. */
export function sumOf(points) {
  const sums = { counts: {}, histograms: {} };
  for (const point of points) {
    for (const [name, count] of Object.entries(point.counts)) {
      sums.counts[name] = count === null ? sums.counts[name] ?? null : (sums.counts[name] ?? 0) + count;
    }
    for (const [name, histogram] of Object.entries(point.histograms)) {
      sums.histograms[name] = merged(sums.histograms[name] ?? null, histogram);
    }
  }
  return sums;
}

/** Return the sum of two histograms; if their bounds differ, the later one. */
function merged(one, other) {
  if (one === null || other === null) return one ?? other;
  if (!haveSameBounds(one, other)) return other;
  return { bounds: one.bounds, counts: one.counts.map((count, index) => count + other.counts[index]) };
}

/** Owns the points of the last `length` seconds, in memory only. */
export class History {
  constructor(length) {
    this.length = length;
    this.latest = null;
    this.points = [];
  }

  /** Add a scrape, later than all before it. */
  add(scrape) {
    this.points.push(pointBetween(this.latest, scrape));
    this.latest = scrape;
    this.points = this.since(scrape.at - this.length);
  }

  /** Return the points since a time. */
  since(at) {
    return this.points.filter((point) => point.at >= at);
  }
}
