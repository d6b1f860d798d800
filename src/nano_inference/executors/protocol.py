"""`Executor`: what computes a model. The core, `weights`, `assemble` and the command line know only this.

Shapes: K tokens that are kept, S rows, T tokens of a step, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.executors.batch import Rows
from nano_inference.executors.staging import Pace
from nano_inference.executors.step_input import ForwardInput
from nano_inference.loader.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.runner import BlockCopy, RowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """How much KV cache to make. What a block takes is the executor's to say (`Executor.block_bytes`)."""

    num_blocks: int
    block_size: int
    """Tokens of a block."""
    dtype: KvDtype = "auto"
    eager: bool = False
    """Take all the memory at once, where the executor can; otherwise as blocks are used."""


class Staged(Protocol):
    """Owns the next weights while they are filled, beside those in force, which keep computing."""

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        """Fill one weight, packed as the executor keeps it; return the bytes kept. May be called from any one thread.

        Raises `NotFinite` where values are checked, and what the pace raises.
        """

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        """Whether a weight that was put has, as it is kept, the values of another source."""

    def finish(self) -> Any:
        """Return what `Executor.commit` takes: the weights that came, and those in force for the rest."""


class Executor(Protocol):
    """Owns a model's weights, the memory of its KV cache, and what a step needs. One thread at a time runs it."""

    config: ModelConfig
    program: Program
    device: torch.device
    """Where it computes."""

    @property
    def code(self) -> str:
        """What computes: "torch", or the instruction set of the CPU kernels."""

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        """Copy and clear blocks as `Runner.run` says, and compute the rows' K/V.

        Returns tokens, log-probabilities, scores and sums of hidden states by row id.

        Raises `MemoryError` when a step needs more memory than there is.
        """

    def recover(self) -> None:
        """Undo what an interrupted `run` left behind in this thread. Can be interrupted and called again."""

    # ---- cache ----

    def cache_dtype(self, wanted: KvDtype) -> torch.dtype:
        """Return the precision of keys and values. Raises `ValueError` for one that this executor does not have."""

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        """Return the bytes that one block takes in all layers."""

    def new_cache(self, size: CacheSize) -> None:
        """Take memory for a KV cache, in the place of the one before. Without one nothing runs."""

    def free_cache(self) -> None:
        """Give the cache's memory back."""

    def restore_cache(self) -> None:
        """Take it again, empty."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that there is room for now."""

    # ---- weights ----

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> Staged:
        """Start the next weights. `check_finite` refuses NaN and infinity."""

    def commit(self, staged: Any) -> None:
        """Compute with what `Staged.finish` returned from the next step on. Between two steps only.

        Until then it is held: several executors can be committed one after another. Can be interrupted at any point and
        called again.
        """

    def drop_spare(self) -> None:
        """Give back memory that is kept for the next update."""

    def discard_weights(self) -> None:
        """Give the memory of the weights back; nothing runs before others are committed."""

    def move_weights(self, device: torch.device) -> None:
        """Move the weights, where they are not kept in main memory always."""

    def weight_values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under their names, all or those named, in the precision that updates are kept in."""

    def staged_values(self, staged: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what `weight_values` would if this were committed."""

    @property
    def weight_dtype(self) -> str:
        """The precision that updates are kept in; "float32" also where narrower weights are kept as they came."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""

    # ---- further views of the same model ----

    def copy(self) -> Executor:
        """Return a second executor with the same weights and no cache; updates of one do not reach the other."""

    def forward(self, inputs: ForwardInput, cache: Any) -> Tensor:
        """Return float32 logits [T, V] of every token of a step over a cache that the caller owns: slow and whole."""
