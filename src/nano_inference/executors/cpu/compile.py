"""Compiles the C sources with the machine's compiler, once per source version, compiler and instruction set.

A cached library is loaded as code, so only this user may have write access to its directory, and its contents are
verified.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Literal

from nano_inference.support.files import digest_of, move_into, open_regular, untrusted_part, why_untrusted_file
from nano_inference.support.processes import find_program, run

Isa = Literal["avx512", "avx2", "generic"]

ISAS: tuple[Isa, ...] = ("avx512", "avx2", "generic")  # fastest first; every machine supports the last

_TIMEOUT_S = 300
_log = logging.getLogger("nano_inference")
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Fused multiply-add only where the source calls it."""
_FLAGS = ("-O3", "-std=gnu11", *_ARITHMETIC, "-fPIC", "-shared", "-pthread")
_NEEDED: Mapping[Isa, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "generic": (),
}
"""Required CPU flags; the names of Linux and of the compiler's -m options agree."""
_USEFUL: Mapping[Isa, Mapping[str, str]] = {
    "avx512": {"avx512_vnni": "-mavx512vnni"},
    "avx2": {"avx_vnni": "-mavxvnni"},
    "generic": {},
}
"""Optional CPU flags and their compiler options."""


class CannotCompile(Exception):
    """There is no compiler, or it failed; the message gives the reason in one line."""


class CannotKeep(CannotCompile):
    """The cache cannot be written, or other users could write to it."""


def cpu_flags() -> frozenset[str]:
    """Return this machine's CPU flags from /proc/cpuinfo; empty if it cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def best_isa(flags: frozenset[str]) -> Isa:
    """Return the fastest instruction set that a CPU with these flags supports."""
    return next(isa for isa in ISAS if cpu_has(isa, flags))


def cpu_has(isa: Isa, flags: frozenset[str]) -> bool:
    """Return True if a CPU with these flags supports an instruction set."""
    return flags.issuperset(_NEEDED[isa])


def options(isa: Isa, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the compiler options for an instruction set on a CPU with these flags."""
    wide = ("-mprefer-vector-width=512",) if isa == "avx512" else ()
    needed = tuple(f"-m{name}" for name in _NEEDED[isa])
    return (*_FLAGS, *needed, *wide, *(option for flag, option in _USEFUL[isa].items() if flag in flags))


def find_compiler(environ: Mapping[str, str]) -> str:
    """Return the absolute path of $CC, else of cc, gcc or clang. Raises `CannotCompile` if none is found."""
    named = environ.get("CC")
    for name in (named,) if named else ("cc", "gcc", "clang"):
        found = find_program(name, environ)
        if found:
            return found
    how = "xcode-select --install" if sys.platform == "darwin" else "apt install gcc, or your system's package of gcc"
    raise CannotCompile(f"no C compiler ({named or 'cc, gcc, clang'}) was found; install one ({how}) or name one in CC")


def compile_library(isa: Isa, cache: Path, environ: Mapping[str, str], extra: tuple[str, ...] = ()) -> Path:
    """Return the path of the library in `cache`; compile it if it is absent or damaged.

    The file name ends in the SHA-256 of the contents, which is verified. Raises `CannotKeep` if the cache cannot be
    written or other users could write to it, `CannotCompile` if there is no compiler or it fails.
    """
    compiler = find_compiler(environ)
    flags = (*options(isa, cpu_flags()), *extra)
    folder = cache.absolute() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = untrusted_part(folder)
        if reason is not None:
            raise CannotKeep(f"{folder} is not used for compiled code: {reason}")
        stem = f"kernels-{isa}-{_digest(compiler, flags)}"
        return _find_whole(folder, stem) or _compile_in(folder, stem, compiler, flags, environ)
    except OSError as error:
        raise CannotKeep(f"{folder} cannot hold compiled code: {error.strerror or error}") from error


@contextmanager
def compiled_library(isa: Isa, cache: Path, environ: Mapping[str, str], extra: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the path of a library from the cache, or of a temporary one if the cache is not usable.

    A temporary library is deleted afterwards; a loaded one stays usable. Raises `CannotCompile`.
    """
    try:
        kept = compile_library(isa, cache, environ, extra)
    except CannotKeep as error:
        _log.warning("the kernels are compiled at each start: %s", error)
    else:
        yield kept
        return
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nano-inference-"))).absolute()
            compiler = find_compiler(environ)
            made = _compile_in(folder, f"kernels-{isa}", compiler, (*options(isa, cpu_flags()), *extra), environ)
        except OSError as error:
            raise CannotCompile(f"the kernels cannot be written: {error}") from error
        yield made


def _find_whole(folder: Path, stem: str) -> Path | None:
    """Return a library whose contents match the digest in its name; delete damaged ones."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        with open_regular(path) as file:
            reason = why_untrusted_file(os.fstat(file.fileno()))
            if reason is None and digest_of(file) != path.stem.removeprefix(f"{stem}-"):
                reason = "is damaged"
        if reason is None:
            return path
        _log.warning("%s %s; the kernels are compiled again", path, reason)
        path.unlink(missing_ok=True)
    return None


def _compile_in(folder: Path, stem: str, compiler: str, flags: tuple[str, ...], environ: Mapping[str, str]) -> Path:
    """Compile into a folder that only this user can write to; the library appears there atomically.

    The compiler runs in an empty directory, so that relative paths in its options resolve to nothing.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryDirectory(dir=folder) as empty:
        made = Path(scratch) / "library"
        arguments = [*flags, "-o", str(made), str(sources() / "program.c"), "-lm"]
        try:
            done = run([compiler, *arguments], cwd=Path(empty), environ=environ, timeout=_TIMEOUT_S)
        except OSError as error:
            raise CannotCompile(f"{compiler} could not be run: {error}") from error
        if done.returncode:
            said = done.stderr.splitlines() or ["it gave no reason"]
            raise CannotCompile(f"{compiler} failed: {next((line for line in said if 'error' in line), said[0])}")
        with open_regular(made) as file:
            digest = digest_of(file)
            if not file.tell():
                raise CannotCompile(f"{compiler} made an empty file")
        made.chmod(0o700)
        target = folder / f"{stem}-{digest}.so"
        move_into(made, target)
    return target


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """Return a digest of everything that determines a build: sources, compiler, options and architecture.

    The compiler is identified by its file's path, size and time, so that it need not be run.
    """
    whole = hashlib.blake2b(digest_size=12)
    program = Path(compiler).resolve()
    stat = program.stat()
    for text in (str(program), str(stat.st_size), str(stat.st_mtime_ns), platform.machine(), *flags):
        whole.update(text.encode() + b"\0")
    for path in sorted(sources().iterdir()):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def sources() -> Path:
    """Return the folder of the C sources; the package is never imported from an archive."""
    return Path(os.fspath(files("nano_inference.executors.cpu") / "c"))  # type: ignore[call-overload]
