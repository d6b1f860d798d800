"""`ShardedExecutor`: rank 0's executor of a model that is divided among ranks.

Every call is also executed by the other ranks (`follower.Follower`). Ranks draw the same tokens from the same numbers,
so one message starts a step, also one that samples several tokens.

Shapes: T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows
from nano_inference.executors.protocol import Cache, CacheSize, Executor
from nano_inference.executors.step_input import ForwardInput
from nano_inference.loading.adapters import Adapter
from nano_inference.parallel.adapters import StagedAdapter, adapter_part, announced, send_part
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.rows import SentRows
from nano_inference.parallel.staged import ShardedWeights, Whole

Result = TypeVar("Result")


class ShardedExecutor(Executor):
    """Owns rank 0's part and, with its copies, the links to the other ranks."""

    def __init__(
        self, own: Executor, whole: Whole, leader: Leader, number: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        """`own` computes rank 0's part.

        `number` is this executor's among the copies of one engine, and `numbers` yields those of further copies.
        """
        self.config, self.program, self.device = own.config, whole.program, own.device
        self.lookahead, self.steps_share_processors = own.lookahead, own.steps_share_processors
        self._own, self._whole, self._leader = own, whole, leader
        self._number, self._numbers = number, count(1) if numbers is None else numbers
        self._sent = SentRows()
        self._end = weakref.finalize(self, leader.close) if number == 0 else None
        self.weights = ShardedWeights(own, whole, leader, number)
        self.cache = ShardedCache(own.cache, leader, number, is_shared=own.device.type == "cpu")

    @property
    def code(self) -> str:
        return self._own.code

    @property
    def failure(self) -> BaseException | None:
        return self._leader.failure

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of all tensors of steps that rank 0 has contributed to sums and exchanges so far."""
        return self._leader.links.data.tensor_bytes

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        """See `protocol.Executor.run`. Raises `EngineDead` for any failure: ranks may be in different places."""
        return self._leader.step(
            "run",
            self._number,
            lambda: [self._sent.write(rows), copies, fresh],
            lambda: self._own.run(rows, copies, fresh),
        )

    def recover(self) -> None:
        """Do nothing: a step ends, or the engine does. What rank 0 dropped alone, other ranks would still have."""

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        self._leader.ask("warm_up", self._number, [], lambda: self._own.warm_up(progress))

    def step_bytes(self, block_size: int) -> int:
        """Return the most bytes that any rank's largest step needs."""
        own = self._own.step_bytes
        return int(self._leader.gather("step_bytes", self._number, block_size, lambda: own(block_size)).max())

    def stage_adapter(self, adapter: Adapter) -> StagedAdapter:
        return StagedAdapter(adapter, self._own.stage_adapter(adapter_part(adapter, self._whole.shards[0])))

    def commit_adapter(self, number: int, staged: StagedAdapter) -> None:
        """Send each rank its part, and commit on all ranks, or on none if one fails."""

        def commit() -> None:
            for rank, part in enumerate(self._whole.shards[1:], 1):
                send_part(adapter_part(staged.whole, part), self._leader.links.commands, rank)
            self._own.commit_adapter(number, staged.own)

        try:
            self._leader.ask("commit_adapter", self._number, [(number, announced(staged.whole))], commit)
        except RuntimeError:  # another rank's
            if self.failure is None:
                self.drop_adapter(number)
            raise

    def drop_adapter(self, number: int) -> None:
        self._leader.ask("drop_adapter", self._number, [number], lambda: self._own.drop_adapter(number))

    def copy(self) -> ShardedExecutor:
        number = next(self._numbers)
        own = self._leader.ask("copy", self._number, [number], self._own.copy)
        return ShardedExecutor(own, self._whole, self._leader, number, self._numbers)

    def close(self) -> None:
        """End the other ranks, with all copies; for a copy, free its memory."""
        if self._end is not None:
            self._end()
        elif self.failure is None:
            self._leader.ask("forget", self._number, [], lambda: None)

    def forward(
        self, inputs: ForwardInput, cache: Any, kept: Sequence[int] | None = None, *, windows: bool = True
    ) -> Tensor:
        """Raise `ValueError`: the caller's cache would be that of one rank."""
        raise ValueError("tensor_parallel: forward is supported by undivided models only")


class ShardedCache:
    """The cache component: rank 0's and the other ranks'. Sizes in bytes are those of one rank."""

    def __init__(self, own: Cache, leader: Leader, number: int, *, is_shared: bool) -> None:
        """`is_shared`: the ranks divide one machine's memory."""
        self._own, self._leader, self._number, self._is_shared = own, leader, number, is_shared

    def dtype(self, wanted: KvDtype) -> torch.dtype:
        return self._own.dtype(wanted)

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        return self._own.block_bytes(block_size, dtype)

    def free_bytes(self, share: float) -> int:
        """Return the bytes that a cache may take on every rank."""
        found = self._leader.gather("free_bytes", self._number, share, lambda: self._own.free_bytes(share))
        return int(found.min()) // (self._leader.links.size if self._is_shared else 1)

    def allocate(self, size: CacheSize) -> None:
        self._ask("allocate", lambda: self._own.allocate(size), size)

    def make(self, size: CacheSize) -> Any:
        """Raise `ValueError`, as `ShardedExecutor.forward` does."""
        raise ValueError("tensor_parallel: a cache of its own is supported by undivided models only")

    def free(self) -> None:
        self._ask("free", self._own.free)

    def restore(self) -> None:
        self._ask("restore", self._own.restore)

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    def _ask(self, command: str, work: Callable[[], None], *arguments: Any) -> None:
        self._leader.ask(command, self._number, list(arguments), work)
