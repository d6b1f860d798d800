/** Whether the server is there, and what it serves: asked until it is ready, and again when it was lost. */

import { ServerError, ask } from "../shared/server.js";

const RETRY_MS = 1000;
/** What waiting does not mend: the wrong key, the wrong address. */
const FINAL = [400, 401, 403, 404];

function pauseFor(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/**
 * Wait until the server takes requests; return what /info says. `onWaiting(text)` is told why it does not yet.
 * Throws `ServerError` 401 when a key is needed.
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
  if (message === "dead") return "The engine has failed; the server must be started again.";
  return `The server is ${message}. Trying again…`;
}
