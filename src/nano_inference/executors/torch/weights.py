"""Torch weights: matrices that share an input are stacked in one tensor, with a view for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.executors.devices import release_unused
from nano_inference.executors.live_weights import LiveWeights
from nano_inference.executors.staging import NotFinite, Pace, dtype_name, pieces_of, rows_of
from nano_inference.loading.pieces import is_finite
from nano_inference.loading.sources import WeightSource
from nano_inference.models.ops import Linear, WeightSpec
from nano_inference.models.program import Program
from nano_inference.support.memory import huge_empty

Layout = Mapping[str, tuple[WeightSpec, ...]]  # the weights of every stack, in order; the key is the name of the first


def layout_of(program: Program) -> Layout:
    """Return a stack for the matrices of each `Linear`, one for its biases, and one for each other weight."""
    stacks: dict[str, tuple[WeightSpec, ...]] = {}
    for op in program.ops:
        groups = (op.matrices, op.biases) if isinstance(op, Linear) else tuple((spec,) for spec in op.weights)
        stacks |= {group[0].name: group for group in groups if group}
    assert sum(map(len, stacks.values())) == len(program.weights), "a weight belongs to two stacks"
    return MappingProxyType(stacks)


@dataclass(frozen=True, slots=True)
class TorchWeights:
    """A complete set of weights. Not written after it is bound to a program."""

    layout: Layout
    stacks: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor] = field(init=False)  # a view of each weight, by name

    def __post_init__(self) -> None:
        named: dict[str, Tensor] = {}
        for name, stack in self.stacks.items():
            named |= views_of(self.layout[name], stack)
        object.__setattr__(self, "tensors", MappingProxyType(named))

    def stacked(self, specs: Sequence[WeightSpec]) -> Tensor:
        """Return the weights of one `Linear` as one tensor."""
        return self.stacks[specs[0].name]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all stacks."""
        return sum(stack.nbytes for stack in self.stacks.values())

    def are_on(self, device: torch.device) -> bool:
        return all(stack.device == device for stack in self.stacks.values())

    def moved(self, device: torch.device) -> TorchWeights:
        """Return the same weights on a device; in page-locked memory if they leave a GPU for main memory."""
        stacks: dict[str, Tensor] = {}
        for name, stack in self.stacks.items():
            is_pinned = stack.device.type == "cuda" and device.type == "cpu"
            target = torch.empty(stack.shape, dtype=stack.dtype, device=device, pin_memory=is_pinned)
            stacks[name] = target.copy_(stack)
        return TorchWeights(self.layout, stacks)

    def copied(self) -> TorchWeights:
        """Return a deep copy of the weights."""
        copies = {name: huge_empty(tuple(s.shape), s.dtype, s.device).copy_(s) for name, s in self.stacks.items()}
        return TorchWeights(self.layout, copies)


@dataclass(frozen=True, slots=True)
class Bound:
    """Weights, and in derived classes what an executor binds to them."""

    weights: TorchWeights


AnyBound = TypeVar("AnyBound", bound=Bound)


class LiveTorchWeights(LiveWeights[AnyBound]):
    """The weights of an executor in one tensor a stack; satisfies `protocol.Weights`."""

    def __init__(
        self, program: Program, device: torch.device, dtype: torch.dtype, bind: Callable[[TorchWeights], AnyBound]
    ) -> None:
        super().__init__(device, lambda model: model.weights.stacks)
        self._layout, self._dtype, self._bind = layout_of(program), dtype, bind

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> TorchStaged:
        """Start filling new weights, reusing the memory of replaced ones first."""
        live = None if self._model is None else self._model.weights
        spare, self._spare = self._spare, {}
        return TorchStaged(
            self._layout, live, self._bind, spare, self.device, self._dtype, pace, check_finite=check_finite
        )

    def move(self, device: torch.device) -> None:
        if self._model is not None and not self._model.weights.are_on(device):
            self._model = self._bind(self._model.weights.moved(device))
            release_unused(self.device)

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) without copying."""
        return ((n, tensor) for n, tensor in self.model.weights.tensors.items() if names is None or n in names)

    def staged_values(self, staged: AnyBound) -> Iterator[tuple[str, Tensor]]:
        return iter(staged.weights.tensors.items())

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        return 0 if self._model is None else self._model.weights.num_bytes

    def copied(self) -> AnyBound:
        """Return the argument of another executor's `commit`: a deep copy."""
        return self._bind(self.model.weights.copied())


def views_of(specs: Sequence[WeightSpec], stack: Tensor) -> dict[str, Tensor]:
    """Return a view of each weight of a stack, by name."""
    parts = torch.split(stack, [spec.shape[0] for spec in specs])
    return {spec.name: part for spec, part in zip(specs, parts, strict=True)}


class TorchStaged:
    """Owns new weights while they are filled; `finish` takes missing weights from the current ones."""

    def __init__(
        self,
        layout: Layout,
        live: TorchWeights | None,
        finish: Callable[[TorchWeights], Any],
        spare: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        pace: Pace | None,
        *,
        check_finite: bool,
        is_pinned: bool = False,
    ) -> None:
        """Start without weights; `finish` turns complete weights into the argument of `commit`.

        `spare` holds unused stacks by name, whose memory is reused. `is_pinned`: allocate page-locked main memory,
        which a GPU copies from at full speed.
        """
        self._layout, self._live, self._finish, self._spare = layout, live, finish, spare
        self._device, self._dtype, self._pace, self._check_finite = device, dtype, pace, check_finite
        self._is_pinned = is_pinned
        self._home = {spec.name: name for name, specs in layout.items() for spec in specs}
        self._fresh: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._taken: set[str] = set()

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        """Fill one weight; return its bytes. Raises `NotFinite` if values are checked."""
        if spec.name not in self._views:
            self._open(self._home[spec.name])
        view = self._views[spec.name]
        for part, piece in _pieces(source, view, self._pace):
            part.read_into(piece)
            if self._check_finite and not is_finite(piece):
                raise NotFinite(dtype_name(view))
        self._taken.add(spec.name)
        return view.nbytes

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        """Return True if a weight that was put equals another source."""
        again = torch.empty_like(self._views[spec.name])
        source.read_into(again)
        return torch.equal(again, self._views[spec.name])

    def discard(self) -> None:
        """Do nothing: the memory is freed with the object."""

    def finish(self) -> Any:
        """Return the new weights, completed by the current ones, as `Weights.commit` takes them."""
        for name in self._fresh:
            for spec in self._layout[name]:
                if spec.name not in self._taken:
                    assert self._live is not None
                    old = self._live.tensors[spec.name]
                    for piece in pieces_of(tuple(old.shape), old.element_size(), self._pace):
                        self._views[spec.name][piece].copy_(old[piece])
            self._taken.update(spec.name for spec in self._layout[name])
        live = {} if self._live is None else self._live.stacks
        return self._finish(TorchWeights(self._layout, MappingProxyType({**live, **self._fresh})))

    def _open(self, name: str) -> None:
        specs = self._layout[name]
        shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
        dtype = torch.float32 if specs[0].kind == "number" else self._dtype
        stack = self._spare.pop(name, None)
        if stack is None and self._is_pinned:
            stack = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._fresh[name] = huge_empty(shape, dtype, self._device) if stack is None else stack
        self._views |= views_of(specs, self._fresh[name])


def _pieces(source: WeightSource, view: Tensor, pace: Pace | None) -> Iterator[tuple[WeightSource, Tensor]]:
    """Yield (source, target) of the whole tensor, or of a few rows at a time if there is a pace."""
    if pace is None or not view.numel():
        yield source, view
        return
    for piece in pieces_of(tuple(view.shape), view.element_size(), pace):
        yield rows_of(source, piece.start, piece.stop), view[piece]
