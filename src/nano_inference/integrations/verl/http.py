"""`HttpFace`: the HTTP routes of an engine, at the address that verl expects of a rollout server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from nano_inference.config import EngineConfig
from nano_inference.server.app import App
from nano_inference.server.config import ServerConfig
from nano_inference.server.engine_link import EngineLink, LoadedModel
from nano_inference.server.hosts import is_loopback_name
from nano_inference.server.keys import KeyRing, load_keys
from nano_inference.server.opening import open_model
from nano_inference.server.protocol import uvicorn_config
from nano_inference.server.run import Listener, bind, close_listener
from nano_inference.server.wiring import guard_policy, installed_dialects, make_app

_POLL_S = 0.005
_LONG_S = 86400.0


class HttpFace:
    """Owns an engine and a listening socket. The routes are those without `enable_rl`, and need no key."""

    def __init__(self, engine: EngineConfig, host: str, name: str) -> None:
        """`name` is the model's for clients; any other is accepted too."""
        self._engine = engine
        self._config = ServerConfig(
            host=host,
            port=0,
            insecure=not is_loopback_name(host),
            served_model_name=(name,),
            any_model=True,
            generation_config="none",
            logprobs_mode=engine.logprobs_mode,
            max_queued_requests=65536,
            max_admitted_tokens=1 << 30,
            request_timeout=_LONG_S,
            log_requests=False,
        )
        self.link = EngineLink(step_timeout=self._config.step_timeout)
        self.port = 0
        self._app: App | None = None
        self._listener: Listener | None = None
        self._serving: asyncio.Task[Any] | None = None

    async def open(self) -> LoadedModel:
        """Open the model and accept requests; return it. Raises what `open_model` raises."""
        config = self._config
        policy = guard_policy(config, KeyRing.of(load_keys(config), is_shared=config.share_prefix_cache))
        self._app = make_app(config, policy, self.link, installed_dialects())
        path = Path(self._engine.model_path)
        opened = await self.link.start(lambda: open_model(self._engine, config, name=path.name, path=path))
        self._app.serve(opened, self._engine.max_batch_size)
        listening = bind(config)
        self.port = listening.getsockname()[1]
        self._listener = Listener(uvicorn_config(self._app.asgi, config, policy, takes_sockets=True))
        self._serving = asyncio.get_running_loop().create_task(self._listener.serve(sockets=[listening]))
        while not (self._listener.started or self._serving.done()):
            await asyncio.sleep(_POLL_S)
        return opened

    async def close(self) -> None:
        """Close the connections, then the engine."""
        if self._listener is not None and self._serving is not None:
            await close_listener(self._listener, self._serving)
        await self.link.stop()
        if self._app is not None:
            self._app.close()
