/** Formats numbers: each function returns `[number, unit]` as texts; the unit may be empty. */

/** Shown for a missing number. */
export const NO_VALUE = ["–", ""];

function digits(value, decimals) {
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** Return a number with three significant digits: 1.23, 12.3, 123, 1,234. */
function three(value) {
  const size = Math.abs(value);
  return digits(value, size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2);
}

/** Format a count. */
export function countText(value) {
  if (value === null) return NO_VALUE;
  if (value >= 1e9) return [three(value / 1e9), "B"];
  return value < 1e6 ? [digits(Math.round(value), 0), ""] : [three(value / 1e6), "M"];
}

/** Format a rate, without its unit. */
export function rateText(value) {
  if (value === null) return NO_VALUE;
  return value < 1e6 ? [digits(value, value < 10 && value % 1 !== 0 ? 1 : 0), ""] : [three(value / 1e6), "M"];
}

/** Format a fraction as percent. */
export function percentText(value) {
  return value === null ? NO_VALUE : [digits(value * 100, value > 0 && value < 0.995 ? 1 : 0), "%"];
}

/** Format seconds, as ms below one second. */
export function secondsText(value) {
  if (value === null) return NO_VALUE;
  return value > 0 && value < 0.9995 ? [three(value * 1000), "ms"] : [three(value), "s"];
}

/** Format a number of bytes. */
export function bytesText(value) {
  if (value === null) return NO_VALUE;
  return value < 1e9 ? [three(value / 1e6), "MB"] : [three(value / 1e9), "GB"];
}

/** Format a long duration in seconds as its two largest units. */
export function spanText(seconds) {
  const [days, hours] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24];
  const [minutes, rest] = [Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (days > 0) return [`${days} d ${hours} h`, ""];
  if (hours > 0) return [`${hours} h ${minutes} min`, ""];
  return minutes > 0 ? [`${minutes} min ${rest} s`, ""] : [`${rest} s`, ""];
}

/** Return a number and its unit as one text without a line break. */
export function joined([number, unit]) {
  return unit === "" ? number : unit === "%" ? `${number}%` : `${number}\u00a0${unit}`;
}

/** Return a number and its unit for the mark of an axis, without trailing zeros. */
export function marked([number, unit]) {
  const bare = number.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return bare === "0" ? bare : joined([bare, unit]);
}

/** Format a time in milliseconds since 1970 as the time of day. */
export function clockText(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}
