"""`fingerprint`: a digest of a checkpoint by which ranks notice that they have different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from nano_inference.loading.packed import PackedTensor
from nano_inference.loading.pieces import DTYPES, FileRange, fill, open_at
from nano_inference.loading.sources import MappedSource, TensorSource, WeightSource
from nano_inference.models.config import ModelConfig

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
    if isinstance(source, MappedSource):
        yield from _sample(source.source)
    elif isinstance(source, TensorSource):
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


def _spans(size: int) -> list[tuple[int, int]]:
    """Return the sampled ranges [start, stop) of a tensor of `size` bytes."""
    if size <= MOST_BYTES:
        return [(0, size)]
    starts = [(size - _SPAN_BYTES) * index // (_SPANS - 1) for index in range(_SPANS)]
    return [(start, start + _SPAN_BYTES) for start in starts]
