"""Responses over WebSocket: each message `response.create` is answered as POST /v1/responses answers a stream.

Each turn is a request of its own to the application, so keys, limits, quotas, log and metrics apply to it as over HTTP.
A connection also keeps its last responses, also those with `store` false, for `previous_response_id` on the same
connection; a turn that fails removes the one that it continued (openresponses.org, transport WebSocket).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.server.body import read_json
from nano_inference.server.cors import granted_origin
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import GuardPolicy, check_admission, json_headers
from nano_inference.server.headers import single
from nano_inference.server.log import AccessRecord, log_access
from nano_inference.server.reply_store import ClientReplies, ReplyStore
from nano_inference.server.translating import unsupported_field

PATH = "/v1/responses"
_MAX_REPLIES, _MAX_BYTES = 1024, 64 << 20
"""Limits of the responses that all connections together keep."""
_MAX_WAITING = 4
"""Messages of a connection that wait while one is answered."""
_TYPE = "response.create"
_FORWARDED = frozenset({b"host", b"authorization", b"x-api-key", b"x-forwarded-for", b"user-agent"})
"""Headers of the handshake that each turn has too."""
_DATA = b"data: "


def with_sockets(app: ASGIApp, policy: GuardPolicy, idle_timeout: float) -> ASGIApp:
    """Return an application that also answers WebSockets, by requests to `app`; it refuses them on other paths.

    A connection without a message for `idle_timeout` seconds is closed.
    """
    replies = ReplyStore(_MAX_REPLIES, _MAX_BYTES, policy.max_body_bytes)
    numbers = itertools.count()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await app(scope, receive, send)
            return
        await receive()  # websocket.connect
        error = _refusal(scope, policy)
        if error is None:
            await send({"type": "websocket.accept"})
            number = next(numbers)
            try:
                await _Connection(app, scope, receive, send, idle_timeout, replies.part_of(number)).run()
            finally:
                replies.remove_all(number)
        else:
            await _refuse(error, send)
            _log_refusal(scope, error)

    return serve


def _refusal(scope: Scope, policy: GuardPolicy) -> ApiError | None:
    """Return the error of a handshake that is not admitted."""
    asked = _http_scope(scope, "GET", scope["headers"])
    asked["state"] = {}
    try:
        check_admission(asked, policy)
        origin = single(scope["headers"], b"origin")
        if origin is not None and granted_origin(scope["headers"], policy.cors_origins) is None:
            # Browsers let every page open a WebSocket to every server.
            raise ApiError(403, "this web page may not connect; see --cors-origin", code="origin_not_allowed")
        if scope["path"] != PATH:
            raise ApiError(404, f"no WebSocket at {scope['path'][:200]}; connect to {PATH}")
    except ApiError as error:
        return error
    return None


async def _refuse(error: ApiError, send: Send) -> None:
    body = error.to_json()
    start = {"type": "websocket.http.response.start", "status": error.status, "headers": json_headers(body)}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})


def _log_refusal(scope: Scope, error: ApiError) -> None:
    """Log a handshake that was refused before any request."""
    log_access(
        AccessRecord(
            ts=time.time(),
            method="GET",
            path=scope["path"],
            status=error.status,
            error_type=error.type,
            error_code=error.code,
            error_param=error.param,
        )
    )


def _http_scope(scope: Scope, method: str, headers: Any) -> Scope:
    """Return the scope of a request with the address and path of a handshake."""
    copied = {
        name: scope[name] for name in ("asgi", "http_version", "path", "raw_path", "root_path", "client", "server")
    }
    scheme = "https" if scope["scheme"] == "wss" else "http"
    return {**copied, "type": "http", "method": method, "scheme": scheme, "query_string": b"", "headers": headers}


@dataclass(slots=True)
class _Connection:
    """One WebSocket: reads messages in a task, and answers them one after the other."""

    app: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    idle_timeout: float
    replies: ClientReplies
    inbox: asyncio.Queue[Message] = field(default_factory=lambda: asyncio.Queue(_MAX_WAITING))
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Answer messages until the client disconnects or is idle for too long."""
        reader = asyncio.create_task(self._read())
        try:
            while (message := await self._next()) is not None:
                await self._answer(message)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _next(self) -> Message | None:
        """Return the next message; None if the client has disconnected, or sent nothing for too long."""
        try:
            async with asyncio.timeout(self.idle_timeout):
                message = await self.inbox.get()
        except TimeoutError:
            await self.send({"type": "websocket.close", "code": 1001, "reason": "no message for too long"})
            return None
        return None if message["type"] == "websocket.disconnect" or self.gone.is_set() else message

    async def _read(self) -> None:
        """Put messages into the inbox, at most `_MAX_WAITING`: a client that sends more is disconnected."""
        while True:
            message = await self.receive()
            is_last = message["type"] == "websocket.disconnect"
            if not is_last and self.inbox.full():
                is_last = True
                await self.send({"type": "websocket.close", "code": 1008, "reason": "too many messages wait"})
            if is_last:
                self.gone.set()
                message = {"type": "websocket.disconnect"}
            if not self.inbox.full():  # if it is full, `_next` finds that the client is gone
                self.inbox.put_nowait(message)
            if is_last:
                return

    async def _answer(self, message: Message) -> None:
        """Answer one message by events, or by one event with an error."""
        previous: Any = None
        try:
            body, data = await asyncio.to_thread(_body_of, message)
            previous = body.get("previous_response_id")
            turn = _Turn(self.send_event, data, self.gone)
            await self.app(self._turn_scope(turn.body), turn.receive, turn.send)
            has_failed = await turn.finish()
        except ApiError as error:
            await self.send_event(_error_event(error.status, error.to_dict()["error"]))
            has_failed = True
        if has_failed and isinstance(previous, str):
            self.replies.store.remove(self.replies.owner, previous)

    def _turn_scope(self, body: bytes) -> Scope:
        headers = [(name, value) for name, value in self.scope["headers"] if name in _FORWARDED]
        scope = _http_scope(self.scope, "POST", [*headers, *json_headers(body)])
        scope["state"] = {"session": self.replies}
        return scope

    async def send_event(self, event: bytes) -> None:
        """Send one event as a text message, unless the client has disconnected."""
        if not self.gone.is_set():
            try:
                await self.send({"type": "websocket.send", "text": event.decode()})
            except OSError:
                self.gone.set()


def _body_of(message: Message) -> tuple[dict[str, Any], bytes]:
    """Return the body of POST /v1/responses for a message, and its JSON. Raises `ApiError` naming the invalid field."""
    text = message.get("text")
    if text is None:
        raise ApiError(400, "send messages as text", code="invalid_json")
    body = read_json(text.encode("utf-8", "surrogatepass"))
    if body.get("type") != _TYPE:
        raise ApiError(400, f"type: must be {_TYPE}", param="type")
    for name, neutral in (("stream", True), ("generate", True)):
        if body.pop(name, neutral) not in (None, neutral):
            raise unsupported_field(name, f"{name} must be true over WebSocket")
    body = {name: value for name, value in body.items() if name != "type"} | {"stream": True}
    return body, to_json(body)


def _error_event(status: int, error: Mapping[str, Any]) -> bytes:
    """Return the event for an error; over WebSocket, its code is never null."""
    return to_json({"type": "error", "status": status, "error": {**error, "code": error["code"] or error["type"]}})


@dataclass(slots=True)
class _Turn:
    """The request and response of one message, as an ASGI exchange."""

    send_event: Callable[[bytes], Any]
    body: bytes
    gone: asyncio.Event
    status: int = 0
    buffer: bytes = b""
    is_sent: bool = False
    is_failed: bool = False

    async def receive(self) -> Message:
        """Return the body, then http.disconnect when the client has disconnected."""
        if not self.is_sent:
            self.is_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the events of a stream; keep the body of an error."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.buffer += message.get("body", b"")
        if self.status != 200:
            return
        *blocks, self.buffer = self.buffer.split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(_DATA):
                    self.is_failed = self.is_failed or block.startswith(b"event: response.failed")
                    await self.send_event(line.removeprefix(_DATA))

    async def finish(self) -> bool:
        """Send the error of a refused request; return True if the turn failed."""
        if self.status == 200:
            return self.is_failed
        if self.buffer:
            await self.send_event(_error_event(self.status, from_json(self.buffer)["error"]))
        return True
