"""Setup of the standard streams: opens closed descriptors, and makes stderr drop failed writes."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_STDERR = 2


class LossyFile(io.RawIOBase):
    """Writes to a descriptor and ignores errors (full disk, closed pipe or terminal).

    Used for stderr only; failed writes to stdout end the command.
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
        """True if the descriptor is a terminal."""
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def write(self, data: Any) -> int:
        """Write bytes; return how many were written or dropped."""
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return len(data)


def prepare() -> None:
    """Open closed standard streams on the null device, and make stderr drop failed writes.

    Otherwise the next file or socket would get a standard descriptor's number and receive output meant for the stream.
    Streams that were replaced in this process are unchanged.
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
    """Open the null device as `descriptor` if that is closed; lower numbers must be open."""
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
