"""Adapters of replicas: all load one, or none does; a replica that starts loads those that the others have."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import httpx2
from starlette.responses import Response

from nano_inference.server.errors import ApiError, queue_full
from nano_inference.server.front.commands import Declined, Sent, unload_of
from nano_inference.server.front.servers import Server, Servers
from nano_inference.server.trainers.adapters import NOT_FOUND

MAX_ADAPTERS = 256  # that a new replica loads: the latest
Send = Callable[[Sequence[Server], Sent], Awaitable[dict[Server, httpx2.Response | Declined]]]
_log = logging.getLogger("nano_inference.server")


class Adapters:
    """Owns the list of loaded adapters. Accessed on the event loop, by one command at a time."""

    def __init__(self, servers: Servers, send: Send) -> None:
        """`send` returns the replies of servers; those that do not answer are started again."""
        self.loads: list[Sent] = []  # what makes a new replica equal to the others
        self._servers, self._send = servers, send

    async def change(self, sent: Sent) -> Response:
        """Load an adapter in all replicas or in none, or unload it in all; return the first one's reply.

        If some cannot load a new version of a loaded adapter, or unload it, these are started again. Raises the first
        one's error.
        """
        servers = self._servers.running
        processes = [one.process for one in servers]
        if not servers:
            raise queue_full("no replica accepts requests at the moment", code="no_replica")
        replies = await self._send(servers, sent)
        declined = {one: reply for one, reply in replies.items() if isinstance(reply, Declined)}
        done = [reply for reply in replies.values() if isinstance(reply, httpx2.Response)]
        others = [one for one in self.loads if one.adapter != sent.adapter]
        is_new = len(others) == len(self.loads)
        is_load = sent.directory is not None
        if declined and (not done or (is_load and is_new)):
            if done:
                await self._send(list(replies), unload_of(sent.adapter))
            raise next(iter(declined.values()))
        if not done:
            raise ApiError(503, "the replicas died before one had answered", code="replica_died")
        self.loads = [*others, sent][-MAX_ADAPTERS:] if is_load else others
        for server, process in zip(servers, processes, strict=True):
            error = declined.get(server)
            if error is not None and error.code != NOT_FOUND and server.process is process:
                _log.error("%s is started again: %s: %s", server.name, sent.path, error)
                self._servers.end(server)
        return Response(done[0].content, media_type=done[0].headers["content-type"])
