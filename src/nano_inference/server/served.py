"""What the bridge is between: an engine, and whoever counts what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nano_inference.engine_thread import DrivenEngine
from nano_inference.server.metrics import SampleRecord
from nano_inference.server.model import ServedModel
from nano_inference.types import (
    OnRunning,
    PauseMode,
    StepStats,
    WeightInfo,
    WeightLabel,
)

NamedWeights = Iterable[tuple[str, Any]]
"""Hugging Face names, and tensors or ranges of files: this room knows no torch."""


class ServedEngine(DrivenEngine, Protocol):
    """What the server's routes need of an engine besides being driven; `InferenceEngine` is one."""

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds it."""

    @property
    def is_pausing(self) -> bool:
        """Whether it will be paused when what has begun has ended."""

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` holds it."""

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with."""

    @property
    def is_on_cuda(self) -> bool:
        """Whether it computes on a GPU."""

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False, blocking: bool = True) -> None:
        """Stop running steps; with `blocking=False`, "wait" returns at once and `tick` pauses."""

    def cancel_pause(self) -> bool:
        """Call off a pause that still waits."""

    def resume(self) -> None:
        """Go on."""

    def sleep(self, *, discard_weights: bool = False) -> None:
        """Give memory back."""

    def wake(self) -> None:
        """Take it again."""

    def flush_cache(self) -> int:
        """Forget cached prefixes; return how many blocks are free by that."""

    def update_weights(
        self,
        weights: NamedWeights,
        *,
        on_running: OnRunning | None = None,
        version: WeightLabel | None = None,
        partial: bool = False,
        checksum: str | None = None,
        timeout: float | None = None,
        on_gathered: Callable[[], None] | None = None,
    ) -> int:
        """Gather new weights in a thread; `tick` installs them."""

    def finish_update(self, timeout: float | None = None) -> int:
        """Raise what the last update failed of."""

    def cancel_update(self) -> bool:
        """Forget the update under way."""

    def label_weights(self, label: WeightLabel, *, are_next: bool = False) -> None:
        """Name the weights in force, or those under way."""

    def expect_checksum(self, checksum: str) -> None:
        """Say what the digest of the update under way must be."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of all weights; from whatever thread."""

    def weight_info(self) -> WeightInfo:
        """Return the version in force, and where an update stands."""

    def weights_dtype(self) -> str:
        """Return the precision of the weights."""

    def weights_checksum(self) -> str:
        """Return the digest of the weights in force."""


class Observer(Protocol):
    """Whoever counts; called on the event loop."""

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
class Opened:
    """A model that is loaded and can be served."""

    engine: ServedEngine
    observer: Observer
    model: ServedModel
    step_tokens: int = 256
    """Most tokens that one step computes."""
