"""Rewrite a JSON schema for llguidance, which refuses keywords that it cannot enforce even where they say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
    for key in _silent(out):
        out.pop(key, None)
    return _with_named_properties(out)


def _below(key: str, value: Any) -> Any:
    if key in VALUES:
        return value
    if key in SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: for_llguidance(one) for name, one in value.items()}
    return for_llguidance(value) if isinstance(value, list | Mapping) else value


def _silent(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a schema that allow everything, by their value or without the keyword they belong to."""
    silent = [key for key, values in _NOTHING.items() if key in schema and schema[key] in values]
    if "contains" not in schema:
        silent += ["minContains", "maxContains"]
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        silent.append("contains")
    if "if" not in schema:
        silent += ["then", "else"]
    elif all(schema.get(key, True) in (True, {}) for key in ("then", "else")):
        silent += ["if", "then", "else"]
    return silent


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
