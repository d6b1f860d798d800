"""Tool calling in OpenAI's format: reads the tool fields of a request, and makes `tool_calls` of replies. Pure.

Fields as in OpenAI's chat completions. `text.tool_calls` parses the calls in the model's output; the client runs them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from nano_inference.server.errors import ApiError, refused
from nano_inference.server.schema import NamedFunction, Tool, ToolChoice, ToolFields
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
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def parses(self) -> bool:
        """True if calls are parsed. With "none", the prompt lists the tools and the text is returned unparsed."""
        return self.choice != "none" and bool(self.functions)

    @property
    def must_call(self) -> bool:
        return self.choice == "required"


def requested_tools(body: ToolFields, template_source: str | None) -> ToolUse | None:
    """Return the tools of a request, from the current or the deprecated fields; None if it has none.

    Raises `ApiError` naming the invalid field, or if both kinds of fields are given.
    """
    tools, choice, parallel = body.tools, body.tool_choice, body.parallel_tool_calls
    field, inner, choice_field = "tools", ".function", "tool_choice"
    if body.functions is not None or body.function_call is not None:
        if tools is not None or choice is not None:
            text = "functions and function_call cannot be combined with tools and tool_choice"
            raise ApiError(400, text, param="functions")
        field, inner, choice_field, given = "functions", "", "function_call", body.function_call
        tools = [Tool(type="function", function=function) for function in body.functions or ()]
        choice = ToolChoice(type="function", function=given) if isinstance(given, NamedFunction) else given
        parallel = False
    functions = _functions(tools or (), field, inner)
    chosen, name = _choice(choice, choice_field, [function["function"]["name"] for function in functions])
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


def _functions(tools: Sequence[Tool], field: str, inner: str) -> tuple[Mapping[str, Any], ...]:
    """Return the functions among tools as chat templates take them. Raises `ApiError` naming the invalid tool.

    `field` has the tools in the body, and a function is at `inner` in each.
    """
    functions: list[Mapping[str, Any]] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place, function = f"{field}.{index}", tool.function
        if tool.type == "calculator":
            continue
        if tool.type != "function":
            raise refused(f"{place}.type", f"{tool.type!r} is not supported, only 'function' and 'calculator'")
        if function is None:
            raise refused(f"{place}.function", "field required")
        place += inner
        if function.name in names:
            raise refused(f"{place}.name", f"{function.name!r} is given twice")
        names.add(function.name)
        schema = function.parameters or {}
        required = schema.get("required", [])
        if schema.get("type", "object") != "object":
            raise refused(f"{place}.parameters.type", "must be 'object'")
        if not isinstance(schema.get("properties", {}), dict):
            raise refused(f"{place}.parameters.properties", "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise refused(f"{place}.parameters.required", "must be a list of names")
        form = {"name": function.name, "description": function.description, "parameters": function.parameters}
        form = {name: value for name, value in form.items() if value is not None}
        functions.append({"type": "function", "function": form})
    size = len(json.dumps(functions, ensure_ascii=False).encode("utf-8", "replace"))
    if size > MAX_TOOLS_BYTES:
        raise refused(field, f"must be at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}")
    return tuple(functions)


def _choice(given: str | ToolChoice | None, field: str, names: Sequence[str]) -> tuple[Choice, str | None]:
    """Return the choice and the name of the function that must be called. Raises `ApiError`."""
    if given in (None, "auto"):
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        if not names:
            raise refused(field, "'required' needs a function")
        return "required", None
    if not isinstance(given, ToolChoice):
        text = f"must be 'none', 'auto', 'required' or an object that names a function, got {given!r}"
        raise refused(field, text)
    if given.type != "function":
        raise refused(f"{field}.type", f"{given.type!r} is not supported, only 'function'")
    name = given.name if given.function is None else given.function.name
    if name is None:
        raise refused(f"{field}.function", "field required")
    if name not in names:
        raise refused(field, f"there is no function {name!r}")
    return "required", name


# ---- replies


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class MessageContent(NamedTuple):
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
