"""Check the grammar of a request and convert it to llguidance's form.

llguidance's native compiler cannot be interrupted. Its own limits (`grammar.py`) end what takes long, except for long
texts and a large common multiple of all `multipleOf`. These have limits here, from measurements with version 1.9.1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from nano_inference.types import BadRequest

KNOWN_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""The values of `format` that llguidance enforces; by the standard, any other is an annotation."""
SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
VALUES: Final = ("const", "enum", "default", "examples")  # keywords whose value contains no schema
_NOTES = frozenset({"$schema", "$comment", "$id", "title", "description"})
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Keyword -> the values that allow everything."""
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")  # in a regex, which no automaton can match


def for_llguidance(schema: Any) -> Any:
    """Return an equivalent schema without keywords that say nothing, and with names of properties as properties.

    Formats that llguidance does not know are dropped. So is a pattern with look-around beside a format that it knows:
    zod writes its own regex of a format so. All other keywords stay, and the library refuses those it cannot enforce.
    """
    if isinstance(schema, list):
        return [for_llguidance(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    if schema == {"not": {}}:
        return False
    out = {key: _below(key, value) for key, value in schema.items()}
    names = out.get("propertyNames")
    if isinstance(names, dict):
        out["propertyNames"] = {key: value for key, value in names.items() if key not in _NOTES}
    if isinstance(out.get("format"), str) and out["format"] not in KNOWN_FORMATS:
        del out["format"]
    elif "format" in out and any(mark in str(out.get("pattern")) for mark in _LOOK_AROUND):
        del out["pattern"]
    # Drop keywords that allow everything, by their value or without the keyword they belong to.
    silent = [key for key, values in _NOTHING.items() if key in out and out[key] in values]
    if "contains" not in out:
        silent += ["minContains", "maxContains"]
    elif out.get("minContains") == 0 and "maxContains" not in out:
        silent.append("contains")
    if "if" not in out:
        silent += ["then", "else"]
    elif all(out.get(key, True) in (True, {}) for key in ("then", "else")):
        silent += ["if", "then", "else"]
    for key in silent:
        out.pop(key, None)
    return _with_named_properties(out)


def _below(key: str, value: Any) -> Any:
    if key in VALUES:
        return value
    if key in SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: for_llguidance(one) for name, one in value.items()}
    return for_llguidance(value) if isinstance(value, list | Mapping) else value


def _with_named_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose `propertyNames` is a list or a pattern with these as properties, as of zod's records."""
    names = schema.get("propertyNames")
    if (
        not isinstance(names, dict)
        or names.get("type", "string") != "string"
        or not schema.keys().isdisjoint(("properties", "patternProperties"))
    ):
        return schema
    value = schema.get("additionalProperties", True)
    rest = {key: one for key, one in schema.items() if key != "propertyNames"} | {"additionalProperties": False}
    keys = names.keys() - {"type"}
    if keys == {"enum"} and isinstance(names["enum"], list):
        return rest | {"properties": {name: value for name in names["enum"] if isinstance(name, str)}}
    if keys == {"const"} and isinstance(names["const"], str):
        return rest | {"properties": {names["const"]: value}}
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        return rest | {"patternProperties": {names["pattern"]: value}}
    return schema


Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "calls"]
""""calls" is Lark written by `tool_format`; only it may contain special tokens."""

MAX_BYTES: Mapping[Kind, int] = {
    "json_schema": 65536,
    "json_object": 1024,
    "regex": 8192,
    "choice": 131072,
    "lark": 32768,
    "gbnf": 32768,
    "calls": 131072,
}
"""Limits on a grammar's UTF-8 bytes; compile time is at worst quadratic in a regex and linear in a schema."""
MAX_CHOICES = 10_000
MAX_MULTIPLE = 1000
"""Limit on the least common multiple of all `multipleOf` in a schema, without decimal points: the automaton has that
many states, and an `allOf` of two builds their product."""
MAX_REASON = 300  # limit on the characters of the library's message in an error
WHITESPACE = r" |\n[ \t]{0,24}"
"""Whitespace allowed between JSON tokens, at most once; where it is unlimited, small models write it without end."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_SPECIAL_NAME = re.compile(r'"(?:\\.|[^"\\\n])*+(?:"|\\?$)|//[^\n]*+|/(?:\\.|[^/\\\n])++(?:/|\\?$)|(<[^<>\s]+>)', re.M)
"""Matches a Lark grammar's strings, comments and regexes, to their end or that of the line, or names a special token.
Possessive, because backtracking in an unterminated one would take quadratic time."""
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_QUOTE = '"'
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[^uU])", re.S)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a sample must match. `text` is JSON for a schema, and a JSON list of strings for a choice.

    A schema with `"x-guidance": {"whitespace_flexible": false}` means JSON without any whitespace.
    """

    kind: Kind
    text: str
    special: frozenset[int] = frozenset()  # the special tokens that are markers of calls


def for_library(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form. Raises `BadRequest` for an exceeded limit, or a text not of its kind."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise BadRequest(grammar.kind, "contains half of a surrogate pair, which UTF-8 cannot encode") from None
    if size > MAX_BYTES[grammar.kind]:
        raise BadRequest(grammar.kind, f"{size} bytes are more than {MAX_BYTES[grammar.kind]}")
    try:
        return _converted(grammar)
    except BadRequest:
        raise
    except ImportError:
        message = "needs the extra 'grammar': pip install 'nano-inference[grammar]'"
        raise BadRequest(grammar.kind, f"structured output {message}") from None
    except RecursionError:
        raise BadRequest(grammar.kind, "nested too deep") from None
    except json.JSONDecodeError as error:
        raise BadRequest(grammar.kind, f"is not valid JSON: {error}") from None
    except Exception as error:  # the converters raise ValueError, IndexError and plain Exception
        raise BadRequest(grammar.kind, f"{reason_of(str(error))}") from None


def _converted(grammar: Grammar) -> str:
    """Return a grammar in llguidance's form, except for its size unchecked. Raises any error."""
    from llguidance import LLMatcher

    library: Any = LLMatcher  # its stub requires another type of dictionary
    kind, text = grammar.kind, grammar.text
    converted: str
    if kind in ("json_schema", "json_object"):
        schema = _decoder().decode(text) if kind == "json_schema" else {"type": "object"}
        if not isinstance(schema, dict):
            raise BadRequest(kind, "json_schema: must be an object")
        options = schema.pop("x-guidance", None)
        is_compact = isinstance(options, dict) and options.get("whitespace_flexible") is False
        rules: dict[str, Any] = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITESPACE}
        converted = library.grammar_from_json_schema(json.dumps(for_llguidance(schema)), overrides=rules)
    elif kind in ("regex", "choice"):
        if kind == "choice":
            choices = _decoder().decode(text)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
                raise BadRequest(kind, "choice: must be a list of strings, at least one")
            if len(choices) > MAX_CHOICES:
                raise BadRequest(kind, f"{len(choices)} alternatives are more than {MAX_CHOICES}")
            text = "|".join(_META.sub(r"\\\g<0>", one) for one in choices)
        converted = library.grammar_from_regex(text)
    elif kind == "gbnf":
        from llguidance.gbnf_to_lark import gbnf_to_lark

        converted = library.grammar_from_lark(gbnf_to_lark(_GBNF_ESCAPE.sub(_unescaped, text)))
    else:
        if kind == "lark" and text.lstrip().startswith("{"):  # the library's JSON form, which could set any option
            raise BadRequest(kind, "a grammar begins with a rule or a directive, not with {")
        named = next((found[1] for found in _SPECIAL_NAME.finditer(text) if found[1]), None)
        if kind == "lark" and named is not None:
            raise BadRequest(kind, f"{named[:60]}: special tokens cannot be written by a grammar")
        converted = library.grammar_from_lark(_with_plain_schemas(text))
    return converted


def reason_of(message: str) -> str:
    """Return one line of limited length from a message of the library, without its excerpts of the grammar."""
    if message.startswith("panic"):
        return "the grammar library failed on it"
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    found = re.search(r"^error: (.+)$", message, re.M)
    line = found[1] if found else next(iter(message.strip().splitlines()), "no reason given")
    line = _UNKNOWN_KEYS.sub(lambda keys: f"{keys[1].replace(_QUOTE, '')} is not supported", line)
    line = " ".join(line.partition("; either increase")[0].split())  # a user cannot raise the library's limits
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON // 2]} … {line[-MAX_REASON // 2 :]}"


def _decoder() -> json.JSONDecoder:
    """Return a decoder of JSON that raises `BadRequest` if all `multipleOf` have too large a common multiple."""
    common = 1

    def checked(value: dict[str, Any]) -> dict[str, Any]:
        nonlocal common
        number = value.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            digits = format(Decimal(str(number)), "f").replace(".", "").lstrip("-0")  # 25 for 0.025
            common = math.lcm(common, int(digits[:20] or 1))
        if common > MAX_MULTIPLE:
            raise BadRequest("json_schema", f"the multipleOf have a common multiple above {MAX_MULTIPLE}")
        return value

    def refuse(name: str) -> None:
        raise json.JSONDecodeError(f"{name} is not a JSON number", "", 0)

    return json.JSONDecoder(object_hook=checked, parse_constant=refuse)


def _with_plain_schemas(text: str) -> str:
    """Return a Lark grammar with llguidance's form of the schemas after %json; for invalid JSON the library raises."""
    pieces, at = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", text):
        try:
            schema, end = _decoder().raw_decode(text, found.end())
        except BadRequest:
            raise
        except (ValueError, RecursionError):
            continue
        if found.end() >= at:
            pieces += [text[at : found.end()], json.dumps(for_llguidance(schema))]
            at = end
    return "".join([*pieces, text[at:]])


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of GBNF's `\\u` and `\\U`, which the library's converter cannot decode."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    char = chr(int(digits, 16))
    return f"\\x{ord(char):02x}" if char.isascii() else char  # an ASCII character may have a meaning in GBNF
