/** Synchronizes tabs of this page: all show the same conversations, and only one generates in a conversation. */

const CHANNEL = "nano-inference";

function lockOf(id) {
  return `${CHANNEL} ${id}`;
}

/**
 * Owns the channel between tabs, which some browsers lack. `on` maps kinds of messages to functions of a conversation's
 * id: "changed", "removed", "writing", "ended", "stop", and "asking", which the tab that writes answers by "writing".
 *
 * A tab holds a lock while it writes into a conversation. The browser releases the lock if the tab crashes, for which
 * other tabs wait. Over plain HTTP from another host there are no locks, so a crash is not detected.
 */
export class Tabs {
  constructor(on) {
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel(CHANNEL) : null;
    this.channel?.addEventListener("message", ({ data }) => on[data.kind]?.(data.id));
    this.releases = new Map();
  }

  /** Lock a conversation and notify the other tabs that this tab writes into it. */
  begin(id) {
    const notify = () => { if (this.releases.has(id)) this.post("writing", id); };
    this.releases.set(id, () => {});
    if (!navigator.locks) notify();
    else navigator.locks.request(lockOf(id), () => this.#hold(id)).catch(notify);
  }

  /** Notify the other tabs once this tab has the lock, so that they request it later; hold it until `end`. */
  #hold(id) {
    if (!this.releases.has(id)) return null;
    this.post("writing", id);
    return new Promise((resolve) => this.releases.set(id, resolve));
  }

  /** Unlock a conversation and notify the other tabs. */
  end(id) {
    this.releases.get(id)?.();
    this.releases.delete(id);
    this.post("ended", id);
  }

  /** Call `then` once the tab that writes into a conversation has released its lock, also by a crash. */
  onUnlock(id, then) {
    navigator.locks?.request(lockOf(id), { mode: "shared" }, then).catch(() => {});
  }

  /** Send a message to the other tabs. */
  post(kind, id) {
    this.channel?.postMessage({ kind, id });
  }
}
