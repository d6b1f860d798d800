"""Constants that a model's files do not contain and that its format infers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Constant(NamedTuple):
    """An inferred value."""

    value: object
    reason: str  # why it was chosen, in a few words


class Inferred(Protocol):
    """The values that a format inferred about a model, as text for the user."""

    @property
    def headline(self) -> str:
        """Return the recognised kind of model and the reason, in a few words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return unusual values, each with its reason."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return uncertain values, and how to override them."""

    @property
    def values(self) -> Mapping[str, Constant]:
        """Return every inferred constant, by its name in `EngineConfig.overrides`."""
