"""Start child processes so that none runs code from the current directory; only this module starts processes.

The caller chooses the child's current directory, to which only this process writes. Relative entries are removed from
environment variables with search paths. Python runs isolated (`-I`: no current directory, no PYTHON* variables), and
programs are given by absolute paths.
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

PYTHON: tuple[str, ...] = (sys.executable, "-I")  # the first arguments of a Python child's command
_SEARCH_PATHS = (
    *("PATH", "LD_LIBRARY_PATH", "LD_RUN_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "PYTHONPATH"),
    *("CPATH", "C_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"),
)
"""Variables with lists of directories, in which an empty entry means the current directory."""
_SINGLE_PATHS = ("GCC_EXEC_PREFIX", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "TMPDIR", "DEPENDENCIES_OUTPUT")
Process = subprocess.Popen[str]
_LISTS_OF_FILES = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child: `environ` without relative paths in variables with search paths."""
    out = dict(environ)
    for name in _SEARCH_PATHS:
        if name in out:
            kept = [entry for entry in out[name].split(os.pathsep) if Path(entry).is_absolute()]
            out[name] = os.pathsep.join(kept)
            if not kept:
                del out[name]  # an empty list means the current directory
    for name in _SINGLE_PATHS:
        if name in out and not Path(out[name]).is_absolute():
            del out[name]
    for name in _LISTS_OF_FILES:
        if name in out:
            entries = out[name].replace(":", " ").split()
            out[name] = ":".join(entry for entry in entries if Path(entry).is_absolute() or "/" not in entry)
    return out


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the absolute path of a program, None if it is not found.

    A name is searched in the absolute entries of PATH; a name with a separator is a path, which may be relative.
    """
    if Path(name).name != name:
        return shutil.which(str(Path(name).absolute()))
    return shutil.which(name, path=environment(environ).get("PATH", os.defpath))


def run(
    command: Sequence[str], *, cwd: Path, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output and exit code. Raises `OSError`; `TimeoutError` after `timeout` seconds.

    `cwd` must be a directory to which only this process writes.
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
    """Start a program and return it as a context manager that waits for its end. Raises `OSError`.

    Its stdout is a pipe of text. `cwd` must be a directory to which only this process writes. The environment is that
    of this process.
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


def start_worker(command: Sequence[str], *, cwd: Path, is_read: bool) -> Process:
    """Start a program with a text pipe as stdin, and with `is_read` one as stdout. Raises `OSError`.

    Its stderr is that of this process. `cwd` must be a directory to which only this process, or only the system,
    writes. Ctrl-C in a terminal does not reach the program.
    """
    _check(command, cwd)
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if is_read else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def has_ended(process: Process, seconds: float) -> bool:
    """Wait at most so many seconds for a process; return whether it has ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _check(command: Sequence[str], cwd: Path) -> None:
    assert cwd.is_absolute() and (command[0] != sys.executable or tuple(command[:2]) == PYTHON)
    if not Path(command[0]).is_absolute():  # an embedded interpreter has no sys.executable
        raise FileNotFoundError(errno.ENOENT, "the path of a program must be absolute", command[0])
