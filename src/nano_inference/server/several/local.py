"""`LocalServer`: the server process of one model on this machine, for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil

from nano_inference.server.replicas.child import ChildServer

_THREADS = 3  # one waits for the process's end; the others start, measure and stop it
_T = TypeVar("_T")


class LocalServer:
    """Owns a `ChildServer` and the threads in which its methods block."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process. `setup`: see `replicas.process.main`."""
        self._child = ChildServer(setup)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="model-server")
        self._is_stopped = False

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    async def ready(self) -> str:
        """Return its URL when the model is loaded. Raises `ReplicaFailed`."""
        return await self._in_thread(self._child.wait_ready)

    async def wait(self) -> int:
        """Return its exit code when it has ended."""
        return await self._in_thread(self._child.wait)

    async def memory(self) -> int:
        """Return the resident bytes of the process and its descendants; 0 if it has ended."""
        return await self._in_thread(lambda: resident_bytes(self._child.pid))

    async def stop(self, timeout: float) -> None:
        """Let it drain for up to `timeout` seconds, then end it. Has no effect the second time."""
        if not self._is_stopped:
            self._is_stopped = True
            await self._in_thread(lambda: self._child.stop(timeout))
            self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; those that have ended count as 0."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(map(_resident, family))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
