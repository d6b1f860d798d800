"""`replica_class`: verl's `RolloutReplica` with an actor that owns an engine."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple

from nano_inference.rl.pool.ray_workers import require_ray
from nano_inference.server.verl.options import RolloutMode, RolloutOptions, rollout_options
from nano_inference.server.verl.rollout import server_name
from nano_inference.server.verl.server import RolloutServer


class Place(NamedTuple):
    """Where a worker runs."""

    node: str
    address: str
    devices: tuple[str, ...]


class EngineReplica:
    """The methods and attributes that `replica_class` adds to `RolloutReplica`; the annotated ones are the base's."""

    config: Any
    model_config: Any
    replica_rank: int
    nnodes: int
    rollout_mode: Any
    is_reward_model: bool
    is_teacher_model: bool
    name_suffix: str
    workers: list[Any]
    servers: list[Any]
    max_concurrency: int

    async def launch_servers(self) -> None:
        """Start the server in an actor beside the first worker, on the devices of all. Raises `ValueError`."""
        from verl.workers.rollout.replica import TokenOutput

        if self.nnodes != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size: a replica has the devices of one node, not {self.nnodes}"
            )
        ray = require_ray()
        places: list[Place] = await asyncio.gather(*[worker.__ray_call__.remote(place_of) for worker in self.workers])
        mode: RolloutMode = self.rollout_mode.value
        read = partial(read_options, self.config, self.model_config, mode, self.replica_rank)
        role = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=places[0].node, soft=False)
        server = (
            ray.remote(RolloutServer)
            .options(
                scheduling_strategy=near,
                runtime_env={"env_vars": device_variables(places)},
                name=server_name(self.replica_rank, role) + self.name_suffix,
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(read, TokenOutput)
        )
        host, port = await server.launch_server.remote(places[0].address)
        self.servers.append(server)
        self._server_handle = server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def replica_class() -> type[Any]:
    """Return the class that verl makes replicas of."""
    from verl.workers.rollout.replica import RolloutReplica

    made: type[Any] = type("EngineReplica", (EngineReplica, RolloutReplica), {"__module__": __name__})
    return made


def place_of(_: object) -> Place:
    """Return where this worker runs; called in its process."""
    ray = require_ray()
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get("GPU", [])
    return Place(context.get_node_id(), ray.util.get_node_ip_address().strip("[]"), tuple(map(str, devices)))


def device_variables(places: list[Place]) -> dict[str, str]:
    """Return the environment of an actor that reserves no devices of its own but uses those of the workers."""
    devices = sorted({device for place in places for device in place.devices}, key=lambda one: (len(one), one))
    if not devices:
        return {}
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ",".join(devices)}


def read_options(config: Any, model_config: Any, mode: RolloutMode, replica_rank: int) -> RolloutOptions:
    """Return the server's options; called in its process, where verl copies a remote model to."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    known = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
    return rollout_options(omega_conf_to_dataclass(config), known, mode, replica_rank)
