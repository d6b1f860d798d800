"""`WeightUpdate`: new weights and installation options. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.support.checks import check_fields, check_label, checked, number
from nano_inference.types import BadRequest, OnRunning, WeightLabel

NamedWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Hugging Face names with tensors or file ranges: a state dict, or an iterable of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights and installation options. Raises `BadRequest` naming an invalid field."""

    weights: NamedWeights | str | Path  # pairs, or a directory
    label: WeightLabel | None = None  # the trainer's name for them
    on_running: OnRunning = "keep"  # what happens to started requests: see `OnRunning`
    partial: bool = False  # tensors that are not given keep their values
    allow_nonfinite: bool = False  # accept NaN and infinity
    checksum: str | None = None  # expected `weights_checksum` of all weights
    hold: bool = False  # keep the gathered weights beside the current ones until `commit_update` installs them
    timeout: float | None = checked(None, number(0, 1e9))  # most seconds for gathering in a thread
    on_gathered: Callable[[], None] | None = None  # called by the gathering thread at its end, also after an error

    def __post_init__(self) -> None:
        check_weight_label(self.label)
        check_fields(self)
        if self.checksum is not None and not isinstance(self.checksum, str):
            raise BadRequest("checksum", f"must be a string, got {self.checksum!r}")


def check_weight_label(label: WeightLabel | None) -> None:
    """Raise `BadRequest` unless the label is an integer, a string or None."""
    if label is not None:
        check_label("version", label)
