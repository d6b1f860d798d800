"""Random expressions and attacks for nanochat's calculator, equal in all versions of Python (`Random.random` only)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import TypeVar

COUNT = 30_000
SEED = 27

_Item = TypeVar("_Item")
_LETTERS = "abcdefghilmnoprstuwxyzABRST"
_WORDS = ("strawberry", "Mississippi", "banana", "a b c", "", "x", "10 20", "ABBA", "aab", " padded ", "3.5", "it")
_NO_ARGUMENT = (
    *("capitalize", "casefold", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "lstrip", "rstrip", "split", "splitlines"),
    *("strip", "swapcase", "title", "upper", "format", "rsplit", "expandtabs", "encode"),
)
_TEXT_ARGUMENT = (
    *("count", "count", "count", "find", "index", "join", "lstrip", "partition", "removeprefix", "removesuffix"),
    *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "strip", "startswith", "endswith", "format"),
    *("format_map", "translate", "maketrans", "replace", "zfill"),
)
_KEEPING = (
    *(".capitalize()", ".casefold()", ".lower()", ".lstrip()", ".rstrip()", ".strip()", ".swapcase()", ".title()"),
    *(".upper()", ".format()", ".expandtabs()", ".strip('a')", ".lstrip('s b')", ".rstrip('a')", ".join('abc')"),
    *(".removeprefix('s')", ".removesuffix('a')", ".zfill(12)", ".center(9)", ".ljust(7)", ".rjust(300)"),
    *(".split().pop()", ".split('a').pop(0)", ".format('x')"),
)
"""Methods from texts to texts."""
_NUMBER_ARGUMENT = ("center", "ljust", "rjust", "zfill", "expandtabs", "splitlines", "count", "find")
_ON_NUMBERS = (
    *(".bit_length()", ".real", ".imag", ".numerator", ".denominator", ".conjugate()", ".as_integer_ratio()"),
    *(".bit_count()", ".to_bytes()", ".hex()", ".is_integer()"),
)
_ON_LISTS = (
    *(".count('a')", ".pop()", ".pop(0)", ".copy()", ".index('a')", ".reverse()", ".sort()", ".append('x')"),
    *(".extend('xy')", ".remove('a')", ".clear()"),
)
_SOUP = (
    *("'", '"', "'a'", ".count('a')", ".count(", ")", "(", ".", " ", " or ", " and ", "not ", " is ", " in ", " if "),
    *(
        " else ",
        "None",
        "True",
        "x",
        "1",
        "2.5",
        "_",
        "u'b'",
        "b'a'",
        "1or 2",
        "for",
        "lambda",
        "yield",
        "await",
        "f''",
    ),
)
_ARITHMETIC_SOUP = ("1", "23", ".", "(", ")", "+", "-", "*", "/", "//", " ", ",", "0", "**", "7.5", "()")


class _Writer:
    """Writes random expressions."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def number(self) -> str:
        digits = "".join(self.pick("0123456789") for _ in range(1 + self.below(self.pick((2, 5, 9, 25)))))
        digits = digits.lstrip("0") or "0" if self.chance(0.97) else digits
        forms: tuple[Callable[[], str], ...] = (
            lambda: digits,
            lambda: digits,
            lambda: f"{int(digits):,}",
            lambda: f"{digits}.{self.below(1000)}",
            lambda: f"{digits}.",
            lambda: f".{self.below(100)}",
        )
        return self.pick(forms)()

    def arithmetic(self, depth: int) -> str:
        if depth == 0 or self.chance(0.15):
            return self.number()
        operator = self.pick(("+", "-", "*", "/", "//", " + ", " - ", " * ", " / ", "+", "-", "*", "/"))
        operator = "**" if self.chance(0.004) else operator
        text = f"{self.arithmetic(depth - 1)}{operator}{self.arithmetic(depth - 1)}"
        if self.chance(0.3):
            text = f"({text})"
        return f"-{text}" if self.chance(0.08) else text

    def literal(self) -> str:
        word = self.pick(_WORDS) if self.chance(0.7) else "".join(self.pick(_LETTERS) for _ in range(self.below(9)))
        quote = self.pick(("'", "'", '"')) if self.chance(0.97) else self.pick(("'''", '"""'))
        prefix = self.pick(("u", "r", "f", "b", "U", "rb", "Rb")) if self.chance(0.05) else ""
        text = f"{prefix}{quote}{word}{quote}"
        return f"{text} {self.literal()}" if self.chance(0.03) else text

    def subject(self, depth: int) -> str:
        text = self.literal() + "".join(self.pick(_KEEPING) for _ in range(self.below(4)))
        for _ in range(self.pick((0, 0, 0, 1, 1, 2))):
            kind = self._random.random()
            if kind < 0.3:
                text += f".{self.pick(_NO_ARGUMENT)}()"
            elif kind < 0.75:
                inner = self.subject(depth - 1) if depth and self.chance(0.2) else self.literal()
                text += f".{self.pick(_TEXT_ARGUMENT)}({inner})"
            elif kind < 0.87:
                text += f".{self.pick(_NUMBER_ARGUMENT)}({self.pick((0, 1, 2, 5, 12, 40, 300, 9000, 70000))})"
            elif kind < 0.95:
                text += self.pick(_ON_LISTS)
            else:
                text += self.pick(_ON_NUMBERS)
        return text

    def value(self, depth: int) -> str:
        kind = self._random.random()
        if depth == 0 or kind < 0.45:
            counted = self.literal() if self.chance(0.2) else f"'{self.pick('aabBr s03')}'"
            return f"{self.subject(depth)}.count({counted})"
        if kind < 0.6:
            return self.subject(depth - 1)
        if kind < 0.7:
            return self.pick(
                ("0", "1", "2", "True", "False", "None", "()", "...", "3.5", "0x1f", "1_0", "1j", "1e2", "x")
            )
        if kind < 0.8:
            return f"{self.value(depth - 1)} {self.pick(('is', 'is not', 'in', 'not in'))} {self.value(depth - 1)}"
        if kind < 0.9:
            return f"{self.value(depth - 1)} {self.pick(('and', 'or'))} {self.value(depth - 1)}"
        if kind < 0.95:
            return f"{self.value(depth - 1)} if {self.value(depth - 1)} else {self.value(depth - 1)}"
        if kind < 0.96:
            return f"{self.literal()}.join(c for c in {self.literal()}).count('a')"
        if kind < 0.97:
            return f"{self.literal()}.{self.pick(('upper', 'count', 'strip'))}"
        return self.pick((f"({self.value(depth - 1)})", f"not {self.value(depth - 1)}"))

    def soup(self, tokens: Sequence[str], most: int) -> str:
        return "".join(self.pick(tokens) for _ in range(1 + self.below(most)))


def expressions(count: int = COUNT, seed: int = SEED) -> Iterator[str]:
    """Yield random expressions: half arithmetic, four in ten with texts, the rest random tokens."""
    writer = _Writer(seed)
    kinds: tuple[Callable[[], str], ...] = (
        *(lambda: writer.arithmetic(1 + writer.below(4)),) * 10,
        *(lambda: writer.value(writer.below(4)),) * 8,
        partial(writer.soup, _SOUP, 9),
        partial(writer.soup, _ARITHMETIC_SOUP, 9),
    )
    for _ in range(count):
        yield writer.pick(kinds)()


def attacks() -> list[str]:
    """Return expressions that reach for objects, for memory or time, or for the parser's limits."""
    return [
        *_reaching(),
        *_growing(),
        *(
            f"'a'.count({argument})"
            for argument in ("'a'*9", "*'a'", "x='a'", "lambda: 1", "'a'for", "\\'a\\'", "'a'\n")
        ),
        *("9" * 4301, "9" * 4300, "9" * 257, "9" * 256, "(" * 199 + "1" + ")" * 199, "(" * 65 + "1" + ")" * 65),
        *(
            "(" * 201 + "1" + ")" * 201,
            "-" * 3000 + "1",
            "-" * 256 + "1",
            "1" + "+1" * 5000,
            "1" + "+1" * 127,
            "not " * 90,
        ),
        *("1" + " if 1 else 1" * 25 + " or 'a'.count('a')", "'a'.count('a')" + " or 1" * 60, "'a'" + ".lower()" * 30),
        *(
            "'a'.count('a')" + ".real" * 48,
            "'''''''''.count('a')",
            "''''''.count('')",
            "\x00",
            "\ud800",
            "٣+٤",
            "1\t+1",
        ),
        *(
            "2* *3",
            "9*" * 2000 + "9",
            ",".join("9" * 300),
            "1e308*10",
            "1e400",
            "..",
            "....",
            "()()",
            "()*3",
            "3*()",
            "()+()",
        ),
        *(
            "-()",
            "()/1",
            "...+1",
            "0//0",
            "0.0/0",
            "1/0.",
            "0x",
            "0b2",
            "0o8",
            "1__0",
            "1_",
            "_1",
            "1._0",
            "01",
            "00",
            "0_0",
        ),
    ]


def _reaching() -> list[str]:
    names = ("().__class__", "(x for x in ()).gi_frame.f_globals", "'a'.count.im_self", "x", "print()", "globals()")
    escapes = (
        "(g for g in 'a').gi_frame.f_back.f_builtins.get('chr')(65).count('A')",
        "(g for g in 'a').gi_frame.f_back.f_back.f_code.co_name.count('a')",
        "''.join(g.gi_code.co_name for g in ((x for x in 'a') for y in 'a')).count('g')",
        "'a'.join(x.upper() for x in 'abc').count('A')",
        "(yield).count('a')",
        "(await x).count('a')",
        "(lambda).count('a')",
        "'a'.count('a').to_bytes().count(1)",
        "'a'.encode('rot13').count('a')",
        "'a'.encode('utf8').decode().count('a')",
        "'{0.a}'.format(1).count('a')",
        "f'{1}'.count('1')",
        "'a'.maketrans('a').count('a')",
        "'a'.format_map('b').count('a')",
        "'a'.upper.count('a')",
        "'a'.count('a').real.count('a')",
        "'a'.count('a').denominator.real.imag",
        "type('a').count('a')",
        "(1).count('a')",
        "1..fromhex('a').is_integer() or 'a'.count('a')",
        "('a'.upper if 'a'.count('a') else 'a'.lower)()",
        "('a'.upper)().count('A')",
        "'a'.count('a')(1)",
        "'a'.count('a') or (1)(2)",
        "x.y.z or 'a'.count('a')",
        "'a'.count('a') or x.y.z()",
    )
    words = ("import", "exec", "eval", "open", "file", "dir", "vars", "locals", "input", "getattr", "OPEN", "Import")
    return [*(f"{name}.count('a')" for name in names), *escapes, *(f"'{word}'.count('a')" for word in words)]


def _growing() -> list[str]:
    sizes = ("8192", "8193", "100000", "9999999", "300000000", "99999999999999999999")
    padded = [f"'a'.{name}({size}).count('a')" for name in ("zfill", "center", "ljust", "rjust") for size in sizes]
    joined = ["'a'"]
    for _ in range(17):
        joined.append(f"'abc'.join({joined[-1]})")
    nested = "'ab'"
    for _ in range(6):
        nested = f"'{'c' * 20}'.join({nested})"
    return [
        *padded,
        *(f"'a'.expandtabs({size}).count('a')" for size in sizes),
        *(f"{one}.count('a')" for one in joined[1::4]),
        f"{nested}.count('c')",
        "'a'.zfill(9000).rfind('0'.zfill(4000)) or 'a'.count('a')",
        "'a'.zfill(8000).rfind('0'.zfill(4000)) or 'a'.count('a')",
        "'a'.zfill(8000).split('0').count('')",
        "'a'.zfill(8000).title().swapcase().casefold().count('0')",
        "'a'.count('a') or 'a'.zfill(300000000)",
        "'a'.zfill(300000000) if 'b'.count('a') else 2",
        "'a b'.split().pop(300000000).count('a')",
        "'ab'.join('cd'.zfill(8000)).count('ab')",
        "'a'.zfill(4000).join('abc').count('a')",
        "'a'.zfill(4000).join('ab').count('a')",
        "'a'.zfill(8000).split('').count('a')",
        "'a'.center(8000).split(' ').count('')",
        "'0'.zfill(8000).partition('0').count('0')",
        "'a'.zfill(8000).join('a'.zfill(8000)).count('a')",
    ]
