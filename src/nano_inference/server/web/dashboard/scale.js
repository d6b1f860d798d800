/** Positions of values and times on a chart. All functions are pure. */

/**
 * Return the marks of an axis from 0 to at least `highest`, in equal steps of 1, 2 or 5 times a power of ten, so that
 * the axis seldom changes. `least` is the smallest step.
 */
export function marksTo(highest, least = 0, wanted = 4) {
  const rough = Math.max((highest > 0 ? highest : 1) / wanted, least, 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  const number = Math.max(1, Math.ceil(highest / step - 1e-9));
  return Array.from({ length: number + 1 }, (_, index) => index * step);
}

/** Return the marks of the time axis for a window of `length` seconds: `[seconds ago, text]`, oldest first. */
export function timeMarks(length) {
  const [unit, size, every] = length <= 60 ? ["s", 1, 10] : ["min", 60, length <= 300 ? 60 : 120];
  const number = Math.round(length / every);
  return Array.from({ length: number + 1 }, (_, index) => {
    const ago = (number - index) * every;
    const text = `−${ago / size}`;
    return [ago, ago === 0 ? "now" : index === 0 ? `${text} ${unit}` : text];
  });
}

/** Return the point nearest to a time in seconds, null without points. */
export function nearest(points, at) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point.at - at) < Math.abs(best.at - at)) best = point;
  return best;
}

/**
 * Return an SVG path through points, each `[x, y, isApart]`. The line is interrupted at a point with y null, and before
 * a point with `isApart`. An isolated point is a stroke of length 0, which a round line cap shows as a dot.
 */
export function pathThrough(points) {
  let path = "";
  let isDown = false;
  for (const [x, y, isApart] of points) {
    const [pen, dot] = isDown && !isApart ? ["L", ""] : ["M", "h0"];
    if (y !== null) path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}${dot}`;
    isDown = y !== null;
  }
  return path;
}
