"""The one door for weights: named sources into a model's memory, whether from a file or from a trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nano_inference.types import ModelError

_SHOWN_NAMES = 5
HARMLESS_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which follow from the configuration."""


class WeightSource(Protocol):
    """One tensor that can be read, as often as wanted, from a file or from memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape it will fill."""

    @property
    def dtype(self) -> str:
        """How it is stored: "float32", "bfloat16", "Q4_1", …"""

    def read_into(self, target: Tensor) -> None:
        """Fill `target`, a contiguous tensor (a slice of rows, too) of this shape, any float dtype, any device.

        Values are converted in bounded pieces. Raises `ModelError` when the file cannot be read.
        """


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor in memory, so that a trainer's weights pass the same door."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """The tensor's precision, such as "float32"."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def read_into(self, target: Tensor) -> None:
        """Copy, converting the precision."""
        target.copy_(self.tensor)


@torch.no_grad()
def load_into(
    slots: Mapping[str, Tensor],
    named: Iterable[tuple[str, WeightSource]],
    *,
    ignore: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill every slot from the source of the same name, in place, in the order of `named`.

    `slots` maps Hugging Face names to contiguous views of the model's memory; `ignore` names extras that may be there
    (a tied model's `lm_head.weight`); `progress` is told the bytes written after each tensor. Raises `ModelError` that
    names what is unknown, there twice, of another shape, or missing; slots before the fault have then been written.
    """
    taken: set[str] = set()
    for name, source in named:
        slot = slots.get(name)
        if slot is None:
            if name in ignore or name.endswith(HARMLESS_SUFFIX):
                continue
            raise ModelError(f"the checkpoint has {name}, which the model has not")
        if name in taken:
            raise ModelError(f"the checkpoint has {name} twice")
        if tuple(slot.shape) != source.shape:
            raise ModelError(f"{name}: the checkpoint has the shape {source.shape}, the model {tuple(slot.shape)}")
        source.read_into(slot)
        taken.add(name)
        if progress is not None:
            progress(slot.numel() * slot.element_size())
    _refuse_missing([name for name in slots if name not in taken])


def check_names(shapes: Mapping[str, tuple[int, ...]], named: Mapping[str, WeightSource]) -> None:
    """Raise `ModelError` as `load_into` would, before anything is written; `shapes` are those of the model."""
    for name, source in named.items():
        if name not in shapes:
            raise ModelError(f"the checkpoint has {name}, which the model has not")
        if shapes[name] != source.shape:
            raise ModelError(f"{name}: the checkpoint has the shape {source.shape}, the model {shapes[name]}")
    _refuse_missing([name for name in shapes if name not in named])


def _refuse_missing(names: list[str]) -> None:
    if names:
        rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise ModelError(f"the checkpoint lacks {len(names)} tensors: {', '.join(names[:_SHOWN_NAMES])}{rest}")
