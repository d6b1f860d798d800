"""`Runner`: what the core needs of the thing that computes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nano_inference.types import EngineDead, RowResult, ScheduledBatch


class Runner(Protocol):
    """A step in, drawn tokens out; every `executors.Executor` is one."""

    def run(self, batch: ScheduledBatch) -> Mapping[int, RowResult]:
        """Compute the rows' K/V and draw what they ask for; a result for each row's id."""

    def free_cache(self) -> None:
        """Give the memory of the KV cache back."""

    def restore_cache(self) -> None:
        """Take it again, empty."""

    def recover(self) -> None:
        """Undo what an interrupted `run` left behind in this thread. Can be interrupted and called again."""


class ClosedRunner:
    """The runner of an engine that was shut down, after it let go of its model."""

    def run(self, batch: ScheduledBatch) -> Mapping[int, RowResult]:
        """Refuse."""
        raise EngineDead("the engine was shut down")

    def free_cache(self) -> None:
        """There is none."""

    def restore_cache(self) -> None:
        """There is none."""

    def recover(self) -> None:
        """There is nothing to undo."""
