"""`Proxy`: the ASGI application in front of the replicas. It forwards requests and answers about the whole itself.

A request that got no byte of a response is sent to another replica when its own dies or answers 503: a generation has
no effect that could happen twice. A stream that has started ends with an error event instead.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx2
from starlette.types import Receive, Scope, Send

from nano_inference.server.dialect import StreamError, openai_stream_error
from nano_inference.server.errors import queue_full
from nano_inference.server.front.fleet import Fleet
from nano_inference.server.front.forwarding import (
    fetch_all,
    request_for,
    respond,
    respond_text,
    return_reply,
    summed_load,
)
from nano_inference.server.front.merging import merge
from nano_inference.server.front.placement import ANYWHERE, Placement, placement_of
from nano_inference.server.front.supervisor import HealthCheck, Supervisor, forever
from nano_inference.server.guard import GuardPolicy, read_body, while_connected

_LARGE_BODY = 64 << 10  # bodies of more bytes are parsed in a thread
_log = logging.getLogger("nano_inference.server")


class Proxy:
    """Forwards to the replicas of a fleet. `draining` refuses new requests."""

    def __init__(
        self,
        fleet: Fleet,
        client: httpx2.AsyncClient,
        policy: GuardPolicy,
        stream_errors: Mapping[str, StreamError] = MappingProxyType({}),
        supervisor: Supervisor | None = None,
        urls: Sequence[str] = (),
    ) -> None:
        """`stream_errors`: path -> what ends its streams; OpenAI's error for other paths.

        `supervisor` starts the replicas; None: those at `urls` run already.
        """
        self._supervisor, self._urls = supervisor, urls
        self._health_check = HealthCheck(fleet, client)
        self._stream_errors = stream_errors
        self._fleet, self._client, self._policy = fleet, client, policy
        self.is_draining = False

    @property
    def num_open(self) -> int:
        """Open requests of all replicas."""
        return self._fleet.num_open

    async def open(self) -> None:
        """Start the replicas, or take those that run. Raises `ReplicaFailed` if a replica cannot start at first."""
        for index, url in enumerate(self._urls):
            self._fleet.set_ready(index, url)
        if self._supervisor is not None:
            await self._supervisor.open()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._supervisor.restart_all)
        self._health_check.start()

    async def run(self) -> None:
        """See `run.Front`. Raises `ClusterLost`."""
        await (forever() if self._supervisor is None else self._supervisor.run())

    async def close(self) -> None:
        """End the health checks and the replicas."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        await self._health_check.close()
        if self._supervisor is not None:
            await self._supervisor.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that the guard has admitted. Raises `ApiError`, `ClientGone`."""
        path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
        if is_read and path in ("/health", "/ping", "/liveness", "/ready"):
            await respond(send, *self._health(path))
        elif is_read and path == "/load":
            await respond(send, 200, summed_load(await fetch_all(self._client, self._urls_of_ready(), scope, "/load")))
        elif is_read and path == "/metrics":
            await respond_text(send, await self._metrics(scope))
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

    def _urls_of_ready(self) -> dict[int, str]:
        return {index: self._fleet.members[index].url for index in self._fleet.ready}

    async def _metrics(self, scope: Scope) -> bytes:
        texts = await fetch_all(self._client, self._urls_of_ready(), scope, "/metrics")
        num_ready, size = len(self._fleet.ready), len(self._fleet.members)
        own = (
            "# HELP nano_inference_replicas Replicas behind this address.\n# TYPE nano_inference_replicas gauge\n"
            f"nano_inference_replicas {size}\n"
            "# HELP nano_inference_replicas_ready Replicas that accept requests.\n"
            f"# TYPE nano_inference_replicas_ready gauge\nnano_inference_replicas_ready {num_ready}\n"
        )
        return (own + merge(texts)).encode()

    # ---- one request ------------------------------------------------------------------------------------------------

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_draining:
            raise queue_full("the server is shutting down", code="shutting_down")
        body = await read_body(receive, self._policy.max_body_bytes, self._policy.body_timeout)
        placement = ANYWHERE
        if body and len(body) > _LARGE_BODY:
            placement = await asyncio.to_thread(placement_of, scope["headers"], body)
        elif body:
            placement = placement_of(scope["headers"], body)
        await while_connected(self._try_replicas(scope, body, placement, send), receive)

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
            reply = await self._client.send(request_for(self._client, url, scope, body), stream=True)
        except httpx2.HTTPError as error:
            if self._fleet.members[index].url == url and self._fleet.members[index].state == "ready":
                _log.warning("replica %d at %s: %s", index, url, type(error).__name__)
                self._fleet.set_away(index, "unreachable")  # until its next health check
            return False
        try:
            if reply.status_code == 503 and not is_last:
                return False
            await return_reply(reply, send, self._stream_errors.get(scope["path"], openai_stream_error))
            return True
        finally:
            await reply.aclose()
