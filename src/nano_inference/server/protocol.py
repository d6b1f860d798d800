"""uvicorn's HTTP/1.1 protocol with limits: how long a head may take, how many connect, how long a reader may stall.

uvicorn has no header timeout, refuses nobody before a request is read, and waits for ever for a client that does not
read. What h11 leaves to others about framing (RFC 9112, 6.1 and 6.3) is refused here, before the application hears
of the request.
"""

from __future__ import annotations

import asyncio
import math
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from nano_inference.config import ServerConfig
from nano_inference.server.clients import Network, is_trusted, parse_address, prefix_of
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import LINGER_SECONDS, MAX_HEADERS, GuardPolicy
from nano_inference.server.quota import quota

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request line and its headers."""
MAX_HEAD_LINES = 2 * MAX_HEADERS
"""Far beyond this, telling the exact number is not worth the memory."""
SPARE_FILES = 64
"""Files left for what is no connection: the model, logs, the listening socket."""
MIN_CONNECTIONS = 8

_CONTENT_LENGTH = re.compile(rb"(?im)^content-length:(.*)$")
_ODD_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line that does not end in CR LF, or that goes on in the next."""
_REASONS = {
    400: "this is not a valid HTTP/1.1 request",
    431: f"request line and headers are larger than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS} lines",
    501: "the only transfer-encoding that is understood is chunked",
    505: "HTTP/1.1 is spoken here, and HTTP/1.0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What bounds a connection."""

    max_connections: int
    max_per_address: int
    """Connections of one client's address; those of `trusted_proxies` are not bounded, they carry many clients'."""
    trusted_proxies: tuple[Network, ...] = ()
    header_timeout: float
    write_timeout: float


class StrictConnection(h11.Connection):
    """h11's parser, without the leniency that lets two servers see two different requests in the same bytes."""

    method = b""
    """The method of the latest request, refused or not."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as h11 does; raise h11's `RemoteProtocolError` for an ambiguous head."""
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        check_lines(before)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.method = event.method
            check_head(before[: len(before) - len(self.trailing_data[0])], event)
        return event


def check_lines(received: bytes) -> None:
    """Refuse a head of too many lines before h11 makes objects of them."""
    end = received.find(b"\r\n\r\n")
    if received.count(b"\n", 0, len(received) if end < 0 else end) > MAX_HEAD_LINES:
        raise h11.RemoteProtocolError("too many lines", error_status_hint=431)


def check_head(head: bytes, request: h11.Request) -> None:
    """Refuse a head that is too large, or whose body could be measured in two ways."""
    if len(head) > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError("head too large", error_status_hint=431)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("another HTTP version", error_status_hint=505)
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("transfer-encoding beside content-length, or in HTTP/1.0")
    # h11 makes one of equal lengths, so only the bytes tell.
    lengths = _CONTENT_LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths) or _ODD_LINE.search(head):
        raise h11.RemoteProtocolError("repeated content-length, or lines that others may cut differently")


class LimitedProtocol(H11Protocol):
    """One connection. Owns two timers: one while bytes of a request are due, one while the client does not read."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self.parser = StrictConnection(h11.SERVER, MAX_HEAD_BYTES)
        self.limits = limits
        self.is_refused = False
        self.read_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    # asyncio promises a BaseTransport, uvicorn counts on the Transport that it gets.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it when there are too many."""
        super().connection_made(transport)
        # Every byte that the kernel does not take counts as unread; otherwise 64 KiB could wait for ever.
        transport.set_write_buffer_limits(high=0)
        refusal = self._refusal()
        if refusal:
            self._send_error(ApiError(503, refusal, code="too_many_connections", headers={"retry-after": "1"}))
            transport.close()
        else:
            self._watch_reading()

    def _refusal(self) -> str:
        """Return why there are too many connections; nothing when there are not."""
        limits, count = self.limits, len(self.connections)
        if count > limits.max_connections:
            return "too many open connections"
        if count <= limits.max_per_address:
            return ""
        address = client_address(self.client, limits.trusted_proxies)
        if address is None:
            return ""
        peers = [one.client for one in self.connections if isinstance(one, LimitedProtocol)]
        same = sum(client_address(peer, limits.trusted_proxies) == address for peer in peers)
        if same <= limits.max_per_address:
            return ""
        return f"too many open connections of one address: {limits.max_per_address} are allowed (--client-share)"

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its timers."""
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:  # uvicorn stops it only if the client left without an error
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._stop_reading_timer()
        self._stop_writing_timer()

    def data_received(self, data: bytes) -> None:
        """Take bytes; what follows a refusal or a last request is dropped."""
        if self.is_refused or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch_reading()

    def pause_writing(self) -> None:
        """Start to count: the client does not read."""
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop counting: the client has read."""
        super().resume_writing()
        self._stop_writing_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, from within uvicorn's handler of the parser's error, and give up the connection."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(ApiError(status, _REASONS.get(status, _REASONS[400]), code="bad_http"))
            self._linger()
        else:
            self.transport.abort()
        self._disconnect_application()

    def _send_error(self, error: ApiError) -> None:
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.parser.method == b"HEAD"
        for event in error_events(error, with_body=not is_head):
            self.transport.write(self.conn.send(event))

    def _linger(self) -> None:
        """Close our side, and the connection a little later."""
        self.is_refused = True
        self._stop_reading_timer()
        self.transport.write_eof()
        self.read_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _disconnect_application(self) -> None:
        """Let an application that waits for the rest of the request know that it will not come."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_reading(self) -> None:
        """Run the reading timer exactly while bytes are due. It is not started anew by bytes: a drip is no progress."""
        if self.is_refused:
            return
        if not self._is_due():
            self._stop_reading_timer()
        elif self.read_timer is None:
            self.read_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def _is_due(self) -> bool:
        """Whether a head has to be completed, or a body that its application did not wait for."""
        if self.conn.their_state is h11.IDLE:
            return self.cycle is None or bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _stop_reading_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def _stop_writing_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None


def error_events(error: ApiError, *, with_body: bool) -> list[h11.Response | h11.Data | h11.EndOfMessage]:
    """Return an error as what h11 sends; the connection is closed after it."""
    body = error.to_json()
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
        *error.headers.items(),
        ("connection", "close"),
    ]
    start = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase)
    return [start, h11.Data(data=body if with_body else b""), h11.EndOfMessage()]


def client_address(peer: tuple[str, int] | None, trusted: Sequence[Network]) -> str | None:
    """Return what counts as a peer's address; None for a trusted proxy's, and where there is none."""
    address = parse_address(peer[0]) if peer else None
    return None if address is None or is_trusted(address, trusted) else prefix_of(address)


def connection_limit(config: ServerConfig) -> int:
    """Return how many connections to take: as many as asked for, unless the process may not open so many files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(soft - SPARE_FILES, MIN_CONNECTIONS))


def uvicorn_config(app: ASGIApp, config: ServerConfig, policy: GuardPolicy | None = None) -> uvicorn.Config:
    """Return the configuration of the uvicorn server that runs this application; without a policy, for one client."""
    max_connections = connection_limit(config)
    limits = ConnectionLimits(
        max_connections=max_connections,
        max_per_address=quota(policy.client_share if policy else 1.0, max_connections, 0),
        trusted_proxies=policy.trusted_proxies if policy else (),
        header_timeout=config.header_timeout,
        write_timeout=config.write_timeout,
    )
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        # uvicorn only ever calls it.
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # Below it, uvicorn writes a line for each request that is not HTTP, and two for each that asks for an upgrade
        # (a websocket): any client could fill a log.
        log_level="error",
        # A client's X-Forwarded-For is what the client says.
        proxy_headers=False,
        server_header=False,
        date_header=True,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        loop="asyncio",
        timeout_keep_alive=math.ceil(config.keep_alive_timeout),
    )
