/** Other tabs of this page: what one changes the others show, and no two write into one conversation. */

const CHANNEL = "nano-inference";

/**
 * Owns the channel between tabs; silent where the browser has none. `on` holds what is done when another tab says
 * "changed", "removed", "writing" or "ended" of a conversation's id; "asking" wants to know who writes there.
 */
export class Tabs {
  constructor(on) {
    this.channel = "BroadcastChannel" in window ? new BroadcastChannel(CHANNEL) : null;
    this.channel?.addEventListener("message", ({ data }) => on[data.kind]?.(data.id));
  }

  /** Tell the others. */
  tell(kind, id) {
    this.channel?.postMessage({ kind, id });
  }
}
