"""What the user types: lines of a pipe as they are, or in a terminal messages of several lines, with a history.

Editing is the standard library's readline, where there is one; without it the terminal's own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TextIO

from nano_inference.cli.terminal import note

_QUOTES = '"""'
_PROMPT, _MORE = "> ", ". "
_MAX_ENTRIES = 1000
_MAX_ENTRY = 100_000
"""Characters; longer messages are not kept."""

Complete = Callable[[str], Sequence[str]]
"""Takes what stands behind a command and returns what the last word of it may become."""


class Entered(NamedTuple):
    """What was typed before it was sent."""

    text: str
    is_message: bool = False
    """It is no command even when it begins with a slash: it has several lines."""


class Reader:
    """Reads messages. Owns readline's settings, if there is a terminal, and whether Ctrl-C was just pressed."""

    def __init__(self, readline: ModuleType | None, history: History | None, is_typed: bool) -> None:
        self._readline = readline
        self._history = history
        self.is_typed = is_typed
        """Whether a person sits there."""
        self._has_pressed = False
        self._last = ""

    def read(self) -> Entered | None:
        """Return the next message or command, None at the end of the input.

        Ctrl-C clears what is half typed; on an empty line it asks for a second one, which is a `KeyboardInterrupt`.
        """
        while self.is_typed:
            try:
                entered = self._message()
            except KeyboardInterrupt:
                self._forget_line()
                continue
            self._has_pressed = False
            return entered
        line = sys.stdin.readline()
        return Entered(line) if line else None

    def _message(self) -> Entered | None:
        """Read lines until they are a message."""
        line = self._line(_PROMPT)
        if line is None:
            return None
        start = line.lstrip()
        if start.startswith(_QUOTES):
            text = self._quoted(start.removeprefix(_QUOTES))
        elif line.endswith("\\"):
            text = self._continued(line)
        else:
            text = line
        if text is not None:
            self._remember(text)
        is_message = text is not None and ("\n" in text.strip() or start.startswith(_QUOTES))
        return None if text is None else Entered(text, is_message)

    def _quoted(self, line: str) -> str | None:
        """Read on until the quotes are closed; what stands behind them is left out."""
        lines = []
        while _QUOTES not in line:
            lines.append(line)
            more = self._line(_MORE)
            if more is None:
                return None
            line = more
        return "\n".join([*lines, line.partition(_QUOTES)[0]]).strip("\n")

    def _continued(self, line: str) -> str | None:
        """Read on while lines end with a backslash."""
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            more = self._line(_MORE)
            if more is None:
                return None
            line = more
        return "\n".join([*lines, line])

    def _line(self, prompt: str) -> str | None:
        try:
            if sys.stdout.isatty():
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for answers alone
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        except EOFError:
            print()
            return None

    def _forget_line(self) -> None:
        """Leave a line on Ctrl-C. Raises `KeyboardInterrupt` when it was empty and the press before it, too."""
        print()
        was_typing = self._readline is not None and bool(self._readline.get_line_buffer().strip("\n"))
        if was_typing:
            self._has_pressed = False
            return
        if self._has_pressed:
            raise KeyboardInterrupt
        self._has_pressed = True
        note("press Ctrl-C again, or Ctrl-D, to quit")

    def _remember(self, text: str) -> None:
        text = text.strip()
        if self._readline is None or not text or len(text) > _MAX_ENTRY or text == self._last:
            return
        self._last = text
        self._readline.add_history(text)
        if self._history is not None:
            self._history.add(text)


class History:
    """A file of what was typed, one JSON string a line, readable by its owner alone. Whatever fails is let go."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """Return the newest entries, oldest first; the file is cut when it has grown to twice as many."""
        entries: list[str] = []
        with suppress(OSError):
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines[-_MAX_ENTRIES:]:
                with suppress(ValueError):
                    entry = json.loads(line)
                    entries += [entry] if isinstance(entry, str) else []
            if len(lines) > 2 * _MAX_ENTRIES:
                self._write(entries, os.O_TRUNC)
        return entries

    def add(self, text: str) -> None:
        """Put an entry behind the others, those of other chats that run now included."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write([text], os.O_APPEND)

    def _write(self, entries: Sequence[str], how: int) -> None:
        data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb") as file:
            file.write(data)


def history_path(environ: Mapping[str, str]) -> Path | None:
    """Return where the history is kept; None for a user without a home."""
    state = environ.get("XDG_STATE_HOME", "")
    if Path(state).is_absolute():  # relative ones are to be ignored, says the XDG specification
        return Path(state) / "nano-inference" / "history"
    with suppress(RuntimeError):
        return Path.home() / ".local" / "state" / "nano-inference" / "history"
    return None


@contextmanager
def open_reader(commands: Mapping[str, Complete]) -> Iterator[Reader]:
    """Open a reader of stdin; in a terminal with editing, a history, and Tab for commands."""
    _replace_bad_bytes(sys.stdin)
    is_typed = sys.stdin.isatty()
    readline = _readline() if is_typed and sys.stdout.isatty() else None
    if readline is None:
        yield Reader(None, None, is_typed)
        return
    path = history_path(os.environ)
    history = None if path is None else History(path)
    _set_up(readline, history, commands)
    try:
        yield Reader(readline, history, is_typed)
    finally:
        readline.set_completer(None)
        readline.clear_history()


def _readline() -> ModuleType | None:
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


def _set_up(readline: ModuleType, history: History | None, commands: Mapping[str, Complete]) -> None:
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    if not is_libedit and os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.set_auto_history(False)
    readline.clear_history()
    for entry in [] if history is None else history.load():
        readline.add_history(entry)
    readline.set_completer_delims(" ")
    readline.set_completer(completer(readline, commands))


def completer(readline: ModuleType, commands: Mapping[str, Complete]) -> Callable[[str, int], str | None]:
    """Return what readline asks for the `state`-th word that a word may become."""

    def complete(text: str, state: int) -> str | None:
        found = candidates(readline.get_line_buffer()[: readline.get_begidx()], text, commands)
        return found[state] if state < len(found) else None

    return complete


def candidates(before: str, text: str, commands: Mapping[str, Complete]) -> list[str]:
    """Return what a word may become, `before` being the line up to it: a command, or what that one takes."""
    if not before.strip():
        return [f"{name} " for name in commands if name.startswith(text)] if text.startswith("/") else []
    complete = commands.get(before.split()[0])
    return [] if complete is None or len(before.split()) > 1 else list(complete(text))


def _replace_bad_bytes(stream: TextIO) -> None:
    """Let bytes that are no text become U+FFFD instead of ending the chat."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
