"""What the bridge connects: an engine, and an observer that counts what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nano_inference.engine_thread import DrivenEngine
from nano_inference.server.metrics import SampleRecord
from nano_inference.server.model import ServedModel
from nano_inference.types import StepStats


class Observer(Protocol):
    """Counts for metrics; called on the event loop."""

    def step(self, stats: StepStats) -> None:
        """A step was run."""

    def halted(self, is_halted: bool) -> None:
        """Whether a trainer holds the engine after a step."""

    def first_token(self, seconds: float) -> None:
        """A sample's first token came so long after its request."""

    def token_gap(self, seconds: float, num_tokens: int = 1) -> None:
        """A sample's next tokens came so long after those before."""

    def finished(self, record: SampleRecord) -> None:
        """A sample ended."""

    def engine_died(self) -> None:
        """The engine failed."""

    def rejected(self, reason: str) -> None:
        """A request was not let in."""

    def clients(self, num_clients: int, largest_part: int, num_waiting: int) -> None:
        """So many clients hold places, the largest so many, and so many samples wait for their client's turn."""

    def responded(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered."""

    def render(self) -> bytes:
        """Return all counts as Prometheus text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that is loaded and can be served."""

    engine: DrivenEngine
    observer: Observer
    model: ServedModel
    step_tokens: int = 256
    """Most tokens that one step computes."""
