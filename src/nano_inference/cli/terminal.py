"""Text for a terminal without control characters, progress bars on stderr, echo, and Ctrl-C while the engine runs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.progress import TransferSpeedColumn as Speed
from rich.table import Table

FORCED, END_FORCED = "\ufff9", "\ufffb"
"""Markers around tool output within a rendered answer; `printable` replaces both in untrusted text."""

_REPLACEMENT = 0xFFFD
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421, 0x0D: None}
_MISLEADING = (
    *range(0x80, 0xA0),  # C1 control characters: 0x9b begins an escape sequence
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # change the direction of text
    *(0x2028, 0x2029, 0xFFF9, 0xFFFA, 0xFFFB),
    *range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_SHOWN_AS: Mapping[int, int | None] = {**_CONTROLS, **dict.fromkeys(_MISLEADING, _REPLACEMENT)}


def printable(text: str) -> str:
    """Replace control characters, except tab and newline, by their symbols (U+241B for ESC).

    Carriage returns are removed, and bidirectional controls and surrogates become U+FFFD.
    """
    return text.translate(_SHOWN_AS)


def one_line(text: str, limit: int = 300) -> str:
    """Return a text as one printable line of at most `limit` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


try:
    termios: ModuleType | None = importlib.import_module("termios")
except ImportError:  # not on Unix
    termios = None

ProgressCallback = Callable[[int, int | None], None]  # receives (done, total); `total` is None if unknown


def note(text: str, quiet: bool = False, *, indent: int = 0, has_command: bool = False) -> None:
    """Print lines to stderr, without control characters, since they may quote a model or a server.

    On a terminal, lines are wrapped at spaces and continued with an indent of `indent`, unless `has_command` (a
    command to copy).
    """
    if not quiet:
        lines = printable(text).split("\n")
        print(*lines if has_command else (_wrap(one, indent) for one in lines), sep="\n", file=sys.stderr, flush=True)


def _wrap(line: str, indent: int) -> str:
    """Wrap a line at the terminal's width; unchanged if stderr is not a terminal."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return line
    if cell_len(line) <= width or not width:
        return line
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    if 2 * indent > width:  # a narrow window: text below the name
        return f"{line[:indent].rstrip()}\n{fill(line[indent:], initial_indent='  ', subsequent_indent='  ')}"
    return fill(line, subsequent_indent=" " * indent)


def print_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout; in a pipe, rows are not wrapped at 80 columns."""
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


@contextmanager
def bar(label: str, *, is_bytes: bool = False, quiet: bool = False) -> Iterator[ProgressCallback]:
    """Show a progress bar on stderr while the block runs, if stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), Speed()) if is_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def no_echo() -> Iterator[None]:
    """Disable the terminal's echo and Ctrl-D while the block runs; typed input stays queued for the next prompt."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    silent[6] = [*before[6]]
    silent[6][termios.VEOF] = bytes([os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE")])
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Stopped(Exception):
    """Ctrl-C was pressed within `Interrupts.raising`."""


class Interrupts:
    """Handles SIGINT while its block runs: the first Ctrl-C sets `pressed`, the second raises `KeyboardInterrupt`.

    An exception while an answer is written would lose a part of it; so callers check `pressed` between two pieces.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._raises = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise `Stopped` in the block at the first press, which ends a blocked read; at once if it was earlier."""
        self._raises = True
        try:
            if self.pressed:
                raise Stopped
            yield
        finally:
            self._raises = False

    def _on_press(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if self._raises:
            raise Stopped
