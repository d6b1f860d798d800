"""Tool calling in OpenAI's format: reads the tool fields of a request, and makes `tool_calls` of replies. Pure.

Fields as in OpenAI's chat completions. `text.tool_calls` parses the calls in the model's output; the client runs them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nano_inference.server.errors import ApiError, renamed
from nano_inference.server.schema import FunctionSpec, NamedFunction, Tool, ToolChoice, ToolFields
from nano_inference.text.tool_events import CallArguments, CallStart, Content, Event, Reasoning
from nano_inference.text.tool_format import ToolFormat, tool_format

MAX_TOOLS_BYTES = 1 << 18  # limit of the JSON of all functions

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and how they may be called."""

    functions: tuple[Mapping[str, Any], ...]  # in the form of the chat template
    choice: Choice
    name: str | None  # the function that must be called; then `choice` is "required"
    format: ToolFormat
    parallel: bool  # True if a reply may have several calls; False with a named function
    calculator: bool
    strict: frozenset[str]  # names of the functions whose arguments follow their schema in every call

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def parses(self) -> bool:
        """True if calls are parsed. With "none", the prompt lists the tools and the text is returned unparsed."""
        return self.choice != "none" and bool(self.functions)

    @property
    def must_call(self) -> bool:
        """True if the reply must be a call."""
        return self.choice == "required"


def requested_tools(body: ToolFields, template_source: str | None) -> ToolUse | None:
    """Return the tools of a request, from the current or the deprecated fields; None if it has none.

    Raises `ApiError` naming the invalid field, or if both kinds of fields are given.
    """
    if body.functions is None and body.function_call is None:
        return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, template_source)
    if body.tools is not None or body.tool_choice is not None:
        raise ApiError(
            400, "functions and function_call cannot be combined with tools and tool_choice", param="functions"
        )
    tools = [Tool(type="function", function=function) for function in body.functions or ()]
    given = body.function_call
    choice = ToolChoice(type="function", function=given) if isinstance(given, NamedFunction) else given
    try:
        return tool_use(tools, choice, False, template_source)
    except ApiError as error:
        own = renamed(error, {"tools": "functions", "tool_choice": "function_call"})
        if own.param is not None and own.param.startswith("functions."):  # there without the key `function`
            param = own.param.replace(".function", "", 1)
            return_ = ApiError(own.status, own.message.replace(own.param, param, 1), param=param, code=own.code)
            raise return_ from None
        raise own from None


def tool_use(
    tools: Sequence[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None, template_source: str | None
) -> ToolUse | None:
    """Return the tools of these fields; None if there are no tools. Raises `ApiError` naming the field."""
    functions = _functions(tools or ())
    chosen, name = _choice(choice, [function["function"]["name"] for function in functions])
    if not tools:
        return None
    return ToolUse(
        functions=functions,
        choice=chosen,
        name=name,
        format=tool_format(template_source),
        parallel=parallel is not False and name is None,
        calculator=any(tool.type == "calculator" for tool in tools),
        strict=frozenset(tool.function.name for tool in tools if tool.function and tool.function.strict),
    )


# ---- replies


def call_id() -> str:
    """Return a new id of a call."""
    return f"call_{secrets.token_hex(12)}"


class MessageContent(NamedTuple):
    """Content, tool calls and reasoning of a message."""

    content: str | None
    tool_calls: list[dict[str, Any]]
    reasoning: str = ""


def is_reported(event: Event, use: ToolUse) -> bool:
    """Return True if the client gets this event.

    Without `parallel` only the first call is returned. If a call is required, text is dropped: it is the rest of a call
    that was cut off.
    """
    if isinstance(event, Content):
        return not use.must_call
    if isinstance(event, Reasoning):
        return True
    return use.parallel or event.index == 0


def message_content(events: Iterable[Event], *, new_id: Callable[[], str] = call_id) -> MessageContent:
    """Return a message's content, calls and reasoning; the content is None if there are only the others."""
    content: list[str] = []
    reasoning: list[str] = []
    pieces: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            names[event.index], pieces[event.index] = event.name, []
        elif isinstance(event, CallArguments):
            pieces[event.index].append(event.text)
    functions = [{"name": name, "arguments": "".join(pieces[index])} for index, name in names.items()]
    calls = [{"id": new_id(), "type": "function", "function": function} for function in functions]
    text = "".join(content)
    return MessageContent(None if (calls or reasoning) and not text else text, calls, "".join(reasoning))


def reasoning_fields(text: str) -> dict[str, Any]:
    """Return reasoning as fields of a message: DeepSeek's, SGLang's and llama.cpp's name, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def call_deltas(events: Iterable[Event], *, new_id: Callable[[], str] = call_id) -> list[dict[str, Any]]:
    """Return the `delta` objects of a stream's chunks for these events."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            deltas.append({"content": event.text})
        elif isinstance(event, Reasoning):
            deltas.append(reasoning_fields(event.text))
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            entry = {"index": event.index, "id": new_id(), "type": "function", "function": function}
            deltas.append({"tool_calls": [entry]})
        elif isinstance(event, CallArguments):
            deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return deltas


# ---- checks


def _functions(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """Return the functions among tools. Raises `ApiError` naming the invalid tool."""
    functions: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.type == "calculator":
            continue
        function = _function(tool, where)
        if function.name in names:
            raise _refused(f"{where}.function.name", f"{function.name!r} is given twice")
        names.add(function.name)
        functions.append(_template_form(function, where))
    size = len(json.dumps(functions, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_TOOLS_BYTES:
        raise _refused("tools", f"must be at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}")
    return tuple(functions)


def _function(tool: Tool, where: str) -> FunctionSpec:
    if tool.type != "function":
        raise _refused(f"{where}.type", f"{tool.type!r} is not supported, only 'function' and 'calculator'")
    if tool.function is None:
        raise _refused(f"{where}.function", "field required")
    return tool.function


def _template_form(function: FunctionSpec, where: str) -> dict[str, Any]:
    """Return a function as chat templates take it; omits absent fields."""
    fields: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        fields["description"] = function.description
    if function.parameters is not None:
        _check_schema(function.parameters, f"{where}.function.parameters")
        fields["parameters"] = function.parameters
    return {"type": "function", "function": fields}


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raise `ApiError` unless the schema is one of an object."""
    if schema.get("type", "object") != "object":
        raise _refused(f"{where}.type", "must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise _refused(f"{where}.properties", "must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{where}.required", "must be a list of names")


def _choice(given: str | ToolChoice | None, names: Sequence[str]) -> tuple[Choice, str | None]:
    """Return the choice and the name of the function that must be called. Raises `ApiError`."""
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
            "tool_choice", f"must be 'none', 'auto', 'required' or an object that names a function, got {given!r}"
        )
    if given.type != "function":
        raise _refused("tool_choice.type", f"{given.type!r} is not supported, only 'function'")
    name = given.name if given.function is None else given.function.name
    if name is None:
        raise _refused("tool_choice.function", "field required")
    if name not in names:
        raise _refused("tool_choice", f"there is no function {name!r} in tools")
    return "required", name


def _refused(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where}: {what}", param=where)
