"""Checksum of weights, computed identically by a trainer and by an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nano_inference.models.names import TEXT_NAMES
from nano_inference.weights.staging import check_source


def weights_checksum(
    named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> str:
    """Return a 128-bit BLAKE2b digest in hex of names, shapes, dtypes and bytes, independent of the order.

    `named` is a state dict or its pairs. `dtype` converts the tensors first: pass the engine's if the trainer's
    differs. Pass tied tensors once, under the embedding's name, as `model.named_parameters()` of a Transformers model
    yields them (its `state_dict()` has both names). Of a multimodal model, only the text part counts, by its own names.
    Raises `WeightError` for anything else.
    """
    check_source(named)
    named = named.items() if isinstance(named, Mapping) else named
    own = ((TEXT_NAMES.own(name), tensor) for name, tensor in named)
    text = ((name, tensor) for name, tensor in own if name is not None)
    return digest(text if dtype is None else ((name, tensor.detach().to(dtype)) for name, tensor in text))


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the checksum without a conversion."""
    parts: list[tuple[str, bytes]] = []
    for name, tensor in named:
        found = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            found.update(flat.view(torch.uint8).numpy().data)
        parts.append((name, found.digest()))
    whole = hashlib.blake2b(digest_size=16)
    for name, part in sorted(parts):
        whole.update(f"{len(name)}:{name}".encode())
        whole.update(part)
    return whole.hexdigest()
