"""Forwarding of requests to other servers over HTTP, of their responses to the client, and of their metrics.

A stream whose server dies ends with an error in the form of its dialect; everything else is passed on as it arrives.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from urllib.parse import quote

import httpx2
from starlette.types import Scope, Send

from nano_inference.server.dialect import StreamError
from nano_inference.server.errors import ApiError
from nano_inference.server.events import JSON_LINES

CONNECT_TIMEOUT_S = 5.0
DESCRIBE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 10.0
"""Below the servers' `keep_alive_timeout`, so that no request is sent on a connection that is being closed."""
MAX_TAIL = 1 << 20  # bytes of an event that are held back until it is complete
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect", b"x-request-id"),
    }
)
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"})
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?(?P<rest> .*)")
_ENGINE = re.compile(r'(^|,)engine="[^"]*"')
_LOST = "the replica that generated this answer died; send the request again"
_log = logging.getLogger("nano_inference.server")


def make_client() -> httpx2.AsyncClient:
    """Return the client for the servers: no limit of connections, no proxies of the environment."""
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        trust_env=False,
        follow_redirects=False,
    )


def request_for(client: httpx2.AsyncClient, url: str, scope: Scope, body: bytes) -> httpx2.Request:
    """Return a client's request, addressed to the server at `url`."""
    path, query = quote(scope["path"], safe="/:@!$&'()*+,;=~"), scope["query_string"].decode("latin-1")
    target = f"{url}{path}?{query}" if query else f"{url}{path}"
    headers = forwarded_headers(scope)
    if not body and scope["method"] in ("GET", "HEAD"):
        return client.build_request(scope["method"], target, headers=headers)
    return client.build_request(scope["method"], target, headers=headers, content=body)


async def return_reply(reply: httpx2.Response, send: Send, lost: StreamError) -> None:
    """Send a server's response to the client; `lost` is for a stream whose server dies."""
    headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _NOT_RETURNED]
    await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
    kind = reply.headers.get("content-type", "")
    if kind.startswith(("text/event-stream", JSON_LINES.media_type)):
        ending = _LINE_END if kind.startswith(JSON_LINES.media_type) else _EVENT_END
        pieces = whole_parts(reply, ending, partial(lost, ApiError(500, _LOST, code="replica_died")))
    else:
        pieces = reply.aiter_raw()
    async with aclosing(pieces) as reading:
        async for piece in reading:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def whole_parts(
    reply: httpx2.Response, ending: re.Pattern[bytes], lost: Callable[[bytes, int], bytes]
) -> AsyncGenerator[bytes]:
    """Yield a stream of events or lines, each only when it is complete; if the connection breaks, end with `lost`.

    `lost` gets the first part with data, and the number of all.
    """
    tail = first = b""
    number = 0
    try:
        async for piece in reply.aiter_raw():
            tail += piece
            ends = [match.end() for match in ending.finditer(tail)]
            end = ends[-1] if ends else len(tail) if len(tail) > MAX_TAIL else 0
            if end:
                first = first or (tail[:end] if b"data:" in tail[:end] else b"")
                number += len(ends)
                yield tail[:end]
            tail = tail[end:]
    except httpx2.HTTPError as error:
        _log.warning("a stream was cut off: %s", type(error).__name__)
        yield lost(first, number)
        return
    if tail:
        yield tail


async def fetch_all(client: httpx2.AsyncClient, urls: Mapping[int, str], scope: Scope, path: str) -> dict[int, str]:
    """GET a path from several servers with the client's key; return index -> text of those that answer."""
    headers = forwarded_headers(scope)

    async def fetch(url: str) -> str | None:
        try:
            reply = await client.get(f"{url}{path}", headers=headers, timeout=DESCRIBE_TIMEOUT_S)
        except httpx2.HTTPError:
            return None
        return reply.text if reply.status_code == 200 else None

    texts = await asyncio.gather(*map(fetch, urls.values()))
    return {index: text for index, text in zip(urls, texts, strict=True) if text is not None}


def forwarded_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return a request's headers for a server: hop-by-hop ones left out, request id and client address added."""
    kept: list[tuple[bytes, bytes]] = [(n, v) for n, v in scope["headers"] if n.lower() not in _HOP_BY_HOP]
    peer = scope.get("client")
    extra = [(b"x-request-id", scope["state"]["request_id"].encode())]
    if peer:
        extra.append((b"x-forwarded-for", peer[0].encode()))
    names = {name.lower() for name, _ in kept}
    # httpx2 adds its own values of absent headers; a replica must not compress.
    defaults = [(name, value) for name, value in ((b"accept", b"*/*"), (b"accept-encoding", b"identity"))]
    return [*kept, *extra, *(header for header in defaults if header[0] not in names)]


def gauge(name: str, text: str, samples: Mapping[str, float]) -> str:
    """Return a gauge as Prometheus text; `samples` are its values by their labels, as in `{model_name="m"}`."""
    lines = (f"{name}{labels} {value}\n" for labels, value in samples.items())
    return f"# HELP {name} {text}\n# TYPE {name} gauge\n{''.join(lines)}"


def merge(texts: Mapping[int, str]) -> str:
    """Return the samples of several servers' Prometheus texts, one group per family with the first one's comments.

    Each sample gets the server's index as its label `engine`, as vLLM labels the engines of one server: dashboards
    that sum over engines work unchanged. Values are not summed here: a sum of counters falls when a replica restarts.
    """
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for index, text in texts.items():
        family, seen = "", set(comments)
        for line in text.splitlines():
            if line.startswith("#"):
                family = [*line.split(" ", 3), "", "", ""][2]
                if family not in seen:
                    comments.setdefault(family, []).append(line)
            elif (match := _SAMPLE.fullmatch(line)) is not None:
                given, label = match["labels"] or "", f'engine="{index}"'
                labels, count = _ENGINE.subn(rf"\1{label}", given)
                labels = labels if count else ",".join(filter(None, (given, label)))
                samples.setdefault(family, []).append(f"{match['name']}{{{labels}}}{match['rest']}")
    lines = [line for family in samples for line in (*comments.get(family, ()), *samples[family])]
    return "".join(f"{line}\n" for line in lines)
