"""Replicas as Ray actors: Ray places them on machines and devices, restarts nothing and carries no request.

Ray is an extra and is imported in functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from nano_inference.server.config import SettingError
from nano_inference.server.front.process import ServerFailed, ServerProcess
from nano_inference.support.packages import MissingPackage, ray_address

_MOST_CALLS = 8  # calls of one actor at the same time: `ready`, `wait` and `stop`
_MARGIN_S = 5.0
_WATCH_S, _ANSWER_S = 2.0, 20.0
"""Between two questions whether the cluster is alive, and how long it may take to answer."""
_STORE_BYTES = 100 << 20  # Ray's object store on this machine, which replicas do not use


class ClusterLost(Exception):
    """What runs the replicas has ended. The message is one line."""


class ReplicaActor(ServerProcess):
    """Runs in a Ray process and owns one replica's server process on that machine."""

    def __init__(self, setup: Mapping[str, Any], is_remote: bool) -> None:
        if is_remote:
            host = require_ray().util.get_node_ip_address()
            setup = {**setup, "server": {**setup["server"], "host": host}}
        super().__init__(setup)

    async def process_id(self) -> int:
        return self.pid


class RayReplica:
    """Owns an actor; see `servers.Process`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._ray = require_ray()
        self.pid = 0

    async def ready(self) -> str:
        try:
            url, self.pid = await self._actor.ready.remote(), await self._actor.process_id.remote()
        except self._ray.exceptions.RayTaskError as error:
            raise ServerFailed(str(error.cause)) from None
        except self._ray.exceptions.RayError:
            raise ServerFailed("its Ray actor died") from None
        return str(url)

    async def wait(self) -> int:
        return await self._ask(self._actor.wait, 1)

    async def memory(self) -> int:
        return await self._ask(self._actor.memory, 0)

    async def _ask(self, method: Any, lost: int) -> int:
        try:
            return int(await method.remote())
        except self._ray.exceptions.RayError:
            return lost

    async def stop(self, timeout: float) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(timeout + _MARGIN_S):
                await self._actor.stop.remote(timeout)
        self._ray.kill(self._actor, no_restart=True)


class RayCluster:
    """Joins the cluster that RAY_ADDRESS names, else starts one of its own; leaves it at `close`."""

    def __init__(self) -> None:
        """Raises `MissingPackage` without Ray."""
        self._ray = require_ray()
        self._is_owner = not self._ray.is_initialized()
        if self._is_owner:
            own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
            address = ray_address()
            try:
                self._ray.init(address, logging_level=logging.ERROR, **(own if address == "local" else {}))
            except ConnectionError:
                raise SettingError("replicas: no Ray cluster answers at RAY_ADDRESS", "replicas") from None
        self.is_remote = sum(bool(node["Alive"]) for node in self._ray.nodes()) > 1
        """True if replicas may run on other machines than this one."""

    def check(self, num_replicas: int, num_gpus: int) -> None:
        """Raise `SettingError` if the cluster has too few free CPUs or GPUs: Ray would wait without limit."""
        free = self._ray.available_resources()
        for name, needed in (("CPU", num_replicas), ("GPU", num_replicas * num_gpus)):
            if free.get(name, 0) < needed:
                text = f"replicas: {num_replicas} need {needed} {name}s, Ray's cluster has {free.get(name, 0):g} free"
                raise SettingError(text, "replicas")

    @property
    def has_gpus(self) -> bool:
        return bool(self._ray.cluster_resources().get("GPU", 0))

    def start(self, setup: Mapping[str, Any], num_gpus: int) -> RayReplica:
        """Start a replica wherever Ray has a free CPU and `num_gpus` free GPUs."""
        options = {"num_cpus": 1, "num_gpus": num_gpus, "max_restarts": 0, "max_concurrency": _MOST_CALLS}
        actor = self._ray.remote(**options, scheduling_strategy="SPREAD")(ReplicaActor)
        return RayReplica(actor.remote(dict(setup), self.is_remote))

    async def watch(self) -> None:
        """Raise `ClusterLost` when no machine of the cluster is alive, or none says so in time."""
        loop = asyncio.get_running_loop()

        def ask(answer: asyncio.Future[bool]) -> None:
            is_alive = any(bool(node["Alive"]) for node in self._ray.nodes())
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(is_alive))

        while True:
            answer: asyncio.Future[bool] = loop.create_future()
            # Without its control service, Ray's call never returns: nothing may wait for this thread.
            threading.Thread(target=ask, args=(answer,), daemon=True).start()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    is_alive = await answer
            except TimeoutError:
                is_alive = False
            if not is_alive:
                raise ClusterLost("Ray has ended, and the replicas with it; start the server again")
            await asyncio.sleep(_WATCH_S)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._is_owner:
            self._ray.shutdown()


def require_ray() -> Any:
    """Return the module `ray`. Raises `MissingPackage`."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingPackage("--replicas needs Ray: pip install 'nano-inference[ray]'") from error
    return ray
