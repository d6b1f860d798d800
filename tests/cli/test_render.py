"""Splitting of streamed Markdown into blocks, and their rendering."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nano_inference.cli import blocks
from nano_inference.cli.blocks import Block
from nano_inference.cli.conversation import Piece
from nano_inference.cli.printable import one_line, printable
from nano_inference.cli.render import Painter, console_of, output_for

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


def cut(text: str, sizes: list[int]) -> list[Block]:
    """Return the blocks of a text in chunks whose sizes cycle through `sizes`."""
    state, done, at, turn = blocks.START, [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        state, some = blocks.push(state, text[at : at + size])
        done, at, turn = [*done, *some], at + size, turn + 1
    return [*done, *blocks.finish(state)]


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(LINES, max_size=12), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_blocks_do_not_depend_on_chunking(lines: list[str], sizes: list[int]) -> None:
    assert_same_blocks("\n".join(lines), sizes)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_blocks_of_every_kind(size: int) -> None:
    assert_same_blocks(TEXT, [size])


def assert_same_blocks(text: str, sizes: list[int]) -> None:
    found = cut(text, sizes)
    assert "".join(block.text for block in found).rstrip() == text.rstrip()
    assert found == cut(text, [len(text) + 1])


def test_block_is_complete_when_the_next_begins() -> None:
    state, done = blocks.push(blocks.START, "a\n\nb\n\n- c\n- d\n")
    assert [(block.text, block.continues_list) for block in done] == [
        ("a\n\n", False),
        ("b\n\n", False),
        ("- c\n", False),
    ]
    state, done = blocks.push(state, "```py\nx\ny")
    assert [block.kind for block in done] == ["markdown", "fence", "code"] and done[0].continues_list
    assert done[1].language == "py" and blocks.open_block(state) == Block("code", "y")


def painted(text: str, width: int = 40, **options: object) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", **options)  # type: ignore[arg-type]
    painter = Painter(console)
    return "\n".join(row for block in cut(text, [len(text) + 1]) for row in painter.keep(block, width))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", painted(text))


def test_painted_markdown() -> None:
    assert plain(TEXT).splitlines() == [
        *("Head", "", "One two", "three", "", " • a", " • b", "   c", "   d", "", " 1 x", " 2 y", ""),
        *("~~~~python", "```", "x = 1", "~~~", "~~~~", "", " a     b", " ───────", " 1     2", " #tag"),
        *("", "-" * 40, "", " indented", "", "▌ quote", "▌ on", "", "<div>", "[1]: http://x.y", "last"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["[red]x[/red]", "&#27;[31m", "&amp;", "<b>x</b>", "![a](b)x", ":smile:", "[1]: x"])
def test_markup_and_html_are_shown_as_text(text: str) -> None:
    assert plain(text).replace("a (b)", "[a](b)") == text


def test_highlighting_uses_preceding_lines() -> None:
    rows = painted('```python\n"""\nx = 1\n"""\nx = 1\n```').splitlines()
    assert rows[2] != rows[4], "the first one is in a string"


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
