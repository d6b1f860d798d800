/** The choice between the models of a server that serves several. */

import { el } from "../shared/dom.js";
import { readStored, writeStored } from "../shared/storage.js";

const MODEL_KEY = "nano-inference.model";
const STATES = { unloaded: "not loaded", loading: "loading", unloading: "being unloaded", failed: "failed to load" };

/** Owns the list; hidden if there is one model. */
export class ModelPicker {
  /** `onChange(name)` is called when the user has chosen a model, which is then `wanted`. */
  constructor(select, onChange) {
    this.select = select;
    select.addEventListener("change", () => {
      writeStored(MODEL_KEY, select.value);
      onChange(select.value);
    });
  }

  /** The model that the user chose last, null if none. */
  get wanted() {
    return readStored(MODEL_KEY);
  }

  /** Show the models of the answer of `/info`; its model is selected. */
  show({ model, names = [], models = [] }) {
    this.select.hidden = models.length < 2;
    this.select.replaceChildren(...models.map(({ id, state }) =>
      el("option", { value: id }, STATES[state] === undefined ? id : `${id} (${STATES[state]})`)));
    this.select.value = models.find(({ id }) => id === model || names.includes(id))?.id ?? "";
  }
}
