"""Tool fields of requests, and tool calls in OpenAI's format."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from nano_inference.server.body import parse
from nano_inference.server.errors import ApiError
from nano_inference.server.schema import MAX_TOOLS, ToolFields
from nano_inference.server.tools import MAX_TOOLS_BYTES, ToolUse, call_deltas, is_reported, requested_tools
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True},
}
NOW = {"type": "function", "function": {"name": "now"}}
CALCULATOR = {"type": "calculator"}


def use(template: str | None = None, **fields: Any) -> ToolUse | None:
    return requested_tools(parse(json.dumps(fields).encode(), ToolFields), template)


def some(template: str | None = None, **fields: Any) -> ToolUse:
    found = use(template, **fields)
    assert found is not None
    return found


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_deprecated_fields_equal_current_ones() -> None:
    functions = [WEATHER["function"], NOW["function"]]
    assert use(functions=functions) == use(tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert use(functions=functions, function_call="none") == use(
        tools=[WEATHER, NOW], tool_choice="none", parallel_tool_calls=False
    )
    assert some(functions=functions, function_call={"name": "now"}).name == "now"
    assert use(function_call="auto") is None


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": 1}, "tools", "list"),
        ({"tools": [1]}, "tools.0", "object"),
        ({"tools": [{}]}, "tools.0.type", "required"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "field required"),
        ({"tools": [NOW, {"type": "web_search"}]}, "tools.1.type", "'web_search' is not supported"),
        ({"tools": [named("")]}, "tools.0.function.name", "at least 1"),
        ({"tools": [named("a" * 65)]}, "tools.0.function.name", "at most 64"),
        ({"tools": [named("a\n")]}, "tools.0.function.name", "pattern"),
        ({"tools": [named("a", description=1)]}, "tools.0.function.description", "string"),
        ({"tools": [named("a", parameters=[])]}, "tools.0.function.parameters", "dict|object"),
        ({"tools": [named("a", parameters={"type": "string"})]}, "tools.0.function.parameters.type", "'object'"),
        ({"tools": [named("a", parameters={"properties": []})]}, "tools.0.function.parameters.properties", "object"),
        ({"tools": [named("a", parameters={"required": "b"})]}, "tools.0.function.parameters.required", "names"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name", "'now' is given twice"),
        ({"tools": [named(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools", "at most 128"),
        ({"tools": [named("a", description="x" * MAX_TOOLS_BYTES)]}, "tools", f"at most {MAX_TOOLS_BYTES} bytes"),
        ({"tool_choice": "required"}, "tool_choice", "needs a function"),
        ({"tools": [CALCULATOR], "tool_choice": "required"}, "tool_choice", "needs a function"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice", "no function 'now'"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no function 'x'"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto'"),
        ({"tools": [NOW], "tool_choice": 1}, "tool_choice", "string|object"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function", "field required"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "is not supported"),
        ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions.1.name", "'a' is given twice"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call", "no function 'b'"),
        ({"functions": [{"name": "a"}], "tools": [NOW]}, "functions", "cannot be combined"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        use(**fields)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert re.search(said, error.message) and error.message.startswith(param.split(".")[0])


EVENTS: list[Event] = [
    Content("I "),
    Content("look."),
    CallStart(0, "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Bern"}'),
    CallEnd(0),
    CallStart(1, "now"),
    CallArguments(1, "{}"),
    CallEnd(1),
    Content("Done"),
]


def ids() -> Any:
    numbers = iter(range(10))
    return lambda: f"call_{next(numbers)}"


def entry(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_call_deltas() -> None:
    deltas = call_deltas(EVENTS, new_id=ids())
    assert deltas == [
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [{"index": 0, **entry(0, "weather", "")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]},
        {"tool_calls": [{"index": 1, **entry(1, "now", "")}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {"content": "Done"},
    ]
    for delta in deltas:
        ChoiceDelta.model_validate(delta)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, EVENTS),
        ({"parallel_tool_calls": False}, [*EVENTS[:6], EVENTS[9]]),
        ({"tool_choice": "required"}, EVENTS[2:9]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, EVENTS[2:6]),
    ],
)
def test_reported_events(fields: dict[str, Any], expected: list[Event]) -> None:
    wanted = some(tools=[WEATHER, NOW], **fields)
    assert [event for event in EVENTS if is_reported(event, wanted)] == expected
