"""`Reduce` for the torch executor.

Shapes: T tokens of the step, W width of a buffer.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from nano_inference.executors.torch.compiled import OPERATIONS, Operations, Scope, Value
from nano_inference.models.ops import Reduce
from nano_inference.parallel.group import Group


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
