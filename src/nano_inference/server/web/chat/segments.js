/** Splits an answer into text, thoughts before it, and calls of the calculator with their results. */

const THOUGHT = /^\s*<think>([\s\S]*?)(<\/think>|$)/;

/**
 * Return an answer's segments in order: {kind: "text" | "thought", text} or {kind: "call", text, result}. An unfinished
 * thought or call has `open: true`; `result` is null if there is none.
 */
export function segmentsOf(message) {
  return message.parts ? callSegments(message.parts, message.finish !== null) : textSegments(message.text);
}

function textSegments(text) {
  const thought = THOUGHT.exec(text);
  if (!thought) return [{ kind: "text", text }];
  const rest = text.slice(thought[0].length);
  const first = { kind: "thought", text: thought[1].trim(), open: thought[2] === "" };
  return rest.trim() ? [first, { kind: "text", text: rest }] : [first];
}

function callSegments(parts, isFinished) {
  const segments = [];
  for (const { type, text } of parts) {
    const last = segments.at(-1);
    if (type === "text") segments.push({ kind: "text", text });
    else if (type === "python") segments.push({ kind: "call", text, result: null, open: !isFinished });
    else if (last?.kind === "call") Object.assign(last, { result: text, open: false });
  }
  return segments.map((one, index) => (index < segments.length - 1 && one.open ? { ...one, open: false } : one));
}
