"""An HTTP server whose replies a test sends byte by byte."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

PATIENCE_S = 60
MODELS = {"object": "list", "data": [{"id": "parrot", "object": "model", "owned_by": "someone"}]}
_END = None


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


def chunk(text: str | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return an event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **fields}]}


class Scripted:
    """Serves one connection at a time. The script's bytes are the replies to POSTs; `_END` ends a reply."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._script: queue.Queue[bytes | None] = queue.Queue()
        self.asked: queue.Queue[Asked] = queue.Queue()
        self.left = threading.Event()
        """Set when a client disconnected before the end of its reply."""
        self.models: Any = MODELS
        self.models_status = "200 OK"
        self.head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        self._script.put(data)

    def event(self, data: Any) -> None:
        """Send an event."""
        self.raw(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())

    def say(self, text: str) -> None:
        """Send a text delta."""
        self.event(chunk(text))

    def end(self, finish: str = "stop", usage: dict[str, Any] | None = None) -> None:
        """Finish an answer and the stream."""
        self.event(chunk(None, finish))
        if usage is not None:
            self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self.cut()

    def cut(self) -> None:
        """Close the connection."""
        self._script.put(_END)

    def answer(self, text: str) -> None:
        """Send a whole answer."""
        self.say(text)
        self.end()

    def post(self) -> Any:
        """Return the next POST's body."""
        while True:
            asked = self.asked.get(timeout=PATIENCE_S)
            if asked.method == "POST":
                return asked.body

    def serve(self) -> None:
        """Answer until the listening socket is closed."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, suppress(ValueError):  # invalid HTTP
                try:
                    self._answer(connection)
                except ConnectionError:  # the client disconnected while it was sent to
                    self.left.set()

    def close(self) -> None:
        """Stop listening."""
        self._script.put(_END)
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as file:
            method, path, _ = file.readline().decode().split(" ")
            headers = {}
            while line := file.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            body = file.read(int(headers.get("content-length", 0)))
        self.asked.put(Asked(method, path, headers, json.loads(body) if body else None))
        if method == "GET":
            text = self.models if isinstance(self.models, bytes) else json.dumps(self.models).encode()
            head = f"HTTP/1.1 {self.models_status}\r\nContent-Length: {len(text)}\r\n\r\n"
            connection.sendall(head.encode() + text)
            return
        connection.sendall(self.head.encode())
        while (data := self._next(connection)) is not _END:
            connection.sendall(data)

    def _next(self, connection: socket.socket) -> bytes | None:
        """Return the next bytes to send; `_END` if the client disconnected."""
        while True:
            try:
                return self._script.get(timeout=0.02)
            except queue.Empty:
                connection.setblocking(False)
                try:
                    if connection.recv(1) == b"":
                        self.left.set()
                        return _END
                except BlockingIOError:
                    pass
                except ConnectionError:
                    self.left.set()
                    return _END
                finally:
                    connection.setblocking(True)


@contextmanager
def scripted() -> Iterator[Scripted]:
    """Run a scripted server while the block runs."""
    server = Scripted()
    thread = threading.Thread(target=server.serve, name="scripted")
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(PATIENCE_S)
