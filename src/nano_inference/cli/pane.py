"""The rows of an answer that may still change: drawn over, in place, without flicker, whatever the window's size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, TextIO

from rich.cells import cell_len
from rich.text import Text

_REWRAPS = (
    *("VTE_VERSION", "KITTY_WINDOW_ID", "ALACRITTY_WINDOW_ID", "WT_SESSION", "WEZTERM_PANE", "KONSOLE_VERSION"),
    *("TERM_PROGRAM", "TMUX"),
)
"""Set by terminals that break long rows anew when the window becomes narrower. Others cut them off."""


class Size(NamedTuple):
    """A window's size in cells."""

    columns: int
    rows: int


class Pane:
    """Owns the last rows of the screen while an answer is written.

    All escape sequences that move the cursor are here. A row never fills the window's last two columns, so the cursor
    is where it is thought to be, even behind a ^C that the terminal echoes.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows: list[str] = []
        self._size = self.size

    @property
    def size(self) -> Size:
        """The window's size now; 80 x 24 when there is no window."""
        try:
            columns, rows = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            return Size(80, 24)
        return Size(columns or 80, rows or 24)  # a serial line says 0

    def draw(self, kept: Sequence[str], live: Sequence[str]) -> None:
        """Put rows in place of the live ones: `kept` for good, then new live ones, of which the screen must hold all.

        Everything goes out in one write, and rows that have not changed are left alone.
        """
        rows = [*kept, *live]
        size = self.size
        height = self._height(size)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._rows, rows, strict=False)))
        start = same if height == len(self._rows) else 0
        if len(rows) <= height:
            start = max(0, min(start, len(rows) - 1))  # the cursor is to end behind the last row
        if rows != self._rows or height != len(self._rows):
            self._out.write(self._to(start, height) + "\n".join(f"{row}\x1b[K" for row in rows[start:]) + "\x1b[J")
            self._out.flush()
        self._rows, self._size = list(live), size
        if kept and not live:
            self._out.write("\n")
            self._out.flush()

    def _to(self, start: int, height: int) -> str:
        """Return what moves the cursor from the last row's end to the beginning of row `start`."""
        if height and start >= height:
            return "\r\n"
        up = height - 1 - start
        return f"\r\x1b[{up}A" if up > 0 else "\r"

    def _height(self, size: Size) -> int:
        """Return how many rows of the window the live rows take, now that it may have become narrower."""
        if size.columns >= self._size.columns or not any(os.environ.get(name) for name in _REWRAPS):
            return len(self._rows)
        return sum(max(1, -(-cells_of(row) // size.columns)) for row in self._rows)


def cells_of(row: str) -> int:
    """Return how many cells a row with escape sequences takes."""
    return cell_len(Text.from_ansi(row).plain)
