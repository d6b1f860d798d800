"""`WeightUpdate` and `AdapterLoad`: new weights and installation options. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_inference.support.checks import check_fields, check_label, check_text, checked, number
from nano_inference.types import BadRequest, OnAdapter, OnRunning, WeightLabel

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """A LoRA adapter to load, and what happens to requests that use its name. Raises `BadRequest` naming a field."""

    name: str
    source: NamedWeights | str | Path  # PEFT's names with tensors, or its directory
    config: Mapping[str, Any] | None = None  # PEFT's configuration, with tensors
    version: WeightLabel | None = None  # the trainer's name for it; by default the number of loads so far
    on_running: OnAdapter = "keep"  # what happens to started requests

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_weight_label(self.version)
        check_fields(self)
        is_directory = isinstance(self.source, str | Path)
        if self.config is not None and is_directory:
            raise BadRequest("config", "must be left out with a directory, which has an adapter_config.json")
        if not is_directory and not isinstance(self.config, Mapping):
            raise BadRequest("config", f"must be PEFT's configuration as a mapping, with tensors, got {self.config!r}")


def check_weight_label(label: WeightLabel | None) -> None:
    """Raise `BadRequest` unless the label is an integer, a string or None."""
    if label is not None:
        check_label("version", label)
