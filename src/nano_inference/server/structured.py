"""Reads structured output fields: OpenAI's response_format and those of vLLM, SGLang and llama.cpp.

Pure: returns the grammar that a request asks for and refuses values of the wrong type. `text.grammar` compiles it
later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nano_inference.server.errors import ApiError, refused
from nano_inference.text.grammar import Grammar
from nano_inference.text.grammar_text import SCHEMA_MAPS, VALUES

_KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of vLLM's structured_outputs
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_REFUSED = ("whitespace_pattern", "structural_tag")
_FORMATS = ("text", "json_object", "json_schema")
_FLAT: Mapping[str, str] = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},  # vLLM, formerly
    **{"regex": "regex", "ebnf": "gbnf"},  # SGLang
    **{"grammar": "gbnf", "json_schema": "json"},  # llama.cpp, the second also SGLang
}
"""Field whose value is the structure -> its kind."""
FIELDS: frozenset[str] = frozenset({"response_format", "structured_outputs", *_FLAT})
"""The names that `structure_of` reads."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.M)
_LONGEST_RULE = 4096
"""Characters searched for a GBNF rule to distinguish GBNF from Lark; bounded, as the search is not linear."""


class Structure(NamedTuple):
    """The grammar of an answer, and the field that requests it."""

    field: str
    grammar: Grammar


def structure_of(fields: Mapping[str, Any]) -> Structure | None:
    """Return the structure that a request asks for; None if all fields are absent, null or empty.

    Raises `ApiError` naming the field for a value of the wrong type or without support, and for two structures.
    """
    asked = list(_structures(fields))
    for name, grammar in asked[1:]:
        if grammar != asked[0].grammar:
            raise ApiError(400, f"{asked[0].field} and {name} cannot be combined; give one of them", param=name)
    return asked[0] if asked else None


def _structures(fields: Mapping[str, Any]) -> Iterator[Structure]:
    if fields.get("response_format"):
        found = _of_response_format(_checked("response_format", fields["response_format"], Mapping))
        if found is not None:
            yield Structure("response_format", found)
    if fields.get("structured_outputs"):
        yield from _of_structured_outputs(_checked("structured_outputs", fields["structured_outputs"], Mapping))
    for name, kind in _FLAT.items():
        found = _grammar(name, kind, fields.get(name))
        if found is not None:
            yield Structure(name, found)


def _of_response_format(form: Mapping[str, Any]) -> Grammar | None:
    """Read OpenAI's field; clients of llama.cpp and vLLM may put the schema beside the type."""
    kind = form.get("type")
    if kind == "structural_tag":
        raise refused("response_format.type", "structural_tag is not supported")
    if kind not in _FORMATS:
        raise refused("response_format.type", f"must be one of {', '.join(_FORMATS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return _grammar("response_format.schema", "json", form.get("schema")) or Grammar("json_object", "")
    name, schema = "response_format.schema", form.get("schema")
    if form.get("json_schema") is not None or schema is None:  # {name, schema, strict, description}
        inner = _checked("response_format.json_schema", form.get("json_schema"), Mapping)
        _flag("response_format.json_schema.strict", inner.get("strict"))  # enforced whatever it is
        name, schema = "response_format.json_schema.schema", inner.get("schema")
    return Grammar("json_schema", _dumped(name, _checked(name, schema, Mapping)))


def _of_structured_outputs(options: Mapping[str, Any]) -> Iterator[Structure]:
    for key, value in options.items():
        name = f"structured_outputs.{key}"
        if key in _REFUSED and value is not None:
            raise ApiError(400, f"{name} is not supported", param=name)
        if key not in (*_KINDS, *_FLAGS, *_REFUSED):
            message = f"structured_outputs: unknown field {key[:64]!r}"
            raise ApiError(400, message, param="structured_outputs", code="unknown_field")
    flags = {flag: _flag(f"structured_outputs.{flag}", options.get(flag)) for flag in _FLAGS}
    for key in _KINDS:
        name, value = f"structured_outputs.{key}", options.get(key)
        if key != "json" and value in ("", []):
            raise refused(name, "must not be empty")
        found = _grammar(name, key, value, flags)
        if found is not None:
            yield Structure(name, found)


def _grammar(name: str, kind: str, value: Any, flags: Mapping[str, bool] | None = None) -> Grammar | None:
    """Return the grammar of one value; None if it is absent. An empty schema is any JSON with `flags`, else absent."""
    if value is None or value == "" or (value == {} and kind == "json" and flags is None):
        return None
    is_compact = flags is not None and flags["disable_any_whitespace"]
    if kind == "json_object" and not (_flag(name, value) and is_compact):
        return Grammar("json_object", "") if value else None
    if kind in ("json", "json_object"):
        schema: Any = {"type": "object"}
        if kind == "json":
            schema = _checked(name, _loaded(name, value) if isinstance(value, str) else value, Mapping)
        if flags is not None and flags["disable_additional_properties"] and kind == "json":
            schema = _closed(schema)
        if is_compact:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        return Grammar("json_schema", _dumped(name, schema))
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise refused(name, "must be a list of strings")
        return Grammar("choice", _dumped(name, value)) if value else None
    text: str = _checked(name, value, str)
    if kind == "regex":
        return Grammar("regex", text)
    if kind == "gbnf":
        return Grammar("lark" if text.lstrip().startswith("%llguidance") else "gbnf", text)
    return Grammar("gbnf" if _GBNF_RULE.search(text[:_LONGEST_RULE]) else "lark", text)


def _closed(value: Any) -> Any:
    """Return the schema with additional properties forbidden, except where it sets additionalProperties."""
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    closed: dict[str, Any] = {}
    for key, one in value.items():
        if key in SCHEMA_MAPS and isinstance(one, Mapping):
            closed[key] = {name: _closed(schema) for name, schema in one.items()}
        else:
            closed[key] = one if key in VALUES else _closed(one)
    is_open = "additionalProperties" not in value and ("properties" in value or "patternProperties" in value)
    return {**closed, "additionalProperties": False} if is_open else closed


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise refused(name, "is nested too deeply") from None
    except ValueError as error:
        raise refused(name, f"is not valid JSON: {error}") from None


def _dumped(name: str, value: Any) -> str:
    """Return a value as JSON; keeps the order of keys, which the answer follows."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise refused(name, "is nested too deeply") from None


def _checked(name: str, value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise refused(name, f"must be {'a string' if kind is str else 'an object'}")
    return value


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise refused(name, "must be true or false")
    return bool(value)
