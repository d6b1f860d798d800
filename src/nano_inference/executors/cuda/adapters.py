"""`AdapterStacks`: adapters on the device, at addresses that captured graphs have.

Each projection has the matrices of all adapters in one tensor, with room for some more and for higher ranks. A step is
given the place of each token's adapter.

Shapes: T tokens, X places, M matrices of a projection, R most ranks, N outputs and K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nano_inference.executors.cuda.records import LowRankStack
from nano_inference.executors.torch.adapters import Pairs, moved
from nano_inference.loading.adapters import Adapter
from nano_inference.models import ops
from nano_inference.models.program import Program
from nano_inference.types import BadRequest

_FEWEST_PLACES, _FEWEST_RANKS = 4, 16


class AdapterStacks:
    """Owns the memory of a program's adapters."""

    def __init__(
        self, program: Program, device: torch.device, dtype: torch.dtype, max_tokens: int, on_move: Callable[[], None]
    ) -> None:
        """`on_move` is called before the memory is replaced by a larger one."""
        self._linears = {_key(op): op for op in program.body if isinstance(op, ops.Linear)}
        self._names = {spec.name for op in self._linears.values() for spec in op.matrices}
        self._device, self._dtype, self._max_tokens, self._on_move = device, dtype, max_tokens, on_move
        self._stacks: Mapping[str, LowRankStack] = {}
        self._num_places = self._most_ranks = 0
        self._place_of: dict[int, int] = {}  # by the adapter's number

    def stage(self, adapter: Adapter) -> Pairs:
        """Return a copy of an adapter on the device. Raises `BadRequest` if the kernels lack one of its matrices."""
        if others := sorted(adapter.pairs.keys() - self._names):
            raise BadRequest("adapter", f"{others[0]}: the CUDA kernels have adapters of layers only; use kernels=off")
        pairs = moved(adapter, self._device, self._dtype)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # another thread commits
        return pairs

    def commit(self, number: int, pairs: Pairs) -> None:
        """Copy a staged adapter to a free place. Raises `BadRequest` if the device has no memory for more places."""
        most = max((pair.a_RK.size(0) for pair in pairs.values()), default=0)
        if len(self._place_of) == self._num_places or most > self._most_ranks:
            try:
                self._grow(len(self._place_of) + 1, most)
            except torch.OutOfMemoryError as error:
                raise BadRequest(
                    "adapter", f"the device has no memory for {len(self._place_of) + 1} adapters"
                ) from error
        place = min(set(range(self._num_places)).difference(self._place_of.values()))
        for key, op in self._linears.items():
            stack = self._stacks[key]
            ranks, scales = [0] * len(op.matrices), [0.0] * len(op.matrices)
            starts = accumulate(op.widths, initial=0)
            for index, (spec, start, width) in enumerate(zip(op.matrices, starts, op.widths, strict=False)):
                if (pair := pairs.get(spec.name)) is not None:
                    rank = ranks[index] = pair.a_RK.size(0)
                    scales[index] = pair.scale
                    stack.a_XMRK[place, index, :rank].copy_(pair.a_RK)
                    stack.b_XNR[place, start : start + width, :rank].copy_(pair.b_NR)
            stack.rank_XM[place].copy_(torch.tensor(ranks, dtype=torch.int32))
            stack.scale_XM[place].copy_(torch.tensor(scales))
        self._place_of[number] = place

    def drop(self, number: int) -> None:
        """Free an adapter's place."""
        self._place_of.pop(number, None)

    def places(self, numbers: Sequence[int]) -> list[int]:
        """Return the places of adapters by their numbers; -1 for the number 0."""
        return [self._place_of[number] if number else -1 for number in numbers]

    def has(self, op: ops.Linear) -> bool:
        """Return whether adapters can have a projection's matrices: those of layers."""
        return _key(op) in self._linears

    def of(self, op: ops.Linear) -> LowRankStack:
        """Return the matrices of all adapters for a projection."""
        return self._stacks[_key(op)]

    def _grow(self, num_places: int, most_ranks: int) -> None:
        """Replace the memory by one for at least so many adapters and ranks, with the same contents."""
        places = max(_FEWEST_PLACES, self._num_places, 1 << (num_places - 1).bit_length())
        ranks = max(_FEWEST_RANKS, self._most_ranks, 1 << max(0, most_ranks - 1).bit_length())
        widest = max(len(op.matrices) for op in self._linears.values())
        low_N = torch.zeros(self._max_tokens * widest * ranks, device=self._device)
        grown: dict[str, LowRankStack] = {}
        for key, op in self._linears.items():
            stack = self._new_stack(op, places, ranks, low_N)
            if key in self._stacks:
                old = self._stacks[key]
                size = old.rank_XM.size(0)
                stack.a_XMRK[:size, :, : self._most_ranks].copy_(old.a_XMRK)
                stack.b_XNR[:size, :, : self._most_ranks].copy_(old.b_XNR)
                stack.rank_XM[:size].copy_(old.rank_XM)
                stack.scale_XM[:size].copy_(old.scale_XM)
            grown[key] = stack
        self._on_move()
        self._stacks, self._num_places, self._most_ranks = grown, places, ranks

    def _new_stack(self, op: ops.Linear, places: int, ranks: int, low_N: Tensor) -> LowRankStack:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        num_matrices, starts = len(op.matrices), list(accumulate(op.widths, initial=0))
        low_TMR = low_N.narrow(0, 0, self._max_tokens * num_matrices * ranks).view(-1, num_matrices, ranks)
        return LowRankStack(
            a_XMRK=zeros(places, num_matrices, ranks, op.matrices[0].shape[1], dtype=self._dtype),
            b_XNR=zeros(places, starts[-1], ranks, dtype=self._dtype),
            rank_XM=zeros(places, num_matrices, dtype=torch.int32),
            scale_XM=zeros(places, num_matrices, dtype=torch.float32),
            start_M=torch.tensor(starts, dtype=torch.int32, device=self._device),
            widest=max(op.widths),
            low_TMR=low_TMR,
        )


def _key(op: ops.Linear) -> str:
    return op.matrices[0].name
