/** Other tabs of this page: what one changes the others show, and no two write into one conversation. */

const CHANNEL = "nano-inference";

function lockOf(id) {
  return `${CHANNEL} ${id}`;
}

/**
 * Owns the channel between tabs; silent where the browser has none. `on` holds what is done when another tab says
 * "changed", "removed", "writing" or "ended" of a conversation's id; "asking" wants to know who writes there.
 *
 * Who writes holds a lock, which the browser takes from a tab that crashes: the others wait for it, and then know that
 * nobody writes any more. A page over plain HTTP from elsewhere has no locks; there a tab that crashed cannot say so.
 */
export class Tabs {
  constructor(on) {
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel(CHANNEL) : null;
    this.channel?.addEventListener("message", ({ data }) => on[data.kind]?.(data.id));
    this.letGo = new Map();
  }

  /** Tell the others from here on that this tab writes there. */
  begin(id) {
    const tell = () => { if (this.letGo.has(id)) this.tell("writing", id); };
    this.letGo.set(id, () => {});
    if (!navigator.locks) tell();
    else navigator.locks.request(lockOf(id), () => this.#hold(id)).catch(tell);
  }

  /** The lock is ours: nobody who hears of it now can take it before. */
  #hold(id) {
    if (!this.letGo.has(id)) return null;
    this.tell("writing", id);
    return new Promise((resolve) => this.letGo.set(id, resolve));
  }

  /** Tell the others that this tab writes there no more. */
  end(id) {
    this.letGo.get(id)?.();
    this.letGo.delete(id);
    this.tell("ended", id);
  }

  /** Call back once the tab that writes there is gone, though it did not say so. */
  whenGone(id, then) {
    navigator.locks?.request(lockOf(id), { mode: "shared" }, then).catch(() => {});
  }

  /** Tell the others. */
  tell(kind, id) {
    this.channel?.postMessage({ kind, id });
  }
}
