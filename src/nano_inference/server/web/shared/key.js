import { byId } from "./dom.js";
import { apiKey, setApiKey } from "./server.js";

/** The dialog for the API key, which is stored for this tab only. */

/** Prepare the dialog; `onKey` is called after a key was entered. */
export function startKeyDialog(onKey) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (key === "") return;
    setApiKey(key);
    byId("key").value = "";
    byId("key-dialog").close();
    onKey();
  });
  byId("key-later").addEventListener("click", () => byId("key-dialog").close());
}

/** Open the dialog; if there is a key already, with a note that the server rejects it. */
export function askForKey() {
  byId("key-note").textContent = apiKey() === null
    ? "This server needs a key. It is stored for this tab only."
    : "The server does not accept this key.";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}
