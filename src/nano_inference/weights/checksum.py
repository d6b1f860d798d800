"""One short text that says which weights these are, the same for a trainer and for an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_checksum(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """Return a 128-bit BLAKE2b digest in hex over names, shapes, precisions and bytes; the order does not matter.

    `dtype` converts first: give the engine's, when the trainer's differs. Tied tensors count once, under the name of
    the embedding: `model.named_parameters()` of a Transformers model gives just that.
    """
    return digest(named if dtype is None else ((name, tensor.detach().to(dtype)) for name, tensor in named))


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of the tensors as they are."""
    parts = sorted((name, _digest_one(tensor)) for name, tensor in named)
    whole = hashlib.blake2b(digest_size=16)
    for name, part in parts:
        whole.update(f"{len(name)}:{name}".encode())
        whole.update(part)
    return whole.hexdigest()


def _digest_one(tensor: Tensor) -> bytes:
    """Return the digest of one tensor: precision, shape, bytes."""
    found = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().view(-1)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy().data)
    return found.digest()
