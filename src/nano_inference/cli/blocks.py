"""Markdown that is still being written, cut into blocks as soon as nothing that follows can change them. Pure steps.

A paragraph, a heading, a table is whole when the next block begins; a list is given item by item, and a fence of code
line by line, since both can be longer than a screen. All blocks together are the text, whatever pieces it came in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt  # what rich parses Markdown with: it comes with rich
from markdown_it.token import Token

BlockKind = Literal["markdown", "fence", "code", "fence_end"]


class Block(NamedTuple):
    """A piece of Markdown that is certain."""

    kind: BlockKind
    text: str
    goes_on: bool = False
    """It is the next item of the list before, so no blank line comes between."""
    language: str = ""
    """Of the code that a fence opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """What is not certain yet."""

    rest: str = ""
    fence: str = ""
    """What opened the fence that the rest is in, such as three backticks; empty outside of one."""
    in_list: bool = False
    """The rest begins with a further item of a list."""


START = BlockState()


def take(state: BlockState, text: str) -> tuple[BlockState, tuple[Block, ...]]:
    """Take more text; return the new state and the blocks that became certain."""
    state = replace(state, rest=state.rest + text)
    blocks: list[Block] = []
    while "\n" in text or blocks:  # only a whole line can make something certain
        state, block = _first(state)
        if block is None:
            break
        blocks.append(block)
    return state, tuple(blocks)


def finish(state: BlockState) -> tuple[Block, ...]:
    """Return what is left, now that no text follows."""
    end = "" if state.rest.endswith("\n") else "\n"
    state, blocks = take(state, end)
    rest = open_block(state)
    return blocks if rest is None else (*blocks, rest)


def open_block(state: BlockState) -> Block | None:
    """Return the block that is being written; None when there is nothing of it to show."""
    if not state.rest.strip("\n" if state.fence else None):
        return None
    return Block("code" if state.fence else "markdown", state.rest, state.in_list)


@cache
def parser() -> MarkdownIt:
    """Return the parser. What it would take for HTML, entities, images or link definitions is text: none of it may
    vanish, and `&#13;` must not turn into what it stands for.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return parser.disable(["reference", "entity", "image"])


def _first(state: BlockState) -> tuple[BlockState, Block | None]:
    """Return the first certain block of the rest and the state behind it."""
    if state.fence:
        return _code_line(state)
    whole = state.rest[: state.rest.rfind("\n") + 1]
    tokens = parser().parse(whole)
    tops = [token for token in tokens if token.level == 0 and token.map is not None and token.nesting >= 0]
    if tops and tops[0].type == "fence":
        return _fence(state, tops[0])
    own = tokens[: tokens.index(tops[1])] if len(tops) > 1 else tokens
    items = [token for token in own if token.level == 1 and token.type == "list_item_open"]
    if len(items) > 1:
        return _cut(state, items[1], in_list=True)
    return _cut(state, tops[1], in_list=False) if len(tops) > 1 else (state, None)


def _cut(state: BlockState, following: Token, *, in_list: bool) -> tuple[BlockState, Block]:
    """Cut off what lies before a token's first line."""
    assert following.map is not None, "block tokens know their lines"
    at = _offset(state.rest, following.map[0])
    block = Block("markdown", state.rest[:at], state.in_list)
    return replace(state, rest=state.rest[at:], in_list=in_list), block


def _fence(state: BlockState, token: Token) -> tuple[BlockState, Block]:
    """Cut off the line that opens a fence."""
    assert token.map is not None, "block tokens know their lines"
    at = _offset(state.rest, token.map[0] + 1)
    words = token.info.split()
    block = Block("fence", state.rest[:at], language=words[0] if words else "")
    return replace(state, rest=state.rest[at:], fence=token.markup, in_list=False), block


def _code_line(state: BlockState) -> tuple[BlockState, Block | None]:
    """Cut off a line of code, or the one that closes its fence."""
    line, newline, rest = state.rest.partition("\n")
    if not newline:
        return state, None
    mark = re.escape(state.fence[0])
    if re.fullmatch(rf" {{0,3}}{mark}{{{len(state.fence)},}}[ \t]*", line):
        return replace(state, rest=rest, fence=""), Block("fence_end", line + newline)
    return replace(state, rest=rest), Block("code", line + newline)


def _offset(text: str, line: int) -> int:
    """Return where a line of a text begins, in characters."""
    at = 0
    for _ in range(line):
        at = text.index("\n", at) + 1
    return at
