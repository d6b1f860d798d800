import { el } from "../shared/dom.js";
import { ask, ServerError } from "../shared/server.js";
import { fieldsOf, partsOf, resolved } from "./schema.js";

/** One route: its fields, and a form that sends a request. */

const EXAMPLES = {
  messages: [{ role: "user", content: "Hello" }], prompt: "Hello", input: "Hello", content: "Hello", text: "Hello",
  max_tokens: 16, tokens: [1, 2, 3], token_ids: [1, 2, 3], input_prefix: "a = ", input_suffix: "\n",
};

/** Return the element of a route, whose content is made when it is opened. `model()`: the name in examples, or "". */
export function routeElement(route, document, model) {
  const heading = el("summary", {},
    el("span", { class: "method" }, route.method.toUpperCase()), el("span", { class: "path" }, route.path),
    el("span", { class: "summary" }, route.summary));
  const node = el("details", { class: "route" }, heading);
  node.addEventListener("toggle", () => {
    if (node.open && node.childElementCount === 1) node.append(contentOf(route, document, model()));
  });
  return node;
}

function contentOf(route, document, model) {
  const tables = [];
  if (route.body !== null) {
    tables.push(fieldTable("Fields of the body", fieldsOf(route.body, document)));
    for (const [name, part] of partsOf(route.body, document)) tables.push(fieldTable(name, fieldsOf(part, document)));
  }
  const form = route.path.includes("{") || route.method === "delete" ? null : formOf(route, document, model);
  return el("div", { class: "inside" }, ...tables, form);
}

function fieldTable(caption, fields) {
  const rows = fields.map(({ name, type, isRequired, note }) =>
    el("tr", {}, el("td", {}, name), el("td", {}, type), el("td", {}, isRequired ? "required" : note)));
  return el("div", { class: "fields", tabindex: "0", role: "group", "aria-label": caption }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, el("th", {}, "Field"), el("th", {}, "Type"), el("th", {}, "Default"))),
    el("tbody", {}, ...rows)));
}

function formOf(route, document, model) {
  const body = route.body === null ? null
    : el("textarea", { "aria-label": "Body of the request", spellcheck: "false" });
  if (body !== null) body.value = JSON.stringify(exampleOf(route.body, document, model), null, 2);
  const button = el("button", { type: "button", class: "primary" }, "Send");
  const status = el("span", { role: "status" });
  const answer = el("pre", { hidden: true, tabindex: "0", "aria-label": "Response" });
  button.addEventListener("click", async () => {
    button.disabled = true;
    status.textContent = "Sending";
    const { text, note } = await sent(route, body === null ? null : body.value);
    answer.textContent = text;
    answer.hidden = false;
    status.textContent = note;
    button.disabled = false;
  });
  return el("div", {}, body, el("div", { class: "send" }, button, status), answer);
}

/** Return the body with which an example request is sent: the required fields, and a model if there is one. */
function exampleOf(schema, document, model) {
  const { properties = {}, required = [] } = resolved(schema, document);
  const names = new Set([...required, ...["model"].filter((name) => model !== "" && name in properties)]);
  for (const name of ["max_tokens"]) if (name in properties) names.add(name);
  if (!["messages", "prompt", "input"].some((name) => names.has(name))) {
    const first = ["messages", "prompt", "content", "text"].find((name) => name in properties);
    if (first !== undefined) names.add(first);
  }
  return Object.fromEntries([...names].map((name) => [name, name === "model" ? model : EXAMPLES[name] ?? {}]));
}

async function sent(route, source) {
  let body = null;
  try {
    if (source !== null) body = JSON.parse(source);
  } catch (error) {
    return { text: String(error.message), note: "The body is not JSON" };
  }
  try {
    const response = await ask(route.path, { body });
    const text = await response.text();
    return { text: pretty(text), note: `Status ${response.status}` };
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    return { text: error.message, note: error.status === 0 ? "No answer" : `Status ${error.status}` };
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
