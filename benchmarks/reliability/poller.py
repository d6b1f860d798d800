"""Asks a server every 10 ms and writes down how late the answers were; a process of its own, so that only the server
is measured.

    python poller.py PORT PATH

Ends when stdin does; prints a JSON list of seconds. A time at which it could not ask, because the last answer was still
awaited, counts as asked then and answered with it.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

EVERY_S = 0.01
MOST_S = 300.0


def main() -> int:
    """Run the command line."""
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    late: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < MOST_S:
        due = began + len(late) * EVERY_S
        if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
            break
        connection.request("GET", sys.argv[2])
        reply = connection.getresponse()
        reply.read()
        now = time.monotonic()
        if reply.status != 200:
            raise RuntimeError(f"{sys.argv[2]} is {reply.status}")
        while (due := began + len(late) * EVERY_S) <= now:
            late.append(now - due)
    print(json.dumps(late))
    return 0


if __name__ == "__main__":
    sys.exit(main())
