"""`serve --replicas` and `serve --workers`: one URL for several engines."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from dataclasses import replace

from nano_inference.cli.arguments import Typed, error_text
from nano_inference.cli.options import Common
from nano_inference.cli.place import cache_of, fetch, for_any_directory
from nano_inference.cli.terminal import note
from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import served_name
from nano_inference.server.config import ServerConfig
from nano_inference.server.front.child import ClusterLost, ReplicaFailed
from nano_inference.server.front.cluster import RayCluster
from nano_inference.server.front.run import check_remote, replica_setup, serve_fleet
from nano_inference.server.front.supervisor import Start, Watch, forever
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.wiring import guard_policy


def listen(
    engine: EngineConfig, config: ServerConfig, common: Common, typed: Typed, listening: socket.socket, url: str
) -> int:
    """Serve on a bound socket; return the exit code."""
    if config.workers:
        return _serve(config, listening, None, forever, url, common, typed)
    with closing(RayCluster()) as cluster:
        return _serve(config, listening, _starter(cluster, engine, config, common), cluster.watch, url, common, typed)


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


def _serve(
    config: ServerConfig,
    listening: socket.socket,
    start: Start | None,
    watch: Watch,
    url: str,
    common: Common,
    typed: Typed,
) -> int:
    size = config.replicas or len(config.workers)
    what = "replicas, loading" if start is not None else "workers"
    serving = serve_fleet(
        config,
        listening,
        start,
        watch=watch,
        on_listening=lambda: note(f"listening on {config.uds or url} for {size} {what}", common.quiet),
        on_ready=lambda: note(f"ready: {size} {what.partition(',')[0]} behind {url}", common.quiet),
    )
    try:
        return asyncio.run(serving)
    except ClusterLost as error:
        note(f"nano-inference: {error}")
        return 1
    except ReplicaFailed as error:
        note(f"nano-inference: a replica does not start: {error_text(error, typed.names)}")
        return 1
