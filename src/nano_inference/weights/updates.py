"""`WeightUpdate`: new weights and installation options. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_inference.support.checks import check_bool, check_fields, check_label, checked, number
from nano_inference.types import BadRequest, OnRunning, WeightLabel

NamedWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Hugging Face names with tensors or file ranges; `weights.staging.NamedWeights` without torch types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """Checks applied to new weights. Raises `ValueError` naming an invalid field."""

    partial: bool = False  # tensors that are not given keep their values
    allow_nonfinite: bool = False  # accept NaN and infinity
    checksum: str | None = None  # expected `weights_checksum`

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checksum is not None and not isinstance(self.checksum, str):
            raise BadRequest("checksum", f"must be a string, got {self.checksum!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights and installation options. Raises `BadRequest` naming an invalid field."""

    weights: NamedWeights | str | Path  # pairs, or a directory
    rules: UpdateRules = field(default_factory=UpdateRules)
    label: WeightLabel | None = None  # the trainer's name for them
    on_running: OnRunning = "keep"  # what happens to started requests: see `OnRunning`
    hold: bool = False  # keep the gathered weights beside the current ones until `commit_update` installs them
    timeout: float | None = checked(None, number(0, 1e9))  # most seconds for gathering in a thread
    on_gathered: Callable[[], None] | None = None  # called by the gathering thread at its end, also after an error

    def __post_init__(self) -> None:
        check_weight_label(self.label)
        check_fields(self)


def update_of(
    weights: NamedWeights | str | Path,
    *,
    blocking: bool = False,
    on_running: OnRunning | None,
    version: WeightLabel | None,
    partial: bool,
    allow_nonfinite: bool,
    checksum: str | None,
    timeout: float | None,
    on_gathered: Callable[[], None] | None = None,
    hold: bool = False,
) -> WeightUpdate:
    """Return the record of `InferenceEngine.update_weights`'s arguments. Raises `BadRequest`."""
    check_bool("blocking", blocking)
    check_bool("hold", hold)
    rules = UpdateRules(partial=partial, allow_nonfinite=allow_nonfinite, checksum=checksum)
    return WeightUpdate(
        weights=weights,
        rules=rules,
        label=version,
        on_running=("recompute" if blocking else "keep") if on_running is None else on_running,
        hold=hold,
        timeout=timeout,
        on_gathered=on_gathered,
    )


def check_weight_label(label: WeightLabel | None) -> None:
    """Raise `BadRequest` unless the label is an integer, a string or None."""
    if label is not None:
        check_label("version", label)
