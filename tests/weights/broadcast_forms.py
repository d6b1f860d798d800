"""Arrays that trainers broadcast one after the other, by the form of their update."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

import torch

LAYERS = "model.layers."


def dict_arrays(named: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what prime-rl's trainer broadcasts: a state dict of the tensors outside of layers, and one per layer."""
    layers = sorted({name.split(".")[2] for name in named if name.startswith(LAYERS)}, key=int)
    places = [None, *layers]
    yield torch.tensor([len(places)])
    for place in places:
        part = {name: one for name, one in named.items() if layer_of(name) == place}
        kinds = list(dict.fromkeys(one.dtype for one in part.values()))
        groups = {kind: [(name, one) for name, one in part.items() if one.dtype == kind] for kind in kinds}
        described = {kind: [(name, one.shape, one.numel()) for name, one in group] for kind, group in groups.items()}
        yield from described_by(pickle.dumps(described))
        yield from (torch.cat([one.flatten() for _, one in group]) for group in groups.values())


def described_by(data: bytes) -> Iterator[torch.Tensor]:
    """Yield the number of bytes of a description, and the description."""
    yield torch.tensor([len(data)])
    yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def layer_of(name: str) -> str | None:
    """Return the number of a weight's layer, or None."""
    return name.split(".")[2] if name.startswith(LAYERS) else None
