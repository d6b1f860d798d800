"""`EngineRollout`: sends a trainer's weights to the server of its replica; has the methods of verl's `BaseRollout`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nano_inference.rl.adapters import plain_config
from nano_inference.rl.pool.ray_workers import SharedTensor, require_ray, to_shared
from nano_inference.server.verl import NAME

_MEGABYTE = 1 << 20


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name of a replica's actor; `role` is that of servers that receive no weights."""
    return f"{NAME}_server_{role}{replica_rank}"


class EngineRollout:
    """One for each process of a trainer, or of a checkpoint engine; the first of each replica sends."""

    def __init__(
        self,
        config: Any,
        model_config: Any,
        device_mesh: Any = None,
        replica_rank: int = -1,
        get_actor: Callable[[str], Any] | None = None,
    ) -> None:
        """`config` is verl's `RolloutConfig`; `replica_rank` -1 follows from the process's rank.

        `get_actor` finds an actor by its name; the default is Ray's.
        """
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self._replica_rank = replica_rank
        self._get_actor = get_actor
        self._actor: Any = None

    @property
    def replica_rank(self) -> int:
        return self._replica_rank if self._replica_rank >= 0 else _rank() // self.config.tensor_model_parallel_size

    @property
    def is_leader_rank(self) -> bool:
        """Return True in the process that sends to the replica's server."""
        return _rank() % int(self.config.tensor_model_parallel_size) == 0

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().resume_memory.remote(tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        base_sync_done: bool = False,
    ) -> None:
        """Install (name, tensor) pairs, from an iterator or an asynchronous one.

        With a `peft_config` they are the weights under an adapter, and after them (`base_sync_done`) the adapter.
        All processes read them, because gathering sharded tensors takes part in all; the leader sends. If reading
        fails, or the engine refuses a tensor, the old weights stay in use. Raises `ValueError` naming a field.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"checkpoint_engine.backend: {NAME} takes whole tensors, not the format {wire_format!r}")
        if not self.is_leader_rank:
            async for _ in _pairs(weights):
                pass
            return
        server = self._server()
        adapter = plain_config(peft_config) if peft_config is not None and base_sync_done else None
        await server.begin_update.remote(global_steps, adapter)
        try:
            async for bucket in self._buckets(weights, under_adapter=peft_config is not None and adapter is None):
                await server.put_weights.remote(bucket)
        except BaseException as error:
            await server.cancel_update.remote(f"the trainer failed: {type(error).__name__}: {error}")
            raise
        await server.finish_update.remote(global_steps)

    async def _buckets(self, weights: Any, *, under_adapter: bool) -> AsyncIterator[list[SharedTensor]]:
        """Yield copies of the tensors in main memory, in lists of about `update_weights_bucket_megabytes`.

        `under_adapter`: PEFT names the tensors of the layers that it wraps `base_layer`.
        """
        most = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) * _MEGABYTE
        bucket: list[SharedTensor] = []
        size = 0
        async for name, tensor in _pairs(weights):
            shared = to_shared(name.replace(".base_layer.", ".") if under_adapter else name, tensor)
            if bucket and size + shared.data.nbytes > most:
                yield bucket
                bucket, size = [], 0
            bucket.append(shared)
            size += shared.data.nbytes
        if bucket:
            yield bucket

    def _server(self) -> Any:
        """Return the actor, which starts later than this object."""
        if self._actor is None:
            get_actor = self._get_actor or require_ray().get_actor
            self._actor = get_actor(server_name(self.replica_rank))
        return self._actor


async def _pairs(weights: Any) -> AsyncIterator[tuple[str, Tensor]]:
    if isinstance(weights, AsyncIterator):
        async for pair in weights:
            yield pair
        return
    plain: Iterator[tuple[str, Tensor]] = iter(weights)
    for pair in plain:
        yield pair


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
