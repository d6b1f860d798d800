"""A proxy before a server that changes bodies, so that a client's request has fields that the client does not send."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

from tests.clients.process import PATIENCE

JSON = dict[str, Any]


@contextmanager
def forcing(url: str, change: Callable[[JSON], JSON]) -> Iterator[str]:
    """Yield the URL of a proxy to `url` that passes each body of a POST through `change`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            self._forward(json.dumps(change(json.loads(data))).encode())

        def _forward(self, data: bytes) -> None:
            headers = {"content-type": "application/json"} if data else {}
            with httpx2.stream(self.command, url + self.path, content=data, headers=headers, timeout=PATIENCE) as reply:
                self.send_response(reply.status_code)
                self.send_header("content-type", reply.headers.get("content-type", "application/json"))
                self.send_header("connection", "close")
                self.end_headers()
                for piece in reply.iter_bytes():
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="forcing")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)
