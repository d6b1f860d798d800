"""What lies in a model's directory, before any file of it is opened. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from nano_inference.types import ModelError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that can run code when they are unpickled; they never are."""

_NO_WEIGHTS = re.compile(r"(meta|optim|token).*")
"""Names of pickles beside a model that are not its weights."""


def file_names(directory: Path) -> list[str]:
    """Return what lies in a directory, sorted; `ModelError` when it cannot be listed."""
    try:
        return sorted(file.name for file in directory.iterdir())
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error


def pickle_note(directory: Path) -> str:
    """Return the end of a message that names pickled weights which lie there, empty when there are none."""
    names = [name for name in file_names(directory) if name.endswith(PICKLED) and not _NO_WEIGHTS.fullmatch(name)]
    if not names:
        return ""
    return f"; {names[0]} is a pickle, which can run code and is never read: convert it to safetensors"


def only_gguf(directory: Path) -> Path:
    """Return the one .gguf file of a directory without config.json; `ModelError` when there is none or a choice."""
    names = file_names(directory)
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) == 1:
        return directory / found[0]
    if found:
        raise ModelError(f"{directory}: holds {len(found)} .gguf files; name one of them: {', '.join(found[:5])}")
    if not names:
        raise ModelError(f"{directory}: the directory is empty")
    raise ModelError(f"{directory}: has no config.json and no .gguf file{pickle_note(directory)}")
