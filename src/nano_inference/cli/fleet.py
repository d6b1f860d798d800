"""`serve --replicas`, `--workers` and `--further-model`: several engines or models behind one URL."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from nano_inference.cli.arguments import Typed, error_text
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of, fetch, for_any_directory
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import served_name
from nano_inference.server.config import ServerConfig
from nano_inference.server.front.child import ClusterLost, ReplicaFailed
from nano_inference.server.front.cluster import RayCluster
from nano_inference.server.front.models import ModelEntry
from nano_inference.server.front.run import (
    check_remote,
    limits_of,
    model_setup,
    replica_setup,
    serve_fleet,
    serve_models,
    weight_bytes,
)
from nano_inference.server.front.supervisor import Start, forever
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.model import tagged
from nano_inference.server.wiring import guard_policy


def listen(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    """Serve on a bound socket; return the exit code."""
    if config.further_model:
        return _serve_models(engine, config, common, typed, listening, url)
    size = config.replicas or len(config.workers)
    what, loading = ("replicas", ", loading") if config.replicas else ("workers", "")
    with ExitStack() as stack:
        cluster = stack.enter_context(closing(RayCluster())) if config.replicas else None
        serving = serve_fleet(
            config,
            listening,
            None if cluster is None else _starter(cluster, engine, config, common),
            watch=forever if cluster is None else cluster.watch,
            on_listening=lambda: note(f"listening on {config.uds or url} for {size} {what}{loading}", common.quiet),
            on_ready=lambda: note(f"ready: {size} {what} behind {url}", common.quiet),
        )
        return _run(serving, "a replica does not start", typed)


def _run(serving: Coroutine[Any, Any, int], failure: str, typed: Typed) -> int:
    try:
        return asyncio.run(serving)
    except ClusterLost as error:
        note(f"nano-inference: {error}")
    except ReplicaFailed as error:
        note(f"nano-inference: {failure}: {error_text(error, typed.names)}")
    return 1


def _starter(cluster: RayCluster, engine: EngineConfig, config: ServerConfig, common: Common) -> Start:
    """Return a function that starts a replica. Raises `ValueError` for a configuration that Ray cannot place."""
    assert config.replicas is not None
    if cluster.is_remote:
        check_remote(config, guard_policy(config, KeyRing.of(load_keys(config))))
    uses_gpus = engine.device.startswith("cuda") or (engine.device == "auto" and cluster.has_gpus)
    num_gpus = engine.tensor_parallel if uses_gpus else 0
    cluster.check(config.replicas, num_gpus)
    path = fetch(engine.model_path, common)
    name = served_name(engine.model_path, path)
    engine = replace(engine, model_path=for_any_directory(engine.model_path, path))
    setup = replica_setup(engine, config, name=name, cache=str(cache_of(common).absolute()))
    return lambda: cluster.start(setup, num_gpus)


def _serve_models(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    entries, limits = entries_of(engine, config, common), limits_of(config)
    first, *further = [", ".join(entry.names) for entry in entries]
    memory = f"{limits.num_bytes / 2**30:.1f} GiB"
    ready = f"ready: {first}; loaded when a request names them: {', '.join(further)}\n"
    ready += f"  {f'chat page {url}/, ' if config.pages else ''}models {url}/v1/models; loaded models may use {memory}"
    serving = serve_models(
        config,
        listening,
        entries,
        limits,
        on_listening=lambda: note(f"listening on {config.uds or url}, loading {first}", common.quiet),
        on_ready=lambda: note(ready, common.quiet, indent=2),
    )
    return _run(serving, first, typed)


def entries_of(engine: EngineConfig, config: ServerConfig, common: Common) -> list[ModelEntry]:
    """Return all models, fetching those that are not in the cache. Raises `ValueError` for a name used twice."""
    if engine.overrides:
        raise ValueError("overrides belong to one model: they cannot be set with further_model")
    entries = [_entry(engine, config, common, engine.model_path, config.served_model_name)]
    for text in config.further_model:
        name, equals, path = text.partition("=")
        if equals and not (name and path):
            raise ValueError(f"further_model must be a model, or NAME=PATH, got {text!r}")
        entries.append(_entry(engine, config, common, path if equals else text, (name,) if equals else ()))
    names = [tagged(name) for entry in entries for name in entry.names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"further_model: two models are named {name}; give one of them as NAME=PATH")
    return entries


def _entry(
    engine: EngineConfig, config: ServerConfig, common: Common, model: str, names: tuple[str, ...]
) -> ModelEntry:
    path = fetch(model, common)
    own = replace(engine, model_path=for_any_directory(model, path))
    names = names or (served_name(model, path),)
    setup = model_setup(own, config, names=names, cache=str(cache_of(common).absolute()))
    return ModelEntry(names=names, file_bytes=weight_bytes(path), setup=setup)
