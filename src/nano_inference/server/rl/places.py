"""Which directories HTTP may name: those below one that the operator chose, wherever links lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nano_inference.files import path_of
from nano_inference.server.errors import ApiError


def weights_root(weights_dir: str | None) -> Path | None:
    """Return the directory below which weights may be named. Raises `ValueError` when there is none of that name."""
    if weights_dir is None:
        return None
    root = path_of(weights_dir, "weights_dir").resolve()
    if not root.is_dir():
        raise ValueError(f"weights_dir is not a directory: {weights_dir}")
    return root


def place_of(root: Path | None, asked: str, field: str) -> Path:
    """Return the directory that a client means, absolute or relative to the root, links resolved.

    Raises `ApiError` naming `field`: 403 for what does not lie below the root, 400 for what is no directory of
    safetensors.
    """
    if root is None:
        raise ApiError(403, f"{field}: this server takes no weights from files: it needs --weights-dir", param=field)
    if "\0" in asked or ".." in Path(asked).parts:
        raise ApiError(400, f"{field}: a path must not hold .. or a zero byte", param=field)
    try:
        return _followed(root, asked, field)
    except (OSError, RuntimeError) as error:  # a loop of links, a name too long, a directory closed to us
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise ApiError(400, f"{field}: the path cannot be followed{why}", param=field) from None


def _followed(root: Path, asked: str, field: str) -> Path:
    """Return what a path leads to, for `place_of`. Raises `OSError` and `RuntimeError` when it leads nowhere."""
    place = (root / asked).resolve()
    _require_below(root, place, field)
    if not place.is_dir():
        text = f"{field}: there is no directory of that name below --weights-dir, to which names are relative"
        raise ApiError(400, text, param=field)
    files = _files(place)
    if not files:
        raise ApiError(400, f"{field}: the directory holds no safetensors", param=field)
    for file in files:
        _require_below(root, file.resolve(), field)
    return place


def shown_below(root: Path | None) -> Callable[[str], str]:
    """Return what makes the paths in a message relative to the root: clients know no others, and shall not."""

    def shown(message: str) -> str:
        if root is None or root == Path(root.anchor):
            return message
        return message.replace(f"{root}/", "").replace(f"{root}:", "--weights-dir:")

    return shown


def weights_below(root: Path, place: Path) -> Iterator[tuple[str, Any]]:
    """Yield a directory's weights, for the thread that gathers them; its files must lie below the root until the end.

    Raises `WeightError` and `ModelError` as `weights_in` does, `ValueError` for a file that leads away.
    """
    from nano_inference.weights.directory import weights_in  # torch, which the event loop need not wait for

    yield from weights_in(place, marker=None)
    if not all(file.resolve().is_relative_to(root) for file in _files(place)):
        raise ValueError("a file was replaced by a link that leads away while it was read")


def _files(place: Path) -> list[Path]:
    """Return the weight files, and the index that names them."""
    return [*place.glob("*.safetensors"), *place.glob("*.safetensors.index.json")]


def _require_below(root: Path, place: Path, field: str) -> None:
    if not place.is_relative_to(root):
        raise ApiError(403, f"{field}: leads away from --weights-dir", param=field)
