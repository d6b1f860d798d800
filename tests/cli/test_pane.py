"""Rendered answers on a pseudo-terminal of several sizes, with every piece drawn."""

from __future__ import annotations

import fcntl
import io
import os
import random
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyte
import pytest
from rich.console import Console

from nano_inference.cli.conversation import Piece
from nano_inference.cli.pane import Pane
from nano_inference.cli.render import MarkdownOutput, console_of
from tests.cli.screen import Emulator, shown_on
from tests.cli.test_terminal_chat import LONG, assert_once


class Recorder(io.TextIOWrapper):
    """A text file that records what is written; `before_sizes` has what happens before each request for its window."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(os.fdopen(descriptor, "wb"), encoding="utf-8")
        self.written: list[str] = []
        self.before_sizes: Iterator[Callable[[], None]] = iter(())

    def fileno(self) -> int:
        for happens in self.before_sizes:
            happens()
            break
        return super().fileno()

    def write(self, text: str) -> int:
        self.written.append(text)
        return super().write(text)


class EveryPiece(MarkdownOutput):
    """An output that draws every piece: by its clock, an hour passes before each."""

    def __init__(self, console: Console) -> None:
        self.hours = 0
        super().__init__(console, lambda: 3600.0 * self.hours)

    def write(self, pieces: Sequence[Piece]) -> None:
        self.hours += 1
        super().write(pieces)


class Device:
    """A pseudo-terminal: text written to `out` appears on `screen`."""

    def __init__(self, rows: int, columns: int) -> None:
        self._master, slave = os.openpty()
        self.out = Recorder(slave)
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
        """Feed the written bytes to the screen."""
        while True:
            try:
                self._stream.feed(os.read(self._master, 65536))
            except BlockingIOError:
                return

    def text(self) -> str:
        """Return the text of the scrollback and the screen."""
        self.update()
        return shown_on(self.screen)

    def close(self) -> None:
        """Close both ends."""
        self.out.close()
        os.close(self._master)


@contextmanager
def output_on(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Device, MarkdownOutput]]:
    """Open an output that draws every piece without a pause."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "VTE_VERSION", "TERM_PROGRAM", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    device = Device(rows, columns)
    try:
        yield device, EveryPiece(console_of(device.out))
    finally:
        device.close()


@pytest.mark.parametrize(("rows", "columns"), [(6, 40), (12, 50), (24, 80), (60, 200)])
def test_every_row_is_shown_once(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with output_on(rows, columns, monkeypatch) as (device, output):
        device.out.write("before\n")
        for at in range(0, len(LONG), 11):
            output.write([Piece(LONG[at : at + 11])])
            device.update()
            assert device.text().startswith("before\n")
        output.finish()
        device.out.write("after\n")
        device.out.flush()
        text = device.text()
        assert_once(text)
        assert text.count("word") == 180 and text.endswith("end\nafter") and "|" not in text


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_shown_once_with_resizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most half the window's rows are redrawn, so they fit after each of these resizes."""
    chance = random.Random(seed)
    with output_on(20, 60, monkeypatch) as (device, output):
        for at in range(0, len(LONG), 7):
            if chance.random() < 0.1:
                device.resize(chance.randint(21, 40), chance.randint(30, 100))
            output.write([Piece(LONG[at : at + 7])])
            device.update()
        output.finish()
        assert_once(device.text())


def test_block_is_complete_after_losing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words are on the screen once."""
    words = [f"word{i}\n" for i in range(40)]
    with output_on(20, 60, monkeypatch) as (device, output):
        for i, word in enumerate(words):
            if i == 15:
                device.resize(11, 60)
            output.write([Piece(word)])
            device.update()
        output.finish()
        assert device.text().split() == [word.strip() for word in words]


@pytest.mark.parametrize(("rows", "columns"), [(20, 30), (6, 60)])
def test_resize_during_rendering(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows rendered for the larger window are not written."""
    words = [f"word{i}" for i in range(60)]
    with output_on(20, 60, monkeypatch) as (device, output):
        before_and_after_rendering = [lambda: None, lambda: device.resize(rows, columns)]
        device.out.before_sizes = iter(before_and_after_rendering)
        output.write([Piece(" ".join(words[:50]))])
        device.update()
        output.write([Piece(" " + " ".join(words[50:]))])
        output.finish()
        assert device.text().split() == words


def test_only_changed_rows_are_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with output_on(20, 60, monkeypatch) as (device, output):
        output.write([Piece("first line\nsecond line\nthird ")])
        device.update()
        before = device.screen.cursor.y
        device.out.written.clear()
        output.write([Piece("line")])
        assert "".join(device.out.written) == "\rthird line\x1b[K\x1b[J" and before == 2


def test_rewrapping_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal known to rewrap, rows are counted at the new width."""
    with output_on(20, 60, monkeypatch) as (device, output):
        monkeypatch.setenv("VTE_VERSION", "7600")
        output.write([Piece("x" * 58 + "\n" + "y" * 10)])
        device.resize(20, 30)
        device.out.written.clear()
        output.write([Piece("z")])
        assert "".join(device.out.written).startswith("\r\x1b[2A"), "58 cells are two rows of 30, and 10 a third"


def test_fewer_live_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with output_on(20, 60, monkeypatch) as (device, _):
        pane = Pane(device.out)
        for kept, live in (([], ["a", "b", "c"]), ([], ["a"]), ([], ["a", "d"]), (["a"], []), ([], ["e"]), ([], [])):
            pane.draw(kept, live)
        device.out.write("end\n")
        device.out.flush()
        assert device.text() == "a\nend"
