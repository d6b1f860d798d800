"""`Server`: an HTTP client of one engine server; every failure is one of the pool's errors, of one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from nano_inference.rl.pool.worker import WorkerDied
from nano_inference.support.packages import needed
from nano_inference.types import BadRequest, UpdateBusy

JSON = dict[str, Any]
_CONNECT_S = 10.0
COMMAND_S = 600.0  # most seconds of a command, such as gathering an update
_IDLE_S = 2.0  # less than servers keep idle connections: a request on one that they close would fail
_FULL, _FULL_S = 429, 0.25  # status of a full queue, and the pause before the request is sent again
_MOST_TEXT = 500


class Refused(BadRequest):
    """The server replied with an error status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__("", text)
        self.status = status


class Server:
    """Owns the connections to one server. Proxies and passwords from the environment are ignored."""

    def __init__(self, url: str, api_key: str | None) -> None:
        with needed("a pool of servers"):
            import httpx2
        self.url = url
        self._failures = (httpx2.TransportError, httpx2.DecodingError)
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_S),
            trust_env=False,
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, limit: float | None = COMMAND_S) -> JSON:
        """POST a body, or GET without one, again while the server's queue is full; return the reply's JSON.

        Raises `WorkerDied` if the server does not answer within `limit` seconds, else `Refused`, `UpdateBusy`.
        """
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(limit):
                while (reply := await self._client.request(method, path, json=body)).status_code == _FULL:
                    await asyncio.sleep(_FULL_S)
        except self._failures as error:
            raise self._gone(error) from None
        except TimeoutError:
            raise WorkerDied(f"{self.url}: did not answer within {limit:g} s") from None
        if reply.status_code != 200:
            raise self._refusal(reply.status_code, reply.content)
        try:
            found: JSON = reply.json() if reply.content else {}
        except ValueError:
            raise WorkerDied(f"{self.url}: replied to {path} with something else than JSON") from None
        return found

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[JSON]:
        """POST a request and yield its server-sent events. Raises `WorkerDied` if the stream ends without [DONE]."""
        try:
            async with self._client.stream("POST", path, json=dict(body)) as reply:
                if reply.status_code != 200:
                    raise self._refusal(reply.status_code, await reply.aread())
                async for line in _lines(reply.aiter_bytes()):
                    data = line.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    if data == line:
                        continue
                    event: JSON = json.loads(data)
                    if "error" in event and "choices" not in event:
                        raise WorkerDied(f"{self.url}: {_message(data)}")
                    yield event
        except self._failures as error:
            raise self._gone(error) from None
        raise WorkerDied(f"{self.url}: the stream ended early")

    async def close(self) -> None:
        await self._client.aclose()

    def _refusal(self, status: int, content: bytes) -> Exception:
        text = f"{self.url}: {_message(content) or f'status {status}'}"
        if status >= 500 and status != 501:
            return WorkerDied(text)
        return UpdateBusy(text) if status == 409 else Refused(text, status)

    def _gone(self, error: Exception) -> WorkerDied:
        return WorkerDied(f"{self.url}: {str(error) or type(error).__name__}")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield lines without their ends. `aiter_lines` of httpx2 also splits at U+2028, which JSON may contain."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def read_url(text: str) -> str:
    """Return a server's URL without a trailing slash or /v1. Raises `BadRequest`."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        raise BadRequest("urls", f"{text!r} is not the address of a server, such as http://host:8000")
    if parts.username is not None or parts.password is not None:
        raise BadRequest("urls", f"give the key of {parts.hostname} as api_key, not in its address")
    return url


def _message(content: bytes) -> str:
    """Return the error message of a reply in OpenAI's or SGLang's form, else its first text."""
    try:
        found = json.loads(content)
    except ValueError:
        return content[:_MOST_TEXT].decode("utf-8", "replace").strip()
    for _ in range(2):
        if isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or found
    return str(found)[:_MOST_TEXT]
