"""Incremental splitting of streamed Markdown into blocks that later text cannot change. Pure functions.

A paragraph, heading or table is complete when the next block begins; lists are emitted item by item and fenced code
line by line, since both can be longer than the screen. The blocks concatenate to the text, however it is chunked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from markdown_it import MarkdownIt  # a dependency of rich
from markdown_it.token import Token

BlockKind = Literal["markdown", "fence", "code", "fence_end"]


class Block(NamedTuple):
    """A piece of Markdown."""

    kind: BlockKind
    text: str
    continues_list: bool = False  # True for a further item of a list: no blank line precedes it
    language: str = ""  # language of the code, for kind "fence"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """Text that is not complete yet."""

    rest: str = ""
    fence: str = ""  # marker of the open code fence, such as three backticks; empty outside of one
    in_list: bool = False  # True if `rest` begins with a further item of a list


START = BlockState()


def push(state: BlockState, text: str) -> tuple[BlockState, tuple[Block, ...]]:
    """Add text; return the new state and the blocks that it completes."""
    state = replace(state, rest=state.rest + text)
    blocks: list[Block] = []
    while "\n" in text or blocks:  # only a complete line can complete a block
        state, block = _first(state)
        if block is None:
            break
        blocks.append(block)
    return state, tuple(blocks)


def finish(state: BlockState) -> tuple[Block, ...]:
    """Return the remaining blocks at the end of the text."""
    end = "" if state.rest.endswith("\n") else "\n"
    state, blocks = push(state, end)
    rest = open_block(state)
    return blocks if rest is None else (*blocks, rest)


def open_block(state: BlockState) -> Block | None:
    """Return the incomplete block; None if it is blank."""
    if not state.rest.strip("\n" if state.fence else None):
        return None
    return Block("code" if state.fence else "markdown", state.rest, state.in_list)


@cache
def parser() -> MarkdownIt:
    """Return a parser that keeps HTML, entities, images and link definitions as text.

    So no part of an answer is hidden, and `&#13;` does not become a control character.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    return parser.disable(["reference", "entity", "image"])


def _first(state: BlockState) -> tuple[BlockState, Block | None]:
    """Split off the first complete block, None if there is none yet."""
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
    """Split off the lines before a token."""
    assert following.map is not None, "block tokens know their lines"
    at = _offset(state.rest, following.map[0])
    block = Block("markdown", state.rest[:at], state.in_list)
    return replace(state, rest=state.rest[at:], in_list=in_list), block


def _fence(state: BlockState, token: Token) -> tuple[BlockState, Block]:
    """Split off the line that opens a fence."""
    assert token.map is not None, "block tokens know their lines"
    at = _offset(state.rest, token.map[0] + 1)
    words = token.info.split()
    block = Block("fence", state.rest[:at], language=words[0] if words else "")
    return replace(state, rest=state.rest[at:], fence=token.markup, in_list=False), block


def _code_line(state: BlockState) -> tuple[BlockState, Block | None]:
    """Split off a line of code, or the line that closes its fence."""
    line, newline, rest = state.rest.partition("\n")
    if not newline:
        return state, None
    mark = re.escape(state.fence[0])
    if re.fullmatch(rf" {{0,3}}{mark}{{{len(state.fence)},}}[ \t]*", line):
        return replace(state, rest=rest, fence=""), Block("fence_end", line + newline)
    return replace(state, rest=rest), Block("code", line + newline)


def _offset(text: str, line: int) -> int:
    """Return the character offset of a line."""
    at = 0
    for _ in range(line):
        at = text.index("\n", at) + 1
    return at
