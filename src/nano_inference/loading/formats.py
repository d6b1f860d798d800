"""`ModelFormat`: recognises and opens model files of one format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from nano_inference.loading.opened import Checkpoint

FORMATS_GROUP = "nano_inference.formats"  # entry point group for formats of other packages


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormat:
    """A format of model files, as registered in the table of `loading.checkpoint.installed_formats`."""

    title: str  # name for a path of this format in messages, with an article: "a GGUF file"
    recognises: Callable[[Path], bool]
    """Returns True for a file or directory of this format. May raise `ModelError` if it is ambiguous or damaged."""
    open: Callable[[Path, Iterable[str]], Checkpoint]
    """Opens a path; the second argument is `EngineConfig.overrides`. Raises `ModelError` naming the file."""
    takes_overrides: bool = False  # True if `EngineConfig.overrides` may set constants that the files do not contain
