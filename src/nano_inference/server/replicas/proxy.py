"""`Proxy`: the ASGI application in front of the replicas. It forwards requests and answers about the whole itself.

A request that got no byte of a response is sent to another replica when its own dies or answers 503: a generation has
no effect that could happen twice. A stream that has started ends with an error event instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import httpx2
from starlette.types import Receive, Scope, Send

from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.events import JSON_LINES, line
from nano_inference.server.guard import ClientGone, GuardPolicy, json_headers, read_body
from nano_inference.server.headers import Headers
from nano_inference.server.metrics import CONTENT_TYPE
from nano_inference.server.replicas.fleet import Fleet
from nano_inference.server.replicas.metrics import merge
from nano_inference.server.replicas.placement import ANYWHERE, Placement, placement_of

CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 10.0
"""Below the replicas' `keep_alive_timeout`, so that no request is sent on a connection that is being closed."""
MAX_TAIL = 1 << 20
"""Bytes of an event that are held back until it is complete."""
_LARGE_BODY = 64 << 10
"""Bodies of more bytes are parsed in a thread."""
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"x-request-id"),
    }
)
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"})
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")
_LOST = "the replica that generated this answer died; send the request again"
_SUMMED = ("server_load", "running", "waiting")
_log = logging.getLogger("nano_inference.server")


def make_client() -> httpx2.AsyncClient:
    """Return the client for the replicas: no limit of connections, no proxies of the environment."""
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        trust_env=False,
        follow_redirects=False,
    )


class Proxy:
    """Forwards to the replicas of a fleet. `draining` refuses new requests."""

    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient, policy: GuardPolicy) -> None:
        self._fleet, self._client, self._policy = fleet, client, policy
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that the guard has admitted. Raises `ApiError`, `ClientGone`."""
        path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
        if is_read and path in ("/health", "/ping", "/liveness", "/ready"):
            await _respond(send, *self._health(path))
        elif is_read and path == "/load":
            await _respond(send, 200, await self._load(scope))
        elif is_read and path == "/metrics":
            await _respond_text(send, await self._metrics(scope))
        else:
            await self._forward(scope, receive, send)

    # ---- the whole --------------------------------------------------------------------------------------------------

    def _health(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and body: 200 while at least one replica accepts requests, since the others' work goes there.

        While draining, /health is 200 and /ready 503, as for one engine.
        """
        num_ready, members = len(self._fleet.ready), self._fleet.members
        status = "ok" if num_ready == len(members) else "degraded" if num_ready else "unavailable"
        if not num_ready and all(member.state == "starting" and not member.url for member in members):
            status = "loading"
        if self.is_draining:
            status = "draining"
        accepts = status in ("ok", "degraded") or (status == "draining" and path != "/ready")
        states = [{"state": member.state, "open": member.num_open} for member in members]
        return 200 if accepts else 503, {"status": status, "ready": num_ready, "replicas": states}

    async def _load(self, scope: Scope) -> dict[str, int]:
        replies = await self._fetch_all(scope, "/load")
        found = [json.loads(text) for text in replies.values()]
        return {name: sum(int(one.get(name, 0)) for one in found) for name in _SUMMED}

    async def _metrics(self, scope: Scope) -> bytes:
        texts = await self._fetch_all(scope, "/metrics")
        num_ready, size = len(self._fleet.ready), len(self._fleet.members)
        own = (
            "# HELP nano_inference_replicas Replicas behind this address.\n# TYPE nano_inference_replicas gauge\n"
            f"nano_inference_replicas {size}\n"
            "# HELP nano_inference_replicas_ready Replicas that accept requests.\n"
            f"# TYPE nano_inference_replicas_ready gauge\nnano_inference_replicas_ready {num_ready}\n"
        )
        return (own + merge(texts)).encode()

    async def _fetch_all(self, scope: Scope, path: str) -> dict[int, str]:
        """GET a path from all replicas that accept requests, with the client's key; leave out those that fail."""
        headers = forwarded_headers(scope)

        async def fetch(index: int) -> tuple[int, str | None]:
            try:
                reply = await self._client.get(f"{self._fleet.members[index].url}{path}", headers=headers, timeout=10)
            except httpx2.HTTPError:
                return index, None
            return index, reply.text if reply.status_code == 200 else None

        replies = await asyncio.gather(*(fetch(index) for index in self._fleet.ready))
        return {index: text for index, text in replies if text is not None}

    # ---- one request ------------------------------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "1"})
        body = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
        placement = ANYWHERE
        if body and len(body) > _LARGE_BODY:
            placement = await asyncio.to_thread(placement_of, scope["headers"], body)
        elif body:
            placement = placement_of(scope["headers"], body)
        sending = asyncio.ensure_future(self._try_replicas(scope, body, placement, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientGone  # cancelling `sending` closes the connection, so that the replica aborts
            sending.result()
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _try_replicas(self, scope: Scope, body: bytes, placement: Placement, send: Send) -> None:
        """Send the request to one replica after another until one answers with other than 503."""
        tried: set[int] = set()
        while True:
            with self._fleet.place(placement, tried) as index:
                if index is None:
                    raise queue_full("no replica accepts requests at the moment", code="no_replica")
                tried.add(index)
                if await self._try_one(index, scope, body, send, is_last=set(self._fleet.ready) <= tried):
                    return

    async def _try_one(self, index: int, scope: Scope, body: bytes, send: Send, *, is_last: bool) -> bool:
        """Forward to one replica; return False if another one should be tried. `is_last`: return its 503, too."""
        url = self._fleet.members[index].url
        try:
            reply = await self._client.send(self._request(url, scope, body), stream=True)
        except httpx2.HTTPError as error:
            if self._fleet.members[index].url == url and self._fleet.members[index].state == "ready":
                _log.warning("replica %d at %s: %s", index, url, type(error).__name__)
                self._fleet.set_away(index, "unreachable")  # until its next health check
            return False
        try:
            if reply.status_code == 503 and not is_last:
                return False
            await self._return(reply, send)
            return True
        finally:
            await reply.aclose()

    def _request(self, url: str, scope: Scope, body: bytes) -> httpx2.Request:
        path, query = quote(scope["path"], safe="/:@!$&'()*+,;=~"), scope["query_string"].decode("latin-1")
        target = f"{url}{path}?{query}" if query else f"{url}{path}"
        headers = forwarded_headers(scope)
        if not body and scope["method"] in ("GET", "HEAD"):
            return self._client.build_request(scope["method"], target, headers=headers)
        return self._client.build_request(scope["method"], target, headers=headers, content=body)

    async def _return(self, reply: httpx2.Response, send: Send) -> None:
        """Send a replica's response to the client."""
        headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _NOT_RETURNED]
        await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
        kind = reply.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            pieces = whole_parts(reply, _EVENT_END, lost_event())
        elif kind.startswith(JSON_LINES.media_type):
            pieces = whole_parts(reply, _LINE_END, lost_line())
        else:
            pieces = reply.aiter_raw()
        async with aclosing(pieces) as reading:
            async for piece in reading:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def whole_parts(reply: httpx2.Response, ending: re.Pattern[bytes], lost: bytes) -> AsyncGenerator[bytes]:
    """Yield a stream of events or lines, each only when it is complete; if the connection breaks, end with `lost`."""
    tail = b""
    try:
        async for piece in reply.aiter_raw():
            tail += piece
            ends = [match.end() for match in ending.finditer(tail)]
            end = ends[-1] if ends else len(tail) if len(tail) > MAX_TAIL else 0
            if end:
                yield tail[:end]
            tail = tail[end:]
    except httpx2.HTTPError as error:
        _log.warning("a stream was cut off: %s", type(error).__name__)
        yield lost
        return
    if tail:
        yield tail


def lost_event() -> bytes:
    """Return the event that ends a stream whose replica died; clients of OpenAI and Anthropic raise it."""
    error = ApiError(500, _LOST, code="replica_died").to_dict()
    return b"event: error\ndata: " + json.dumps({"type": "error", **error}).encode() + b"\n\n"


def lost_line() -> bytes:
    """Return the line that ends a stream of JSON lines whose replica died; clients of Ollama raise it."""
    return line({"error": _LOST})


def forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return a request's headers for a replica: hop-by-hop ones left out, request id and client address added."""
    kept: list[tuple[bytes, bytes]] = [(n, v) for n, v in scope["headers"] if n.lower() not in _HOP_BY_HOP]
    peer = scope.get("client")
    extra = [(b"x-request-id", scope["state"]["request_id"].encode())]
    if peer:
        extra.append((b"x-forwarded-for", peer[0].encode()))
    names = {name.lower() for name, _ in kept}
    # httpx2 adds its own values of absent headers; a replica must not compress.
    defaults = [(name, value) for name, value in ((b"accept", b"*/*"), (b"accept-encoding", b"identity"))]
    return [*kept, *extra, *(header for header in defaults if header[0] not in names)]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, fields: Mapping[str, Any]) -> None:
    body = json.dumps(fields).encode()
    await _send_whole(send, status, json_headers(body), body)


async def _respond_text(send: Send, body: bytes) -> None:
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    await _send_whole(send, 200, headers, body)


async def _send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    with contextlib.suppress(ClientGone):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
