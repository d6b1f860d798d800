"""`HostedApp`: the server as an ASGI application, for a process that already has an HTTP server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from starlette.types import Receive, Scope, Send

from nano_inference.config import EngineConfig
from nano_inference.loading.catalog import resolve, served_name
from nano_inference.server.app import App, guard_policy, installed_dialects
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.security import KeyRing, load_keys

OF_THE_LISTENER = (
    *("port", "uds", "max_connections", "keep_alive_timeout", "write_timeout", "log_requests", "exit_on_failure"),
    *("replicas", "workers", "further_model", "models_memory", "max_loaded_models"),
)
"""Fields of `ServerConfig` for a process that listens itself; the host has options of its own."""
_DEFAULT = ServerConfig()
_POLL_S = 0.05

_log = logging.getLogger("nano_inference.server")


class HostedApp:
    """An ASGI application that owns an engine: the host's lifespan loads the model, and drains and closes the engine.

    `server.host` is the address that the host listens on: keys are required and Host headers checked as for
    `nano-inference serve`. Limits on connections, headers and slow readers are the host's.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig, cache: Path) -> None:
        """`cache` is the directory of fetched models. Raises `ValueError` naming a field of `OF_THE_LISTENER`."""
        given = next((one for one in OF_THE_LISTENER if getattr(server, one) != getattr(_DEFAULT, one)), None)
        if given is not None:
            raise ValueError(f"{given}: has no effect in another ASGI server, only in nano-inference serve")
        self._engine = engine
        self._config = server
        self._cache = cache
        self._link: EngineLink | None = None
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request, or follow the host's lifespan.

        Raises `RuntimeError` for a request before the lifespan has started.
        """
        if scope["type"] == "lifespan":
            await self._follow(receive, send)
        elif self._app is None:
            raise RuntimeError("the model is not loaded: enable lifespan events in the ASGI server")
        else:
            await self._app.asgi(scope, receive, send)

    async def open(self) -> LoadedModel:
        """Load the model and accept requests; return it. Raises what `opening.open_model` raises."""
        from nano_inference.server.opening import open_model  # imports torch

        config, name = self._config, self._engine.model_path
        policy = guard_policy(config, KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache))
        self._link = link = EngineLink(step_timeout=config.step_timeout)
        self._app = App(config, policy, link, installed_dialects())

        def load() -> LoadedModel:
            path = resolve(name, self._cache)
            return open_model(self._engine, config, name=served_name(name, path), path=path)

        opened = await link.start(load)
        self._app.serve(opened, self._engine.max_batch_size)
        return opened

    async def close(self) -> None:
        """Wait up to `shutdown_timeout` seconds for open requests, abort the rest, and close the engine."""
        if self._link is None or self._app is None:
            return
        self._link.drain()
        try:
            async with asyncio.timeout(self._config.shutdown_timeout):
                while self._link.num_open:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            _log.warning("%d open requests are aborted", self._link.num_open)
        self._link.abort_all()
        await self._link.stop()
        self._app.close()

    async def _follow(self, receive: Receive, send: Send) -> None:
        """Load at the host's start and close at its end; report a failure of either."""
        for event, act in (("startup", self.open), ("shutdown", self.close)):
            await receive()
            try:
                await act()
            except Exception as error:
                if self._link is not None:
                    await self._link.stop(0.5)
                if self._app is not None:
                    self._app.close()
                text = " ".join(str(error).split()) or type(error).__name__
                await send({"type": f"lifespan.{event}.failed", "message": text})
                return
            await send({"type": f"lifespan.{event}.complete"})
