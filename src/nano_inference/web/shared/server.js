/** Requests to the server that this page came from: its address, the key, what its errors say. */

import { readKept, writeKept } from "./keep.js";

const KEY = "nano-inference.key";

/** What the server refused, or what did not reach it (status 0). */
export class ServerError extends Error {
  constructor(status, message, { code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Return the address of a path of the server, wherever a proxy has put it. */
export function address(path) {
  return location.pathname.replace(/\/(dashboard\/?)?$/, "") + path;
}

/** Return the API key of this tab, null without one. */
export function apiKey() {
  return readKept(KEY, true);
}

/** Keep a key for this tab only; null forgets it. */
export function setApiKey(key) {
  writeKept(KEY, key, true);
}

/** GET a path, or POST a body as JSON; return the response. Throws `ServerError`, and `AbortError` when stopped. */
export async function ask(path, { body = null, signal = null } = {}) {
  const headers = body === null ? {} : { "content-type": "application/json" };
  if (apiKey() !== null) headers.authorization = `Bearer ${apiKey()}`;
  const options = { headers, signal, cache: "no-store", method: body === null ? "GET" : "POST" };
  if (body !== null) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(address(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, navigator.onLine ? "the server does not answer" : "you are offline");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Return the error that a response tells of. */
async function refusal(response) {
  const told = await response.json().catch(() => ({}));
  const error = told.error ?? {};
  return new ServerError(response.status, error.message ?? told.status ?? `the server says ${response.status}`,
    { code: error.code ?? null });
}
