"""Structured output: all fields of all dialects, and errors that name their field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nano_inference.server.errors import ApiError
from nano_inference.server.structured import FIELDS, structure_of
from nano_inference.text.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
AS_SCHEMA = Grammar("json_schema", TEXT)
LARK = 'start: "a"'
GBNF = 'root ::= "a"'


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    found = structure_of(fields)
    return None if found is None else found.grammar


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SCHEMA),
        ({"response_format": {"type": "json_object", "schema": {}}}, Grammar("json_object", "")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, Grammar("json_schema", "{}")),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes","no"]')),
        ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
        ({"structured_outputs": {"grammar": GBNF}}, Grammar("gbnf", GBNF)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
        ({"structured_outputs": {"json": SCHEMA, "disable_fallback": True, "regex": None}}, AS_SCHEMA),
        ({"guided_json": SCHEMA}, AS_SCHEMA),
        ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
        ({"guided_choice": ["é"]}, Grammar("choice", '["é"]')),
        ({"guided_grammar": "# a comment\nroot ::= x"}, Grammar("gbnf", "# a comment\nroot ::= x")),
        ({"guided_grammar": 'start: "::="'}, Grammar("lark", 'start: "::="')),
        ({"json_schema": TEXT}, AS_SCHEMA),
        ({"regex": "x?"}, Grammar("regex", "x?")),
        ({"ebnf": GBNF}, Grammar("gbnf", GBNF)),
        ({"grammar": GBNF}, Grammar("gbnf", GBNF)),
    ],
)
def test_structured_output_fields(fields: dict[str, Any], expected: Grammar) -> None:
    assert set(fields) <= FIELDS
    assert grammar_of(fields) == expected
    assert grammar_of({**dict.fromkeys(FIELDS), **fields, "prompt": "p", "model": "m"}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}, "prompt": "x"},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "choice": None, "disable_any_whitespace": True}},
        {"guided_json": {}, "guided_choice": [], "guided_regex": "", "guided_grammar": ""},
        {"json_schema": "", "regex": "", "ebnf": "", "grammar": ""},
        {"json_schema": {}, "response_format": None},
    ],
)
def test_null_and_empty_fields_are_ignored(fields: dict[str, Any]) -> None:
    assert grammar_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "must not be empty"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema"),
        ({"response_format": {"json_schema": {}}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "must be true or false",
        ),
        ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema", "must be an object"),
        ({"structured_outputs": [1]}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown field 'jsn'"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "is not supported"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supported"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "must be an object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not valid JSON"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "must be true or false"),
        ({"structured_outputs": {"choice": ["a", 2]}}, "structured_outputs.choice", "must be a list of strings"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex", "must be a string"),
        ({"guided_json": "[" * 100_000}, "guided_json", "nested too deeply"),
        ({"guided_grammar": {"a": 1}}, "guided_grammar", "must be a string"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert message in caught.value.message and param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"regex": "a", "ebnf": GBNF}, ("regex", "ebnf")),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, ("response_format", "guided_regex")),
        ({"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA}, ("structured_outputs.regex", "guided_json")),
    ],
)
def test_two_structures_are_refused_naming_both(fields: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(fields)
    assert all(name in caught.value.message for name in names) and caught.value.param == names[1]


def test_one_grammar_under_several_names_is_accepted() -> None:
    text = '%llguidance {}\n\nstart: "a"\n'
    guidance = {"guided_grammar": text, "structured_outputs": {"grammar": text}, "guided_decoding_backend": "guidance"}
    for fields in (guidance, {"ebnf": text}, {"grammar": text}):
        assert grammar_of(fields) == Grammar("lark", text)
    with pytest.raises(ApiError, match=r"structured_outputs\.grammar and guided_regex cannot"):
        grammar_of({**guidance, "guided_regex": "a"})


def test_vllm_flags() -> None:
    nested = {
        "properties": {"a": {"items": [{"properties": {}}, {"patternProperties": {}, "additionalProperties": True}]}}
    }
    found = grammar_of({"structured_outputs": {"json": nested, "disable_additional_properties": True}})
    assert found is not None and json.loads(found.text) == {
        "properties": {
            "a": {
                "items": [
                    {"properties": {}, "additionalProperties": False},
                    {"patternProperties": {}, "additionalProperties": True},
                ]
            }
        },
        "additionalProperties": False,
    }
    named = {"properties": {"properties": {"const": {"properties": 1}}}}
    found = grammar_of({"structured_outputs": {"json": named, "disable_additional_properties": True}})
    assert found is not None and json.loads(found.text) == {**named, "additionalProperties": False}
    compact = {"x-guidance": {"whitespace_flexible": False}}
    for asked in ({"json": {"type": "object"}}, {"json_object": True}):
        found = grammar_of({"structured_outputs": {**asked, "disable_any_whitespace": True}})
        assert found is not None and found.kind == "json_schema"
        assert json.loads(found.text) == {"type": "object", **compact}
