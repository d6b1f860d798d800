"""`load_part`: one rank's executor with its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from nano_inference.executors.loading import LoadProgress, known_sources, load_weights
from nano_inference.executors.sampling import draw
from nano_inference.executors.torch.attention import Backend
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loader.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.program import Program
from nano_inference.parallel.fingerprint import fingerprint
from nano_inference.parallel.links import Links
from nano_inference.parallel.operations import operations_of
from nano_inference.parallel.shard import shard
from nano_inference.parallel.sources import parts_of
from nano_inference.parallel.vocabulary import ShardedVocabulary

Result = TypeVar("Result")


def load_part(
    config: ModelConfig,
    program: Program,
    sources: Mapping[str, WeightSource],
    links: Links,
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend,
    progress: LoadProgress | None = None,
) -> TorchExecutor:
    """Load this rank's part of a model. All ranks call it; they agree on the model before they read weights.

    Raises `ValueError` on every rank if one has another checkpoint, `ModelError` if a tensor is unknown, missing or of
    another shape.
    """
    check_same(config, sources, links)
    part = shard(program, links.rank, links.size)
    vocabulary = ShardedVocabulary(links.data, part.vocabulary)
    executor = TorchExecutor(
        config,
        part.program,
        device,
        dtype,
        backend,
        partial(draw, vocabulary=vocabulary),
        operations_of(links.data),
        vocabulary,
    )
    agree(links, lambda: load_weights(executor, parts_of(known_sources(program, sources), part), progress))
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


def check_same(config: ModelConfig, sources: Mapping[str, WeightSource], links: Links) -> None:
    """Raise `ValueError` on every rank unless `fingerprint` of the whole checkpoint is the same on all of them."""
    own = agree(links, lambda: fingerprint(config, sources))
    others = [rank for rank, digest in enumerate(links.commands.exchange(own)) if digest != own]
    if others:
        raise ValueError(f"tensor_parallel: rank {others[0]} has another checkpoint than rank {links.rank}")
