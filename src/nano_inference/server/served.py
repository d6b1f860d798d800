"""`LoadedModel`: an engine with its metrics observer and served model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nano_inference.engine_thread import DrivenEngine
from nano_inference.server.metrics import SampleRecord
from nano_inference.server.model import ServedModel
from nano_inference.types import StepStats


class Observer(Protocol):
    """Records metrics; called on the event loop. See `metrics.Metrics`."""

    def step(self, stats: StepStats) -> None:
        """Record a step."""

    def halted(self, is_halted: bool) -> None:
        """Record whether the engine is paused, asleep or without weights."""

    def first_token(self, seconds: float) -> None:
        """Record the seconds from a sample's arrival to its first token."""

    def token_gap(self, seconds: float, num_tokens: int = 1) -> None:
        """Record the seconds between a sample's deltas; the later one has `num_tokens`."""

    def finished(self, record: SampleRecord) -> None:
        """Record an ended sample."""

    def engine_died(self) -> None:
        """Record a failure of the engine."""

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted."""

    def clients(self, num_clients: int, largest_part: int, num_waiting: int) -> None:
        """Record the clients, the largest client's samples, and the samples not dispatched yet."""

    def responded(self, method: str, route: str, status: int, seconds: float) -> None:
        """Record an HTTP response."""

    def render(self) -> bytes:
        """Return all series as Prometheus text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model, ready to be served."""

    engine: DrivenEngine
    observer: Observer
    model: ServedModel
    step_tokens: int = 256
    """Maximum tokens of one step."""
