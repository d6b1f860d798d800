"""Output of an answer while it is streamed: rendered Markdown, plain text on a simple terminal, unchanged in a pipe.

Text for a terminal passes through `printable`, and is never parsed as rich's markup. Probabilities of tokens are shown
on stderr as colours, or as numbers without colour support.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ClassVar

from markdown_it import MarkdownIt  # a dependency of rich
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown, Paragraph
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from nano_inference.cli.chat.conversation import Piece, ShownToken
from nano_inference.cli.terminal import END_FORCED, FORCED, note, printable

_THEME = Theme({"markdown.code": "bold cyan"})  # rich's own has a black background
_FORCED_STYLE = Style(dim=True, underline=True)
_MARKS = re.compile(f"([{FORCED}{END_FORCED}])")
_REFRESHES_PER_S = 12


@contextmanager
def open_output(plain: bool) -> Iterator[PlainOutput | MarkdownOutput]:
    """Open an output on stdout, and finish it at the end of the block."""
    output = output_for(console_of(sys.stdout), plain)
    try:
        yield output
    finally:
        output.finish()


def console_of(stream: object) -> Console:
    """Return a rich console that honours NO_COLOR, FORCE_COLOR and TERM and parses no markup."""
    return Console(file=stream, theme=_THEME, markup=False, emoji=False, highlight=False)  # type: ignore[arg-type]


def output_for(console: Console, plain: bool) -> PlainOutput | MarkdownOutput:
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
        """Write pieces of the answer."""
        self._is_used = True
        for piece in pieces:
            text = piece.text if self._is_pipe else printable(piece.text)
            if piece.is_forced and self._can_mark:
                text = _FORCED_STYLE.render(text)
            self._out.write(text)
        self._out.flush()

    def finish(self) -> None:
        """End the last line, if anything was written."""
        if self._is_used:
            self._out.write("\n")
            self._out.flush()


class OpenBlock(Live):
    """Redraws the text that later text can change, after it has changed. Half the window at most, which may shrink."""

    def __init__(self, console: Console) -> None:
        self.text = self._drawn = ""
        super().__init__(
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def get_renderable(self) -> RenderableType:
        return AnswerMarkdown(self.text, tallest(self.console))

    def refresh(self) -> None:
        if self.text != self._drawn:
            self._drawn = self.text
            super().refresh()


def tallest(console: Console) -> int:
    """Return how many rows of an unfinished block are shown, so that they still fit if the window becomes smaller."""
    return max(1, console.height // 2)


class MarkdownOutput:
    """Rendered Markdown: finished blocks are printed once, and rich's `Live` redraws the unfinished one below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = OpenBlock(console)
        self._has_printed = self._continues = False

    def write(self, pieces: Sequence[Piece]) -> None:
        """Print the blocks that the pieces finish."""
        texts = ((printable(piece.text), piece.is_forced) for piece in pieces)
        text = "".join(f"{FORCED}{text}{END_FORCED}" if is_forced else text for text, is_forced in texts)
        if "\n" in text:
            done, self._open.text, continues = split(self._open.text + text, tallest(self._console))
            self._print(done, continues)
        else:
            self._open.text += text
        if self._open.text and self._console.file.isatty():
            self._open.start()

    def finish(self) -> None:
        """Print the last block."""
        text, self._open.text = self._open.text, ""
        self._open.stop()
        self._print(text, False)

    def _print(self, text: str, continues: bool) -> None:
        """Print finished blocks, after an empty line unless they continue the last one."""
        if text.strip():
            if self._open.is_started:
                self._open.refresh()  # `print` draws what was refreshed last below the text
            if self._has_printed and not self._continues:
                self._console.print()
            self._console.print(AnswerMarkdown(text))
            self._has_printed, self._continues = True, continues


@cache
def parser() -> MarkdownIt:
    """Return a parser that keeps HTML, entities, images and link definitions as text.

    So no part of an answer is hidden, and `&#13;` does not become a control character.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return parser.disable(["reference", "entity", "image"])


def split(text: str, most_lines: int) -> tuple[str, str, bool]:
    """Return the blocks that later text cannot change, the rest, and whether the rest continues the last of them.

    If the last block is a list or code of more than `most_lines`, its finished items or lines are returned too.
    """
    *lines, partial = text.split("\n")
    tokens = parser().parse("\n".join(lines) + "\n")
    tops = [token for token in tokens if token.level == 0 and token.map is not None and token.nesting >= 0]
    if not tops or tops[-1].map is None:
        return "", text, False
    last, start = tops[-1], tops[-1].map[0]
    if len(lines) - start <= most_lines:
        return _at(lines, start, partial, False)
    end = lines[-1].strip()
    is_closed = last.type == "fence" and end.startswith(last.markup) and set(end) == {last.markup[0]}
    if last.type == "fence" and end and not is_closed:
        return "\n".join([*lines, last.markup]), f"{lines[start]}\n{partial}", True
    items = [token.map[0] for token in tokens if token.type == "list_item_open" and token.level == 1 and token.map]
    is_list = bool(items) and items[-1] > start
    return _at(lines, items[-1] if is_list else start, partial, is_list)


def _at(lines: list[str], start: int, partial: str, continues: bool) -> tuple[str, str, bool]:
    return "\n".join(lines[:start]), "\n".join([*lines[start:], partial]), continues


class _Code(CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = self.text.plain.rstrip("\n")
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")


class _Heading(Paragraph):
    style_name = "bold"


class AnswerMarkdown(Markdown):
    """Markdown in which newlines are kept, headings are bold lines and HTML is text.

    It leaves two columns empty, and renders the last `most_rows` rows if that is given.
    """

    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code}

    def __init__(self, text: str, most_rows: int = 0) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = parser().parse(text)
        for token in self.parsed:
            for child in token.children or ():
                child.type = "hardbreak" if child.type == "softbreak" else child.type
        self._most_rows = most_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(1, options.max_width - 2), height=None)
        parts = (part for part in super().__rich_console__(console, inner) if isinstance(part, Segment))
        rows = list(_rows(Segment.split_lines(parts)))
        filled = [number for number, row in enumerate(rows) if row]
        first = 0 if self.parsed and self.parsed[0].type == "fence" else min(filled, default=0)  # keeps code's own
        for row in rows[first : max(filled, default=-1) + 1][-self._most_rows :]:
            yield from (*row, Segment.line())


def _rows(lines: Iterable[list[Segment]]) -> Iterator[list[Segment]]:
    """Yield rendered lines with forced text styled, and without trailing spaces, which would be copied."""
    is_forced = False
    for line in lines:
        row: list[Segment] = []
        for text, style, _ in line:
            for part in _MARKS.split(text):
                if part in (FORCED, END_FORCED):
                    is_forced = part == FORCED
                elif part:
                    row.append(Segment(printable(part), (style or Style()) + _FORCED_STYLE if is_forced else style))
        while row and not row[-1].text.strip():
            row.pop()
        yield [*row[:-1], Segment(row[-1].text.rstrip(), row[-1].style)] if row else row


_COLOURS = ((0.8, "green"), (0.4, "cyan"), (0.1, "yellow"), (0.0, "red"))  # lowest probability of each colour


def show_tokens(tokens: tuple[ShownToken, ...]) -> None:
    """Print an answer's tokens with their probabilities."""
    if not tokens:
        note("[this answer has no probabilities]")
        return
    console = console_of(sys.stderr)
    if console.color_system is None or console.no_color:
        note("tokens: " + " ".join(f"{_quoted(token.text)}{_share(token)}" for token in tokens))
    else:
        console.print(coloured(tokens))


def coloured(tokens: Iterable[ShownToken]) -> Text:
    """Return tokens coloured by probability, after a legend."""
    legend = (part for low, colour in _COLOURS for part in (" ", (f"≥{low:.0%}", colour)))
    body: list[tuple[str, str | Style]] = []
    for token in tokens:
        style: str | Style = _FORCED_STYLE
        if not token.is_forced and token.logprob is not None:
            share = math.exp(token.logprob)
            style = next(colour for low, colour in _COLOURS if share >= low)
        # Newlines are made visible, and the text of a token that is part of a character is empty.
        body.append((printable(token.text).replace("\n", "⏎\n") or "·", style))
    return Text.assemble("tokens,", *legend, " ", ("forced", _FORCED_STYLE), ":\n", *body)


def table(tokens: tuple[ShownToken, ...], number: int) -> str:
    """Return the alternatives of token `number` (counted from 1) as a table."""
    token = tokens[number - 1]
    head = f"token {number} of {len(tokens)}: {_quoted(token.text)}{_share(token)}"
    if token.is_forced:
        return head
    rows = [f"  {rank}. {logprob:9.4f} {math.exp(logprob):7.2%}  {_quoted(text)}{' <- drawn' * (text == token.text)}"
            for rank, (text, logprob) in enumerate(token.top, start=1)]  # fmt: skip
    logprob = "unknown" if token.logprob is None else f"{token.logprob:.4f}"
    return "\n".join([f"{head}, logprob {logprob}", *rows])


def _share(token: ShownToken) -> str:
    if token.is_forced:
        return " forced"
    return " ?" if token.logprob is None else f" {math.exp(token.logprob):.0%}"


def _quoted(text: str) -> str:
    return f"'{printable(text).translate({10: '⏎', 9: '⇥'})}'"
