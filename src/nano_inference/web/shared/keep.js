/** Small things kept by the browser. Where it does not allow that, they are kept while the page is open. */

const unkept = new Map();

function storage(isForTab) {
  try {
    return isForTab ? sessionStorage : localStorage;
  } catch {
    return null;
  }
}

/** Return what is kept under a key, null without. `isForTab`: in this tab only. */
export function readKept(key, isForTab = false) {
  try {
    return unkept.get(key) ?? storage(isForTab)?.getItem(key) ?? null;
  } catch {
    return null;
  }
}

/** Keep a text under a key; null forgets it. Return whether it outlives the page. */
export function writeKept(key, text, isForTab = false) {
  unkept.delete(key);
  try {
    if (text === null) storage(isForTab)?.removeItem(key);
    else storage(isForTab).setItem(key, text);
    return true;
  } catch {
    if (text !== null) unkept.set(key, text);
    return false;
  }
}

/** Return the keys that begin with a text. */
export function keptKeys(prefix) {
  try {
    return Object.keys(storage(false) ?? {}).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}
