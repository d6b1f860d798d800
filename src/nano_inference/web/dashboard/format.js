/** Numbers for people: each function returns `[number, unit]` as texts; the unit may be empty. */

/** What stands where there is no number. */
export const NOTHING = ["–", ""];

function digits(value, decimals) {
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

/** Three digits that count: 1.23, 12.3, 123, 1,234. */
function three(value) {
  const size = Math.abs(value);
  return digits(value, size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2);
}

/** Of things that are counted. */
export function countText(value) {
  if (value === null) return NOTHING;
  if (value >= 1e9) return [three(value / 1e9), "B"];
  return value < 1e6 ? [digits(Math.round(value), 0), ""] : [three(value / 1e6), "M"];
}

/** Of things in a second, a minute, …; the unit stands elsewhere. */
export function rateText(value) {
  if (value === null) return NOTHING;
  return value < 1e6 ? [digits(value, value < 10 && value % 1 !== 0 ? 1 : 0), ""] : [three(value / 1e6), "M"];
}

/** Of a part of one, as percent. */
export function percentText(value) {
  return value === null ? NOTHING : [digits(value * 100, value > 0 && value < 0.995 ? 1 : 0), "%"];
}

/** Of seconds: ms below one. */
export function secondsText(value) {
  if (value === null) return NOTHING;
  return value > 0 && value < 0.9995 ? [three(value * 1000), "ms"] : [three(value), "s"];
}

/** Of bytes. */
export function bytesText(value) {
  if (value === null) return NOTHING;
  return value < 1e9 ? [three(value / 1e6), "MB"] : [three(value / 1e9), "GB"];
}

/** Of a long time in seconds: its two largest parts. */
export function spanText(seconds) {
  const [days, hours] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24];
  const [minutes, rest] = [Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (days > 0) return [`${days} d ${hours} h`, ""];
  if (hours > 0) return [`${hours} h ${minutes} min`, ""];
  return minutes > 0 ? [`${minutes} min ${rest} s`, ""] : [`${rest} s`, ""];
}

/** Put a number and its unit together; they stay on one line. */
export function joined([number, unit]) {
  return unit === "" ? number : unit === "%" ? `${number}%` : `${number}\u00a0${unit}`;
}

/** Put them together for the mark of an axis: without zeros at the end. */
export function marked([number, unit]) {
  const bare = number.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return bare === "0" ? bare : joined([bare, unit]);
}

/** Of a time of the day, from milliseconds since 1970. */
export function clockText(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}
