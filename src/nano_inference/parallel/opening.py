"""Divide a model among ranks: load one rank's part, and start the processes of the others."""

from __future__ import annotations

import torch

from nano_inference.config import EngineConfig
from nano_inference.executors.devices import pick_dtype, rank_device
from nano_inference.executors.loading import LoadProgress
from nano_inference.executors.torch.attention import pick
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.checkpoint import Checkpoint
from nano_inference.loading.kinds import ModelKinds
from nano_inference.models.config import ModelConfig, with_length
from nano_inference.models.families import program_of
from nano_inference.models.program import Program
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.links import Links, local_links
from nano_inference.parallel.local import load_part
from nano_inference.parallel.processes import Processes
from nano_inference.parallel.shard import check_divisible
from nano_inference.parallel.staged import Whole


def start_ranks(
    checkpoint: Checkpoint, config: EngineConfig, kinds: ModelKinds, progress: LoadProgress | None
) -> ShardedExecutor:
    """Start the other ranks as processes, and load rank 0's part of the model.

    Raises `ValueError` if the model cannot be divided, or naming a rank that failed.
    """
    size = config.tensor_parallel
    model, program = divided_model(checkpoint, config, kinds)
    device = rank_device(config.device, 0, size)
    processes = Processes(config.to_dict(), size)
    try:
        processes.wait_until_ready()
        links = local_links(processes.directory, 0, size, device)
        own = load_rank(checkpoint, model, program, config, links, device, progress)
        leader = Leader(links, processes.end, processes.kill, is_serving=True)
    except BaseException:
        processes.kill()
        raise
    return ShardedExecutor(own, Whole(program, size), leader, is_fed=True)


def divided_model(checkpoint: Checkpoint, config: EngineConfig, kinds: ModelKinds) -> tuple[ModelConfig, Program]:
    """Return a model's configuration and its whole program. Raises `ValueError` if it cannot be divided."""
    model = with_length(checkpoint.config, min(config.max_model_len, checkpoint.config.max_positions))
    program = program_of(model, kinds.families)
    check_divisible(program, config.tensor_parallel)
    return model, program


def load_rank(
    checkpoint: Checkpoint,
    model: ModelConfig,
    program: Program,
    config: EngineConfig,
    links: Links,
    device: torch.device,
    progress: LoadProgress | None = None,
) -> TorchExecutor:
    """Load this rank's part of a model; all ranks call it. Raises what `load_part` raises, after leaving the links."""
    dtype, backend = pick_dtype(config.dtype, device), pick(config.attention, device)
    try:
        return load_part(model, program, checkpoint.sources, links, device, dtype, backend, progress)
    except BaseException:
        links.close()  # threads of a group that is left open can abort the process at its end
        raise
