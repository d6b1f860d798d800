"""Starts child processes: the only room that does, so that none runs code it finds in the current directory.

A child's current directory is named by its caller and is one that only this process writes to. Environment variables
that hold search paths lose their relative entries, which would be looked up in it; Python runs isolated (`-I`: no
current directory and no PYTHON* variables), and programs are named by absolute paths.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PYTHON: tuple[str, ...] = (sys.executable, "-I")
"""The start of a Python child's command."""
_SEARCH_PATHS = (
    *("PATH", "LD_LIBRARY_PATH", "LD_RUN_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONPATH"),
    *("CPATH", "C_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
)
"""Lists of directories; an empty entry means the current one."""
_SINGLE_PATHS = ("GCC_EXEC_PREFIX", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "TMPDIR", "DEPENDENCIES_OUTPUT")
_LISTS_OF_FILES = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a child: those given, without anything relative in those that say where to look."""
    out = dict(environ)
    for name in _SEARCH_PATHS:
        if name in out:
            kept = [entry for entry in out[name].split(os.pathsep) if Path(entry).is_absolute()]
            out[name] = os.pathsep.join(kept)
            if not kept:
                del out[name]  # an empty list would mean the current directory
    for name in _SINGLE_PATHS:
        if name in out and not Path(out[name]).is_absolute():
            del out[name]
    for name in _LISTS_OF_FILES:
        if name in out:
            entries = out[name].replace(":", " ").split()
            out[name] = ":".join(entry for entry in entries if Path(entry).is_absolute() or "/" not in entry)
    return out


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the absolute path of a program, None if there is none.

    A name is looked up in the absolute entries of PATH; one with a separator is what the user wrote, relative or not.
    """
    if Path(name).name != name:
        return shutil.which(str(Path(name).absolute()))
    return shutil.which(name, path=environment(environ).get("PATH", os.defpath))


def run(
    command: Sequence[str], *, cwd: Path, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it printed. Raises `OSError`, a `TimeoutError` after `timeout` seconds.

    `cwd` is a directory that only this process writes to.
    """
    _check(command, cwd)
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"still runs after {timeout:g} seconds") from None


def start(command: Sequence[str], *, cwd: Path, stderr: IO[str]) -> subprocess.Popen[str]:
    """Start a program whose output is read as it comes; a context manager that waits for its end. Raises `OSError`.

    `cwd` is a directory that only this process writes to. The environment is this process's.
    """
    _check(command, cwd)
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
    )


def start_worker(command: Sequence[str], *, cwd: Path) -> subprocess.Popen[bytes]:
    """Start a program that answers over its standard streams, unbuffered; its errors are dropped. Raises `OSError`.

    `cwd` is a directory that only this process, or only the system, writes to. A terminal's Ctrl-C does not reach it.
    """
    _check(command, cwd)
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


def _check(command: Sequence[str], cwd: Path) -> None:
    assert cwd.is_absolute() and (command[0] != sys.executable or tuple(command[:2]) == PYTHON)
    if not Path(command[0]).is_absolute():  # an embedded interpreter has no sys.executable
        raise FileNotFoundError(errno.ENOENT, "the path of a program must be absolute", command[0])
