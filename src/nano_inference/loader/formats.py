"""`ModelFormat`: how model files of one format are recognised and opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nano_inference.loader.opened import Checkpoint

FORMATS_GROUP = "nano_inference.formats"
"""The group of entry points by which a package adds a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """One format of model files: a row of the table that `loader.checkpoint.installed_formats` returns."""

    title: str
    """What a path of this format is called in messages, with its article: "a GGUF file"."""
    recognises: Callable[[Path], bool]
    """True for a file or directory of this format. May raise `ModelError` for one that is ambiguous or damaged."""
    open: Callable[[Path, Iterable[str]], Checkpoint]
    """Open such a path; the second argument is `EngineConfig.overrides`. Raises `ModelError` naming the file."""
    takes_overrides: bool = False
    """True if the files leave constants open; the overrides of any other format are empty."""
