"""Typed, range-checked values of a file, whose errors name file and field; constants that a format infers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from nano_inference.support.files import read_json_object
from nano_inference.support.files import shown as shown
from nano_inference.types import ModelError

T = TypeVar("T")
MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """Values of one file. The getters raise `ModelError`; `default` replaces an absent or null value."""

    origin: str  # the file, for messages
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """Return the unchecked value, or None."""
        return self.values.get(name)

    def bad(self, name: str, wanted: str) -> ModelError:
        """Return the error that `name` must be `wanted`."""
        return ModelError(f"{self.origin}: {name} must be {wanted}, got {shown(self.get(name))}")

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        """Return an integer in [low, high]; the field is required unless there is a default."""
        return self._required(name, self.optional_integer(name, low=low, high=high), default)

    def optional_integer(self, name: str, *, low: int = 1, high: int = MAX_INT) -> int | None:
        """Return an integer in [low, high], or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """Return a finite number in (low, high]; the field is required unless there is a default."""
        return self._required(name, self.optional_number(name, low=low, high=high), default)

    def _required(self, name: str, found: T | None, default: T | None) -> T:
        """Return the value that was found, else the default. Raises `ModelError` without both."""
        value = default if found is None else found
        if value is None:
            raise ModelError(f"{self.origin}: {name} is missing")
        return value

    def optional_number(self, name: str, *, low: float = 0.0, high: float = 1e12) -> float | None:
        """Return a finite number in (low, high], or None."""
        value = self.get(name)
        if value is None:
            return None
        # Python compares integers with floats exactly, so the range check makes the conversion safe.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.bad(name, f"a number in ({low:g}, {high:g}]")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        return self._required(name, self._of(name, bool, "true or false"), default)

    def text(self, name: str, default: str) -> str:
        return self._required(name, self._of(name, str, "a string"), default)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object; empty if the field is absent."""
        return self._of(name, dict, "an object") or {}

    def sequence(self, name: str) -> Sequence[Any] | None:
        """Return a list, or None."""
        return self._of(name, (list, tuple), "a list")

    def _of(self, name: str, kinds: type[T] | tuple[type[T], ...], wanted: str) -> T | None:
        """Return a value of a kind, or None."""
        value = self.get(name)
        if value is not None and not isinstance(value, kinds):
            raise self.bad(name, wanted)
        return value

    def within(self, name: str) -> Fields:
        """Return the fields of the object `name`."""
        return Fields(f"{self.origin}: {name}", self.mapping(name))


def read_json(path: Path) -> Fields:
    """Return the JSON object in a file of at most 64 MiB. Raises `ModelError` if it cannot be read or parsed."""
    return Fields(str(path), read_json_object(path))


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
