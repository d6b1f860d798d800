"""`ServerProcess`: a `serve` process of one replica or model, controlled by its pipes.

The parent writes the setup as a line of JSON to stdin and keeps the pipe open: at its end, also when the parent is
killed, the child drains and exits, so no process is left behind. The child writes one line of JSON to stdout: its URL,
or why it could not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from nano_inference.support.processes import PYTHON, start_worker

COMMAND: tuple[str, ...] = (*PYTHON, "-m", "nano_inference.server.front.process")
_DIRECTORY = Path(sys.executable).anchor or "/"
_POLL_S = 0.1  # between two questions whether the process has ended
_LONGEST_REPLY = 1 << 20


class ReplicaFailed(Exception):
    """A server ended, or could not start. The message is one line."""


class ClusterLost(Exception):
    """What runs the replicas has ended. The message is one line."""


class ServerProcess:
    """Owns the process. Its methods are called on one event loop."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process. `setup`: see `process.main`."""
        self._popen = start_worker(COMMAND, cwd=Path(_DIRECTORY), is_read=True)
        self.pid = self._popen.pid
        self._reading: asyncio.BaseTransport | None = None
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `ready` reports it
            self._popen.stdin.write(json.dumps(setup) + "\n")
            self._popen.stdin.flush()

    async def ready(self) -> str:
        """Return the server's URL when its model is loaded. Raises `ReplicaFailed`."""
        reader = asyncio.StreamReader(_LONGEST_REPLY)
        loop = asyncio.get_running_loop()
        self._reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._popen.stdout
        )
        line = await reader.readline()
        reply = json.loads(line) if line.endswith(b"\n") else {"error": f"ended with code {await self.wait()}"}
        if "error" in reply:
            raise ReplicaFailed(str(reply["error"]))
        return str(reply["url"])

    async def wait(self) -> int:
        """Return the exit code when the process has ended, negative for a signal."""
        while (code := self._popen.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code

    async def memory(self) -> int:
        """Return the resident bytes of the process and its descendants; those that have ended count as 0."""
        return await asyncio.to_thread(resident_bytes, self.pid)

    async def stop(self, timeout: float) -> None:
        """Let it drain for up to `timeout` seconds, then end it."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), timeout)
        except TimeoutError:
            self._popen.kill()
            await self.wait()
        for pipe in (self._popen.stdin, self._reading or self._popen.stdout):  # the transport owns the pipe
            assert pipe is not None
            pipe.close()


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; those that have ended count as 0."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(one.memory_info().rss)
    return total
