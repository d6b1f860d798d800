"""Divide a model among ranks: load one rank's part, and start the processes of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.executors.cuda.executor import CudaExecutor
from nano_inference.executors.cuda.launchers import Kernels
from nano_inference.executors.cuda.ranks import Ranks
from nano_inference.executors.devices import pick_dtype, rank_device
from nano_inference.executors.loading import LoadProgress, known_sources, load_weights
from nano_inference.executors.opening import cuda_limits, pick_cuda_kernels
from nano_inference.executors.protocol import Executor
from nano_inference.executors.sampling import draw
from nano_inference.executors.torch.attention import pick
from nano_inference.executors.torch.compiled import OPERATIONS, Operations, Scope, Value
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.checkpoint import Checkpoint
from nano_inference.loading.kinds import ModelKinds
from nano_inference.models.config import ModelConfig, with_length
from nano_inference.models.families import program_of
from nano_inference.models.ops import Reduce
from nano_inference.models.program import Program
from nano_inference.parallel.executor import ShardedExecutor
from nano_inference.parallel.fingerprint import fingerprint
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.links import Group, Links, local_links
from nano_inference.parallel.processes import Processes
from nano_inference.parallel.shard import check_divisible, shard, vocabulary_part
from nano_inference.parallel.staged import Whole, parts_of
from nano_inference.parallel.vocabulary import ShardedVocabulary

Result = TypeVar("Result")


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
        leader = Leader(links, processes.end, processes.kill, is_fed=True, has_lost=processes.has_lost)
    except BaseException:
        processes.kill()
        raise
    return ShardedExecutor(own, Whole(program, size), leader)


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
    kernels: Kernels | None = None,
) -> Executor:
    """Load this rank's part of a model. All ranks call it; they agree on the model before they read weights.

    `kernels` are by default those of `pick_cuda_kernels`; without any, torch computes.

    Raises `ValueError` on every rank if one has another checkpoint, `ModelError` if a tensor is unknown, missing or of
    another shape. Then the links are left: threads of an open group can abort the process at its end.
    """
    dtype = pick_dtype(config.dtype, device)
    try:
        own = agree(links, lambda: fingerprint(model, checkpoint.sources))
        for rank, other in enumerate(links.commands.exchange(own)):
            if other != own:
                raise ValueError(f"tensor_parallel: rank {rank} has another checkpoint than rank {links.rank}")
        part = shard(program, links.rank, links.size)
        # Torch computes recurrent states on every device.
        kernels = None if program.states else kernels or pick_cuda_kernels(config, device)
        if config.deterministic and kernels is None:
            raise ValueError("deterministic: ranks require the CUDA kernels (docs/cuda.md)")
        executor: Executor
        if kernels is not None:
            limits = cuda_limits(config, model)
            ranks = Ranks(links.data, vocabulary_part(program.vocab_size, 0, links.size).size)
            own_program = replace(part.program, vocab_size=program.vocab_size)
            executor = CudaExecutor(model, own_program, device, dtype, kernels, limits, ranks=ranks)
        else:
            backend, vocabulary = pick(config.attention, device), ShardedVocabulary(links.data, part.vocabulary)
            sampler, operations = partial(draw, vocabulary=vocabulary), operations_of(links.data)
            executor = TorchExecutor(model, part.program, device, dtype, backend, sampler, operations, vocabulary)
        sources = checkpoint.sources
        agree(links, lambda: load_weights(executor, parts_of(known_sources(program, sources), part), progress))
    except BaseException:
        links.close()
        raise
    return executor


def agree(links: Links, work: Callable[[], Result]) -> Result:
    """Return `work()`, which all ranks call; raise its exception, or `ValueError` with that of another rank."""
    try:
        result = work()
    except Exception as error:
        links.commands.exchange(f"{type(error).__name__}: {error}")
        raise
    for rank, fault in enumerate(links.commands.exchange("")):
        if fault:
            raise ValueError(f"tensor_parallel: rank {rank}: {fault}")
    return result


def operations_of(group: Group) -> Operations:
    """Return torch's operations and `Reduce` among the ranks of a group."""

    def reduce(op: Reduce, scope: Scope) -> Value:
        x = scope.read(op.x)
        return scope.like(op.x, op.x, lambda step: added(group, x(step)))

    return MappingProxyType({**OPERATIONS, Reduce: reduce})


def added(group: Group, x_TW: Tensor) -> Tensor:
    """Return the sum over all ranks; a column-major tensor, which some products return, stays so."""
    if not x_TW.is_contiguous() and x_TW.t().is_contiguous():
        return group.add(x_TW.t()).t()
    return group.add(x_TW)
