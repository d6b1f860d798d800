"""`Front`: the ASGI application in front of several servers. It forwards requests and answers about the whole itself.

A request that got no byte of a response is sent again, to another replica or to the new process of its model: a
generation has no effect that could happen twice. A stream that has started ends with an error event instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx2
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nano_inference.server.dialect import StreamError, openai_stream_error
from nano_inference.server.errors import queue_full
from nano_inference.server.front.forwarding import fetch_all, gauge, merge, request_for, return_reply
from nano_inference.server.front.models import Models
from nano_inference.server.front.placement import ANYWHERE, placement_of
from nano_inference.server.front.servers import LARGE_BODY, NEEDS_UPDATE, Answer, Server, Servers, Target
from nano_inference.server.front.trainers import Trainers
from nano_inference.server.guard import GuardPolicy, read_body, while_connected
from nano_inference.server.metrics import CONTENT_TYPE

HEALTH = ("/health", "/ping", "/liveness", "/ready")
LOAD = ("server_load", "running", "waiting")


class Front:
    """Forwards to `servers`. `is_draining` refuses new requests."""

    def __init__(
        self,
        servers: Servers,
        kind: Replicas | Models,
        client: httpx2.AsyncClient,
        policy: GuardPolicy,
        stream_errors: Mapping[str, StreamError],
        load_timeout: float,
        trainers: Trainers | None = None,
    ) -> None:
        """`stream_errors`: path -> what ends its streams. `load_timeout`: seconds that a request waits for a model."""
        self.is_draining = False
        self._servers, self._kind, self._client, self._policy = servers, kind, client, policy
        self._stream_errors, self._load_timeout, self._trainers = stream_errors, load_timeout, trainers
        own = {**dict.fromkeys(HEALTH, self._health), "/load": self._load, "/metrics": self._metrics}
        self._answers: Mapping[str, Answer] = {**kind.answers, **own}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that the guard has admitted. Raises `ApiError`, `ClientGone`."""
        answer = self._answers.get(scope["path"])
        if answer is not None and scope["method"] in ("GET", "HEAD"):
            response = await answer(scope)
            await response(scope, receive, send)
            return
        if self.is_draining:
            raise queue_full("the server is shutting down", code="shutting_down")
        if self._trainers is not None and self._trainers.answers(scope):
            response = await self._trainers.answer(scope, receive)
            await response(scope, receive, send)
            return
        body = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
        await while_connected(self._forward(scope, body, receive, send), receive)

    async def _health(self, scope: Scope) -> Response:
        """Return 200 while requests are accepted. While draining, /health is 200 and /ready 503, as for one engine."""
        status, fields = self._kind.health()
        status = "draining" if self.is_draining else status
        accepts = status in ("ok", "degraded") or (status == "draining" and scope["path"] != "/ready")
        return JSONResponse({"status": status, **fields}, 200 if accepts else 503)

    async def _load(self, scope: Scope) -> Response:
        texts = await fetch_all(self._client, self._servers.urls, scope, "/load")
        loads = [json.loads(text) for text in texts.values()]
        return JSONResponse({name: sum(int(one.get(name, 0)) for one in loads) for name in LOAD})

    async def _metrics(self, scope: Scope) -> Response:
        texts = await fetch_all(self._client, self._servers.urls, scope, "/metrics")
        return Response(self._kind.metrics() + merge(texts), headers={"content-type": CONTENT_TYPE})

    async def _forward(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Send a request to one server after another until one answers with another status than `passed_over`."""
        target = await self._kind.target(scope, body)
        if isinstance(target, Response):
            await target(scope, receive, send)
            return
        tried: list[Server] = []
        while left := [one for one in target.servers() if tried.count(one) < target.attempts]:
            server = left[0] if target.placement is None else self._servers.place(target.placement, left)
            cost = 0 if target.placement is None else target.placement.cost
            tried.append(server)
            async with self._servers.use(server, self._load_timeout, may_start=target.may_start, cost=cost) as url:
                try:
                    reply = await self._client.send(request_for(self._client, url, scope, body), stream=True)
                except httpx2.HTTPError as error:
                    await self._servers.lost(server, url, type(error).__name__)
                    continue
                try:
                    if reply.status_code != target.passed_over or set(target.servers()) <= set(tried):
                        await return_reply(reply, send, self._stream_errors.get(scope["path"], openai_stream_error))
                        return
                finally:
                    await reply.aclose()
        raise target.lost


class Replicas:
    """Replicas of one model: any of them answers a request."""

    def __init__(self, servers: Servers) -> None:
        self.answers: Mapping[str, Answer] = {}
        self._servers = servers

    def health(self) -> tuple[str, dict[str, Any]]:
        """Return "ok" or "degraded" while at least one replica accepts requests: the others' work goes there."""
        servers, num_ready = self._servers.all, len(self._servers.ready)
        status = "ok" if num_ready == len(servers) else "degraded" if num_ready else "unavailable"
        if all(not one.url for one in servers):
            status = "loading"
        states = [{"state": one.state, "open": one.num_open} for one in servers]
        return status, {"ready": num_ready, "replicas": states}

    def metrics(self) -> str:
        count, num_ready = len(self._servers.all), len(self._servers.ready)
        text = gauge("nano_inference_replicas", "Replicas behind this address.", {"": count})
        return text + gauge("nano_inference_replicas_ready", "Replicas that accept requests.", {"": num_ready})

    async def target(self, scope: Scope, body: bytes) -> Target:
        placement = ANYWHERE
        if len(body) > LARGE_BODY:
            placement = await asyncio.to_thread(placement_of, scope["headers"], body)
        elif body:
            placement = placement_of(scope["headers"], body)
        lost = queue_full("no replica accepts requests at the moment", code="no_replica")
        lacking = next((one.error for one in self._servers.all if one.state == NEEDS_UPDATE), "")
        if lacking:
            lost = queue_full(
                f"no replica has the weights in force, send a complete update: {lacking}", code="needs_update"
            )
        return Target(servers=lambda: self._servers.ready, placement=placement, passed_over=503, lost=lost)
