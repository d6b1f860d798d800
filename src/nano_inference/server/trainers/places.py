"""Directories below `--weights-dir`, from which trainers may have weights installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nano_inference.loading.listing import weight_files
from nano_inference.server.errors import ApiError
from nano_inference.server.trainers.groups import in_thread
from nano_inference.support.files import path_of

T = TypeVar("T")
Stamps = tuple[tuple[str, int, int], ...]
_FILE_SYSTEM_TIMEOUT_S = 10.0  # limit for resolving a path, which may be on a network file system


def weights_root(weights_dir: str | None) -> Path | None:
    """Return the resolved `--weights-dir`. Raises `ValueError` if it is not a directory."""
    if weights_dir is None:
        return None
    root = path_of(weights_dir, "weights_dir").resolve()
    if not root.is_dir():
        raise ValueError(f"weights_dir is not a directory: {weights_dir}")
    return root


async def weights_at(root: Path | None, path: str, field: str) -> Iterator[tuple[str, Any]]:
    """Return the weights of a client's path. Raises `ApiError` as `seen_at` does."""
    place = await seen_at(root, path, field, lambda place: place)
    assert root is not None, "place_of raises without a root"
    return weights_below(root, place)


async def adapter_at(root: Path | None, path: str, field: str) -> Path:
    """Return the directory of an adapter at a client's path. Raises `ApiError` as `seen_at` does."""
    return await seen_at(root, path, field, lambda place: place)


async def stamps_at(root: Path | None, path: str, field: str) -> Stamps:
    """Return name, size and time of change of the weight files at a client's path. Raises as `seen_at` does."""

    def stamps(place: Path) -> Stamps:
        found = ((file.name, file.stat()) for file in weight_files(place))
        return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))

    return await seen_at(root, path, field, stamps)


async def seen_at(root: Path | None, path: str, field: str, look: Callable[[Path], T]) -> T:
    """Return what `look` returns for the directory of a client's path, in a thread.

    Raises `ApiError` as `place_of` does, and 503 if the file system does not respond.
    """
    looking = in_thread(lambda: look(place_of(root, path, field)), lambda _: None, "weight-place")
    try:
        async with asyncio.timeout(_FILE_SYSTEM_TIMEOUT_S):  # Python 3.11's wait_for can lose a cancellation
            return await looking
    except TimeoutError:
        text = f"{field}: the file system did not answer within {_FILE_SYSTEM_TIMEOUT_S:g} seconds"
        raise ApiError(503, text, param=field, code="no_answer") from None


def place_of(root: Path | None, path: str, field: str) -> Path:
    """Return the resolved directory of a client's path, which is absolute or relative to `root`.

    Raises `ApiError` naming `field`: 403 for a path that leads outside `root`, 400 for one that is not a directory
    with weight files.
    """

    def refused(text: str, status: int = 400) -> ApiError:
        return ApiError(status, f"{field}: {text}", param=field)

    if root is None:
        raise refused("this server does not load weights from files; start it with --weights-dir", 403)
    if "\0" in path or ".." in Path(path).parts:
        raise refused("a path must not contain .. or a zero byte")
    try:
        place = (root / path).resolve()
        if not place.is_relative_to(root):
            raise refused("leads outside --weights-dir", 403)
        if not place.is_dir():
            raise refused("there is no directory of that name below --weights-dir, to which names are relative")
        if not (files := weight_files(place)):
            raise refused("the directory has no safetensors files and no pytorch_model.bin")
        if not all(file.resolve().is_relative_to(root) for file in (*files, *place.glob("*.json"))):
            raise refused("leads outside --weights-dir", 403)
        return place
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long, no permission
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise refused(f"the path cannot be followed{why}") from None


def relative_to(root: Path | None, message: str) -> str:
    """Return a message whose paths are relative to `root`, which clients must not see."""
    if root is None or root == Path(root.anchor):
        return message
    return message.replace(f"{root}/", "").replace(f"{root}:", "--weights-dir:")


def weights_below(root: Path, place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a directory's weights; read on the gathering thread. Links are checked again at the end.

    Raises `WeightError` and `ModelError` as `weights_in` does, `ValueError` for a file that now leads outside `root`.
    """
    from nano_inference.weights.directory import weights_in  # imports torch: not on the event loop

    yield from weights_in(place, marker=None)
    if not all(file.resolve().is_relative_to(root) for file in weight_files(place)):
        raise ValueError("a file was replaced by a link outside --weights-dir while it was read")
