"""A command in a pseudo-terminal: `pexpect` reads its output, `pyte` emulates the screen."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte
from pexpect.fdpexpect import fdspawn

from tests.warm import Forker

PATIENCE_S = 60
_CLEAN = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM_PROGRAM", "TMUX", "VTE_VERSION", "PYTHONIOENCODING")


class Emulator(pyte.HistoryScreen):
    """A terminal with scrollback; losing rows keeps the cursor's row on the screen, as in xterm."""

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """Change the size; long rows are truncated, not rewrapped."""
        for _ in range(max(0, self.cursor.y + 1 - (lines or self.lines))):
            top, y = self.cursor.y, self.cursor.x
            self.cursor.y = self.lines - 1
            self.index()
            self.cursor.y, self.cursor.x = top - 1, y
        x, y = self.cursor.x, self.cursor.y
        old, self.lines = self.lines, lines or self.lines  # disables pyte's rule, which removes rows at the top
        for row in range(self.lines, old):
            self.buffer.pop(row, None)
        super().resize(None, columns)
        self.cursor.x, self.cursor.y = x, y


class Forked(fdspawn):  # type: ignore[misc]
    """A fork of a warm process in a terminal, with the methods of `pexpect.spawn` that `Terminal` uses."""

    def __init__(self, forker: Forker, argv: Sequence[str], env: Mapping[str, str], size: tuple[int, int]) -> None:
        master, slave = pty.openpty()
        termios.tcsetwinsize(master, size)
        self._command = forker.start(argv, env, terminal=slave)
        os.close(slave)
        super().__init__(master, timeout=PATIENCE_S)
        self.pid = self._command.pid

    def setwinsize(self, rows: int, columns: int) -> None:
        """Change the window's size."""
        termios.tcsetwinsize(self.child_fd, (rows, columns))

    def close(self, force: bool = False) -> None:
        """Close the terminal and wait for the command's end; kill it with `force`."""
        if self.closed:
            return
        if force:
            self._command.kill()
        self.exitstatus = self._command.wait(PATIENCE_S)
        super().close()


def spawned(command: list[str], env: Mapping[str, str], size: tuple[int, int]) -> pexpect.spawn:
    """Start a process in a terminal."""
    return pexpect.spawn(
        command[0],
        command[1:],
        env=dict(env),
        dimensions=size,
        timeout=PATIENCE_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background processes ignore Ctrl-C
    )


class Terminal:
    """A command in a terminal. Waits fail after `PATIENCE_S` with the text on the screen."""

    def __init__(self, child: pexpect.spawn | Forked, rows: int, columns: int) -> None:
        self.child = child
        self.child.delaybeforesend = None
        self.screen = Emulator(columns, rows, history=100_000, ratio=0.5)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def send(self, text: str) -> None:
        """Type text."""
        self.child.send(text)

    def interrupt(self) -> None:
        """Press Ctrl-C when the command waits for input."""
        deadline = time.monotonic() + PATIENCE_S
        while (state := _state_of(self.child.pid)) != "S":
            assert state != "Z" and time.monotonic() < deadline, f"it does not wait for input\n{self.text()}"
            os.sched_yield()
        self.send("\x03")

    def wait(self, text: str, count: int = 1) -> None:
        """Wait until the screen and its scrollback contain a text `count` times."""
        while self.text().count(text) < count:
            self._read(f"{count} x {text!r}")

    def prompt(self) -> None:
        """Wait until the last line is an empty prompt, then clear the raw bytes."""
        while not f"\n{self.text()}".endswith("\n>"):
            self._read("prompt")
        self.raw = b""

    def ask(self, text: str) -> None:
        """Send a line at the prompt, and wait for the next prompt."""
        self.prompt()
        self.send(f"{text}\r")
        self.wait_raw("\n")
        self.prompt()

    def wait_raw(self, text: str) -> None:
        """Wait until the raw output contains a text."""
        while text.encode() not in self.raw:
            self._read(repr(text))

    def wait_below(self, text: str) -> None:
        """Wait for any text below the last occurrence of a text: the first words of an answer."""
        self.wait(text)
        while not self.text().rpartition(text)[2].strip():
            self._read(f"answer to {text!r}")

    def _read(self, wanted: str) -> None:
        try:
            data = self.child.read_nonblocking(4096, PATIENCE_S)
        except (pexpect.EOF, pexpect.TIMEOUT) as error:
            raise AssertionError(f"no {wanted}: {type(error).__name__}\n{self.text()}") from None
        self.raw += data
        self.stream.feed(data)

    def resize(self, rows: int, columns: int) -> None:
        """Change the window's size, which sends SIGWINCH; wait for the command's last output before."""
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def text(self) -> str:
        """Text of the scrollback and the screen."""
        return shown_on(self.screen)

    def leave(self) -> int:
        """Wait for the command's end; return its exit code."""
        while True:
            try:
                data = self.child.read_nonblocking(4096, PATIENCE_S)
            except pexpect.EOF:
                break
            self.raw += data
            self.stream.feed(data)
        self.child.close()
        return -1 if self.child.exitstatus is None else int(self.child.exitstatus)


def _state_of(process: int) -> str:
    """Return the state of a process: "S" sleeping, "R" running, "Z" ended (proc_pid_stat(5))."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def shown_on(screen: Emulator) -> str:
    """Return the text of the scrollback and the screen."""
    rows = [*screen.history.top, *(screen.buffer[y] for y in range(screen.lines))]
    return "\n".join("".join(row[x].data for x in range(screen.columns)).rstrip() for row in rows).rstrip()


@contextmanager
def terminal(
    *argv: str,
    forker: Forker | None = None,
    rows: int = 24,
    columns: int = 80,
    python: tuple[str, ...] = ("-m", "nano_inference"),
    **env: str,
) -> Iterator[Terminal]:
    """Run nano-inference in a terminal while the block runs: as a fork of a process, or as a new one."""
    clean = {name: value for name, value in os.environ.items() if name not in _CLEAN}
    environ, size = {**clean, "TERM": "xterm-256color", **env}, (rows, columns)
    command = [sys.executable, *python, *argv]
    child = spawned(command, environ, size) if forker is None else Forked(forker, argv, environ, size)
    try:
        yield Terminal(child, rows, columns)
    finally:
        child.close(force=True)
