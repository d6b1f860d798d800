"""`serve --replicas`, `--workers` and `--further-model`: several engines or models behind one URL."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from dataclasses import replace

from nano_inference.cli.arguments import Typed, error_text
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of, fetch, for_any_directory
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import served_name
from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.front.cluster import ClusterLost, RayCluster
from nano_inference.server.front.process import ServerFailed, ServerProcess
from nano_inference.server.front.run import check_remote, limits_of, serve_front, setup_of, weight_bytes
from nano_inference.server.front.servers import Server
from nano_inference.server.guard import GuardPolicy
from nano_inference.server.model import tagged
from nano_inference.server.security import KeyRing, load_keys


def listen(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    """Serve on a bound socket; return the exit code."""
    address, limits, policy = config.uds or url, None, guard_policy(config, KeyRing.of(load_keys(config)))
    watch: Callable[[], Awaitable[object]] = asyncio.Event().wait  # never ends
    with ExitStack() as stack:
        if config.further_model:
            behind, limits = models(engine, config, policy, common), limits_of(config)
            what, *further = (", ".join(one.names) for one in behind)
            starting, failure = f", loading {what}", what
            ready = f"{what}; loaded when a request names them: {', '.join(further)}\n"
            ready += f"  {f'chat page {url}/, ' if config.pages else ''}models {url}/v1/models; "
            ready += f"loaded models may use {limits.num_bytes / 2**30:.1f} GiB"
        elif config.replicas:
            cluster = stack.enter_context(closing(RayCluster()))
            behind, watch = replicas(cluster, engine, config, policy, common), cluster.watch
            starting, failure = f" for {config.replicas} replicas, loading", "a replica does not start"
            ready = f"{config.replicas} replicas behind {url}"
        else:
            behind = [
                Server(names=(f"worker {index}",), url=one, state="ready") for index, one in enumerate(config.workers)
            ]
            starting, failure = f" for {len(behind)} workers", ""
            ready = f"{len(behind)} workers behind {url}"
        serving = serve_front(
            config,
            policy,
            listening,
            behind,
            limits,
            watch=watch,
            on_listening=lambda: note(f"listening on {address}{starting}", common.quiet),
            on_ready=lambda: note(f"ready: {ready}", common.quiet, indent=2),
        )
        try:
            return asyncio.run(serving)
        except ClusterLost as error:
            note(f"nano-inference: {error}")
        except ServerFailed as error:
            note(f"nano-inference: {failure}: {error_text(error, typed.names)}")
    return 1


def replicas(
    cluster: RayCluster, engine: EngineConfig, config: ServerConfig, policy: GuardPolicy, common: Common
) -> list[Server]:
    """Return the replicas. Raises `ValueError` for a configuration that Ray cannot place."""
    assert config.replicas is not None
    if cluster.is_remote:
        check_remote(config, policy)
    uses_gpus = engine.device.startswith("cuda") or (engine.device == "auto" and cluster.has_gpus)
    num_gpus = engine.tensor_parallel if uses_gpus else 0
    cluster.check(config.replicas, num_gpus)
    path = fetch(engine.model_path, common)
    lineage = engine.lineage or secrets.token_hex(8)  # of all: a version means the same weights in each of them
    own = replace(engine, model_path=for_any_directory(engine.model_path, path), lineage=lineage)
    setup = setup_of(own, config, policy, (served_name(engine.model_path, path),), cache_of(common))
    return [
        Server(names=(f"replica {index}",), start=lambda: cluster.start(setup, num_gpus))
        for index in range(config.replicas)
    ]


def models(engine: EngineConfig, config: ServerConfig, policy: GuardPolicy, common: Common) -> list[Server]:
    """Return all models, fetching those that are not in the cache. Raises `ValueError` for a name used twice."""
    if engine.overrides:
        raise ValueError("overrides belong to one model: they cannot be set with further_model")
    found = [_model(engine, config, policy, common, engine.model_path, config.served_model_name)]
    for text in config.further_model:
        name, equals, path = text.partition("=")
        if equals and not (name and path):
            raise ValueError(f"further_model must be a model, or NAME=PATH, got {text!r}")
        found.append(_model(engine, config, policy, common, path if equals else text, (name,) if equals else ()))
    names = [tagged(name) for one in found for name in one.names]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"further_model: two models are named {name}; give one of them as NAME=PATH")
    return found


def _model(
    engine: EngineConfig,
    config: ServerConfig,
    policy: GuardPolicy,
    common: Common,
    model: str,
    names: tuple[str, ...],
) -> Server:
    path = fetch(model, common)
    own = replace(engine, model_path=for_any_directory(model, path))
    names = names or (served_name(model, path),)
    setup = setup_of(own, config, policy, names, cache_of(common))
    return Server(names=names, start=lambda: ServerProcess(setup), file_bytes=weight_bytes(path))
