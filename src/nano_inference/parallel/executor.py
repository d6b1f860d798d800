"""`ShardedExecutor`: rank 0's executor of a model that is divided among ranks.

Every call is also executed by the other ranks (`follower.Follower`). Ranks draw the same tokens from the same numbers,
so one message starts a step, also one that samples several tokens.

Shapes: T tokens of a step, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from nano_inference.config import KvDtype
from nano_inference.core.step import BlockCopy, RowResult
from nano_inference.executors.batch import Rows
from nano_inference.executors.protocol import CacheSize, Executor
from nano_inference.executors.staging import Pace
from nano_inference.executors.step_input import ForwardInput
from nano_inference.models.config import ModelConfig
from nano_inference.parallel.leader import Leader
from nano_inference.parallel.messages import RowCoder
from nano_inference.parallel.staged import ShardedStaged, Whole

Result = TypeVar("Result")


class ShardedExecutor:
    """Owns rank 0's part and, with its copies, the links to the other ranks; satisfies `protocol.Executor`."""

    def __init__(
        self, own: Executor, whole: Whole, leader: Leader, number: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        """`own` computes rank 0's part.

        `number` is this executor's among the copies of one engine, and `numbers` yields those of further copies.
        """
        self.config: ModelConfig = own.config
        self.program = whole.program
        self.device = own.device
        self.lookahead = own.lookahead
        self.steps_share_processors = own.steps_share_processors
        self._own, self._whole, self._leader = own, whole, leader
        self._number, self._numbers = number, count(1) if numbers is None else numbers
        self._rows = RowCoder()
        self._end = weakref.finalize(self, leader.close) if number == 0 else None

    @property
    def code(self) -> str:
        return self._own.code

    @property
    def failure(self) -> BaseException | None:
        return self._leader.failure

    @property
    def num_ranks(self) -> int:
        return self._leader.links.size

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of all commands so far."""
        return self._leader.links.commands.bytes_sent

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of all tensors of steps that rank 0 has contributed to sums and exchanges so far."""
        return self._leader.links.data.tensor_bytes

    def _ask(self, command: str, work: Callable[[], Result], *arguments: Any) -> Result:
        """Return `work()` of this rank after the others have executed the command."""
        return self._leader.ask(command, self._number, list(arguments), work)

    def _numbers_of(self, command: str, argument: float) -> Tensor:
        """Return what each rank's executor returns for a method with one argument."""
        method, commands = getattr(self._own, command), self._leader.links.commands
        return self._ask(command, lambda: commands.gather(torch.tensor([method(argument)])), argument)

    # ---- steps ----

    def run(self, rows: Rows, copies: tuple[BlockCopy, ...], fresh: tuple[int, ...]) -> Mapping[int, RowResult]:
        """See `protocol.Executor.run`. Raises `EngineDead` for any failure: ranks may be in different places."""
        return self._leader.step(
            "run",
            self._number,
            lambda: [self._rows.written(rows), copies, fresh],
            lambda: self._own.run(rows, copies, fresh),
        )

    def recover(self) -> None:
        self._own.recover()

    def step_bytes(self, block_size: int) -> int:
        """Return the most bytes that any rank's largest step needs."""
        return int(self._numbers_of("step_bytes", block_size).max())

    def free_bytes(self, share: float) -> int:
        """Return the bytes that a cache may take on every rank."""
        least = int(self._numbers_of("free_bytes", share).min())
        return least // self.num_ranks if self.device.type == "cpu" else least

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Do nothing: nothing is compiled in advance."""

    # ---- cache ----

    def cache_dtype(self, wanted: KvDtype) -> torch.dtype:
        return self._own.cache_dtype(wanted)

    def block_bytes(self, block_size: int, dtype: KvDtype = "auto") -> int:
        """Return the bytes of one block on one rank."""
        return self._own.block_bytes(block_size, dtype)

    def new_cache(self, size: CacheSize) -> None:
        self._ask("new_cache", lambda: self._own.new_cache(size), asdict(size))

    def free_cache(self) -> None:
        self._ask("free_cache", self._own.free_cache)

    def restore_cache(self) -> None:
        self._ask("restore_cache", self._own.restore_cache)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of rank 0's keys and values."""
        return self._own.cache_bytes

    # ---- weights ----

    def stage(self, *, pace: Pace | None = None, check_finite: bool = False) -> ShardedStaged:
        with self._leader.updating() as group:
            group.broadcast("stage", self._number, {"check_finite": check_finite, "paced": pace is not None})
        own = self._own.stage(pace=pace, check_finite=check_finite)
        return ShardedStaged(own, self._whole, self._leader, self._number)

    def commit(self, staged: Any) -> None:
        self._ask("commit", lambda: self._own.commit(staged))

    def drop_spare(self) -> None:
        self._ask("drop_spare", self._own.drop_spare)

    def discard_weights(self) -> None:
        self._ask("discard_weights", self._own.discard_weights)

    def move_weights(self, device: torch.device) -> None:
        where = "here" if device == self.device else "away"
        self._ask("move_weights", lambda: self._own.move_weights(device), where)

    def weight_values(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole weight), put together from the ranks' parts."""
        commands = self._leader.links.commands
        for spec in self.program.weights:
            name = spec.name
            if names is None or name in names:
                ((_, own),) = self._own.weight_values((name,))
                if self._whole.is_cut(name):
                    own = self._ask("values", partial(self._whole.joined, name, own, commands), name)
                yield name, own

    def staged_values(self, staged: Any) -> Iterator[tuple[str, Tensor]]:
        own = dict(self._own.staged_values(staged))
        for spec in self.program.weights:
            value = own[spec.name]
            if self._whole.is_cut(spec.name):
                with self._leader.updating() as group:
                    group.broadcast("staged_values", self._number, spec.name)
                    value = self._whole.joined(spec.name, value, group)
            yield spec.name, value

    @property
    def weight_dtype(self) -> str:
        return self._own.weight_dtype

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of rank 0's weights."""
        return self._own.weight_bytes

    # ---- further views of the same model ----

    def copy(self) -> ShardedExecutor:
        number = next(self._numbers)
        own = self._ask("copy", self._own.copy, number)
        return ShardedExecutor(own, self._whole, self._leader, number, self._numbers)

    def close(self) -> None:
        """End the other ranks, with all copies; for a copy, free its memory."""
        if self._end is not None:
            self._end()
        elif self.failure is None:
            self._ask("forget", lambda: None)

    def forward(self, inputs: ForwardInput, cache: Any) -> Tensor:
        """Raise `ValueError`: the caller's cache would be that of one rank."""
        raise ValueError("tensor_parallel: forward is supported by undivided models only")
