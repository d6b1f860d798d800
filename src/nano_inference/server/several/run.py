"""Serves several models behind one address: see `models` for when each is loaded."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from nano_inference.config import EngineConfig
from nano_inference.server.config import ServerConfig
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.replicas.forwarding import make_client
from nano_inference.server.replicas.front import serve_front
from nano_inference.server.replicas.run import replica_setup
from nano_inference.server.several.front import ModelsFront
from nano_inference.server.several.local import LocalServer
from nano_inference.server.several.models import MemoryLimits, ModelEntry, Models
from nano_inference.server.wiring import guard_policy, installed_dialects

_SHARE = 0.8  # part of the memory that is free at the start: the default of `models_memory`


def model_setup(engine: EngineConfig, config: ServerConfig, *, names: tuple[str, ...], cache: str) -> dict[str, Any]:
    """Return the setup of one model's server (`replicas.process.main`) from the configuration of the whole."""
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
