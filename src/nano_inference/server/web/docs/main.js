/** The page of the API: reads the OpenAPI document and shows its routes. */

import { byId } from "../shared/dom.js";
import { address, ask } from "../shared/server.js";
import { askForKey, startKeyDialog } from "../shared/key.js";
import { startTheme, toggleTheme } from "../shared/theme.js";
import { routeElement } from "./route.js";
import { fieldsOf } from "./schema.js";

const RETRY_MS = 1000;
const shown = [];
/** The model that examples name; "" until it is loaded. */
let model = "";

/** Return the document's routes: [{path, method, summary, body}]; `body` is a schema or null. */
function routesOf(document) {
  return Object.entries(document.paths).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, operation]) => ({
      path, method, summary: operation.summary ?? "",
      body: operation.requestBody?.content["application/json"].schema ?? null,
    })));
}

async function load() {
  byId("enter-key").hidden = true;
  byId("state").textContent = "Loading";
  try {
    show(await (await ask("/openapi.json")).json());
    readModel();
  } catch (error) {
    const isLocked = error.status === 401;
    byId("enter-key").hidden = !isLocked;
    byId("state").textContent = isLocked ? "The server needs an API key." : `Not available: ${error.message}`;
  }
}

/** Ask for the model's name until the model is loaded. */
async function readModel() {
  try {
    model = (await (await ask("/v1/models")).json()).data[0].id;
  } catch {
    setTimeout(readModel, RETRY_MS);
  }
}

function show(document) {
  byId("version").textContent = `${document.info.title} ${document.info.version}`;
  shown.length = 0;
  for (const route of routesOf(document).sort(inOrder)) {
    const names = route.body === null ? [] : fieldsOf(route.body, document).map((field) => field.name);
    const words = [route.method, route.path, route.summary, ...names].join(" ").toLowerCase();
    shown.push({ words, node: routeElement(route, document, () => model) });
  }
  byId("routes").replaceChildren(...shown.map(({ node }) => node));
  filter();
}

/** OpenAI's routes come first, then the others by path. */
function inOrder(one, other) {
  const rank = (route) => (route.path.startsWith("/v1/") ? 0 : 1);
  return rank(one) - rank(other) || (one.path < other.path ? -1 : Number(one.path > other.path));
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const { words, node } of shown) node.hidden = !words.includes(wanted);
  byId("state").textContent = `${shown.filter(({ node }) => !node.hidden).length} routes`;
}

startTheme();
byId("theme").addEventListener("click", toggleTheme);
byId("filter").addEventListener("input", filter);
byId("enter-key").addEventListener("click", askForKey);
byId("chat").href = address("/");
byId("dashboard").href = address("/dashboard");
byId("document").href = address("/openapi.json");
startKeyDialog(load);
load();
