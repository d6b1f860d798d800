"""`WeightUpdate`: what new weights come with; and what `control` needs of the owner of the weights. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nano_inference.checks import check_bool, check_label, check_number
from nano_inference.types import ON_RUNNING, BadRequest, OnRunning, UpdateState, WeightLabel

NamedWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Hugging Face names and tensors or ranges of files: `weights.staging.NamedWeights`, without torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """What an update may be. Raises `ValueError` naming the field when a value makes no sense."""

    partial: bool = False
    """Tensors that are not named keep their values."""
    allow_nonfinite: bool = False
    """NaN and infinity are let in."""
    checksum: str | None = None
    """What `weights_checksum` must give for the whole."""

    def __post_init__(self) -> None:
        check_bool("partial", self.partial)
        check_bool("allow_nonfinite", self.allow_nonfinite)
        if self.checksum is not None and not isinstance(self.checksum, str):
            raise ValueError(f"checksum must be a string, got {self.checksum!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights, and how they are to be installed. Raises `BadRequest` naming the field that makes no sense."""

    weights: NamedWeights
    rules: UpdateRules = field(default_factory=UpdateRules)
    label: WeightLabel | None = None
    """The trainer's own name for them."""
    on_running: OnRunning = "keep"
    """What happens to requests that have begun."""
    timeout: float | None = None
    """Seconds after which gathering in a thread is given up."""
    on_gathered: Callable[[], None] | None = None
    """Called by the thread that gathers at its end, however it ended."""

    def __post_init__(self) -> None:
        if self.on_running not in ON_RUNNING:
            raise BadRequest(f"on_running must be one of {', '.join(ON_RUNNING)}, got {self.on_running!r}")
        check_weight_label(self.label)
        if self.timeout is not None:
            try:
                check_number("timeout", self.timeout, 0, 1e9)
            except ValueError as error:
                raise BadRequest(str(error)) from None


class Weights(Protocol):
    """What control needs of the owner of the weights; `weights.sync.WeightSyncManager` is one."""

    version: int
    label: WeightLabel | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def state(self) -> UpdateState:
        """Where the update stands."""

    @property
    def has_weights(self) -> bool:
        """Whether there are weights to compute with."""

    @property
    def dtype(self) -> str:
        """The precision that the weights are kept in."""

    def checksum(self) -> str:
        """Return the digest of the weights in force."""

    def stage(self, named: NamedWeights, *, rules: UpdateRules, label: WeightLabel | None) -> None:
        """Gather in this thread."""

    def start_sync(
        self,
        named: NamedWeights,
        *,
        rules: UpdateRules,
        label: WeightLabel | None,
        timeout: float | None,
        on_gathered: Callable[[], None] | None,
    ) -> None:
        """Begin to gather in a thread."""

    def wait(self, timeout: float | None = None) -> UpdateState:
        """Wait until the gathering has ended."""

    def maybe_finish_sync(self) -> bool:
        """Install what is staged."""

    def cancel(self, wait: float = 0.0) -> bool:
        """Forget an update that is not installed yet."""

    def label_next(self, label: WeightLabel) -> bool:
        """Name the weights of the update under way."""

    def expect_next(self, checksum: str) -> bool:
        """Say what the digest of the update under way must be."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_step(self) -> None:
        """A step has ended."""

    def sleep(self, *, discard: bool) -> None:
        """Give memory back."""

    def wake(self) -> None:
        """Take it again."""

    def recover(self) -> None:
        """Complete what an interruption left half done."""


def check_weight_label(label: WeightLabel | None) -> None:
    """Raise `BadRequest` for what cannot name weights."""
    if label is not None:
        try:
            check_label("version", label)
        except ValueError as error:
            raise BadRequest(str(error)) from None
