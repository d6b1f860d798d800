"""`Launcher`: starts windows, also before the one before is committed, and counts what ends the overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nano_inference.core.core import Core, PlannedStep
from nano_inference.core.step import Launch, RowResult

Collect = Callable[[], Mapping[int, RowResult]]


class Flight(NamedTuple):
    """A window that was launched before the one before it was committed."""

    step: PlannedStep
    collect: Collect


class Launcher:
    """Owns the counts; `launch` is the runner's, or None if it cannot start steps without waiting for them."""

    def __init__(self, launch: Launch | None) -> None:
        self._launch = launch
        self.counts: Counter[str] = Counter()

    def start(self, step: PlannedStep) -> Collect | None:
        """Start a step; None if the runner must run it."""
        if self._launch is None or not step.rows:
            return None
        collect = self._launch(step.rows, step.copies, step.fresh, is_next=False)
        if collect is None:
            self.counts["pass"] += 1
        return collect

    def plan_next(self, core: Core, step: PlannedStep, *, may_overlap: bool) -> PlannedStep | None:
        """Plan the window after one that runs, unless something must happen between them."""
        found = core.plan_ahead(step) if may_overlap else "update"
        if isinstance(found, str):
            self.counts[found] += 1
            return None
        return found

    def start_next(self, ahead: PlannedStep | None) -> Flight | None:
        """Start a planned window behind the one that runs; None if there is none, or no memory for it."""
        if ahead is None or self._launch is None:
            return None
        collect = self._launch(ahead.rows, (), ahead.fresh, is_next=True)
        self.counts["memory" if collect is None else "ahead"] += 1
        return None if collect is None else Flight(ahead, collect)
