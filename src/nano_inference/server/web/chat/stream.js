/** Requests for answers: the body, the server-sent events, and the updates of messages by events. */

import { ServerError, ask } from "../shared/server.js";

const ALTERNATIVES = 5;
/** Below this duration, the speed is not shown: tokens that arrive in one piece do not indicate it. */
const SHORTEST_S = 0.02;
/** Default `max_tokens` for continuing a text. */
const CONTINUATION = 200;
const ENDS = ["stop", "abort"];
/** The limits of `text/stream.py`. */
const [MAX_PERIOD, MIN_TIMES, MIN_TOKENS] = [48, 6, 128];

/** Yield the data of a response's server-sent events; throws `ServerError` if the connection is lost. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const piece = await read(reader);
      if (piece.done) return;
      const blocks = (rest + piece.value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield* blocks.map(dataOf).filter((data) => data !== null);
    }
  } finally {
    reader.cancel().catch(() => {}); // stops the server when the caller needs no more events
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch {
    throw new ServerError(0, "the connection was lost"); // also after an abort, which the caller checks
  }
}

/** Return an event's data, null for a comment. */
function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).trimStart()).join("\n") : null;
}

/**
 * Return the body of a request for answers.
 *
 * `sampling`: the user's settings, completed by the server's defaults. In `options`, `given` are the ids with which the
 * answer starts, or null, and `sample` is the sample's index.
 */
export function requestBody(info, messages, sampling, options) {
  const { seed, samples = 1, sample = 0, given = null, echo = false, details = true } = options;
  return {
    ...streamed(info), messages, ...sampling, seed, reasoning_format: "none",
    ...(details ? { logprobs: true, top_logprobs: Math.min(ALTERNATIVES, info.max_logprobs) } : {}),
    ...(samples > 1 ? { n: samples } : {}),
    ...(sample > 0 ? { sample_index: sample } : {}),
    ...(info.calculator ? { calculator: true } : {}),
    ...(given ? { answer_token_ids: given, echo } : {}),
  };
}

function streamed({ model }) {
  return { model, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
}

/** Return the server's sampling defaults for chats; empty for an older server. */
export function chatDefaults(info) {
  return Object.fromEntries(Object.entries(info?.chat_defaults ?? {}).filter(([, value]) => value !== null));
}

/** Return the body of a request that continues a text. */
export function completionBody(info, prompt, { sampling, seed, details }) {
  return {
    ...streamed(info), prompt, max_tokens: CONTINUATION, ...sampling,
    ...(seed === null ? {} : { seed }),
    ...(details ? { logprobs: Math.min(ALTERNATIVES, info.max_logprobs) } : {}),
  };
}

/**
 * Request answers and write them into `messages`, one for each sample; call `onProgress(message)` after each event.
 *
 * Returns when all answers have ended; with `onlyBeginning`, once the server has sent the ids of the answer's
 * beginning. Throws `ServerError`; the messages then contain what arrived before.
 */
export async function writeAnswers(body, messages, signal, onProgress, onlyBeginning = false) {
  const asked = performance.now();
  const clocks = messages.map(() => ({ asked, first: null, last: null }));
  const response = await ask("prompt" in body ? "/v1/completions" : "/v1/chat/completions", { body, signal });
  // The server sends this header if the context has less room than max_tokens.
  const limit = response.headers.has("x-max-tokens") ? "context" : "length";
  let usage = null;
  let isRepetition = false;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(response.status, event.error.message, { code: event.error.code });
    usage = event.usage ?? usage;
    for (const choice of event.choices ?? []) {
      const message = messages[choice.index];
      const clock = clocks[choice.index];
      if (message.finish === "repetition") continue;
      if (addChoice(message, choice, limit)) {
        clock.last = performance.now();
        clock.first ??= clock.last;
      }
      if (body.messages && message.finish === null && repeats(message)) {
        message.finish = "repetition";
        isRepetition = true;
      }
      message.stats = statsOf(message, clock, usage);
      onProgress(message);
      if (onlyBeginning && choice.answer_token_ids) return;
    }
    if (isRepetition && messages.every((one) => one.finish !== null)) break;
  }
  messages.forEach((message, index) => {
    message.stats = statsOf(message, clocks[index], usage);
    onProgress(message);
  });
  if (messages.some((one) => one.finish === null)) {
    throw new ServerError(response.status, "the server ended the stream before the answer");
  }
}

/** Return true if at least the last 128 new tokens are one sequence of at most 48, six times or more. */
function repeats({ tokens, numGiven = 0 }) {
  const isSame = ([id, text], other) => id === other[0] && text === other[1];
  const hasPeriod = (period, length) => {
    let at = tokens.length - 1;
    while (at >= tokens.length - length + period && isSame(tokens[at], tokens[at - period])) at -= 1;
    return at < tokens.length - length + period;
  };
  for (let period = 1; period <= MAX_PERIOD; period += 1) {
    const length = Math.max(MIN_TIMES * period, MIN_TOKENS);
    if (tokens.length - numGiven >= length && hasPeriod(period, length)) return true;
  }
  return false;
}

/** Add an event's choice to a message; return true if it has tokens. `limit`: the `finish` of a truncated answer. */
function addChoice(message, choice, limit) {
  const { delta = {} } = choice;
  if (choice.answer_token_ids) resetBeginning(message, choice.answer_token_ids);
  message.text += choice.text ?? delta.content ?? "";
  if (delta.parts) message.parts = joinedParts(message.parts ?? [], delta.parts);
  const ids = choice.token_ids ?? [];
  const entries = choice.logprobs?.content ?? entriesOf(choice.logprobs);
  ids.forEach((id, index) => message.tokens.push(tokenOf(id, choice.mask[index], entries[index])));
  for (const number of choice.token_versions ?? []) addVersion(message, number);
  if (choice.weight_versions) labelVersions(message, choice.weight_versions, message.numGiven ?? 0);
  if (choice.finish_reason) message.finish = ENDS.includes(choice.finish_reason) ? choice.finish_reason : limit;
  return ids.length > 0;
}

/** Return a completion's log-probabilities in a chat's form; its alternatives have texts and no ids. */
function entriesOf(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token, logprob: logprobs.token_logprobs[index],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[index] ?? {})
      .map(([text, logprob]) => ({ token: text, token_id: null, logprob })),
  }));
}

/** Reset the text, which the server sends again, and add tokens that a calculator forced after the given ones. */
function resetBeginning(message, ids) {
  Object.assign(message, { text: "", parts: null });
  for (const id of ids.slice(message.tokens.length)) message.tokens.push([id, "", 0, 1, []]);
  message.numGiven = ids.length;
}

function tokenOf(id, isDrawn, entry) {
  const top = (entry?.top_logprobs ?? []).map((one) => [one.token_id, one.token, rounded(one.logprob)]);
  return [id, entry?.token ?? "", rounded(entry?.logprob ?? null), isDrawn ? 0 : 1, top];
}

function rounded(value) {
  return value === null ? null : Number(value.toFixed(6));
}

/** Return the parts with adjacent ones of the same kind joined. */
function joinedParts(before, added) {
  const parts = before.map((one) => ({ ...one }));
  for (const part of added) {
    const last = parts.at(-1);
    if (last?.type === part.type) last.text += part.text;
    else parts.push({ ...part });
  }
  return parts;
}

/** Record the weight version of the next token. */
function addVersion(message, number) {
  const last = message.versions.at(-1);
  if (last?.number === number) last.end += 1;
  else message.versions.push({ version: String(number), number, start: last?.end ?? 0, end: (last?.end ?? 0) + 1 });
}

/** Replace the weight versions of the tokens from index `first` on by the server's names for them. */
function labelVersions(message, versions, first) {
  message.versions = [
    ...message.versions.filter((one) => one.start < first).map((one) => ({ ...one, end: Math.min(one.end, first) })),
    ...versions.map((one) => ({ ...one, start: one.start + first, end: one.end + first })),
  ];
}

/** Return an answer's figures: tokens, seconds to the first token, tokens per second after it. */
function statsOf(message, clock, usage) {
  const numSampled = message.tokens.length - (message.numGiven ?? 0);
  const seconds = clock.first === null ? 0 : (clock.last - clock.first) / 1000;
  return {
    tokens: message.tokens.length,
    first: clock.first === null ? null : (clock.first - clock.asked) / 1000,
    speed: numSampled > 1 && seconds > SHORTEST_S ? (numSampled - 1) / seconds : null,
    prompt: usage?.prompt_tokens ?? message.stats?.prompt ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? message.stats?.cached ?? null,
  };
}
