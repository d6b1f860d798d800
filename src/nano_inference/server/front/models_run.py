"""Serves several models behind one address: see `models` for when each is loaded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.front.child import ChildServer
from nano_inference.server.front.forwarding import make_client
from nano_inference.server.front.listen import serve_front
from nano_inference.server.front.models import MemoryLimits, ModelEntry, Models
from nano_inference.server.front.models_front import ModelsFront
from nano_inference.server.front.run import replica_setup
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.wiring import guard_policy, installed_dialects

_SHARE = 0.8  # part of the memory that is free at the start: the default of `models_memory`


def model_setup(engine: EngineConfig, config: ServerConfig, *, names: tuple[str, ...], cache: str) -> dict[str, Any]:
    """Return the setup of one model's server (`process.main`) from the configuration of the whole."""
    own = replace(config, further_model=(), models_memory=None, max_loaded_models=None, served_model_name=names)
    return replica_setup(engine, own, name=names[0], cache=cache)


def limits_of(config: ServerConfig) -> MemoryLimits:
    """Return what loaded models may use together."""
    num_bytes = config.models_memory or int(_SHARE * free_memory())
    return MemoryLimits(num_bytes, config.max_loaded_models)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that are free, within the limit of the cgroup (a container's) if there is one."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except (OSError, UnicodeDecodeError):
        return available
    return min(available, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() else available


def weight_bytes(path: Path) -> int:
    """Return the bytes of a model's weight files, for an estimate: all shards, or the largest of other files."""
    if path.is_file():
        return path.stat().st_size
    shards = [file.stat().st_size for file in path.glob("*.safetensors")]
    others = [file.stat().st_size for ending in ("gguf", "pt", "bin") for file in path.glob(f"*.{ending}")]
    return sum(shards) or max(others, default=0)


async def serve_models(
    config: ServerConfig,
    listening: socket.socket,
    entries: Sequence[ModelEntry],
    limits: MemoryLimits,
    *,
    on_listening: Callable[[], None],
    on_ready: Callable[[], None],
) -> int:
    """Serve until a signal; return 0. Raises `ReplicaFailed` if the first model cannot be loaded."""
    policy = guard_policy(config, KeyRing.of(load_keys(config)))
    models = Models(entries, lambda entry: LocalServer(entry.setup), limits)
    async with make_client() as client:
        front = ModelsFront(
            models,
            client,
            policy,
            installed_dialects(),
            any_model=config.any_model,
            has_pages=config.pages,
            load_timeout=config.request_timeout,
        )
        return await serve_front(config, listening, front, policy, on_listening=on_listening, on_ready=on_ready)


_THREADS = 3  # one waits for the process's end; the others start, measure and stop it
_T = TypeVar("_T")


class LocalServer:
    """Owns a `ChildServer` and the threads in which its methods block."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Start the process. `setup`: see `process.main`."""
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
