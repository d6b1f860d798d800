"""Weights through files: a directory of safetensors that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from nano_inference.files import exists, is_present, path_of
from nano_inference.loader.pieces import FileRange
from nano_inference.loader.safetensors_file import SINGLE_NAME, open_weights
from nano_inference.types import WeightError

MARKER = "STABLE"
"""The file that says a directory is finished; prime-rl's name for it."""


def save_weights(named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], directory: str | Path) -> Path:
    """Write weights for `weights_in`: into a hidden sibling first, which then takes the name in one rename.

    A tensor that is there under two names (a tied head) is written once. Raises `WeightError` when the directory exists
    already: each version has its own.
    """
    target = path_of(directory, "directory")
    if exists(target):
        raise WeightError(f"{target}: exists already; give every version a directory of its own")
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        save_file(_plain(dict(named)), hidden / SINGLE_NAME)
        _sync_to_disk(hidden / SINGLE_NAME)
        (hidden / MARKER).touch()
        hidden.chmod(0o755)
        hidden.rename(target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return target


def _plain(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the format wants them: on the CPU, contiguous, none twice."""
    plain: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in named.items():
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if identity not in seen or not tensor.numel():
            plain[name] = tensor.detach().cpu().contiguous()
        seen.add(identity)
    return plain


def weights_in(directory: str | Path, marker: str | None = MARKER) -> Iterator[tuple[str, FileRange]]:
    """Yield the weights of a safetensors directory, sharded or not, one range of a file at a time.

    The directory must hold a file called `marker` (None asks for none): its writer creates it last, or renames the
    finished directory into place as `save_weights` does. Files that change while they are read are noticed. Raises
    `WeightError` or `ModelError` naming the file.
    """
    path = path_of(directory, "weights")
    if not path.is_dir():
        raise WeightError(f"{path}: no such directory")
    if marker is not None and not is_present(path / marker):
        raise WeightError(f"{path}: has no file {marker}, so it is not finished (marker=None reads it nevertheless)")
    before = _signature(path)
    yield from open_weights(path).items()
    if _signature(path) != before:
        raise WeightError(f"{path}: its files changed while they were read")


def _signature(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Say which weight files there are, and when each was last written."""
    stats = {file.name: file.stat() for file in directory.glob("*.safetensors")}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _sync_to_disk(path: Path) -> None:
    """Wait until a file's bytes are on the disk: a rename must not overtake them."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
