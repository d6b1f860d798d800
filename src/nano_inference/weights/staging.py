"""A second memory of the model's shape, filled tensor by tensor and checked before anybody computes with it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_inference.loader.door import HARMLESS_SUFFIX, TensorSource, WeightSource
from nano_inference.loader.pieces import FileRange
from nano_inference.models.build import Model, weight_slots
from nano_inference.models.packed import AnyModel, Pace, pieces_of, weight_values
from nano_inference.types import WeightError, check_bool
from nano_inference.weights.checksum import digest

_SHOWN_NAMES = 5

NamedWeights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor | FileRange]]
"""Hugging Face names and tensors: a state dict, an iterator, or one of the places of this room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """What an update may be. Raises `ValueError` naming the field when a value makes no sense."""

    partial: bool = False
    """Tensors that are not named keep their values."""
    allow_nonfinite: bool = False
    """NaN and infinity are let in."""
    checksum: str | None = None
    """What `weights_checksum` must give for the whole."""

    def __post_init__(self) -> None:
        check_bool("partial", self.partial)
        check_bool("allow_nonfinite", self.allow_nonfinite)
        if self.checksum is not None and not isinstance(self.checksum, str):
            raise ValueError(f"checksum must be a string, got {self.checksum!r}")


class Staging:
    """Owns the next weights while they are gathered. `spare` is a model's worth of memory that nobody computes with."""

    def __init__(self, spare: Model, rules: UpdateRules, pace: Pace | None = None) -> None:
        self._spare = spare
        self._rules = rules
        self._pace = pace
        self._slots = weight_slots(spare)
        self._aliases = tied_names(spare)
        self._taken: dict[str, str] = {}
        """Slot -> the name under which it came."""

    @property
    def taken(self) -> Collection[str]:
        """The weights that came, under their checkpoint's names."""
        return self._taken.keys()

    @torch.no_grad()
    def put(self, name: object, value: object) -> None:
        """Check one named tensor and copy it in; `WeightError` names what is wrong with it."""
        if not isinstance(name, str):
            raise WeightError(f"a weight's name must be a string, got {name!r}")
        if name.endswith(HARMLESS_SUFFIX):
            return
        known = self._aliases.get(name, name)
        slot = self._slots.get(known)
        if slot is None:
            raise WeightError(f"{name}: the model has no such tensor")
        source = _as_source(name, value)
        if tuple(source.shape) != tuple(slot.shape):
            raise WeightError(f"{name}: the update has the shape {tuple(source.shape)}, the model {tuple(slot.shape)}")
        if known in self._taken:
            self._check_again(name, known, source)
            return
        for part, piece in self._pieces(source, slot):
            part.read_into(piece)
            if not self._rules.allow_nonfinite and not is_finite(piece):
                raise WeightError(f"{name}: holds NaN or infinity (in the engine's {dtype_name(slot)})")
        self._taken[known] = name

    @torch.no_grad()
    def complete(self, live: AnyModel, checksum: str | None = None) -> Model:
        """Fill in what a partial update left out, check that nothing is missing, return what was gathered.

        `checksum` is what `weights_checksum` must give for the whole.
        """
        missing = [name for name in self._slots if name not in self._taken]
        if missing and not self._rules.partial:
            rest = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
            raise WeightError(f"the update lacks {len(missing)} tensors: {', '.join(missing[:_SHOWN_NAMES])}{rest}")
        if not self._taken:
            raise WeightError("the update is empty")
        if missing:
            for name, old in weight_values(live, missing):
                for part, piece in self._pieces(TensorSource(old), self._slots[name]):
                    part.read_into(piece)
        found = digest(self._slots.items()) if checksum is not None else None
        if found != checksum:
            raise WeightError(f"checksum: the update has {found}, {checksum} was expected")
        return self._spare

    def _pieces(self, source: WeightSource, slot: Tensor) -> Iterator[tuple[WeightSource, Tensor]]:
        """Yield the whole tensor, or, at a pace, a few rows after the other."""
        if self._pace is None or not slot.numel() or not slot.dim():
            yield source, slot
            return
        for piece in pieces_of(slot, self._pace):
            yield rows_of(source, piece.start, piece.stop), slot[piece]

    def _check_again(self, name: str, known: str, source: WeightSource) -> None:
        """A tied tensor may come under both its names, with the same values; nothing else may come twice."""
        if name == self._taken[known]:
            raise WeightError(f"{name}: is there twice")
        again = torch.empty_like(self._slots[known])
        source.read_into(again)
        if not torch.equal(again, self._slots[known]):
            raise WeightError(f"{name}: differs from {self._taken[known]}, to which this model ties it")


def tied_names(model: AnyModel) -> dict[str, str]:
    """Return the names that a trainer may send for a tensor that has another name already."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_embeddings else {}


def pairs(named: NamedWeights) -> Generator[tuple[object, object]]:
    """Yield the (name, tensor) pairs of an update; `WeightError` when it is something else."""
    items = named.items() if isinstance(named, Mapping) else named
    if isinstance(items, str | bytes | Tensor) or not isinstance(items, Iterable):
        raise WeightError(f"weights must be a state dict or (name, tensor) pairs, got {type(named).__name__}")
    try:
        for item in items:
            if not isinstance(item, tuple) or len(item) != 2:
                raise WeightError(f"weights must be (name, tensor) pairs, got {type(item).__name__}")
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()  # now, not when it is collected: a process group then takes in what is still on its way


def rows_of(source: WeightSource, start: int, stop: int) -> WeightSource:
    """Return some rows of a source, where it can be cut."""
    if isinstance(source, TensorSource):
        return TensorSource(source.tensor[start:stop])
    assert isinstance(source, FileRange)
    return source.rows(start, stop)


def _as_source(name: str, value: object) -> TensorSource | FileRange:
    """Return a tensor, or a range of a file, as something to read; `WeightError` when it is neither, or no floats."""
    if isinstance(value, FileRange):
        return value
    if not isinstance(value, Tensor):
        raise WeightError(f"{name}: must be a tensor, got {type(value).__name__}")
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise WeightError(f"{name}: a {type(value).__name__} must be gathered into a plain tensor first")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise WeightError(f"{name}: must be a dense tensor with values, got {value.layout} on {value.device}")
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise WeightError(f"{name}: has the dtype {dtype_name(value)}; known: float64, float32, float16, bfloat16")
    return TensorSource(value.detach())


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. NaN passes through a minimum, so one pass over the bytes is enough."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return float(low) > -torch.inf and float(high) < torch.inf


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
