"""Rendered answers on a real terminal device of many sizes, every piece drawn: what the screen holds at last."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pyte
import pytest
from rich.markdown import Markdown

from nano_inference.cli import render
from nano_inference.cli.pane import Pane
from nano_inference.cli.render import MarkdownPage, console_of
from nano_inference.cli.talk import Piece
from tests.cli.screen import Emulator, shown_on
from tests.cli.test_terminal_chat import LONG, assert_once


class Device:
    """A terminal's two ends: what is written to `out` is drawn on `screen`."""

    def __init__(self, rows: int, columns: int) -> None:
        self._master, slave = os.openpty()
        self.out: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.screen = Emulator(columns, rows, history=100_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        os.set_blocking(self._master, False)
        self.resize(rows, columns)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window's size."""
        self.update()
        fcntl.ioctl(self.out, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def update(self) -> None:
        """Draw what was written."""
        while True:
            try:
                self._stream.feed(os.read(self._master, 65536))
            except BlockingIOError:
                return

    def text(self) -> str:
        """What can be seen, what has scrolled away before it."""
        self.update()
        return shown_on(self.screen)

    def close(self) -> None:
        """Close both ends."""
        self.out.close()
        os.close(self._master)


@contextmanager
def page_on(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, MarkdownPage]]:
    """Open a page that draws with every piece."""
    monkeypatch.setattr(render, "_LEAST_PAUSE_S", 0)
    monkeypatch.setattr(render, "_PAUSE_RATIO", 0)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "VTE_VERSION", "TERM_PROGRAM", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    device = Device(rows, columns)
    try:
        yield device, MarkdownPage(console_of(device.out))
    finally:
        device.close()


@pytest.mark.parametrize(("rows", "columns"), [(6, 40), (12, 50), (24, 80), (60, 200)])
def test_nothing_is_lost_or_told_twice(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with page_on(rows, columns, monkeypatch) as (device, page):
        device.out.write("before\n")
        for at in range(0, len(LONG), 11):
            page.write([Piece(LONG[at : at + 11])])
            device.update()
            assert device.text().startswith("before\n")
        page.finish()
        device.out.write("after\n")
        device.out.flush()
        text = device.text()
        assert_once(text)
        assert text.count("word") == 180 and text.endswith("end\nafter") and "|" not in text


@pytest.mark.parametrize("seed", range(4))
def test_a_window_of_another_size_at_every_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a window is the most that is drawn of a block, so all of it is still there in any of these."""
    chance = random.Random(seed)
    with page_on(20, 60, monkeypatch) as (device, page):
        for at in range(0, len(LONG), 7):
            if chance.random() < 0.1:
                device.resize(chance.randint(21, 40), chance.randint(30, 100))
            page.write([Piece(LONG[at : at + 7])])
            device.update()
        page.finish()
        assert_once(device.text())


def test_a_lower_window_in_the_middle_of_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still whole on the screen."""
    words = [f"word{i}\n" for i in range(40)]
    with page_on(20, 60, monkeypatch) as (device, page):
        for i, word in enumerate(words):
            if i == 15:
                device.resize(11, 60)
            page.write([Piece(word)])
            device.update()
        page.finish()
        assert device.text().split() == [word.strip() for word in words]


@pytest.mark.parametrize(("rows", "columns"), [(20, 30), (6, 60)])
def test_a_window_that_becomes_smaller_while_rows_are_rendered(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were rendered for the larger window are not written."""
    words = [f"word{i}" for i in range(60)]
    markdown_of = render.markdown_of

    def resizing(text: str) -> Markdown:
        if (device.screen.lines, device.screen.columns) != (rows, columns):
            device.resize(rows, columns)
        return markdown_of(text)

    with page_on(20, 60, monkeypatch) as (device, page):
        monkeypatch.setattr(render, "markdown_of", resizing)
        page.write([Piece(" ".join(words[:50]))])
        device.update()
        page.write([Piece(" " + " ".join(words[50:]))])
        page.finish()
        assert device.text().split() == words


def test_only_rows_that_change_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with page_on(20, 60, monkeypatch) as (device, page):
        page.write([Piece("first line\nsecond line\nthird ")])
        device.update()
        before = device.screen.cursor.y
        written: list[str] = []
        monkeypatch.setattr(page._pane, "_out", Recorder(device.out, written))
        page.write([Piece("line")])
        assert "".join(written) == "\rthird line\x1b[K\x1b[J" and before == 2


def test_a_terminal_that_breaks_rows_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told who it is, so the rows above the block are counted as they stand there now."""
    with page_on(20, 60, monkeypatch) as (device, page):
        monkeypatch.setenv("VTE_VERSION", "7600")
        page.write([Piece("x" * 58 + "\n" + "y" * 10)])
        device.resize(20, 30)
        written: list[str] = []
        monkeypatch.setattr(page._pane, "_out", Recorder(device.out, written))
        page.write([Piece("z")])
        assert "".join(written).startswith("\r\x1b[2A"), "58 cells are two rows of 30, and 10 a third"


def test_rows_that_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    with page_on(20, 60, monkeypatch) as (device, _):
        pane = Pane(device.out)
        for kept, live in (([], ["a", "b", "c"]), ([], ["a"]), ([], ["a", "d"]), (["a"], []), ([], ["e"]), ([], [])):
            pane.draw(kept, live)
        device.out.write("end\n")
        device.out.flush()
        assert device.text() == "a\nend"


class Recorder:
    """Writes on, and remembers."""

    def __init__(self, out: TextIO, written: list[str]) -> None:
        self._out, self._written = out, written

    def write(self, text: str) -> None:
        self._written.append(text)
        self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()
