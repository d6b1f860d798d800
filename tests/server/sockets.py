"""A WebSocket client for tests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import wsproto
from wsproto import events

JSON = dict[str, Any]
ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""Types of the event that ends a turn."""


class SocketClient:
    """One connection."""

    def __init__(self, url: str, path: str, headers: Mapping[str, str]) -> None:
        host, port = urlsplit(url).hostname, urlsplit(url).port
        self.wire = socket.create_connection((host, port), timeout=60)
        self.protocol = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.send_event(events.Request(host=f"{host}:{port}", target=path, extra_headers=extra))
        self._waiting: list[events.Event] = []
        self._text = ""
        self.opening = self.next_event()
        """AcceptConnection, or RejectConnection."""

    def send_event(self, event: events.Event) -> None:
        self.wire.sendall(self.protocol.send(event))

    def next_event(self) -> events.Event:
        """Return the next event of the server; raises `ConnectionError` at the end of the connection."""
        while not self._waiting:
            data = self.wire.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self.protocol.receive_data(data)
            self._waiting += self.protocol.events()
        return self._waiting.pop(0)

    def send(self, message: Any) -> None:
        """Send a message as JSON, or a text or bytes as they are."""
        data = message if isinstance(message, str | bytes) else json.dumps(message)
        self.send_event(events.Message(data=data))

    def receive(self) -> JSON:
        """Return the next message of the server."""
        while True:
            event = self.next_event()
            if isinstance(event, events.Ping):
                self.send_event(event.response())
            elif isinstance(event, events.TextMessage):
                self._text += event.data
                if event.message_finished:
                    message: JSON = json.loads(self._text)
                    self._text = ""
                    return message
            else:
                raise ConnectionError(f"not a message: {event}")

    def turn(self, **fields: Any) -> Sequence[JSON]:
        """Create a response; return its events."""
        self.send({"type": "response.create", **fields})
        received = [self.receive()]
        while received[-1]["type"] not in ENDS:
            received.append(self.receive())
        return received

    def rejection(self) -> tuple[int, JSON]:
        """Return status and body of a refused handshake."""
        assert isinstance(self.opening, events.RejectConnection), self.opening
        body = b""
        while True:
            event = self.next_event()
            assert isinstance(event, events.RejectData)
            body += event.data
            if event.body_finished:
                return self.opening.status_code, json.loads(body)


@contextmanager
def connected(url: str, path: str = "/v1/responses", **headers: str) -> Iterator[SocketClient]:
    """Connect to a server."""
    client = SocketClient(url, path, headers)
    try:
        yield client
    finally:
        client.wire.close()
