"""A grammar as its request spells it: what is checked before the library sees it, and how the library wants it.

The library is llguidance. Its compiler is a native one that runs where nothing can stop it, so that everything whose
time grows faster than its text is bounded here; every figure is from measurements with version 1.9.1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal

from nano_inference.types import BadRequest

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "calls"]
"""The last is Lark that this package writes itself (`tool_format`), which alone may name special tokens."""

MAX_BYTES = MappingProxyType(
    {
        "json_schema": 65536,
        "json_object": 1024,
        "regex": 8192,
        "choice": 131072,
        "lark": 32768,
        "gbnf": 32768,
        "calls": 131072,
    }
)
"""UTF-8 bytes of a grammar's text: time to compile is at worst quadratic in a regex and linear in a schema."""
MAX_PATTERN = MAX_BYTES["regex"]
"""Characters of a `pattern` in a schema."""
MAX_CHOICES = 10_000
MAX_NESTING = 64
"""Levels of objects and arrays in a schema, of brackets in the others."""
MAX_MULTIPLE = 1000
"""Least common multiple of all `multipleOf` in a schema, their decimal points left out: the automaton has as many
states, and an `allOf` of two builds their product."""
MAX_REASON = 300
"""Characters of the library's message that are passed on."""
WHITESPACE = r" |\n[ \t]{0,24}"
"""What may stand once where JSON allows whitespace: a small model writes spaces for ever when it may."""

_NO_SPACES = "whitespace_flexible"
_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_SPECIAL_NAME = re.compile(r'"(?:\\.|[^"\\\n])*+(?:"|\\?$)|//[^\n]*+|/(?:\\.|[^/\\\n])++(?:/|\\?$)|(<[^<>\s]+>)', re.M)
"""Strings, comments and regexes of a Lark grammar, which are passed over to their end or that of the line, and what
names a special token. Possessive: where one does not end, trying shorter ones would take quadratic time."""
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[^uU])", re.S)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a sample must be: of which kind, and its text; JSON for a schema and, a list, for a choice.

    A schema may ask for JSON without any whitespace by `"x-guidance": {"whitespace_flexible": false}`.
    """

    kind: Kind
    text: str
    special: frozenset[int] = frozenset()
    """The special tokens that calls stand between."""


def check_grammar(grammar: Grammar) -> None:
    """Raise `BadRequest` for a grammar that passes a limit; it says which."""
    _check_size(grammar)
    if grammar.kind == "json_schema":
        _check_schema(_schema_of(grammar))
    elif grammar.kind == "choice":
        _choices_of(grammar)
    elif grammar.kind not in ("json_object", "calls") and _depth(grammar.text) > MAX_NESTING:
        raise BadRequest(f"{grammar.kind}: nested more than {MAX_NESTING} levels deep")
    if grammar.kind == "lark":
        _check_lark(grammar.text)
    if grammar.kind in ("lark", "calls"):
        for schema in _inline_schemas(grammar.text):
            _check_schema(schema)


def for_library(grammar: Grammar) -> str:
    """Return what llguidance compiles. Raises `BadRequest` for a text that is not of its kind."""
    from llguidance import LLMatcher

    library: Any = LLMatcher  # whose stub wants its own kind of dictionary
    try:
        match grammar.kind:
            case "json_schema":
                schema, rules = _split_rules(_schema_of(grammar))
                text: str = library.grammar_from_json_schema(json.dumps(schema), overrides=rules)
            case "json_object":
                text = library.grammar_from_json_schema('{"type":"object"}', overrides=_rules(is_compact=False))
            case "regex":
                text = library.grammar_from_regex(grammar.text)
            case "choice":
                text = library.grammar_from_regex("|".join(map(_literal, _choices_of(grammar))))
            case "lark" | "calls":
                text = library.grammar_from_lark(grammar.text)
            case "gbnf":
                text = library.grammar_from_lark(_lark_of(grammar.text))
    except BadRequest:
        raise
    except Exception as error:  # the converters raise ValueError, IndexError and the bare Exception
        raise BadRequest(f"{grammar.kind}: {reason_of(str(error))}") from None
    return text


def reason_of(message: str) -> str:
    """Return one line of bounded length from what the library said: not the excerpts of the grammar below it."""
    if message.startswith("panic"):
        return "the grammar library failed on it"
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    found = re.search(r"^error: (.+)$", message, re.M)
    line = found[1] if found else next(iter(message.strip().splitlines()), "no reason given")
    line = " ".join(line.partition("; either increase")[0].split())  # its advice is for who sets the limits
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON // 2]} … {line[-MAX_REASON // 2 :]}"


def _check_size(grammar: Grammar) -> None:
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise BadRequest(f"{grammar.kind}: holds half of a surrogate pair, which no UTF-8 text can") from None
    limit = MAX_BYTES[grammar.kind]
    if size > limit:
        raise BadRequest(f"{grammar.kind}: {size} bytes are more than {limit}")


def _parsed(grammar: Grammar) -> Any:
    try:
        value = json.loads(grammar.text, parse_constant=_no_constant)
    except RecursionError:
        raise BadRequest(f"{grammar.kind}: nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise BadRequest(f"{grammar.kind}: is no JSON: {error}") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _schema_of(grammar: Grammar) -> dict[str, Any]:
    """Return a schema as an object. Python's reader gives up before its stack is full, whatever the nesting."""
    schema = _parsed(grammar)
    if not isinstance(schema, dict):
        raise BadRequest("json_schema: must be an object")
    return schema


def _choices_of(grammar: Grammar) -> list[str]:
    choices = _parsed(grammar)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise BadRequest("choice: must be a list of strings, at least one")
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"choice: {len(choices)} alternatives are more than {MAX_CHOICES}")
    return choices


def _check_schema(schema: dict[str, Any]) -> None:
    """Refuse what would take the compiler long, wherever in the schema it stands."""
    multiple = 1
    for level, holder in _containers(schema):
        if level > MAX_NESTING:
            raise BadRequest(f"json_schema: nested more than {MAX_NESTING} levels deep")
        if not isinstance(holder, dict):
            continue
        if any(len(pattern) > MAX_PATTERN or _depth(pattern) > MAX_NESTING for pattern in _patterns(holder)):
            raise BadRequest(f"json_schema: a pattern is over {MAX_PATTERN} characters or {MAX_NESTING} levels deep")
        multiple = math.lcm(multiple, _digits(holder.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            raise BadRequest(f"json_schema: the multipleOf have a common multiple above {MAX_MULTIPLE}")


def _patterns(holder: dict[str, Any]) -> Iterator[str]:
    """Return the regexes of one level of a schema."""
    if isinstance(holder.get("pattern"), str):
        yield holder["pattern"]
    if isinstance(holder.get("patternProperties"), dict):
        yield from holder["patternProperties"]


def _digits(number: object) -> int:
    """Return a number's digits as an integer, without leading zeros: 25 for 0.025; 1 for what is none."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return 1
    digits = format(Decimal(str(number)), "f").replace(".", "").lstrip("-0")
    return int(digits[:20] or 1)


def _containers(value: Any) -> Iterator[tuple[int, Any]]:
    """Go through the objects and arrays of a JSON value, each with its level; the value itself is at 1."""
    todo = [(1, value)]
    while todo:
        level, holder = todo.pop()
        yield level, holder
        for inner in holder.values() if isinstance(holder, dict) else holder:
            if isinstance(inner, dict | list):
                todo.append((level + 1, inner))


def _split_rules(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a schema without the library's own options, and those that hold: ours, or no whitespace at all."""
    wishes = schema.get("x-guidance")
    is_compact = isinstance(wishes, dict) and wishes.get(_NO_SPACES) is False
    return {name: value for name, value in schema.items() if name != "x-guidance"}, _rules(is_compact=is_compact)


def _rules(*, is_compact: bool) -> dict[str, Any]:
    return {_NO_SPACES: False} if is_compact else {"whitespace_pattern": WHITESPACE}


def _depth(text: str) -> int:
    """Return how deep brackets nest in a regex or grammar; those behind a backslash do not count."""
    plain = re.sub(r"\\.", "", text, flags=re.S)
    level = deepest = 0
    for char in plain:
        if char in "([{":
            level += 1
            deepest = max(deepest, level)
        elif char in ")]}":
            level = max(0, level - 1)
    return deepest


def _literal(text: str) -> str:
    """Return a regex that matches just this text."""
    return "".join(f"\\{char}" if char in _META else char for char in text)


def _check_lark(text: str) -> None:
    if text.lstrip().startswith("{"):  # the library's own JSON, in which every option could be set
        raise BadRequest("lark: a grammar begins with a rule or a directive, not with {")
    named = next((found[1] for found in _SPECIAL_NAME.finditer(text) if found[1]), None)
    if named is not None:
        raise BadRequest(f"lark: {named[:60]}: special tokens cannot be written by a grammar")


def _inline_schemas(text: str) -> Iterator[dict[str, Any]]:
    """Return the schemas that stand in a Lark grammar behind %json; what cannot be read the library refuses."""
    reader = json.JSONDecoder()
    for found in re.finditer(r"%json\s*(?=\{)", text):
        try:
            schema, _ = reader.raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        yield schema


def _lark_of(text: str) -> str:
    """Turn llama.cpp's GBNF to Lark. The library's converter does not know four digits behind a backslash and u."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text))
    except RecursionError:
        raise BadRequest(f"gbnf: nested more than {MAX_NESTING} levels deep") from None


def _unescaped(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    char = chr(int(digits, 16))
    return f"\\x{ord(char):02x}" if char.isascii() else char  # an ASCII one may mean something where it stands
