"""Fetch files from Hugging Face's hub into its cache, report progress, and verify checksums.

The hub's cache names large files by their SHA-256, so they can be verified at any time.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_inference.support.files import open_buffered
from nano_inference.types import ModelError

Progress = Callable[[int, int | None], None]
"""Callback receiving (bytes_done, bytes_total); the total is None if unknown."""

TIMEOUT_S = 10
_POLL_S = 0.2
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download(
    repo: str,
    revision: str | None,
    sizes: Mapping[str, int | None],
    progress: Progress | None,
    endpoint: str,
    cache: Path,
) -> Path:
    """Fetch the files of a repository and return the snapshot's directory; `sizes` maps names to bytes.

    The library resumes after a lost connection, and restarts a file that another process left incomplete. Raises
    `ModelError` for a wrong checksum, after deleting the files.
    """
    import huggingface_hub

    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    total = sum(size or 0 for size in sizes.values()) if all(sizes.values()) else None
    with report_growth(blobs, total, progress), _no_bars():
        path = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(sizes),
            etag_timeout=TIMEOUT_S,
            endpoint=endpoint,
            cache_dir=str(cache),
        )
    verify(Path(path), sizes)
    if progress is not None:
        size = sum((Path(path) / file).stat().st_size for file in sizes)
        progress(size, size)
    return Path(path)


@contextmanager
def report_growth(directory: Path, total: int | None, progress: Progress | None) -> Iterator[None]:
    """Report how much the files below a directory grow while the block runs, for downloads that report no progress."""
    before, done = bytes_in(directory), threading.Event()

    def watch() -> None:
        while progress is not None and not done.wait(_POLL_S):
            progress(min(max(0, bytes_in(directory) - before), total or 1 << 62), total)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disable the library's progress bars, which it draws even without a terminal."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def verify(snapshot: Path, names: Mapping[str, int | None]) -> None:
    """Compare files with their checksums; for a wrong one, delete the files and raise `ModelError`."""
    for name in names:
        known = sha256_of(snapshot / name)
        if known is None:
            continue
        blob = (snapshot / name).resolve()
        with open_buffered(blob) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != known:
            discard(snapshot, names)
            raise ModelError(f"{name}: sha256 is {found}, not {known}; the downloaded files were deleted")


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of a file in the hub's cache as published by the hub; None if it has none."""
    name = path.resolve().name
    return name if path.is_symlink() and _SHA256.fullmatch(name) else None


def discard(snapshot: Path, names: Mapping[str, int | None]) -> None:
    """Delete files of a snapshot with their blobs, and the directories that are then empty."""
    for name in names:
        blob = (snapshot / name).resolve()
        (snapshot / name).unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
    repo = snapshot.parents[1]
    if not bytes_in(repo / "blobs"):
        for path in sorted(repo.rglob("*"), reverse=True):
            with suppress(OSError):  # another download may have just started here
                path.rmdir() if path.is_dir() else path.unlink()
        with suppress(OSError):
            repo.rmdir()


def bytes_in(directory: Path) -> int:
    """Return the bytes of the files below a directory, ignoring files that vanish meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total
