"""Compiles the C sources with the machine's own compiler, once for each source, compiler and instruction set."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Isa = Literal["avx512", "avx2", "generic"]

ISAS: tuple[Isa, ...] = ("avx512", "avx2", "generic")
"""From the fastest to the one that every machine has."""

_TIMEOUT_S = 300
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""A product and a sum are rounded once only where the source says so."""
_FLAGS = ("-O3", "-std=gnu11", *_ARITHMETIC, "-fPIC", "-shared", "-pthread")
_NEEDED: Mapping[Isa, tuple[str, ...]] = MappingProxyType(
    {
        "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"),
        "avx2": ("avx2", "fma", "f16c"),
        "generic": (),
    }
)
"""What a CPU must have, as Linux names it and as the compiler's -m options do."""
_USEFUL: Mapping[Isa, Mapping[str, str]] = MappingProxyType(
    {
        "avx512": MappingProxyType({"avx512_vnni": "-mavx512vnni"}),
        "avx2": MappingProxyType({"avx_vnni": "-mavxvnni"}),
        "generic": MappingProxyType({}),
    }
)
"""What is used where it is there: the CPU's flag -> the compiler's option."""


class CannotCompile(Exception):
    """There is no compiler, or it failed; the message says why in one line."""


def cpu_flags() -> frozenset[str]:
    """Return what this machine's CPU can do, in Linux's names; nothing where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def best_isa(flags: frozenset[str]) -> Isa:
    """Return the fastest instruction set that a CPU with these flags has."""
    return next(isa for isa in ISAS if cpu_has(isa, flags))


def cpu_has(isa: Isa, flags: frozenset[str]) -> bool:
    """Whether a CPU with these flags has an instruction set."""
    return flags.issuperset(_NEEDED[isa])


def options(isa: Isa, flags: frozenset[str]) -> tuple[str, ...]:
    """Return the compiler's options for an instruction set on a CPU with these flags."""
    wide = ("-mprefer-vector-width=512",) if isa == "avx512" else ()
    needed = tuple(f"-m{name}" for name in _NEEDED[isa])
    return (*_FLAGS, *needed, *wide, *(option for flag, option in _USEFUL[isa].items() if flag in flags))


def find_compiler(environ: Mapping[str, str]) -> str:
    """Return the C compiler: $CC, else cc, gcc or clang. Raises `CannotCompile` when there is none."""
    named = environ.get("CC")
    for name in (named,) if named else ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    raise CannotCompile(f"no C compiler ({named or 'cc, gcc, clang'}) was found")


def compile_library(isa: Isa, cache: Path, environ: Mapping[str, str], extra: tuple[str, ...] = ()) -> Path:
    """Return the compiled library, made in `cache` (or, where that cannot be written, in a temporary folder) if absent.

    Raises `CannotCompile` when there is no compiler or it fails.
    """
    compiler = find_compiler(environ)
    flags = (*options(isa, cpu_flags()), *extra)
    name = f"kernels-{isa}-{_digest(compiler, flags)}.so"
    for folder in (cache / "kernels", None):
        try:
            return _compile_in(folder, name, compiler, flags)
        except OSError as error:
            reason = error
    raise CannotCompile(f"the kernels cannot be written: {reason}")


def _compile_in(folder: Path | None, name: str, compiler: str, flags: tuple[str, ...]) -> Path:
    """Compile into a folder of the user's alone; a finished library appears there whole or not at all."""
    folder = folder or Path(tempfile.mkdtemp(prefix="nano-inference-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / name
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        _call(compiler, [*flags, "-o", str(made), str(_sources() / "program.c"), "-lm"])
        made.replace(target)
    return target


def _call(compiler: str, arguments: list[str]) -> None:
    try:
        done = subprocess.run(
            [compiler, *arguments], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler} could not be run: {error}") from error
    if done.returncode:
        said = done.stderr.splitlines() or ["it gave no reason"]
        raise CannotCompile(f"{compiler} failed: {next((line for line in said if 'error' in line), said[0])}")


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    """Return what tells one build from another: sources, compiler and options, and the processor's architecture.

    A compiler is told by its file, so that it is run only when there is something to compile.
    """
    whole = hashlib.blake2b(digest_size=12)
    program = Path(compiler).resolve()
    stat = program.stat()
    for text in (str(program), str(stat.st_size), str(stat.st_mtime_ns), platform.machine(), *flags):
        whole.update(text.encode() + b"\0")
    for path in sorted(_sources().iterdir()):
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def _sources() -> Path:
    """Return the folder of the C sources; the package is never run from an archive."""
    return Path(os.fspath(files("nano_inference.kernels") / "c"))  # type: ignore[call-overload]
