"""Checks the tensors of a weight update while an executor packs them."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nano_inference.executors.protocol import Staged
from nano_inference.executors.staging import NotFinite, dtype_name
from nano_inference.loading.pieces import DTYPES, FileRange
from nano_inference.loading.sources import TensorSource, WeightSource, exchanged_heads
from nano_inference.models.names import NameRules
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.types import ModelError, WeightError
from nano_inference.weights.updates import NamedWeights

_SHOWN_NAMES = 5


class Staging:
    """Owns the staged weights of an update until they are complete."""

    def __init__(self, program: Program, names: NameRules, staged: Staged, *, is_partial: bool) -> None:
        self._staged, self._names = staged, names
        self._is_partial = is_partial
        self._specs = {spec.name: spec for spec in program.weights}
        self._aliases = program.tied_names
        self._taken: dict[
            str, str
        ] = {}  # maps the names of staged weights to those (aliases) by which the update has them

    @torch.no_grad()
    def put(self, name: object, value: object) -> None:
        """Check one named tensor and pack it. Raises `WeightError` naming the tensor."""
        name = checked_name(name)
        own = self._names.own(name)
        if own is None:
            return
        known = self._aliases.get(own, own)
        spec = self._specs.get(known)
        if spec is None:
            raise WeightError(f"{name}: the model has no such tensor")
        source = as_source(name, value)
        if tuple(source.shape) != spec.shape:
            raise WeightError(f"{name}: the update has the shape {tuple(source.shape)}, the model {spec.shape}")
        source = arranged(source, own, self._names)
        if known in self._taken:  # a tied weight under its other name, with equal values
            if own == self._taken[known]:
                raise WeightError(f"{name}: occurs twice")
            if not self._staged.has_same(spec, source):
                raise differs(name, self._taken[known])
            self._taken[known] = known
            return
        if (precision := self._refused_in(spec, source)) is not None:
            raise WeightError(f"{name}: holds NaN or infinity (in the engine's {precision})")
        self._taken[known] = own

    def _refused_in(self, spec: WeightSpec, source: WeightSource) -> str | None:
        """Pack a tensor; return the precision in which it is not finite, or None.

        The exception is not re-raised: as a `__context__`, its frames would keep the partly filled memory alive.
        """
        try:
            self._staged.put(spec, source)
        except NotFinite as error:
            return str(error)
        return None

    @torch.no_grad()
    def complete(self) -> Any:
        """Check that no tensor is missing; return the argument of `Weights.commit`."""
        missing = [name for name in self._specs if name not in self._taken]
        if missing and not self._is_partial:
            rest = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
            raise WeightError(f"the update lacks {len(missing)} tensors: {', '.join(missing[:_SHOWN_NAMES])}{rest}")
        if not self._taken:
            raise WeightError("the update is empty")
        return self._staged.finish()

    @property
    def only_aliases(self) -> dict[str, str]:
        """Map the tied weights that the update has under their other name only to that name."""
        return {known: name for known, name in self._taken.items() if known != name}


def differs(name: str, other: str) -> WeightError:
    """Return the error of a weight with other values than the one to which the model ties it."""
    return WeightError(
        f"{name}: differs from {other}, to which this model ties it; load the model anew from files that have both"
    )


def pairs(named: NamedWeights) -> Generator[tuple[object, object]]:
    """Yield the (name, tensor) pairs of an update. Raises `WeightError` if it has another form, or if it fails."""
    check_source(named)
    items = named.items() if isinstance(named, Mapping) else named
    iterator = iter(items)
    try:
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (WeightError, MemoryError):
                raise
            except ModelError as error:
                raise WeightError(str(error)) from error
            except Exception as error:
                raise WeightError(f"the source of the weights failed: {type(error).__name__}: {error}") from error
            _check_pair(item)
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()  # not left to garbage collection: a process group then receives the remaining broadcasts


def plain_pairs(named: NamedWeights) -> Generator[tuple[str, Tensor]]:
    """Yield the pairs of an update that are dense tensors. Raises `WeightError` for others, as `pairs` does."""
    for name, value in pairs(named):
        yield checked_name(name), plain_tensor(str(name), value)


def check_source(named: object) -> None:
    """Raise `WeightError` unless this can be an update: a state dict, a collection of pairs, or an iterator."""
    if isinstance(named, str | bytes | Tensor | torch.nn.Module) or not isinstance(named, Iterable):
        hint = "; pass its state_dict()" if isinstance(named, torch.nn.Module) else ""
        raise WeightError(f"weights must be a state dict or (name, tensor) pairs, got {type(named).__name__}{hint}")
    if isinstance(named, Collection) and not isinstance(named, Mapping):
        for item in named:
            _check_pair(item)


def _check_pair(item: object) -> None:
    if not isinstance(item, tuple) or len(item) != 2:
        raise WeightError(f"weights must be (name, tensor) pairs, got {type(item).__name__}")


def as_source(name: str, value: object) -> TensorSource | FileRange:
    """Return a dense float tensor or a file range as a `WeightSource`. Raises `WeightError` for anything else."""
    return value if isinstance(value, FileRange) else TensorSource(plain_tensor(name, value))


def arranged(source: TensorSource | FileRange, own: str, names: NameRules) -> TensorSource | FileRange:
    """Return a weight of an update with its heads in the program's order."""
    place = None if names.tiled is None else names.tiled.place_of(own)
    if names.tiled is None or place is None:
        return source
    if isinstance(source, FileRange):
        tensor = torch.empty(source.shape, dtype=DTYPES[source.dtype])
        source.read_into(tensor)
    else:
        tensor = source.tensor
    return TensorSource(exchanged_heads(tensor, place, names.tiled.num_k_heads, names.tiled.num_v_heads))


def as_given(own: str, value: Tensor, names: NameRules) -> Tensor:
    """Return a weight of the program with its heads in the order of updates: the inverse of `arranged`."""
    place = None if names.tiled is None else names.tiled.place_of(own)
    if names.tiled is None or place is None:
        return value
    num_v_heads = names.tiled.num_v_heads
    return exchanged_heads(value, place, num_v_heads // names.tiled.num_k_heads, num_v_heads)


def checked_name(name: object) -> str:
    """Return a weight's name. Raises `WeightError` if it is no string."""
    if not isinstance(name, str):
        raise WeightError(f"a weight's name must be a string, got {name!r}")
    return name


def plain_tensor(name: str, value: object) -> Tensor:
    """Return a dense float tensor without its gradient. Raises `WeightError` for anything else."""
    if not isinstance(value, Tensor):
        raise WeightError(f"{name}: must be a tensor, got {type(value).__name__}")
    if type(value) not in (Tensor, torch.nn.Parameter):
        raise WeightError(f"{name}: a {type(value).__name__} must be gathered into a plain tensor first")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise WeightError(f"{name}: must be a dense tensor with values, got {value.layout} on {value.device}")
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise WeightError(f"{name}: has the dtype {dtype_name(value)}; known: float64, float32, float16, bfloat16")
    return value.detach()
