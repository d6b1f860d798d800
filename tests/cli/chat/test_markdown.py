"""Splitting of streamed Markdown into blocks, and their rendering."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nano_inference.cli.chat.conversation import Piece
from nano_inference.cli.chat.markdown import MarkdownOutput, console_of, output_for, split
from nano_inference.cli.terminal import one_line, printable

TEXT = """# Head

One *two*
three

- a
- b
  c

  d
1. x
2. y

~~~~python
```
x = 1
~~~
~~~~
| a | b |
|---|---|
| 1 | 2 |
#tag
***
    indented

> quote
on

<div>
[1]: http://x.y
last"""
LINES = st.sampled_from(
    ["", "a", "  b", "- c", "  - d", "12. e", "```", "~~~~x", "# f", "|g|", "|-|", "---", ">h", "\t"]
)


def cut(text: str, most_lines: int = 1000) -> list[str]:
    """Return the blocks of a text that arrives line by line."""
    done, rest = [], ""
    for line in text.splitlines(keepends=True):
        block, rest, _ = split(rest + line, most_lines)
        done += [block] if block else []
    return [*done, rest]


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(LINES, max_size=12))
def test_blocks_contain_every_line_once(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert "\n".join(block.rstrip("\n") for block in cut(text)).split() == text.split()


def test_block_is_finished_when_the_next_begins() -> None:
    assert split("a\n\nb", 9) == ("", "a\n\nb", False)
    assert split("a\n\nb\n", 9) == ("a\n", "b\n", False)
    assert cut("a\n\n- c\n- d\n\n```py\nx\n\ny\n```\nz") == ["a\n", "- c\n- d\n", "```py\nx\n\ny\n```\nz"]


def test_long_lists_and_code_are_printed_in_parts() -> None:
    assert split("- a\n- b\n- c", 1) == ("- a", "- b\n- c", True)
    assert split("~~~py\na\nb\nc", 2) == ("~~~py\na\nb\n~~~", "~~~py\nc", True)
    assert split("~~~py\na\n~~~\nc", 2) == ("", "~~~py\na\n~~~\nc", False)
    assert plain("1. a\n2. b\n3. c\n4. d", 1) == " 1 a\n 2 b\n 3 c\n 4 d"
    assert plain("```\na\nb\n\nc\nd\n```", 2) == "a\nb\n\nc\nd"


def painted(text: str, height: int = 100, **options: object) -> str:
    out = io.StringIO()
    sizes = {"width": 42, "height": height}
    console = Console(file=out, force_terminal=True, color_system="truecolor", **sizes, **options)  # type: ignore[arg-type]
    output = MarkdownOutput(console)
    for line in text.splitlines(keepends=True):
        output.write([Piece(line)])
    output.finish()
    return out.getvalue().removesuffix("\n")


def plain(text: str, height: int = 100) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", painted(text, height))


def test_painted_markdown() -> None:
    assert plain(TEXT).splitlines() == [
        *("Head", "", "One two", "three", "", " • a", " • b", "   c", "   d", "", " 1 x", " 2 y", ""),
        *("```", "x = 1", "~~~", "", " a     b", " ───────", " 1     2", " #tag"),
        *("", "-" * 40, "", "indented", "", "▌ quote", "▌ on", "", "<div>", "[1]: http://x.y", "last"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["[red]x[/red]", "&#27;[31m", "&amp;", "<b>x</b>", "![a](b)x", ":smile:", "[1]: x"])
def test_markup_and_html_are_shown_as_text(text: str) -> None:
    assert plain(text).replace("a (b)", "[a](b)") == text


def test_highlighting_uses_preceding_lines() -> None:
    rows = painted('```python\n"""\nx = 1\n"""\nx = 1\n```').splitlines()
    assert rows[1] != rows[3], "the first one is in a string"


def test_no_color_keeps_bold() -> None:
    text = painted("**b** `c`\n\n```python\nx = 'y'\n```", no_color=True)
    assert set(re.findall(r"\x1b\[([0-9;]*)m", text)) <= {"0", "1", "2", "3", "4"} and "\x1b[1m" in text


def test_printable_replaces_control_characters() -> None:
    assert printable("a\tb\nc\rd\x00\x1b\x7f\x9b\u202e\ud800\ufff9é😀") == "a\tb\ncd␀␛␡" + "\ufffd" * 4 + "é😀"
    assert one_line("a\n\n b\x1b", 5) == "a b␛" and one_line("x" * 9, 5) == "xxxx…"


def test_forced_text_is_styled_on_terminals_only() -> None:
    pieces = [Piece("[1+1 → "), Piece("2", is_forced=True), Piece("] \x1b")]
    shown = {}
    for name, options in {"pipe": {}, "terminal": {"force_terminal": True, "color_system": "standard"}}.items():
        for is_plain in (False, True):
            out = io.StringIO()
            output = output_for(Console(file=out, _environ={"TERM": "xterm"}, **options), is_plain)  # type: ignore[arg-type]
            output.write(pieces)
            output.finish()
            shown[name, is_plain] = out.getvalue()
    assert shown["pipe", True] == shown["pipe", False] == "[1+1 → 2] \x1b\n"
    assert shown["terminal", True] == "[1+1 → \x1b[2;4m2\x1b[0m] ␛\n"
    assert "[1+1 → \x1b[2;4m2\x1b[0m] ␛" in shown["terminal", False]


def test_force_color_renders_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    output = output_for(console_of(out), plain=False)
    for char in "**a**\n\nb":
        output.write([Piece(char)])
    output.finish()
    assert "\x1b[1ma\x1b[0m" in out.getvalue() and out.getvalue().count("b") == 1 and "\x1b[1A" not in out.getvalue()
