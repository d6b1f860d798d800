"""`Executor`: the interface through which the core, `weights`, `build` and the command line run a model.

An executor has two components: `weights` and `cache`.

Shapes: K kept tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, Launch, RowResult
from nano_inference.executors.batch import Rows
from nano_inference.executors.staging import Pace
from nano_inference.executors.step_input import ForwardInput
from nano_inference.loading.adapters import Adapter
from nano_inference.loading.sources import WeightSource
from nano_inference.models.config import ModelConfig
from nano_inference.models.ops import WeightSpec
from nano_inference.models.program import Program
from nano_inference.types import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Size of a KV cache; `Cache.block_bytes` returns the memory of one block."""

    num_blocks: int
    block_size: int  # tokens per block
    dtype: KvDtype = "auto"
    num_states: int = 0  # slots for recurrent states, each of `Program.state_bytes`
    eager: bool = False  # commit all memory pages at once, if the executor can; otherwise as blocks are used


class Cache(Protocol):
    """Owns the memory of keys and values."""

    def dtype(self, wanted: KvDtype) -> torch.dtype:
        """Return the precision of keys and values. Raises `ValueError` if the executor does not support it."""

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        """Return the bytes of one block, over all layers."""

    def free_bytes(self, share: float) -> int:
        """Return the default size in bytes; `share` of a GPU's memory is for weights and cache."""

    def allocate(self, size: CacheSize) -> None:
        """Allocate the memory, replacing earlier memory. `Executor.run` needs it."""

    def make(self, size: CacheSize) -> Any:
        """Return other memory of this size, which the caller owns, for `Executor.forward`."""

    def free(self) -> None:
        """Free the memory."""

    def restore(self) -> None:
        """Allocate the memory again, empty."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are allocated now."""


class Staged(Protocol):
    """Owns new weights while they are filled; the current weights stay usable meanwhile."""

    def put(self, spec: WeightSpec, source: WeightSource) -> int:
        """Read and pack one weight; return the bytes stored. One thread at a time, not necessarily the engine's.

        Raises `NotFinite` if values are checked, and any exception of the `Pace`.
        """

    def has_same(self, spec: WeightSpec, source: WeightSource) -> bool:
        """Return True if a weight that was put equals another source once packed."""

    def finish(self) -> Any:
        """Return the argument of `Weights.commit`: the new weights, completed by the current ones.

        Raises `WeightError` if another rank has refused its part (tensor parallelism).
        """

    def discard(self) -> None:
        """Drop the new weights, before or after `finish`; they must not be committed."""


class Weights(Protocol):
    """Owns the weights in use, and replaces them between two steps."""

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> Staged:
        """Start filling new weights; `check_finite` rejects NaN and infinity."""

    def commit(self, staged: Any) -> None:
        """Replace the weights by the result of `Staged.finish`. Call between two steps only.

        `staged` may be held before, so that several executors commit together. Can be interrupted at any point and
        called again.
        """

    def drop_spare(self) -> None:
        """Free memory that is reserved for the next update."""

    def discard(self) -> None:
        """Free the memory of the weights; `run` then needs a new `commit`."""

    def move(self, device: torch.device) -> None:
        """Move the weights to a device; does nothing for an executor that computes in main memory only."""

    def values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight), all or those in `names`, in the precision in which updates are stored."""

    def staged_values(self, staged: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of weights that are not committed yet; see `values`."""

    @property
    def dtype(self) -> str:
        """Return the precision in which updates are stored; "float32" also if narrower weights stay as they are."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights in memory."""


class Executor(Protocol):
    """Owns a model's weights, the memory of its KV cache and the buffers of a step. Not thread-safe."""

    config: ModelConfig
    program: Program
    device: torch.device
    weights: Weights
    cache: Cache
    lookahead: int = 1  # default of `EngineConfig.lookahead`
    steps_share_processors: bool = True
    """Whether steps run on the processors that gather new weights, so that both must take turns."""

    @property
    def code(self) -> str:
        """Return "torch", "cuda", or the instruction set of the CPU kernels."""

    @property
    def failure(self) -> BaseException | None:
        """Return why no step can run any more, such as a lost rank; None while steps can. Thread-safe."""
        return None

    def close(self) -> None:
        """End the processes that belong to the executor, if any. Can be called again."""
        return

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        """Copy and clear blocks (see `Runner.run`), compute the rows' K/V and draw; return results by row id.

        Raises `MemoryError` if a step needs more memory than is available.
        """

    @property
    def launch(self) -> Launch | None:
        """Return what starts a step without waiting for it; None if steps end before `run` returns."""
        return None

    def recover(self) -> None:
        """Undo what an interrupted `run` left in this thread. Can be interrupted and called again."""

    def step_bytes(self, block_size: int) -> int:
        """Return the bytes that the largest step needs beside weights and cache, measured before there is a cache.

        0 for devices whose memory is not divided in advance.
        """
        return 0

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile and record the usual steps, if anything is; `progress` receives (done, total).

        Needs weights and a cache, whose blocks it may overwrite: call it before the first request.
        """
        return

    def stage_adapter(self, adapter: Adapter) -> Any:
        """Return an adapter as the executor computes with it, in memory beside the weights. Any thread may call this.

        Raises `BadRequest` if the executor computes without adapters.
        """
        raise BadRequest("adapter", f"the {self.code} executor has no adapters")

    def commit_adapter(self, number: int, staged: Any) -> None:
        """Let rows use a staged adapter by its number. Call between two steps only, as the next method."""
        raise AssertionError("nothing can be staged")

    def drop_adapter(self, number: int) -> None:
        """Free an adapter that no row uses any more."""
        raise AssertionError("nothing can be committed")

    def free_cache(self) -> None:
        """Free the cache's memory (`Runner.free_cache`)."""
        self.cache.free()

    def restore_cache(self) -> None:
        """Allocate the cache again, empty (`Runner.restore_cache`)."""
        self.cache.restore()

    def copy(self) -> Executor:
        """Return a second executor with the same weights and no cache; updates of one do not affect the other."""

    def forward(
        self, inputs: ForwardInput, cache: Any, kept: Sequence[int] | None = None, *, windows: bool = True
    ) -> Tensor:
        """Return float32 logits [K, V] of the `kept` tokens of a step, or of all, with a cache that the caller owns.

        The next step may overwrite them. `windows` is that of `step.Forward.hidden`. Slow.
        """
