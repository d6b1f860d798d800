"""Output of an answer while it is streamed: rendered Markdown, plain text on a simple terminal, unchanged in a pipe.

Text for a terminal passes through `printable`, and is never parsed as rich's markup.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from typing import Protocol

from markdown_it.token import Token
from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from nano_inference.cli import blocks
from nano_inference.cli.blocks import Block
from nano_inference.cli.conversation import Piece
from nano_inference.cli.pane import Pane
from nano_inference.cli.printable import END_FORCED, FORCED, printable

_THEME = Theme({"markdown.code": "bold cyan"})  # rich's own has a black background
_FORCED_STYLE = Style(dim=True, underline=True)
_CODE_THEME = "ansi_dark"
_MARKS = re.compile(f"([{FORCED}{END_FORCED}])")
_CONTEXT_LINES = 40  # preceding lines of code that the syntax highlighter receives with a line
_MIN_PAUSE_S, _PAUSE_RATIO = 0.03, 4
"""Pause between two drawings of an incomplete block: seconds, and a multiple of the last drawing's time."""


class AnswerOutput(Protocol):
    """Output of an answer."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write pieces of the answer."""

    def finish(self) -> None:
        """End the last line, if anything was written."""


@contextmanager
def open_output(plain: bool) -> Iterator[AnswerOutput]:
    """Open an output on stdout, and finish it at the end of the block."""
    output = output_for(console_of(sys.stdout), plain)
    try:
        yield output
    finally:
        output.finish()


def console_of(stream: object) -> Console:
    """Return a rich console that honours NO_COLOR, FORCE_COLOR and TERM and parses no markup."""
    return Console(file=stream, theme=_THEME, markup=False, emoji=False, highlight=False)  # type: ignore[arg-type]


def output_for(console: Console, plain: bool) -> AnswerOutput:
    """Return an output for a console's capabilities."""
    is_simple = console.is_dumb_terminal or console.legacy_windows
    if not console.is_terminal:  # FORCE_COLOR makes a pipe a terminal
        return PlainOutput(console, is_pipe=True)
    if plain or is_simple or not console.encoding.startswith("utf"):
        return PlainOutput(console, can_mark=not is_simple)
    return MarkdownOutput(console)


class PlainOutput:
    """Plain text; control characters are replaced on a terminal and kept in a pipe."""

    def __init__(self, console: Console, *, is_pipe: bool = False, can_mark: bool = False) -> None:
        self._out = console.file
        self._is_pipe = is_pipe
        self._can_mark = can_mark
        self._is_used = False

    def write(self, pieces: Sequence[Piece]) -> None:
        self._is_used = True
        for piece in pieces:
            text = piece.text if self._is_pipe else printable(piece.text)
            if piece.is_forced and self._can_mark:
                text = _FORCED_STYLE.render(text)
            self._out.write(text)
        self._out.flush()

    def finish(self) -> None:
        if self._is_used:
            self._out.write("\n")
            self._out.flush()


class MarkdownOutput:
    """Rendered Markdown: complete blocks are printed once, the incomplete one is redrawn in place.

    If the last drawing is too recent, a timer thread draws after the pause, so that no text waits for the next token.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pane = Pane(console.file)  # type: ignore[arg-type]
        self._is_live = console.file.isatty()
        self._state = blocks.START
        self._painter = Painter(console)
        self._drawing = threading.Lock()
        self._later: threading.Timer | None = None
        self._next_draw_at = 0.0

    def write(self, pieces: Sequence[Piece]) -> None:
        """Print completed blocks, and draw the rest now or after the pause."""
        text = "".join(_marked(piece) for piece in pieces)
        with self._drawing:
            self._state, done = blocks.push(self._state, text)
            wait = self._next_draw_at - self._clock()
            if done or (self._is_live and wait <= 0):
                self._draw(done)
            elif self._is_live and self._later is None:
                self._later = threading.Timer(wait, self._draw_late)
                self._later.daemon = True
                self._later.start()

    def finish(self) -> None:
        """Print the remaining blocks."""
        with self._drawing:
            if self._later is not None:
                self._later.cancel()
            done = blocks.finish(self._state)
            self._state, self._is_live = blocks.START, False
            self._draw(done)

    def _draw_late(self) -> None:
        with self._drawing:
            self._later = None
            if self._is_live:
                self._draw(())

    def _draw(self, done: Sequence[Block]) -> None:
        start = self._clock()
        while True:
            size, painter = self._pane.size, copy(self._painter)
            width = max(1, size.columns - 2)
            kept = [row for block in done for row in painter.keep(block, width)]
            rest = blocks.open_block(self._state) if self._is_live else None
            live = [] if rest is None else painter.rows(rest, width)
            current = self._pane.size
            if current.columns >= size.columns and current.rows >= size.rows:
                break  # else the window has shrunk: the rows would wrap, and the pane's count would be wrong
        self._painter = painter
        self._pane.draw(kept, live[-max(1, size.rows // 2) :])  # still fits if the window loses rows
        now = self._clock()
        self._next_draw_at = now + max(_MIN_PAUSE_S, _PAUSE_RATIO * (now - start))


class Painter:
    """Renders blocks as terminal rows. Stores the preceding code, and whether any row was printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._code: tuple[str, ...] = ()
        self._language = ""
        self._has_rows = False

    def keep(self, block: Block, width: int) -> list[str]:
        """Return the rows of a complete block, and record it as printed."""
        rows = self.rows(block, width)
        if block.kind == "fence":
            self._code, self._language = (), block.language
        elif block.kind == "code":
            self._code = (*self._code[-_CONTEXT_LINES:], block.text)
        self._has_rows = self._has_rows or bool(rows)
        return rows

    def rows(self, block: Block, width: int) -> list[str]:
        """Return the rows of a block, after a blank row if it is not the first one."""
        if not block.text.strip() and block.kind == "markdown":
            return []
        if block.kind in ("code", "fence_end"):
            return self._code_rows(block, width)
        renderable = _dim(block.text.strip("\n")) if block.kind == "fence" else markdown_of(block.text)
        rows = without_blank_ends(self._painted(renderable, width))
        return ["", *rows] if self._has_rows and not block.continues_list else rows

    def _code_rows(self, block: Block, width: int) -> list[str]:
        line = block.text.rstrip("\n")
        if block.kind == "fence_end":
            return self._painted(_dim(line), width)
        lexer = Syntax("", self._language or "text", theme=_CODE_THEME, background_color="default")
        coloured = lexer.highlight("".join(self._code) + line).split("\n", allow_blank=True)
        text = coloured[len(self._code)] if len(coloured) > len(self._code) else Text(line)
        text.expand_tabs(4)
        return self._painted(text, width) or [""]

    def _painted(self, renderable: RenderableType, width: int) -> list[str]:
        options = self._console.options.update(width=width, height=None)
        lines = self._console.render_lines(renderable, options, pad=False)
        return ansi_rows(lines, self._console)


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def markdown_of(text: str) -> Markdown:
    """Return rich Markdown in which newlines are kept, headings are bold lines and HTML is text."""
    output = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    tokens = blocks.parser().parse(text)
    output.parsed = [_simpler(token, before) for before, token in pairwise([None, *tokens]) if token is not None]
    return output


def _simpler(token: Token, before: Token | None) -> Token:
    """Rewrite a token: headings to bold paragraphs, soft breaks to hard breaks."""
    if token.type in ("heading_open", "heading_close"):
        return token.copy(type=f"paragraph_{token.type.removeprefix('heading_')}", tag="p")
    if not token.children:
        return token
    children = [child.copy(type="hardbreak") if child.type == "softbreak" else child for child in token.children]
    if before is not None and before.type == "heading_open":
        children = [Token("strong_open", "strong", 1), *children, Token("strong_close", "strong", -1)]
    return token.copy(children=children)


def ansi_rows(lines: Iterable[Sequence[Segment]], console: Console) -> list[str]:
    """Return rendered lines as ANSI text, with forced text styled and trailing spaces removed."""
    segments, is_forced = [], False
    for line in lines:
        for text, style in _trimmed(line):
            for part in _MARKS.split(text):
                if part in (FORCED, END_FORCED):
                    is_forced = part == FORCED
                elif part:
                    marked = (style or Style()) + _FORCED_STYLE if is_forced else style
                    segments.append(Segment(printable(part), marked))
        segments.append(Segment.line())
    with console.capture() as printed:
        console.print(Segments(segments), crop=False)
    return printed.get().split("\n")[:-1]


def without_blank_ends(rows: Sequence[str]) -> list[str]:
    """Return rows without leading and trailing empty ones, which rich adds to some blocks."""
    filled = [i for i, row in enumerate(rows) if row]
    return list(rows[filled[0] : filled[-1] + 1]) if filled else []


def _trimmed(line: Sequence[Segment]) -> list[tuple[str, Style | None]]:
    """Return a line's texts and styles without trailing spaces."""
    parts = [(segment.text, segment.style) for segment in line if not segment.control]
    while parts and not parts[-1][0].strip():
        parts.pop()
    return [*parts[:-1], (parts[-1][0].rstrip(), parts[-1][1])] if parts else []


def _marked(piece: Piece) -> str:
    text = printable(piece.text)
    return f"{FORCED}{text}{END_FORCED}" if piece.is_forced else text
