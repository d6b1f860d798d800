/** Requests to this page's server: addresses, the API key, errors. */

import { readStored, writeStored } from "./storage.js";

const KEY = "nano-inference.key";

/** An error response of the server, or a failed request (status 0). */
export class ServerError extends Error {
  constructor(status, message, { code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Return the address of a server's path, including a proxy's path prefix. */
export function address(path) {
  return location.pathname.replace(/\/((dashboard|docs)\/?)?$/, "") + path;
}

/** Return the API key of this tab, null if there is none. */
export function apiKey() {
  return readStored(KEY, true);
}

/** Store an API key for this tab only; null removes it. */
export function setApiKey(key) {
  writeStored(KEY, key, true);
}

/** GET a path, or POST a body as JSON; return the response. Throws `ServerError`, or `AbortError` after an abort. */
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
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? {};
  return new ServerError(response.status, error.message ?? body.status ?? `the server returned ${response.status}`,
    { code: error.code ?? null });
}
