"""Input of a chat: lines of a pipe, or multi-line messages from a line editor in a terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.bindings.completion import display_completions_like_readline
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from nano_inference.cli.terminal import note
from nano_inference.support.files import user_directory

_QUOTES = '"""'
_PROMPT, _MORE = "> ", ". "
_MAX_ENTRIES = 1000
_MAX_ENTRY = 100_000  # characters; longer messages are not stored in the history

Complete = Callable[[str], Sequence[str]]  # receives the word after a command and returns its completions


class Input(NamedTuple):
    """A message or command as entered."""

    text: str
    is_message: bool = False
    """True if it has several lines or quotes, and so is a message even if it begins with a slash."""


class Reader:
    """Reads messages from stdin. Owns the line editor."""

    def __init__(self, is_typed: bool, editor: PromptSession[str] | None) -> None:
        self._editor = editor
        self.is_typed = is_typed  # True if stdin is a terminal
        self.can_edit = editor is not None
        self._has_interrupted = False

    def read(self) -> Input | None:
        """Return the next message or command; None at the end of the input.

        Ctrl-C discards the current line; pressed twice on an empty line, it raises `KeyboardInterrupt`.
        """
        if not self.is_typed:
            line = sys.stdin.readline()
            return Input(line) if line else None
        while True:
            try:
                text = self._read_plain() if self._editor is None else self._editor.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._editor is not None and self._editor.default_buffer.text.strip():
                    self._has_interrupted = False
                    continue
                if self._editor is None:
                    print(file=sys.stderr)
                if self._has_interrupted:
                    raise
                self._has_interrupted = True
                note("press Ctrl-C again, or Ctrl-D, to quit")
                continue
            self._has_interrupted = False
            return parse_input(text)

    @staticmethod
    def _read_plain() -> str:
        """Read a message without a line editor. Raises `EOFError`."""
        text: str | None = ""
        whole = ""
        while text is not None:
            print(_MORE if text else _PROMPT, end="", file=sys.stderr, flush=True)  # stdout has answers only
            line = sys.stdin.readline()
            if not line:
                print(file=sys.stderr)
                raise EOFError
            whole = text + line.removesuffix("\n")
            text = continuation(whole)
        return whole


class HistoryFile(FileHistory):
    """Input history in a file with mode 0600. I/O errors are ignored."""

    def load_history_strings(self) -> Iterable[str]:
        """Return the latest entries, newest first."""
        with suppress(OSError):
            return islice(super().load_history_strings(), _MAX_ENTRIES)
        return ()

    def store_string(self, string: str) -> None:
        """Append an entry; concurrent chats share the file."""
        if string.strip() and len(string) <= _MAX_ENTRY:
            with suppress(OSError):
                path = Path(os.fsdecode(self.filename))
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
                super().store_string(string.strip())


class CommandCompleter(Completer):
    """Completes commands and their arguments."""

    def __init__(self, commands: Mapping[str, Complete]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield completions of the word before the cursor."""
        word = document.get_word_before_cursor(WORD=True)
        before = document.text_before_cursor.removesuffix(word).split()
        if before:
            found = self._commands[before[0]](word) if before[0] in self._commands and len(before) == 1 else ()
        else:
            found = [f"{name} " for name in self._commands if name.startswith(word)] if word.startswith("/") else []
        yield from (Completion(text, -len(word)) for text in found)


def history_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the history; the null device if there is no home directory."""
    with suppress(RuntimeError):
        return user_directory(environ, environ.get("XDG_STATE_HOME"), ".local/state") / "history"
    return Path(os.devnull)


def open_reader(commands: Mapping[str, Complete]) -> Reader:
    """Return a reader of stdin; in a terminal that is not dumb, with line editing, history and completion."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # undecodable bytes become U+FFFD
    is_typed = sys.stdin.isatty()
    can_edit = is_typed and os.environ.get("TERM") != "dumb" and (sys.stdout.isatty() or sys.stderr.isatty())
    return Reader(is_typed, _editor(commands) if can_edit else None)


def parse_input(text: str) -> Input:
    """Parse an entered text: triple quotes are removed, undecodable bytes become U+FFFD."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    quote, quotes, rest = text.lstrip().partition(_QUOTES)
    if quotes and not quote:
        return Input(rest.partition(_QUOTES)[0].strip("\n"), is_message=True)
    return Input(text, is_message="\n" in text.strip())


def continuation(text: str) -> str | None:
    """Return the text up to the start of its next line if it continues (open quotes, backslash), else None."""
    if text.lstrip().startswith(_QUOTES) and text.count(_QUOTES) == 1:
        return f"{text}\n"
    return f"{text[:-1]}\n" if text.endswith("\\") else None


def _editor(commands: Mapping[str, Complete]) -> PromptSession[str]:
    """Return a line editor on the terminal: on stdout, or on stderr if stdout is redirected."""
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # a late reply to a cursor position request would be read as input
    return PromptSession(
        _PROMPT,
        multiline=True,  # Enter is bound in `_keys`
        prompt_continuation=lambda _width, _line, wrap: " " * len(_MORE) if wrap else _MORE,
        key_bindings=_keys(),
        completer=CommandCompleter(commands),
        complete_style=CompleteStyle.READLINE_LIKE,
        history=HistoryFile(history_path(os.environ)),
        enable_suspend=True,
        color_depth=ColorDepth.DEPTH_1_BIT,
        output=output,
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # not while searching the history

    @keys.add("enter", filter=is_typing)
    def send_or_continue(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        so_far = continuation(buffer.text)
        if so_far is None:
            buffer.validate_and_handle()
        elif so_far.startswith(buffer.text):  # within quotes, a new line at the cursor
            buffer.insert_text("\n")
        else:
            buffer.document = Document(so_far)

    @keys.add("tab", filter=is_typing)
    def complete(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        found = list(buffer.completer.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
        if len(found) == 1:
            buffer.apply_completion(found[0])  # prompt_toolkit's binding drops the trailing space
        else:
            display_completions_like_readline(event)

    return keys
