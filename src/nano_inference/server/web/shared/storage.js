/** Small values in the browser's storage, or in memory if the browser does not allow storage. */

const memory = new Map();

function storage(isForTab) {
  try {
    return isForTab ? sessionStorage : localStorage;
  } catch {
    return null;
  }
}

/** Return the value of a key, null if there is none. `isForTab`: from the storage of this tab only. */
export function readStored(key, isForTab = false) {
  try {
    return memory.get(key) ?? storage(isForTab)?.getItem(key) ?? null;
  } catch {
    return null;
  }
}

/** Store a text under a key; null removes it. Return true if it outlives the page. */
export function writeStored(key, text, isForTab = false) {
  memory.delete(key);
  try {
    if (text === null) storage(isForTab)?.removeItem(key);
    else storage(isForTab).setItem(key, text);
    return true;
  } catch {
    if (text !== null) memory.set(key, text);
    return false;
  }
}

/** Return the stored keys that start with `prefix`. */
export function storedKeys(prefix) {
  try {
    return Object.keys(storage(false) ?? {}).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}
