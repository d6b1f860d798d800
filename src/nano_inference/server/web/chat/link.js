/** Waits until the server is ready, at the start and after a lost connection. */

import { ServerError, ask } from "../shared/server.js";

const RETRY_MS = 1000;
/** Statuses for which a retry is useless: a wrong key, a wrong address. */
const FINAL = [400, 401, 403, 404];

function pauseFor(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/**
 * Wait until the server accepts requests; return the answer of /info about `model`, which the server then loads. If it
 * has no such model, or `model` is null, about the model that the server chooses. `onWaiting(text)` receives the reason
 * to wait. Throws `ServerError` 401 if a key is needed, and `AbortError` after an abort.
 */
export async function reachServer(onWaiting, model, signal) {
  let mustLoad = false;
  for (;;) {
    try {
      await ask("/ready", { signal });
      if (mustLoad) {
        const name = model ?? (await (await ask("/v1/models", { signal })).json()).data[0].id;
        await ask("/models/load", { body: { model: name }, signal });
      }
      const path = model === null ? "/info" : `/info?model=${encodeURIComponent(model)}`;
      return await (await ask(path, { signal })).json();
    } catch (error) {
      if (signal.aborted) throw error;
      if (error.code === "model_not_found") {
        model = null;
        continue;
      }
      if (error.code === "load_needs_post" && !mustLoad) {
        mustLoad = true;
        continue;
      }
      if (error instanceof ServerError && FINAL.includes(error.status)) throw error;
      onWaiting(waitingText(error));
      await pauseFor(RETRY_MS);
    }
  }
}

function waitingText({ status, message, code }) {
  if ([undefined, 0, 502, 504].includes(status)) return "The server does not answer. Trying again…";
  if (message === "loading") return "The model is being loaded…";
  if (message === "dead") return "The engine has failed; restart the server.";
  if (code === "model_not_loaded") return `${message}. Choose another one, or wait: it is tried again.`;
  return `The server is ${message}. Trying again…`;
}
