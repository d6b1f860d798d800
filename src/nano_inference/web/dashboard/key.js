import { byId } from "../shared/dom.js";
import { apiKey, setApiKey } from "../shared/server.js";

/** The dialog that asks for the API key. The key stays in this tab. */

/** Prepare the dialog; `onKey` is called once a key is kept. */
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

/** Ask for a key; say so when there is one that the server does not take. */
export function askForKey() {
  byId("key-note").textContent = apiKey() === null
    ? "This server wants a key. It is kept in this tab only."
    : "The server does not accept this key.";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}
