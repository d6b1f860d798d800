"""Ray Serve: replicas of the unchanged server, which Serve places, scales and restarts.

    serve run nano_inference.server.ray_serve:application model=default

Ray is imported in functions: it is an extra. The interface is that of Ray 2.50 and later (`serve.deployment`,
`serve.ingress` with a function that makes an ASGI application, `check_health` of a deployment's class).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx2

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import default_cache
from nano_inference.server.config import ServerConfig
from nano_inference.server.run import HostedApp
from nano_inference.support.packages import MissingPackage

_HEALTH_S = 10.0
_NAMES = ("model", "engine", "server")


def deployment(engine: EngineConfig, server: ServerConfig) -> Any:
    """Return a `ray.serve.Deployment` whose replicas are servers of one model each.

    Its `options` set replicas, GPUs and scaling; `bind()` makes the application. A replica holds as many requests as
    its engine runs at once, and `server.max_queued_requests` more wait in each of Serve's proxies. Models are fetched
    into the cache of the replica's machine. Raises `MissingPackage`, and `ValueError` for settings that a replica
    cannot have: those of a listener, `enable_rl` and `enable_lora`, since weights of one replica alone must not change.
    """
    if server.takes_commands:
        name = "enable_rl" if server.enable_rl else "enable_lora"
        raise ValueError(f"{name}: is not supported with replicas; a RolloutPool updates several engines together")
    HostedApp(engine, server, default_cache(os.environ))  # checks the settings
    try:
        from ray import serve
    except ImportError as error:
        raise MissingPackage("Ray Serve is not installed: pip install 'nano-inference[ray]'") from error

    def make_app() -> HostedApp:
        return HostedApp(engine, server, default_cache(os.environ))

    class Replica:
        async def check_health(self) -> None:
            """Raise `RuntimeError` if the engine is dead, so that Serve replaces the replica."""
            transport = httpx2.ASGITransport(app=self)  # type: ignore[arg-type]  # serve.ingress makes it an application
            async with httpx2.AsyncClient(transport=transport, base_url=f"http://{server.host}") as client:
                answer = await client.get("/health", timeout=_HEALTH_S)
            if answer.status_code != 200:
                raise RuntimeError(answer.text)

    return serve.deployment(
        serve.ingress(make_app)(Replica),
        name="nano-inference",
        max_ongoing_requests=engine.max_batch_size,
        max_queued_requests=server.max_queued_requests,
        health_check_timeout_s=server.step_timeout + _HEALTH_S,
    )


def application(args: Mapping[str, Any]) -> Any:
    """Return the `ray.serve.Application` of a configuration file or of `serve run`'s arguments.

    `model` is a name, a path or a hub id; `engine` and `server` are objects with fields of `EngineConfig` and
    `ServerConfig`. Raises `ValueError` naming an unknown or invalid argument.
    """
    unknown = sorted(set(args) - set(_NAMES))
    if unknown:
        raise ValueError(f"{unknown[0]} is no argument of this application; known: {', '.join(_NAMES)}")
    fields = {name: args.get(name, {}) for name in ("engine", "server")}
    for name, value in fields.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object with fields, as in a configuration file of Serve")
    engine = EngineConfig.from_dict({"model_path": args.get("model", "default"), **fields["engine"]})
    return deployment(engine, ServerConfig.from_dict(fields["server"])).bind()
