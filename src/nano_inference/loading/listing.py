"""Lists a model's directory without opening files. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from nano_inference.types import ModelError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of pickle files, which can run code: no model is loaded from them."""

_NO_WEIGHTS = re.compile(r"(meta|optim|token).*")  # pickles in a model's directory that are not its weights


def file_names(directory: Path) -> list[str]:
    """Return the names in a directory, sorted. Raises `ModelError` if it cannot be listed."""
    try:
        return sorted(file.name for file in directory.iterdir())
    except OSError as error:
        raise ModelError(f"{directory}: cannot be read: {error.strerror}") from error


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a directory that a weight update may read."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
    return [file for pattern in patterns for file in directory.glob(pattern)]


def pickle_note(directory: Path) -> str:
    """Return a note on pickled weights in a directory, to append to an error message; empty if there are none."""
    names = [name for name in file_names(directory) if name.endswith(PICKLED) and not _NO_WEIGHTS.fullmatch(name)]
    if not names:
        return ""
    return f"; {names[0]} is a pickle, which can run code and is never read: convert it to safetensors"


def only_gguf(directory: Path) -> Path:
    """Return a directory's only .gguf file. Raises `ModelError` if there is none or more than one."""
    names = file_names(directory)
    found = [name for name in names if name.endswith(".gguf")]
    if len(found) == 1:
        return directory / found[0]
    if found:
        raise ModelError(f"{directory}: holds {len(found)} .gguf files; name one of them: {', '.join(found[:5])}")
    if not names:
        raise ModelError(f"{directory}: the directory is empty")
    raise ModelError(f"{directory}: has no config.json and no .gguf file{pickle_note(directory)}")
