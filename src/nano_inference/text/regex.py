r"""Regular expressions that are matched in linear time, one character after another.

The syntax is the part of Python's that such an automaton can match: literals, `.`, classes, `\d \w \s` and their
opposites, groups, `|`, `* + ? {m,n}`, lazy or not, and `\n \t \r \f \v \xhh \uhhhh`. Anchors, word boundaries,
look-around and references back are refused. As in Python, `.` matches all but a line break.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nano_inference.types import BadRequest

MAX_STATES = 250
"""Limit on the states of one expression, and on the members of its classes, each of which counts as a state: a
character of the text costs at most a few steps for each."""
_MAX_KNOWN = 4096  # limit on the transitions that a search remembers
MAX_DEPTH = 32  # limit on nested groups

CharTest = Callable[[str], bool]
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES: dict[str, CharTest] = {"d": str.isdecimal, "w": lambda char: char.isalnum() or char == "_", "s": str.isspace}
_COUNTS = re.compile(r"\{([0-9]{0,9})(?:(,)([0-9]{0,9}))?\}")
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(slots=True, eq=False)
class State:
    """A state of the automaton: reads a character that passes `test`, or splits without reading."""

    test: CharTest | None = None
    next: list[State] = field(default_factory=list)


class _Piece(NamedTuple):
    """A part of the automaton: its first state, and the states whose `next` the following part completes."""

    start: State
    ends: list[State]


@dataclass(frozen=True, slots=True)
class Regex:
    """A compiled expression."""

    start: State
    accepting: State
    num_states: int


def compile_regex(pattern: str) -> Regex:
    """Return a compiled expression. Raises `BadRequest` for an invalid, unsupported, empty or too large one."""
    parser = _Parser(pattern)
    piece = parser.alternatives(0)
    if parser.at < len(pattern):
        raise parser.refused("unbalanced parenthesis")
    accepting = State()
    for end in piece.ends:
        end.next.append(accepting)
    if any(state is accepting for state in closure([piece.start])):
        raise BadRequest("", "it matches the empty text")
    return Regex(piece.start, accepting, parser.num_states)


def closure(states: Sequence[State]) -> list[State]:
    """Return the states that are reached without reading a character, those given included."""
    found: dict[int, State] = {}
    stack = list(states)
    while stack:
        state = stack.pop()
        if id(state) not in found:
            found[id(state)] = state
            if state.test is None:
                stack += state.next
    return list(found.values())


class Search:
    """Searches a text that grows for the first end of a match."""

    def __init__(self, regex: Regex) -> None:
        self._regex = regex
        self._states: frozenset[State] = frozenset()
        self._known: dict[tuple[frozenset[State], str], frozenset[State]] = {}
        """Transitions: a text has few combinations of states, and many characters."""

    def push(self, char: str) -> bool:
        """Add a character; return True if a match ends with it."""
        step = self._states, char
        after = self._known.get(step)
        if after is None:
            after = self._after(char)
            if len(self._known) < _MAX_KNOWN:
                self._known[step] = after
        self._states = after
        return self._regex.accepting in after

    def _after(self, char: str) -> frozenset[State]:
        reading = [one for one in closure([*self._states, self._regex.start]) if one.test is not None]
        return frozenset(
            closure([after for one in reading if one.test is not None and one.test(char) for after in one.next])
        )


class _Parser:
    """Recursive descent over one pattern, which builds the automaton."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0
        self.num_states = 0

    def refused(self, what: str) -> BadRequest:
        return BadRequest("", f"{what} at position {self.at} of {self._pattern[:64]!r}")

    def alternatives(self, depth: int) -> _Piece:
        """Parse alternatives up to the end or a closing parenthesis."""
        if depth > MAX_DEPTH:
            raise self.refused(f"more than {MAX_DEPTH} nested groups")
        pieces = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            pieces.append(self._sequence(depth))
        if len(pieces) == 1:
            return pieces[0]
        split = self._state(None)
        split.next += [piece.start for piece in pieces]
        return _Piece(split, [end for piece in pieces for end in piece.ends])

    def _sequence(self, depth: int) -> _Piece:
        whole: _Piece | None = None
        while (char := self._peek()) and char not in "|)":
            piece = self._repeated(depth)
            whole = piece if whole is None else self._joined(whole, piece)
        return self._empty() if whole is None else whole

    def _repeated(self, depth: int) -> _Piece:
        """Parse an atom with its quantifiers; a counted atom is parsed again for each copy."""
        begin = self.at
        piece = self._atom(depth)
        while (char := self._peek()) and char in "*+?{":
            least, most = self._counts()
            if self._peek() in ("?", "+"):
                if self._peek() == "+":
                    raise self.refused("a possessive quantifier is not supported")
                self.at += 1  # lazy: a search for the first end finds the same
            after = self.at
            copies = [piece]
            for _ in range(max(least, most or 0, 1) - 1 + (1 if most is None and least > 1 else 0)):
                self.at = begin
                copies.append(self._atom(depth))
            self.at = after
            piece = self._counted(copies, least, most)
            if (char := self._peek()) and char in "*+?{":
                raise self.refused("a quantifier after a quantifier")
        return piece

    def _counts(self) -> tuple[int, int | None]:
        """Parse a quantifier; return the least and the most repetitions, None for no limit."""
        char = self._pattern[self.at]
        if char != "{":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        found = _COUNTS.match(self._pattern, self.at)
        if found is None or not (found[1] or found[3]):
            raise self.refused("a brace that is no quantifier; write \\{ for the character")
        self.at = found.end()
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and (most < least or most == 0):
            raise self.refused("a quantifier whose most is less than its least, or 0,")
        if max(least, most or 0) > MAX_STATES:
            raise self.refused(f"more than {MAX_STATES} repetitions")
        return least, most

    def _counted(self, copies: list[_Piece], least: int, most: int | None) -> _Piece:
        """Join copies of an atom so that it is read `least` to `most` times."""
        if most is None:
            copies[-1] = self._looped(copies[-1], is_optional=least == 0 or len(copies) > least)
        whole: _Piece | None = None
        skips: list[State] = []
        for index, piece in enumerate(copies):
            if most is not None and index >= least:
                split = self._state(None)
                split.next.append(piece.start)
                skips.append(split)
                piece = _Piece(split, piece.ends)
            whole = piece if whole is None else self._joined(whole, piece)
        assert whole is not None, "there is at least one copy"
        return _Piece(whole.start, [*whole.ends, *skips])

    def _looped(self, piece: _Piece, *, is_optional: bool) -> _Piece:
        split = self._state(None)
        split.next.append(piece.start)
        for end in piece.ends:
            end.next.append(split)
        return _Piece(split if is_optional else piece.start, [split])

    def _atom(self, depth: int) -> _Piece:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._reading(self._class())
        if char == ".":
            return self._reading(lambda one: one != "\n")
        if char == "\\":
            return self._reading(self._escape())
        if char in "^$":
            raise self.refused(f"the anchor {char} is not supported")
        if char in "*+?{":
            raise self.refused("nothing to repeat")
        return self._reading(_equal(char))

    def _group(self, depth: int) -> _Piece:
        if self._peek() == "?":
            if self._pattern[self.at : self.at + 2] != "?:":
                raise self.refused("only plain groups and (?: ) are supported, not a group")
            self.at += 2
        piece = self.alternatives(depth + 1)
        if self._peek() != ")":
            raise self.refused("missing parenthesis")
        self.at += 1
        return piece

    def _escape(self) -> CharTest:
        char = self._next()
        if char.lower() in _CLASSES:
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda one: not test(one)
        return _equal(self._escaped(char))

    def _escaped(self, char: str) -> str:
        """Return the character of an escape whose letter was read."""
        if char in _HEX:
            digits = self._pattern[self.at : self.at + _HEX[char]]
            if len(digits) < _HEX[char] or not all(one in "0123456789abcdefABCDEF" for one in digits):
                raise self.refused("an incomplete escape")
            self.at += len(digits)
            if int(digits, 16) > 0x10FFFF:
                raise self.refused("an escape beyond Unicode")
            return chr(int(digits, 16))
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char.isalnum():
            raise self.refused(f"the escape \\{char} is not supported")
        return char

    def _class(self) -> CharTest:
        """Parse a class after its bracket."""
        is_negated = self._peek() == "^"
        self.at += is_negated
        tests: list[CharTest] = []
        ranges: list[tuple[str, str]] = []
        is_first = True
        while (char := self._next()) != "]" or is_first:
            is_first = False
            if char == "\\":
                kind = self._next()
                if kind.lower() in _CLASSES:
                    self.at -= 1
                    tests.append(self._escape())
                    self._count(1)
                    continue
                char = self._escaped(kind)
            last = char
            if self._peek() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._next()
                last = self._escaped(self._next()) if last == "\\" else last
                if last < char:
                    raise self.refused("a range whose end is before its start")
            ranges.append((char, last))
            self._count(1)

        def matches(one: str) -> bool:
            return any(low <= one <= high for low, high in ranges) or any(test(one) for test in tests)

        return (lambda one: not matches(one)) if is_negated else matches

    def _peek(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise self.refused("an incomplete expression")
        self.at += 1
        return char

    def _state(self, test: CharTest | None) -> State:
        self._count(1)
        return State(test)

    def _count(self, states: int) -> None:
        self.num_states += states
        if self.num_states > MAX_STATES:
            raise BadRequest("", f"it has more than {MAX_STATES} states")

    def _reading(self, test: CharTest) -> _Piece:
        state = self._state(test)
        return _Piece(state, [state])

    def _empty(self) -> _Piece:
        state = self._state(None)
        return _Piece(state, [state])

    def _joined(self, first: _Piece, second: _Piece) -> _Piece:
        for end in first.ends:
            end.next.append(second.start)
        return _Piece(first.start, second.ends)


def _equal(char: str) -> CharTest:
    return lambda one: one == char
