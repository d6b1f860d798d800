/** What happened between two scrapes, and over many of them. Pure: scrapes in, numbers out. Times are seconds. */

/** A longer time between two scrapes is a gap: nobody looked, and charts draw no line across it. Seconds. */
export const GAP_SECONDS = 10;

/**
 * Return what a scrape adds to the one before (null for the first): `at`; `gauges`, as they were then; `seconds` that
 * passed; and in that time `counts`, by how much each counter rose, and `histograms` of what was observed. A count is
 * null where nothing can be said.
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

/** Whether another process answers now: its counters began anew, even where they are higher by now. */
function hasRestarted(before, now) {
  const [old, current] = [before.gauges.started, now.gauges.started];
  return old !== null && current !== null && old !== current;
}

/**
 * Return by how much a counter rose. One that fell began anew at 0; so did one that was not there (null), which is how
 * it looks while the model is loaded.
 */
export function increase(before, now) {
  return before === null || now < before ? now : now - before;
}

/** Return the histogram of what was observed between two states of one, told like `increase`. */
export function added(before, now) {
  const fell = before !== null && now.counts.some((count, index) => count < before.counts[index]);
  if (before === null || fell || !haveSameBounds(before, now)) return now;
  return { bounds: now.bounds, counts: now.counts.map((count, index) => count - before.counts[index]) };
}

function haveSameBounds(one, other) {
  return one.bounds.length === other.bounds.length && one.bounds.every((bound, i) => bound === other.bounds[i]);
}

/**
 * Return the value that the part `q` (0 to 1) of a histogram's observations does not exceed, null without any. As
 * Prometheus' histogram_quantile: even inside a bucket; the highest finite bound for what lies beyond it.
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

/** Return a point's count for each second of its time, null where nothing can be said. */
export function rate(point, name) {
  const count = point.counts[name] ?? null;
  return count === null || !(point.seconds > 0) ? null : count / point.seconds;
}

/** Return one number in proportion to another, null without both or when there is nothing to divide by. */
export function share(part, whole) {
  return part === null || part === undefined || !(whole > 0) ? null : part / whole;
}

/** Return the sums over points: `counts` and `histograms`, null where no point says anything. */
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

/** Return two histograms as one; of two that cannot be added up, the later. */
function merged(one, other) {
  if (one === null || other === null) return one ?? other;
  if (!haveSameBounds(one, other)) return other;
  return { bounds: one.bounds, counts: one.counts.map((count, index) => count + other.counts[index]) };
}

/** The points of the last `length` seconds. Owns them; nothing is kept elsewhere, or when the page is closed. */
export class History {
  constructor(length) {
    this.length = length;
    this.latest = null;
    this.points = [];
  }

  /** Take a scrape, later than all before it. */
  add(scrape) {
    this.points.push(pointBetween(this.latest, scrape));
    this.latest = scrape;
    this.points = this.since(scrape.at - this.length);
  }

  /** Return the points that are not older than a time. */
  since(at) {
    return this.points.filter((point) => point.at >= at);
  }
}
