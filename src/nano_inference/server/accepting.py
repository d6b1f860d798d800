"""Accepts connections from the listening socket, and resumes as soon as file descriptors become free.

asyncio's own server blocks the loop for seconds when `accept` runs out of descriptors: it retries as often as its
backlog is long, logs a traceback each time, and starts a timer for each retry that does the same.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

BACKLOG = 2048
"""Connections that the kernel queues until they are accepted."""
MAX_AT_ONCE = 16
"""Connections accepted in one loop callback; fewer than `SPARE_FILES`, so that those over the connection limit are
refused and closed before descriptors run out."""
RETRY_SECONDS = 0.05
"""Delay before `accept` is retried after it failed for lack of descriptors or memory."""

_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = logging.getLogger("nano_inference.server")


class Acceptor:
    """Owns a listening socket's accept loop, and a spare file descriptor.

    When descriptors run out, the spare one is freed to accept a connection and close it: the client is refused at once
    instead of waiting in the backlog.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._make_protocol = make_protocol
        self._spare: int | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_scarce = False
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start to accept connections."""
        self._listening.setblocking(False)
        self._listening.listen(BACKLOG)
        self._keep_spare()
        self._loop.add_reader(self._listening.fileno(), self._accept_some)

    async def close(self) -> None:
        """Close the listening socket; return when every accepted connection has its protocol."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        self._drop_spare()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept_some(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SCARCE:
                    raise
                self._on_scarce(error)
                return
            if self._is_scarce:
                self._is_scarce = False
                _log.warning("connections are accepted again")
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._keep_spare()

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has disconnected
            connection.close()

    def _on_scarce(self, error: OSError) -> None:
        if not self._is_scarce:
            self._is_scarce = True
            _log.warning("no connection can be accepted for the moment: %s", error.strerror)
        self._loop.remove_reader(self._listening.fileno())
        if self._spare is not None:
            self._drop_spare()
            self._refuse_some()
            self._keep_spare()
        self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _refuse_some(self) -> None:
        for _ in range(MAX_AT_ONCE):
            try:
                self._listening.accept()[0].close()
            except OSError:
                return

    def _resume(self) -> None:
        self._retry = None
        self._keep_spare()
        self._loop.add_reader(self._listening.fileno(), self._accept_some)

    def _keep_spare(self) -> None:
        if self._spare is None:
            try:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._spare = None

    def _drop_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
