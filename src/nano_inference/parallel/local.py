"""`load_part`: one rank's executor with its part of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from nano_inference.executors.loading import LoadProgress, known_sources, load_weights
from nano_inference.executors.sampling import draw
from nano_inference.executors.torch.attention import Backend
from nano_inference.executors.torch.compiled import OPERATIONS, Operations, Scope, Value
from nano_inference.executors.torch.executor import TorchExecutor
from nano_inference.loading.gguf import PackedTensor
from nano_inference.loading.pieces import DTYPES, FileRange, fill, open_at
from nano_inference.loading.sources import TensorSource, WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import Reduce
from nano_inference.models.program import Program
from nano_inference.parallel.group import Group
from nano_inference.parallel.links import Links
from nano_inference.parallel.shard import shard
from nano_inference.parallel.staged import parts_of
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


_SPANS = 8
_SPAN_BYTES = 4096
MOST_BYTES = _SPANS * _SPAN_BYTES  # most bytes that are read of one tensor; a smaller tensor is read whole


def fingerprint(config: ModelConfig, sources: Mapping[str, WeightSource]) -> str:
    """Return a digest of a configuration and of tensors: names, shapes, dtypes and a sample of their stored bytes.

    The sample of a tensor of more than `MOST_BYTES` bytes is 8 spans of 4 KiB at equal distances, the first at its
    start and the last at its end. Values between the spans are not seen, nor are those of a plugin's own kind of
    source. Does not depend on a rank. Raises `ModelError` if a file cannot be read.
    """
    digest = hashlib.sha256(repr(config).encode())
    for name, source in sorted(sources.items()):
        digest.update(f"\n{name} {source.shape} {source.dtype}\n".encode())
        for span in _sample(source):
            digest.update(span)
    return digest.hexdigest()


def _sample(source: WeightSource) -> Iterator[bytes]:
    """Yield the sampled bytes of a tensor as it is stored."""
    if isinstance(source, TensorSource):
        flat = source.tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start, stop in _spans(len(flat)):
            yield flat[start:stop].cpu().numpy().tobytes()
    elif isinstance(source, FileRange | PackedTensor):
        if isinstance(source, PackedTensor):
            offset, size = source.tensor.offset, source.tensor.num_bytes
        else:
            offset = source.offset
            size = source.shape[0] * source.row_bytes if source.shape else DTYPES[source.dtype].itemsize
        with open_at(source.path, offset) as file:
            for start, stop in _spans(size):
                span = torch.empty(stop - start, dtype=torch.uint8)
                file.seek(offset + start)
                fill(file, source.path, span)
                yield span.numpy().tobytes()


def _spans(size: int) -> Iterator[tuple[int, int]]:
    """Yield the sampled ranges [start, stop) of a tensor of `size` bytes."""
    if size <= MOST_BYTES:
        yield 0, size
        return
    for index in range(_SPANS):
        start = (size - _SPAN_BYTES) * index // (_SPANS - 1)
        yield start, start + _SPAN_BYTES
