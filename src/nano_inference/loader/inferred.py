"""What the files of a model leave open and how it was inferred. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Constant(NamedTuple):
    """A value that the files of a model leave open."""

    value: object
    reason: str
    """Why it has this value, in a few words."""


class Inferred(Protocol):
    """What a format had to infer about a model, in lines for its user. Its implementation belongs to the format."""

    @property
    def headline(self) -> str:
        """What the model was taken for and why, in a few words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from the usual, each with its reason."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may be wrong, and how to set it by hand."""

    @property
    def values(self) -> Mapping[str, Constant]:
        """Every constant that the files leave open, by its name among the overrides."""
