"""Function calling on the wire: what a request may say of tools, what it comes to, and calls as OpenAI has them. Pure.

Fields as in OpenAI's chat completions. Which functions were called is read from what the model wrote
(`text.tool_calls`); running them is the client's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nano_inference.server.errors import ApiError
from nano_inference.server.schema import FunctionSpec, NamedFunction, Tool, ToolChoice, ToolFields
from nano_inference.text.tool_calls import CallArguments, CallStart, Content, Event
from nano_inference.text.tool_format import ToolFormat, tool_format

MAX_TOOLS_BYTES = 1 << 18
"""Of all the functions' JSON together."""

_FUNCTION = re.compile(r"\btools(\.\d+)\.function\b")

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request wants of tools."""

    functions: tuple[Mapping[str, Any], ...]
    """As the chat template takes them."""
    choice: Choice
    name: str | None
    """The function that must be called; the choice is "required" then."""
    format: ToolFormat
    parallel: bool
    """Whether more than one call is told of; never of a function that is named."""
    calculator: bool

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def parses(self) -> bool:
        """Whether calls are looked for. With "none" the model is told of its tools and its text is left as it is."""
        return self.choice != "none" and bool(self.functions)

    @property
    def must_call(self) -> bool:
        """Whether the reply has to be a call."""
        return self.choice == "required"


def requested_tools(body: ToolFields, template_source: str | None) -> ToolUse | None:
    """Return what a request wants of tools, in today's fields or in the former ones; None for nothing.

    Raises `ApiError` naming the field, also where both are there.
    """
    if body.functions is None and body.function_call is None:
        return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, template_source)
    if body.tools is not None or body.tool_choice is not None:
        raise ApiError(400, "functions and function_call exclude tools and tool_choice", param="functions")
    tools = [Tool(type="function", function=function) for function in body.functions or ()]
    given = body.function_call
    choice = ToolChoice(type="function", function=given) if isinstance(given, NamedFunction) else given
    try:
        return tool_use(tools, choice, False, template_source)
    except ApiError as error:
        raise _in_former_fields(error) from None


def tool_use(
    tools: Sequence[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None, template_source: str | None
) -> ToolUse | None:
    """Return what these fields want; None when there are no tools. Raises `ApiError` naming the field."""
    functions = _functions(tools or ())
    wanted, name = _choice(choice, [function["function"]["name"] for function in functions])
    if not tools:
        return None
    return ToolUse(
        functions=functions,
        choice=wanted,
        name=name,
        format=tool_format(template_source),
        parallel=parallel is not False and name is None,
        calculator=any(tool.type == "calculator" for tool in tools),
    )


# ---- replies


def call_id() -> str:
    """Return a new call's id."""
    return f"call_{secrets.token_hex(12)}"


class Told(NamedTuple):
    """A whole reply as a message has it."""

    content: str | None
    tool_calls: list[dict[str, Any]]


def is_told(event: Event, use: ToolUse) -> bool:
    """Whether a client is told of what was read.

    Without `parallel` only the first call is, whatever others the model wrote. Where a call must be, what is left of
    one that was cut off is no text.
    """
    if isinstance(event, Content):
        return not use.must_call
    return use.parallel or event.index == 0


def calls_json(events: Iterable[Event], *, new_id: Callable[[], str] = call_id) -> Told:
    """Return a whole reply's content, None when there are only calls, and its calls."""
    content: list[str] = []
    pieces: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, CallStart):
            names[event.index], pieces[event.index] = event.name, []
        elif isinstance(event, CallArguments):
            pieces[event.index].append(event.text)
    functions = [{"name": name, "arguments": "".join(pieces[index])} for index, name in names.items()]
    calls = [{"id": new_id(), "type": "function", "function": function} for function in functions]
    text = "".join(content)
    return Told(None if calls and not text else text, calls)


def call_deltas(events: Iterable[Event], *, new_id: Callable[[], str] = call_id) -> list[dict[str, Any]]:
    """Return the deltas of a stream's chunks that tell of these events."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            deltas.append({"content": event.text})
        else:
            deltas += [{"tool_calls": [entry]} for entry in _entries(event, new_id)]
    return deltas


def _entries(event: Event, new_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Return what `tool_calls` tells of an event: nothing of an end."""
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return [{"index": event.index, "id": new_id(), "type": "function", "function": function}]
    if isinstance(event, CallArguments):
        return [{"index": event.index, "function": {"arguments": event.text}}]
    return []


# ---- checks


def _functions(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """Return the functions among tools, checked. Raises `ApiError` naming the tool that is wrong."""
    functions: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.type == "calculator":
            continue
        function = _function(tool, where)
        if function.name in names:
            raise _refused(f"{where}.function.name", f"there are two functions {function.name!r}")
        names.add(function.name)
        functions.append(_template_form(function, where))
    size = len(json.dumps(functions, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_TOOLS_BYTES:
        raise _refused("tools", f"must be at most {MAX_TOOLS_BYTES} bytes of JSON, not {size}")
    return tuple(functions)


def _function(tool: Tool, where: str) -> FunctionSpec:
    if tool.type != "function":
        raise _refused(f"{where}.type", f"{tool.type!r} is not supported, only 'function' and 'calculator'")
    if tool.function is None:
        raise _refused(f"{where}.function", "field required")
    return tool.function


def _template_form(function: FunctionSpec, where: str) -> dict[str, Any]:
    """Return a function as chat templates take it, without the fields that were not given."""
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    if function.parameters is not None:
        _check_schema(function.parameters, f"{where}.function.parameters")
        told["parameters"] = function.parameters
    return {"type": "function", "function": told}


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Refuse a schema that is not one of an object."""
    if schema.get("type", "object") != "object":
        raise _refused(f"{where}.type", "must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise _refused(f"{where}.properties", "must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{where}.required", "must be a list of names")


def _choice(given: str | ToolChoice | None, names: Sequence[str]) -> tuple[Choice, str | None]:
    """Return the choice, and the function that must be called. Raises `ApiError`."""
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        if not names:
            raise _refused("tool_choice", "'required' needs a function in tools")
        return "required", None
    if isinstance(given, str):
        raise _refused(
            "tool_choice", f"must be 'none', 'auto', 'required' or an object that names a function: {given!r}"
        )
    name = _chosen_name(given)
    if name not in names:
        raise _refused("tool_choice", f"there is no function {name!r} in tools")
    return "required", name


def _chosen_name(given: ToolChoice) -> str:
    if given.type != "function":
        raise _refused("tool_choice.type", f"{given.type!r} is not supported, only 'function'")
    name = given.name if given.function is None else given.function.name
    if name is None:
        raise _refused("tool_choice.function", "field required")
    return name


def _in_former_fields(error: ApiError) -> ApiError:
    """Return an error in terms of the former fields, which are what the client wrote."""
    message, param = (
        _FUNCTION.sub(r"functions\1", text).replace("tool_choice", "function_call").replace("tools", "functions")
        for text in (error.message, error.param or "")
    )
    return ApiError(error.status, message, param=param or None)


def _refused(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where}: {what}", param=where)
