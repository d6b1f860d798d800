"""LoRA adapters of PEFT. Its records only; reading them is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nano_inference.models.names import NameRules
from nano_inference.models.program import Program
from nano_inference.types import BadRequest


class LowRank(NamedTuple):
    """y += scale * (x Aᵀ) Bᵀ for one matrix."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The low-rank parts of a model's matrices."""

    pairs: Mapping[str, LowRank]  # by the program's weight name
    rank: int  # the largest
    num_bytes: int


def read_adapter(source: Path, program: Program, names: NameRules, *, max_rank: int) -> Adapter:
    """Read PEFT's directory. Raises `BadRequest`."""
    raise BadRequest("adapter", "adapters cannot be read")


def adapter_from(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[object, object]],
    program: Program,
    names: NameRules,
    *,
    max_rank: int,
) -> Adapter:
    """Return the adapter of PEFT's configuration and tensors. Raises `BadRequest`."""
    raise BadRequest("adapter", "adapters cannot be read")
