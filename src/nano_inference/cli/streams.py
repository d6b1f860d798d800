"""Standard streams: descriptors 0 to 2 are always open, and a message that cannot be written is dropped."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_STDERR = 2


class LossyFile(io.RawIOBase):
    """Writes to a descriptor, and drops what it does not take: a full disk, a reader or a terminal that has gone.

    Used for stderr alone. What is lost on stdout is an answer, and there an error ends the command.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def write(self, data: Any) -> int:
        """Write bytes and return how many are dealt with."""
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(data)


def prepare() -> None:
    """Open what is closed of stdin, stdout and stderr, and let stderr drop what cannot be written.

    Without this the next file or socket to be opened would have the closed stream's number, and what is written to that
    number would go there. A stream that was replaced in this process stays as it is.
    """
    for descriptor in (0, 1, 2):
        open_if_closed(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        file = io.BufferedWriter(LossyFile(_STDERR))
        sys.stderr = io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)


def open_if_closed(descriptor: int) -> None:
    """Open the null device under a standard descriptor's number when that is free; lower numbers must be taken."""
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
