"""The terminal: bars and notes on stderr, and what Ctrl-C means while the engine works."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.progress import TransferSpeedColumn as Speed

Tell = Callable[[int, int | None], None]
"""Takes how much is done and how much there is, None when that is not known."""


def note(text: str, quiet: bool = False) -> None:
    """Write a line to stderr."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def bar(label: str, *, is_bytes: bool = False, quiet: bool = False) -> Iterator[Tell]:
    """Show a progress bar on stderr while the block runs; nothing is shown when stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), Speed()) if is_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class Interrupts:
    """Owns SIGINT while its block runs: the first Ctrl-C sets `pressed`, a second raises `KeyboardInterrupt`.

    An exception in the middle of the engine's bookkeeping would leave it half done; `pressed` is asked between steps.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._on_press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_press(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
