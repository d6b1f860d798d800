/** Waits until the server is ready, at the start and after a lost connection. */

import { ServerError, ask } from "../shared/server.js";

const RETRY_MS = 1000;
/** Statuses for which a retry is useless: a wrong key, a wrong address. */
const FINAL = [400, 401, 403, 404];

function pauseFor(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/**
 * Wait until the server accepts requests; return the answer of /info. `onWaiting(text)` receives the reason to wait.
 * Throws `ServerError` 401 if a key is needed.
 */
export async function reachServer(onWaiting) {
  for (;;) {
    try {
      await ask("/ready");
      return await (await ask("/info")).json();
    } catch (error) {
      if (error instanceof ServerError && FINAL.includes(error.status)) throw error;
      onWaiting(waitingText(error));
      await pauseFor(RETRY_MS);
    }
  }
}

function waitingText({ status, message }) {
  if ([undefined, 0, 502, 504].includes(status)) return "The server does not answer. Trying again…";
  if (message === "loading") return "The model is being loaded…";
  if (message === "dead") return "The engine has failed; restart the server.";
  return `The server is ${message}. Trying again…`;
}
