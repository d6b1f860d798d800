"""uvicorn's HTTP/1.1 protocol with limits on header time, number of connections, and stalled readers.

uvicorn has no header timeout, refuses connections only after reading a request, and waits without limit for a client
that does not read. Ambiguous framing that h11 accepts (RFC 9112, 6.1 and 6.3) is refused here, before the application
sees the request.
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
from importlib.util import find_spec
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from nano_inference.server.clients import Network, is_trusted, parse_address, prefix_of
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import LINGER_SECONDS, MAX_HEADERS, GuardPolicy
from nano_inference.server.quota import quota

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request line and its headers."""
MAX_HEAD_LINES = 2 * MAX_HEADERS
"""Lines above which a head is refused without parsing it."""
SPARE_FILES = 64
"""Descriptors reserved for the model, logs and the listening socket."""
MIN_CONNECTIONS = 8

_CONTENT_LENGTH = re.compile(rb"(?im)^content-length:(.*)$")
_ODD_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line that does not end in CR LF, or that is folded."""
_ABSOLUTE = re.compile(rb"(?i:https?)://(?P<host>[^/?]*)(?P<rest>.*)", re.DOTALL)
_REASONS = {
    400: "the request is not valid HTTP/1.1",
    431: f"request line and headers are larger than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS} lines",
    501: "the only supported transfer-encoding is chunked",
    505: "the supported versions are HTTP/1.1 and HTTP/1.0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections; timeouts in seconds."""

    max_connections: int
    max_per_address: int
    """Connections of one address; not applied to `trusted_proxies`, which serve many clients."""
    trusted_proxies: tuple[Network, ...] = ()
    header_timeout: float
    write_timeout: float


class StrictConnection(h11.Connection):
    """h11's parser that refuses heads which other servers may parse differently (request smuggling)."""

    method = b""
    """Method of the latest request, accepted or refused."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event. Raises h11's `RemoteProtocolError` for an ambiguous head."""
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        check_lines(before)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.method = event.method
            check_head(before[: len(before) - len(self.trailing_data[0])], event)
            event = in_origin_form(event)
        return event


def check_lines(received: bytes) -> None:
    """Refuse a head with too many lines before h11 parses them."""
    end = received.find(b"\r\n\r\n")
    if received.count(b"\n", 0, len(received) if end < 0 else end) > MAX_HEAD_LINES:
        raise h11.RemoteProtocolError("too many lines", error_status_hint=431)


def check_head(head: bytes, request: h11.Request) -> None:
    """Refuse a head that is too large, or that defines the body length ambiguously."""
    if len(head) > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError("head too large", error_status_hint=431)
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("another HTTP version", error_status_hint=505)
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("transfer-encoding beside content-length, or in HTTP/1.0")
    # h11 merges equal Content-Length headers, so the raw bytes are searched.
    lengths = _CONTENT_LENGTH.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths) or _ODD_LINE.search(head):
        raise h11.RemoteProtocolError("repeated content-length, or ambiguous line ends")


def in_origin_form(request: h11.Request) -> h11.Request:
    """Return a request whose target is a whole URL as if its client had sent path and Host (RFC 9112, 3.2.2).

    The URL's host replaces the Host header, so that the checks of Host apply to it.
    """
    url = _ABSOLUTE.fullmatch(request.target)
    if url is None:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    target = url["rest"] if url["rest"].startswith(b"/") else b"/" + url["rest"]
    return h11.Request(
        method=request.method,
        target=target,
        headers=[(b"host", url["host"]), *headers],
        http_version=request.http_version,
    )


class LimitedProtocol(H11Protocol):
    """One connection. Owns two timers: one while request bytes are due, one while the client does not read."""

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
        self.is_upgraded = False
        """True if another protocol has the connection."""
        self.read_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    # asyncio declares BaseTransport, uvicorn relies on the Transport that it passes.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or answer 503 and close it if there are too many."""
        super().connection_made(transport)
        # Any byte not accepted by the kernel starts the write timer; by default 64 KiB could stay unsent without limit.
        transport.set_write_buffer_limits(high=0)
        refusal = self._refusal()
        if refusal:
            self._send_error(ApiError(503, refusal, code="too_many_connections", headers={"retry-after": "1"}))
            transport.close()
        else:
            self._watch_reading()

    def _refusal(self) -> str:
        """Return the message for too many connections; "" if the limits are kept."""
        limits, count = self.limits, len(self.connections)
        if count > limits.max_connections:
            return "too many open connections"
        if count <= limits.max_per_address:
            return ""
        address = client_address(self.client, limits.trusted_proxies)
        if address is None:
            return ""
        peers = [getattr(one, "client", None) for one in self.connections]
        same = sum(client_address(peer, limits.trusted_proxies) == address for peer in peers)
        if same <= limits.max_per_address:
            return ""
        return (
            f"too many open connections of one address: at most {limits.max_per_address} are allowed (--client-share)"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:  # uvicorn cancels it only if the client closed without an error
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._stop_reading_timer()
        self._stop_writing_timer()

    def data_received(self, data: bytes) -> None:
        """Process bytes; drop those after a refusal or a final request."""
        if self.is_refused or self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED):
            return
        super().data_received(data)
        if not self.is_upgraded:
            self._watch_reading()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Give the connection to the WebSocket protocol."""
        self.is_upgraded = True
        self._stop_reading_timer()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch_reading()

    def pause_writing(self) -> None:
        """Start the write timer: the client does not read."""
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the write timer: the client has read."""
        super().resume_writing()
        self._stop_writing_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP and close the connection; called in uvicorn's handler of the parser's error."""
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
        """Close the sending side now, and the connection after `LINGER_SECONDS`."""
        self.is_refused = True
        self._stop_reading_timer()
        self.transport.write_eof()
        self.read_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _disconnect_application(self) -> None:
        """Send http.disconnect to an application that waits for the rest of the request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_reading(self) -> None:
        """Run the read timer while request bytes are due. Received bytes do not restart it: slow senders time out."""
        if self.is_refused:
            return
        if not self._is_due():
            self._stop_reading_timer()
        elif self.read_timer is None:
            self.read_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def _is_due(self) -> bool:
        """Return True while a head is incomplete, or a body that the application did not read."""
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
    """Return an error response as h11 events; it closes the connection."""
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
    """Return the address or IPv6 network of a peer; None for a trusted proxy or an unknown address."""
    address = parse_address(peer[0]) if peer else None
    return None if address is None or is_trusted(address, trusted) else prefix_of(address)


def connection_limit(config: ServerConfig) -> int:
    """Return the maximum number of connections: as configured, but within the process's file descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(soft - SPARE_FILES, MIN_CONNECTIONS))


def _socket_protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    from nano_inference.server.socket_protocol import LimitedSocket  # imports wsproto

    return cast(type[asyncio.Protocol], partial(LimitedSocket, config.write_timeout))


def uvicorn_config(
    app: ASGIApp, config: ServerConfig, policy: GuardPolicy | None = None, *, takes_sockets: bool = False
) -> uvicorn.Config:
    """Return the uvicorn configuration of this application; without a policy, no per-client limits apply.

    `takes_sockets`: the application answers WebSockets; without the package wsproto, handshakes are plain GET requests.
    """
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
        # uvicorn only calls it.
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
        ws=_socket_protocol(config) if takes_sockets and find_spec("wsproto") is not None else "none",
        ws_max_size=config.max_body_bytes,
        ws_per_message_deflate=False,  # a small message could become a large one
        lifespan="off",
        access_log=False,
        log_config=None,
        # At lower levels uvicorn logs each invalid request and each websocket upgrade: any client could fill a log.
        log_level="error",
        # X-Forwarded-For is controlled by the client; see `clients.address_of`.
        proxy_headers=False,
        server_header=False,
        date_header=True,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        loop="asyncio",
        timeout_keep_alive=math.ceil(config.keep_alive_timeout),
    )
