"""Resolution of weight directories named over HTTP: only those below `--weights-dir`, after following links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nano_inference.files import path_of
from nano_inference.loader.listing import weight_files
from nano_inference.server.errors import ApiError


def weights_root(weights_dir: str | None) -> Path | None:
    """Return the resolved `--weights-dir`. Raises `ValueError` if it is not a directory."""
    if weights_dir is None:
        return None
    root = path_of(weights_dir, "weights_dir").resolve()
    if not root.is_dir():
        raise ValueError(f"weights_dir is not a directory: {weights_dir}")
    return root


def place_of(root: Path | None, path: str, field: str) -> Path:
    """Return the resolved directory of a client's path, which is absolute or relative to `root`.

    Raises `ApiError` naming `field`: 403 for a path that leads outside `root`, 400 for one that is not a directory
    with weight files.
    """
    if root is None:
        text = f"{field}: this server does not load weights from files; start it with --weights-dir"
        raise ApiError(403, text, param=field)
    if "\0" in path or ".." in Path(path).parts:
        raise ApiError(400, f"{field}: a path must not contain .. or a zero byte", param=field)
    try:
        return _resolve(root, path, field)
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long, no permission
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise ApiError(400, f"{field}: the path cannot be followed{why}", param=field) from None


def _resolve(root: Path, path: str, field: str) -> Path:
    """Return the directory for `place_of`. Raises `ApiError`, and `OSError` or `RuntimeError` for a bad path."""
    place = (root / path).resolve()
    _require_below(root, place, field)
    if not place.is_dir():
        text = f"{field}: there is no directory of that name below --weights-dir, to which names are relative"
        raise ApiError(400, text, param=field)
    files = weight_files(place)
    if not files:
        raise ApiError(400, f"{field}: the directory has no safetensors files and no pytorch_model.bin", param=field)
    for file in files:
        _require_below(root, file.resolve(), field)
    return place


def relative_paths(root: Path | None) -> Callable[[str], str]:
    """Return a function that makes the paths in a message relative to `root`, so that clients do not see it."""

    def relative(message: str) -> str:
        if root is None or root == Path(root.anchor):
            return message
        return message.replace(f"{root}/", "").replace(f"{root}:", "--weights-dir:")

    return relative


def weights_below(root: Path, place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a directory's weights; read on the gathering thread. Links are checked again at the end.

    Raises `WeightError` and `ModelError` as `weights_in` does, `ValueError` for a file that now leads outside `root`.
    """
    from nano_inference.weights.directory import weights_in  # imports torch: not on the event loop

    yield from weights_in(place, marker=None)
    if not all(file.resolve().is_relative_to(root) for file in weight_files(place)):
        raise ValueError("a file was replaced by a link outside --weights-dir while it was read")


def _require_below(root: Path, place: Path, field: str) -> None:
    if not place.is_relative_to(root):
        raise ApiError(403, f"{field}: leads outside --weights-dir", param=field)
