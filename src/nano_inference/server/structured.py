"""Structured output as clients ask for it: OpenAI's response_format and what vLLM, SGLang and llama.cpp call the same.

Pure: it reads fields and returns what the answer must be. Whether that compiles is found out later, in
`text.grammar`; here a value of the wrong shape is refused, by the name of its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nano_inference.server.errors import ApiError
from nano_inference.text.grammar import Grammar
from nano_inference.text.grammar_text import Kind

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
    """What an answer must be, and the field that says so."""

    field: str
    grammar: Grammar


_FORMATS = ("text", "json_object", "json_schema")
_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")
_REFUSED = ("whitespace_pattern", "structural_tag")
_ASKS = ("json", "json_object", "regex", "choice", "grammar")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.M)
_LONGEST_RULE = 4096
"""Characters in which the first rule must stand for a grammar to be taken for GBNF: the search is not linear."""


def structure_of(fields: Mapping[str, Any]) -> Structure | None:
    """Return what a request holds its answer to; None when it asks for nothing. What is null or empty is not asked.

    Raises `ApiError` naming the field for a value of the wrong shape, for what is not supported, and, naming both,
    where two are asked for at once.
    """
    asked = [*_of_response_format(fields.get("response_format")), *_of_vllm(fields), *_of_others(fields)]
    if len(asked) > 1:
        (first, _), (second, _) = asked[:2]
        raise ApiError(400, f"{first} and {second}: an answer has one structure; give one of them", param=second)
    return Structure(*asked[0]) if asked else None


def _of_response_format(given: Any) -> Iterator[tuple[str, Grammar]]:
    """OpenAI's field. llama.cpp's and vLLM's clients put a schema beside the type, too."""
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
    """Read {"json_schema": {name, schema, strict, description}}. It is enforced whatever `strict` says."""
    name = "response_format.json_schema"
    if form.get("json_schema") is None and form.get("schema") is not None:
        name, schema = "response_format.schema", form["schema"]
    else:
        inner = _object(name, form.get("json_schema"))
        _flag(f"{name}.strict", inner.get("strict"))
        name, schema = f"{name}.schema", inner.get("schema")
    return Grammar("json_schema", _dumped(name, _object(name, schema)))


def _of_vllm(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    """vLLM's structured_outputs, and the fields it had before."""
    if fields.get("structured_outputs"):
        name = "structured_outputs"
        wishes = _object(name, fields[name])
        _check_known(name, wishes)
        flags = {flag: _flag(f"{name}.{flag}", wishes.get(flag)) for flag in _FLAGS}
        for key in _ASKS:
            found = _of_kind(f"{name}.{key}", key, wishes.get(key), flags)
            if found is not None:
                yield f"{name}.{key}", found
    for key in ("json", "regex", "choice", "grammar"):
        found = _of_kind(f"guided_{key}", key, fields.get(f"guided_{key}"), {})
        if found is not None:
            yield f"guided_{key}", found


def _check_known(name: str, wishes: Mapping[str, Any]) -> None:
    """Refuse what structured_outputs does not have, or has elsewhere only."""
    for key, value in wishes.items():
        if key in _REFUSED and value is not None:
            raise ApiError(400, f"{name}.{key} is not supported", param=f"{name}.{key}")
        if key not in (*_ASKS, *_FLAGS, *_REFUSED):
            raise ApiError(400, f"{name}: unknown field {key[:64]!r}", param=name, code="unknown_field")


def _of_others(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    """Fields that stand by themselves at SGLang and llama.cpp."""
    kinds: tuple[tuple[str, Kind], ...] = (("regex", "regex"), ("ebnf", "gbnf"), ("grammar", "gbnf"))
    for name, kind in kinds:
        text = _text(name, fields.get(name))
        if text:
            yield name, Grammar(kind, text)
    found = _schema("json_schema", fields.get("json_schema"))
    if found is not None:
        yield "json_schema", found


def _of_kind(name: str, key: str, value: Any, flags: Mapping[str, bool]) -> Grammar | None:
    """Read one of vLLM's kinds; None when it is not asked for."""
    match key:
        case "json":
            return _schema(name, value, flags)
        case "json_object":
            return _any_object(flags) if _flag(name, value) else None
        case "choice":
            return _choice(name, value)
    text = _text(name, value)
    if not text:
        return None
    if key == "regex":
        return Grammar("regex", text)
    return Grammar("gbnf" if _GBNF_RULE.search(text[:_LONGEST_RULE]) else "lark", text)


def _any_object(flags: Mapping[str, bool]) -> Grammar:
    if flags.get("disable_any_whitespace"):
        return Grammar("json_schema", _dumped("json_object", _compact({"type": "object"})))
    return Grammar("json_object", "")


def _schema(name: str, value: Any, flags: Mapping[str, bool] | None = None) -> Grammar | None:
    """Read a schema, an object or its JSON; None when it is not asked for."""
    if value is None or value == "" or value == {}:
        return None
    schema = _object(name, _loaded(name, value) if isinstance(value, str) else value)
    if flags and flags["disable_additional_properties"]:
        schema = _closed(schema)
    if flags and flags["disable_any_whitespace"]:
        schema = _compact(schema)
    return Grammar("json_schema", _dumped(name, schema))


def _compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that says that no whitespace may stand anywhere."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


def _closed(value: Any) -> Any:
    """Return a schema in which objects that list properties have no others, unless it says so itself."""
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    closed = {key: one if key in _VALUES else _closed_below(key, one) for key, one in value.items()}
    is_open = "additionalProperties" not in value and ("properties" in value or "patternProperties" in value)
    return {**closed, "additionalProperties": False} if is_open else closed


def _closed_below(key: str, value: Any) -> Any:
    """Close what stands at a keyword: a schema, several, or an object that names schemas."""
    if key in _MAPS and isinstance(value, Mapping):
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
        raise ApiError(400, f"{name}: is no JSON: {error}", param=name) from None


def _dumped(name: str, value: Any) -> str:
    """Write a value as JSON; its order of keys stays, for it is the order of the answer's."""
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
