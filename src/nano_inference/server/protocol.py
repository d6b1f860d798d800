"""uvicorn's HTTP/1.1 protocol with limits on header time, number of connections, and stalled readers.

uvicorn has no header timeout, refuses connections only after reading a request, and waits without limit for a client
that does not read. Invalid HTTP is what h11 refuses.
"""

from __future__ import annotations

import asyncio
import math
import re
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

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.limits import quota
from nano_inference.server.security import Network, is_trusted, parse_address, prefix_of

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a request line and its headers."""
_ABSOLUTE = re.compile(rb"(?i:https?)://(?P<host>[^/?]*)(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections; timeouts in seconds."""

    max_connections: int
    max_per_address: int
    """Connections of one address; not applied to `trusted_proxies`, which serve many clients."""
    trusted_proxies: tuple[Network, ...] = ()
    header_timeout: float
    write_timeout: float


class Connection(h11.Connection):
    """h11's parser that also takes a whole URL as the target, and limits a head that arrives at once."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        num_bytes = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0  # a copy
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if num_bytes - len(self.trailing_data[0]) > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("the head is too large")
        return in_origin_form(event)


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
        self.conn = Connection(h11.SERVER, MAX_HEAD_BYTES)
        self.limits = limits
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
            error = ApiError(503, refusal, code="too_many_connections", headers={"retry-after": "1"})
            for event in error_events(error):
                transport.write(self.conn.send(event))
            transport.close()
        else:
            self._watch_reading()

    def _refusal(self) -> str:
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
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:  # uvicorn cancels it only if the client closed without an error
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._stop_reading_timer()
        self._stop_writing_timer()

    def data_received(self, data: bytes) -> None:
        """Process bytes; drop those after a final request."""
        if self.conn.their_state in (h11.MUST_CLOSE, h11.CLOSED) or self.transport.is_closing():
            return
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch_reading()

    def on_response_complete(self) -> None:
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
        """Answer invalid HTTP and close the connection; without an answer if a response has started."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def _watch_reading(self) -> None:
        """Run the read timer while request bytes are due. Received bytes do not restart it: slow senders time out."""
        # A head that is incomplete, or a body that the application did not read.
        is_due = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
        if self.conn.their_state is h11.IDLE:
            is_due = self.cycle is None or bool(self.conn.trailing_data[0])
        if not is_due:
            self._stop_reading_timer()
        elif self.read_timer is None:
            self.read_timer = self.loop.call_later(self.limits.header_timeout, self.transport.abort)

    def _stop_reading_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def _stop_writing_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None


def error_events(error: ApiError) -> list[h11.Response | h11.Data | h11.EndOfMessage]:
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
    return [start, h11.Data(data=body), h11.EndOfMessage()]


def client_address(peer: tuple[str, int] | None, trusted: Sequence[Network]) -> str | None:
    """Return the address or IPv6 network of a peer; None for a trusted proxy or an unknown address."""
    address = parse_address(peer[0]) if peer else None
    return None if address is None or is_trusted(address, trusted) else prefix_of(address)


def uvicorn_config(app: ASGIApp, config: ServerConfig, policy: GuardPolicy | None = None) -> uvicorn.Config:
    """Return the uvicorn configuration of this application; without a policy, no per-client limits apply."""
    limits = ConnectionLimits(
        max_connections=config.max_connections,
        max_per_address=quota(policy.client_share if policy else 1.0, config.max_connections, 0),
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
        ws="none",  # handshakes are plain GET requests
        lifespan="off",
        access_log=False,
        log_config=None,
        # At lower levels uvicorn logs each invalid request and each websocket upgrade: any client could fill a log.
        log_level="error",
        # X-Forwarded-For is controlled by the client; see `security.address_of`.
        proxy_headers=False,
        server_header=False,
        date_header=True,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        loop="asyncio",
        timeout_keep_alive=math.ceil(config.keep_alive_timeout),
    )
