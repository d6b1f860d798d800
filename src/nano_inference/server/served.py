"""What the bridge is between: an engine, and whoever counts what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nano_inference.door import MatcherFactory
from nano_inference.server.metrics import SampleRecord
from nano_inference.server.model import ServedModel
from nano_inference.types import SamplingParams, StepResult, StepStats, TokenProgram, TrainingSample


class ServedEngine(Protocol):
    """What the bridge needs of an engine; `InferenceEngine` is one."""

    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        salt: str = "",
        make_matcher: MatcherFactory | None = None,
        program: TokenProgram | None = None,
        claim: bool = False,
    ) -> int:
        """Queue a request and return its id."""

    def collect(self, request_id: int) -> list[TrainingSample]:
        """Forget a request; what has not ended is aborted."""

    def has_pending(self) -> bool:
        """Whether `tick` has anything to do."""

    def tick(self) -> StepResult:
        """Run one step."""

    def shutdown(self) -> None:
        """Let go of everything."""


class Observer(Protocol):
    """Whoever counts; called on the event loop."""

    def step(self, stats: StepStats) -> None:
        """A step was run."""

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

    def responded(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered."""

    def render(self) -> bytes:
        """Return all counts as Prometheus text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model that is loaded and can be served."""

    engine: ServedEngine
    observer: Observer
    model: ServedModel
