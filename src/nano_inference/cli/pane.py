"""In-place redrawing of the rows of an answer that may still change, without flicker, at any window size."""

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
"""Variables set by terminals that rewrap long rows when the window becomes narrower; others truncate rows."""


class Size(NamedTuple):
    """A window's size in cells."""

    columns: int
    rows: int


class Pane:
    """Owns the last rows of the screen while an answer is streamed.

    Rows must leave the window's last two columns empty, so that the cursor's position is known even after the terminal
    echoes ^C.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows: list[str] = []
        self._size = self.size

    @property
    def size(self) -> Size:
        """Current size of the window; 80 x 24 if there is none."""
        try:
            columns, rows = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            return Size(80, 24)
        return Size(columns or 80, rows or 24)  # a serial line reports 0

    def draw(self, kept: Sequence[str], live: Sequence[str]) -> None:
        """Replace the live rows by `kept`, which are final, and new live rows, which must fit on the screen.

        Makes one write, and does not redraw leading rows that are unchanged.
        """
        rows = [*kept, *live]
        size = self.size
        height = self._height(size)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._rows, rows, strict=False)))
        start = same if height == len(self._rows) else 0
        if len(rows) <= height:
            start = max(0, min(start, len(rows) - 1))  # the cursor must end after the last row
        if rows != self._rows or height != len(self._rows):
            self._out.write(self._to(start, height) + "\n".join(f"{row}\x1b[K" for row in rows[start:]) + "\x1b[J")
            self._out.flush()
        self._rows, self._size = list(live), size
        if kept and not live:
            self._out.write("\n")
            self._out.flush()

    def _to(self, start: int, height: int) -> str:
        """Return the escape sequence that moves the cursor from the end of the last row to the start of row `start`."""
        if height and start >= height:
            return "\r\n"
        up = height - 1 - start
        return f"\r\x1b[{up}A" if up > 0 else "\r"

    def _height(self, size: Size) -> int:
        """Return the number of window rows of the live rows, which rewrap if the window became narrower."""
        if size.columns >= self._size.columns or not any(os.environ.get(name) for name in _REWRAPS):
            return len(self._rows)
        return sum(max(1, -(-cell_len(Text.from_ansi(row).plain) // size.columns)) for row in self._rows)
