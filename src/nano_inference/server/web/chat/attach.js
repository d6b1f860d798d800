/** Text files attached to the draft message: selected or dropped, listed, removed. */

import { byId, el } from "../shared/dom.js";
import { iconButton } from "./icons.js";
import { toast } from "./toast.js";

const MOST_KB = 64;

/** Return a file's name and its text in a code fence longer than any in the text. */
function fenced(name, text) {
  const runs = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
  const language = /\.([a-z0-9]{1,9})$/i.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${language}\n${text.trimEnd()}\n${fence}`;
}

/** Return a file's text; throws an `Error` with the reason if it cannot be attached. */
async function textOfFile(file, roomKb) {
  if (file.size > roomKb * 1024) {
    throw new Error(`“${file.name}” is too large: at most ${MOST_KB} kB can be attached to a message`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n");
  } catch {
    // not UTF-8
  }
  throw new Error(`“${file.name}” is not a text file (UTF-8)`);
}

function sizeText(bytes) {
  return bytes < 1024 ? `${bytes} bytes` : `${(bytes / 1024).toFixed(1)} kB`;
}

/** Owns the files; calls `onChange` after each change. While the text pane is shown, dropped files go there. */
export class Attachments {
  constructor(onChange, textPane) {
    this.files = [];
    this.onChange = onChange;
    this.textPane = textPane;
    this.reading = Promise.resolve();
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", () => {
      this.#read([...byId("attach-file").files]);
      byId("attach-file").value = "";
    });
    this.#listenToDrops(document.body);
  }

  #listenToDrops(area) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    area.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      area.classList.add("dropping");
    });
    area.addEventListener("dragleave", () => area.classList.remove("dropping"));
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#read([...event.dataTransfer.files]);
    });
  }

  /** Add files, after those being read, so that the limit applies to all of them together. */
  #read(files) {
    this.reading = this.reading.then(() => this.#add(files));
  }

  async #add(files) {
    for (const file of files) {
      try {
        const isForText = this.textPane.isShown;
        const used = isForText ? 0 : this.files.reduce((sum, one) => sum + one.size, 0);
        const text = await textOfFile(file, MOST_KB - used / 1024);
        const name = file.name.replace(/[\n`]/g, " ");
        if (isForText) this.textPane.insert(text);
        else this.files.push({ name, size: file.size, text: fenced(name, text) });
      } catch (error) {
        toast(`${error.message}.`, { isError: true });
      }
    }
    this.#show();
  }

  #show() {
    byId("attached").hidden = this.files.length === 0;
    byId("attached").replaceChildren(...this.files.map((file) => el("li", {},
      el("details", {}, el("summary", {}, `${file.name}, ${sizeText(file.size)}`),
        el("pre", { tabindex: "0" }, file.text)),
      iconButton("close", `Remove ${file.name}`, () => this.#remove(file)))));
    this.onChange();
  }

  #remove(file) {
    this.files = this.files.filter((one) => one !== file);
    this.#show();
    byId("attach").focus();
  }

  /** Return a message followed by the attached files. */
  withFiles(text) {
    return [text, ...this.files.map((one) => one.text)].filter(Boolean).join("\n\n");
  }

  /** Remove all files. */
  clear() {
    this.files = [];
    this.#show();
  }
}
