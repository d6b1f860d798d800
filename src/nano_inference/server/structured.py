"""Reads structured output fields: OpenAI's response_format and those of vLLM, SGLang and llama.cpp.

Pure: returns the grammar that a request asks for and refuses values of the wrong type. `text.grammar` compiles it
later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nano_inference.server.errors import ApiError
from nano_inference.text.grammar import Grammar
from nano_inference.text.grammar_text import SCHEMA_MAPS, VALUES, Kind
from nano_inference.types import EngineRequest

FIELDS: frozenset[str] = frozenset(
    {
        "response_format",  # OpenAI
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),  # vLLM
        *("regex", "ebnf"),  # SGLang
        *("grammar", "json_schema"),  # llama.cpp, the second also SGLang
    }
)
"""The names that `structure_of` reads."""


class Structure(NamedTuple):
    """The grammar of an answer, and the field that requests it."""

    field: str
    grammar: Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest(EngineRequest):
    """The engine request of one prompt, checked against the engine's limits."""

    structure: Structure | None = None
    """Structure of the answer; `make_matcher` includes its matcher only after it was compiled."""


_FORMATS = ("text", "json_object", "json_schema")
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_REFUSED = ("whitespace_pattern", "structural_tag")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.M)
_LONGEST_RULE = 4096
"""Characters searched for a GBNF rule to distinguish GBNF from Lark; bounded, as the search is not linear."""


def structure_of(fields: Mapping[str, Any]) -> Structure | None:
    """Return the structure that a request asks for; None if all fields are absent, null or empty.

    Raises `ApiError` naming the field for a value of the wrong type or without support, and for two structures.
    """
    asked = [*_of_response_format(fields.get("response_format")), *_of_vllm(fields), *_of_others(fields)]
    first, second = asked[0][0] if asked else "", next((name for name, one in asked if one != asked[0][1]), None)
    if second is not None:
        raise ApiError(400, f"{first} and {second} cannot be combined; give one of them", param=second)
    return Structure(*asked[0]) if asked else None


def _of_response_format(given: Any) -> Iterator[tuple[str, Grammar]]:
    """Read OpenAI's field; clients of llama.cpp and vLLM may put the schema beside the type."""
    if not given:
        return
    form = _object("response_format", given)
    kind = form.get("type")
    if kind == "structural_tag":
        raise ApiError(400, "response_format.type: structural_tag is not supported", param="response_format.type")
    if kind not in _FORMATS:
        message = f"response_format.type: must be one of {', '.join(_FORMATS)}"
        raise ApiError(400, message, param="response_format.type")
    if kind == "json_object":
        yield "response_format", _schema("response_format.schema", form.get("schema")) or Grammar("json_object", "")
    elif kind == "json_schema":
        yield "response_format", _named_schema(form)


def _named_schema(form: Mapping[str, Any]) -> Grammar:
    """Read {"json_schema": {name, schema, strict, description}}. Enforced whatever `strict` is."""
    name = "response_format.json_schema"
    if form.get("json_schema") is None and form.get("schema") is not None:
        name, schema = "response_format.schema", form["schema"]
    else:
        inner = _object(name, form.get("json_schema"))
        _flag(f"{name}.strict", inner.get("strict"))
        name, schema = f"{name}.schema", inner.get("schema")
    return Grammar("json_schema", _dumped(name, _object(name, schema)))


def _of_vllm(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    """Read vLLM's structured_outputs and its older guided_* fields."""
    if fields.get("structured_outputs"):
        name = "structured_outputs"
        options = _object(name, fields[name])
        for key, value in options.items():
            if key in _REFUSED and value is not None:
                raise ApiError(400, f"{name}.{key} is not supported", param=f"{name}.{key}")
            if key not in (*_KINDS, *_FLAGS, *_REFUSED):
                raise ApiError(400, f"{name}: unknown field {key[:64]!r}", param=name, code="unknown_field")
        flags = {flag: _flag(f"{name}.{flag}", options.get(flag)) for flag in _FLAGS}
        for key in _KINDS:
            value = options.get(key)
            if key != "json" and value in ("", []):
                raise ApiError(400, f"{name}.{key}: must not be empty", param=f"{name}.{key}")
            if key == "json" and value == {}:  # any JSON
                schema = _compact({}) if flags.get("disable_any_whitespace") else {}
                found: Grammar | None = Grammar("json_schema", _dumped("json", schema))
            else:
                found = _of_kind(f"{name}.{key}", key, value, flags)
            if found is not None:
                yield f"{name}.{key}", found
    for key in ("json", "regex", "choice", "grammar"):
        found = _of_kind(f"guided_{key}", key, fields.get(f"guided_{key}"), {})
        if found is not None:
            yield f"guided_{key}", found


def _of_others(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    """Read the top-level fields of SGLang and llama.cpp."""
    for name in ("regex", "ebnf", "grammar"):
        text = _text(name, fields.get(name))
        if text:
            kind: Kind = "lark" if text.lstrip().startswith("%llguidance") else "gbnf"
            yield name, Grammar("regex" if name == "regex" else kind, text)
    found = _schema("json_schema", fields.get("json_schema"))
    if found is not None:
        yield "json_schema", found


def _of_kind(name: str, key: str, value: Any, flags: Mapping[str, bool]) -> Grammar | None:
    """Read one of vLLM's kinds; None if it is absent."""
    match key:
        case "json":
            return _schema(name, value, flags)
        case "json_object":
            if _flag(name, value) and flags.get("disable_any_whitespace"):
                return Grammar("json_schema", _dumped("json_object", _compact({"type": "object"})))
            return Grammar("json_object", "") if value else None
        case "choice":
            return _choice(name, value)
    text = _text(name, value)
    if not text:
        return None
    if key == "regex":
        return Grammar("regex", text)
    return Grammar("gbnf" if _GBNF_RULE.search(text[:_LONGEST_RULE]) else "lark", text)


def _schema(name: str, value: Any, flags: Mapping[str, bool] | None = None) -> Grammar | None:
    """Read a schema given as an object or as JSON text; None if it is absent."""
    if value is None or value == "" or value == {}:
        return None
    schema = _object(name, _loaded(name, value) if isinstance(value, str) else value)
    if flags and flags["disable_additional_properties"]:
        schema = _closed(schema)
    if flags and flags["disable_any_whitespace"]:
        schema = _compact(schema)
    return Grammar("json_schema", _dumped(name, schema))


def _compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with whitespace forbidden."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def _closed(value: Any) -> Any:
    """Return the schema with additional properties forbidden, except where it sets additionalProperties."""
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    closed = {key: one if key in VALUES else _closed_below(key, one) for key, one in value.items()}
    is_open = "additionalProperties" not in value and ("properties" in value or "patternProperties" in value)
    return {**closed, "additionalProperties": False} if is_open else closed


def _closed_below(key: str, value: Any) -> Any:
    """Close the value of a keyword: a schema, a list of schemas, or a mapping of names to schemas."""
    if key in SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: _closed(schema) for name, schema in value.items()}
    return _closed(value)


def _choice(name: str, value: Any) -> Grammar | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ApiError(400, f"{name}: must be a list of strings", param=name)
    return Grammar("choice", _dumped(name, value))


def _loaded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ApiError(400, f"{name}: is nested too deeply", param=name) from None
    except ValueError as error:
        raise ApiError(400, f"{name}: is not valid JSON: {error}", param=name) from None


def _dumped(name: str, value: Any) -> str:
    """Return a value as JSON; keeps the order of keys, which the answer follows."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ApiError(400, f"{name}: is nested too deeply", param=name) from None


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{name}: must be an object", param=name)
    return value


def _text(name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{name}: must be a string", param=name)
    return value or ""


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name}: must be true or false", param=name)
    return bool(value)
