/** An answer from the server: the request, its events, and what they add to the messages that are being written. */

import { ServerError, ask } from "../shared/server.js";

const ALTERNATIVES = 5;
/** Tokens that came in one piece say nothing of how fast they were drawn. */
const SHORTEST_S = 0.02;
/** Tokens that a text is continued by at a time, unless the settings say otherwise. */
const CONTINUATION = 200;
const ENDS = ["stop", "abort"];

/** Yield the data of a response's server-sent events; throws `ServerError` when the connection breaks. */
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
    reader.cancel().catch(() => {}); // whoever wants no more events lets the server stop, too
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch {
    throw new ServerError(0, "the connection was lost"); // or stopped, which whoever stopped it knows
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
 * `sampling`: what the user has set, and the server's defaults for the rest. Of `wishes`, `begun` are ids that the
 * answer begins with, or null, and `sample` is the number under which it is drawn.
 */
export function requestBody(info, messages, sampling, wishes) {
  const { seed, samples = 1, sample = 0, begun = null, echo = false, details = true } = wishes;
  return {
    ...streamed(info), messages, ...sampling, seed,
    ...(details ? { logprobs: true, top_logprobs: Math.min(ALTERNATIVES, info.max_logprobs) } : {}),
    ...(samples > 1 ? { n: samples } : {}),
    ...(sample > 0 ? { sample_index: sample } : {}),
    ...(info.calculator ? { calculator: true } : {}),
    ...(begun ? { answer_token_ids: begun, echo } : {}),
  };
}

function streamed({ model }) {
  return { model, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
}

/** Return what a chat samples with where the user has set nothing; an older server names nothing. */
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
 * Ask for answers and write them into `messages`, one for each sample; `onNews(message)` after each addition.
 *
 * Returns when all have ended; with `onlyBeginning` as soon as the server has said how the answer begins. Throws
 * `ServerError` for what went wrong; the messages then have what came before.
 */
export async function writeAnswers(body, messages, signal, onNews, onlyBeginning = false) {
  const asked = performance.now();
  const clocks = messages.map(() => ({ asked, first: null, last: null }));
  const response = await ask("prompt" in body ? "/v1/completions" : "/v1/chat/completions", { body, signal });
  // The server sends this header when the context leaves less room than max_tokens asks for.
  const limit = response.headers.has("x-max-tokens") ? "context" : "length";
  let usage = null;
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(response.status, event.error.message, { code: event.error.code });
    usage = event.usage ?? usage;
    for (const choice of event.choices ?? []) {
      const message = messages[choice.index];
      const clock = clocks[choice.index];
      if (addChoice(message, choice, limit)) {
        clock.last = performance.now();
        clock.first ??= clock.last;
      }
      message.stats = statsOf(message, clock, usage);
      onNews(message);
      if (onlyBeginning && choice.answer_token_ids) return;
    }
  }
  messages.forEach((message, index) => {
    message.stats = statsOf(message, clocks[index], usage);
    onNews(message);
  });
  if (messages.some((one) => one.finish === null)) throw new ServerError(0, "the connection was lost");
}

/** Add what a choice of an event brought; return whether it brought tokens. `limit`: the `finish` of a cut answer. */
function addChoice(message, choice, limit) {
  const { delta = {} } = choice;
  if (choice.answer_token_ids) beginAgain(message, choice.answer_token_ids);
  message.text += choice.text ?? delta.content ?? "";
  if (delta.parts) message.parts = joinedParts(message.parts ?? [], delta.parts);
  const ids = choice.token_ids ?? [];
  const entries = choice.logprobs?.content ?? entriesOf(choice.logprobs);
  ids.forEach((id, index) => message.tokens.push(tokenOf(id, choice.mask[index], entries[index])));
  for (const number of choice.token_versions ?? []) addVersion(message, number);
  if (choice.weight_versions) labelVersions(message, choice.weight_versions, message.begun ?? 0);
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

/** Let the server say how an answer begins: its text, and tokens that a calculator forced behind the given ones. */
function beginAgain(message, ids) {
  Object.assign(message, { text: "", parts: null });
  for (const id of ids.slice(message.tokens.length)) message.tokens.push([id, "", 0, 1, []]);
  message.begun = ids.length;
}

function tokenOf(id, isDrawn, entry) {
  const top = (entry?.top_logprobs ?? []).map((one) => [one.token_id, one.token, rounded(one.logprob)]);
  return [id, entry?.token ?? "", rounded(entry?.logprob ?? null), isDrawn ? 0 : 1, top];
}

function rounded(value) {
  return value === null ? null : Number(value.toFixed(6));
}

/** Return parts with those of one kind that meet in one. */
function joinedParts(before, added) {
  const parts = before.map((one) => ({ ...one }));
  for (const part of added) {
    const last = parts.at(-1);
    if (last?.type === part.type) last.text += part.text;
    else parts.push({ ...part });
  }
  return parts;
}

/** Note which weights drew the next token. */
function addVersion(message, number) {
  const last = message.versions.at(-1);
  if (last?.number === number) last.end += 1;
  else message.versions.push({ version: String(number), number, start: last?.end ?? 0, end: (last?.end ?? 0) + 1 });
}

/** Take over what the server calls the weights that drew the tokens behind the first `begun` of them. */
function labelVersions(message, versions, begun) {
  message.versions = [
    ...message.versions.filter((one) => one.start < begun).map((one) => ({ ...one, end: Math.min(one.end, begun) })),
    ...versions.map((one) => ({ ...one, start: one.start + begun, end: one.end + begun })),
  ];
}

/** Return an answer's figures: tokens, seconds to the first of them, tokens a second after it. */
function statsOf(message, clock, usage) {
  const drawn = message.tokens.length - (message.begun ?? 0);
  const seconds = clock.first === null ? 0 : (clock.last - clock.first) / 1000;
  return {
    tokens: message.tokens.length,
    first: clock.first === null ? null : (clock.first - clock.asked) / 1000,
    speed: drawn > 1 && seconds > SHORTEST_S ? (drawn - 1) / seconds : null,
    prompt: usage?.prompt_tokens ?? message.stats?.prompt ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? message.stats?.cached ?? null,
  };
}
