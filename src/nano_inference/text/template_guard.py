"""Rewrite chat templates so that the text they create is counted.

MiniJinja's fuel bounds steps, not bytes: `{% set x = x ~ x %}` forty times is a terabyte. A template is therefore
rewritten before it is compiled: it calls a counter after each assignment, in each iteration of a loop and around each
value that it writes. Operations that multiply text in one step are replaced by counted ones (`replace`, `join`) or
refused (`format`, a product without a small number).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from nano_inference.types import ModelError

MAX_SOURCE = 1 << 18
"""Limit on a template's characters; the longest known ones have 2¹⁵."""
MAX_TAG = 2000
"""Limit on the tokens of one tag, because an expression can join as many values as it names."""
MAX_FACTOR = 64
"""One factor of each product must be a number literal up to this: `'a' * 100000000` is a string."""

SPEND, TURN, REPLACE, JOIN = "__spend", "__turn", "__replace", "__join"
"""The names by which a guarded template calls its counters."""

OWN = frozenset((SPEND, TURN, REPLACE, JOIN, "__out"))
"""Names that a template must not use, because it could replace the counters."""

_KEYWORDS = frozenset(("and", "or", "not", "in", "is", "if", "else", "elif", "for", "set", "call", "filter", "do"))
_TOKEN = re.compile(r"""\s+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\W\d]\w*|\d[\w.]*|.""", re.DOTALL)
_OPEN = re.compile(r"\{[{%#]")
_END_RAW = re.compile(r"\{%[-+]?\s*endraw\s*[-+]?%\}")
_COUNTED = {"replace": REPLACE, "join": JOIN}


class Tag(NamedTuple):
    """One `{{ … }}` or `{% … %}`."""

    kind: str
    """`{{` or `{%`."""
    left: str
    """The whitespace control after the opening: `-`, `+` or empty."""
    tokens: tuple[str, ...]
    right: str
    """The whitespace control before the closing."""


def guarded(source: str, where: str) -> str:
    """Return a template with calls of the counters, and with `{% generation %}` blocks as plain ones.

    Raises `ModelError` naming `where` for a template that is too large or uses a refused operation.
    """
    if len(source) > MAX_SOURCE:
        raise ModelError(f"{where}: the chat template has {len(source)} characters, more than {MAX_SOURCE}")
    parts = list(split(source))
    _check([part for part in parts if isinstance(part, Tag)], where)
    captured: list[str] = []
    return "".join(part if isinstance(part, str) else _counted(part, captured) for part in parts)


def split(source: str) -> Iterator[str | Tag]:
    """Split a template into text (including comments and raw blocks) and tags.

    An unclosed tag is returned as text, which the compiler reports.
    """
    at = 0
    while (match := _OPEN.search(source, at)) is not None:
        yield source[at : match.start()]
        if match.group() == "{#":
            at = _after(source, "#}", match.end())
            yield source[match.start() : at]
            continue
        tag, at = _read_tag(source, match.start())
        if tag is None or _words(tag.tokens)[:1] == ("raw",):
            stop = _END_RAW.search(source, at) if tag is not None else None
            at = stop.end() if stop else len(source)
            yield source[match.start() : at]
        else:
            yield tag
    yield source[at:]


def _after(source: str, text: str, start: int) -> int:
    at = source.find(text, start)
    return len(source) if at < 0 else at + len(text)


def _read_tag(source: str, start: int) -> tuple[Tag | None, int]:
    kind = source[start : start + 2]
    close = "}}" if kind == "{{" else "%}"
    at = start + 2
    left = source[at : at + 1] if source[at : at + 1] in ("-", "+") else ""
    at += len(left)
    tokens: list[str] = []
    depth = 0
    end = re.compile(r"[-+]?" + re.escape(close))
    while at < len(source):
        if depth == 0 and (match := end.match(source, at)):
            return Tag(kind, left, tuple(tokens), match.group()[:-2]), match.end()
        found = _TOKEN.match(source, at)
        token = found.group() if found else source[at]
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        tokens.append(token)
        at += len(token)
    return None, len(source)


def _words(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(token for token in tokens if not token.isspace())


def _check(tags: list[Tag], where: str) -> None:
    for tag in tags:
        words = _words(tag.tokens)
        if len(words) > MAX_TAG:
            raise ModelError(f"{where}: a tag of the chat template has {len(words)} tokens, more than {MAX_TAG}")
        if not OWN.isdisjoint(words):
            raise ModelError(f"{where}: the chat template uses the reserved name {min(OWN.intersection(words))}")
        for dot, name, paren in zip(words, words[1:], words[2:], strict=False):
            if dot == "." and name == "format" and paren == "(":
                raise ModelError(f"{where}: the chat template calls .format(), which is not supported")
        if words.count("*") > 1 or not all(_small_product(words, at) for at, w in enumerate(words) if w == "*"):
            raise ModelError(f"{where}: one factor of each product in a chat template must be a number <= {MAX_FACTOR}")


def _small_product(words: tuple[str, ...], at: int) -> bool:
    """Return True if one side of the `*` at `at` is a small number and the `*` is not part of `**`."""
    neighbours = words[max(0, at - 1) : at] + words[at + 1 : at + 2]
    return "*" not in neighbours and any(w.isdigit() and int(w) <= MAX_FACTOR for w in neighbours)


def _counted(tag: Tag, captured: list[str]) -> str:
    """Return the tag with its counter; `captured` is the stack of open `{% set x %}` blocks."""
    words = _words(tag.tokens)
    body = "".join(_counted_methods(list(tag.tokens)))
    if tag.kind == "{{":
        return _counted_output(tag, words, body)
    name = words[0] if words else ""
    if name in ("generation", "endgeneration"):
        return f"{{%{tag.left} {'if true' if name == 'generation' else 'endif'} {tag.right}%}}"
    call = _counter(name, words, captured)
    if call is None:
        return f"{{%{tag.left}{body}{tag.right}%}}"
    return f"{{%{tag.left}{body}%}}{{% if {call} %}}{{% endif {tag.right}%}}"


def _counted_output(tag: Tag, words: tuple[str, ...], body: str) -> str:
    """Return a tag that captures, counts and then writes the output; a string literal needs no counter.

    `{%+` because a plain `{%`, unlike `{{`, would strip the spaces before it.
    """
    if len(words) == 1 and words[0][0] in "'\"":
        return f"{{{{{tag.left}{body}{tag.right}}}}}"
    head = f"{{%{tag.left or '+'} set __out %}}{{{{ {body} }}}}{{% endset %}}"
    return f"{head}{{% if {SPEND}(__out) %}}{{% endif %}}{{{{ __out {tag.right}}}}}"


def _counter(name: str, words: tuple[str, ...], captured: list[str]) -> str | None:
    """Return the call that counts the value this statement stores or the loop or macro it starts; else None."""
    if name == "set":
        at = _top_level(words, "=")
        if at is not None:
            return f"{SPEND}(({''.join(words[1:at])}))"
        captured.append(words[1] if len(words) > 1 else "''")
    elif name == "endset":
        return f"{SPEND}({captured.pop() if captured else repr('')})"
    elif name == "for":
        at = _top_level(words, "in")
        return f"{TURN}(({''.join(words[1:at])}))"
    elif name == "macro":
        return f"{TURN}([{', '.join(_parameters(words))}])"
    elif name == "call":
        return f"{TURN}('')"
    return None


def _top_level(words: tuple[str, ...], wanted: str) -> int | None:
    depth = 0
    for at, word in enumerate(words):
        depth += (word in ("(", "[", "{")) - (word in (")", "]", "}"))
        if depth == 0 and word == wanted:
            return at
    return None


def _parameters(words: tuple[str, ...]) -> list[str]:
    """Return the parameter names of a macro: `macro name ( a , b = 1 )`."""
    names, depth = [], 0
    for before, word in pairwise(words):
        depth += (before in ("(", "[", "{")) - (before in (")", "]", "}"))
        if depth == 1 and before in ("(", ",") and word.isidentifier():
            names.append(word)
    return names


def _counted_methods(tokens: list[str]) -> list[str]:
    """Replace `x.replace(a, b)` by `__replace(x, a, b)`, likewise `join`; last first, which keeps indices valid."""
    for at in range(len(tokens) - 1, -1, -1):
        if tokens[at] not in _COUNTED:
            continue
        dot, paren = _step(tokens, at, -1), _step(tokens, at, 1)
        if dot is None or paren is None or tokens[dot] != "." or tokens[paren] != "(":
            continue
        start = _receiver(tokens, dot)
        after = _step(tokens, paren, 1)
        comma = "" if after is None or tokens[after] == ")" else ", "
        call = [_COUNTED[tokens[at]], "(", *tokens[start:dot], comma]
        tokens = [*tokens[:start], *call, *tokens[paren + 1 :]]
        return _counted_methods(tokens)
    return tokens


def _step(tokens: list[str], at: int, step: int) -> int | None:
    """Return the index of the next token that is not whitespace, in the direction `step`."""
    at += step
    while 0 <= at < len(tokens) and tokens[at].isspace():
        at += step
    return at if 0 <= at < len(tokens) else None


def _receiver(tokens: list[str], dot: int) -> int:
    """Return the start of the expression before a dot: all of `a.b['c'].d(e)`, but only `a.b` of `x ~ a.b`."""
    at = _step(tokens, dot, -1)
    start = dot
    while at is not None:
        if tokens[at] in (")", "]", "}"):
            start = at = _opening(tokens, at)
            before = _step(tokens, at, -1)
            if before is None or not _is_operand(tokens[before]):
                return start
            at = before
            continue
        if not _is_operand(tokens[at]):
            return start
        start = at
        before = _step(tokens, at, -1)
        if before is None or tokens[before] != ".":
            return start
        at = _step(tokens, before, -1)
    return start


def _is_operand(token: str) -> bool:
    """Return True if an expression can end with this token, so that a bracket after it is a call or an index."""
    return token in (")", "]") or token[0] in "'\"" or (token[0] not in "([{" and _is_name(token))


def _is_name(token: str) -> bool:
    return token.isidentifier() and token not in _KEYWORDS


def _opening(tokens: list[str], at: int) -> int:
    depth = 0
    while at >= 0:
        depth += (tokens[at] in (")", "]", "}")) - (tokens[at] in ("(", "[", "{"))
        if depth == 0:
            return at
        at -= 1
    return 0
