"""Translation of the Responses API's items and tools to a chat's messages and functions, and of names back. Pure.

A function of a namespace has the name `namespace.function` in the prompt. `encrypted_content` of reasoning is its text
as JSON in base64: it is not secret from the client, whose conversation it is, and another server reads it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from nano_inference.server.call import JSON
from nano_inference.server.dialects.responses_body import (
    LOCAL_SEARCH,
    FlatTool,
    FunctionTool,
    InputItem,
    TextFormat,
    is_left_out,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.schema import TextPart
from nano_inference.server.translating import unsupported_field, with_current_reasoning

CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat completion -> its name in this API."""
_ITEM_TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "refusal"})
_PREFIX = "nano1."  # begins the `encrypted_content` of this package's servers
EARLIER = "previous_response_id"  # the place, in errors, of items that the request did not send


@dataclass(slots=True)
class Messages:
    """A chat's messages."""

    chat: list[JSON] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)  # reasoning of the assistant's next message

    def add(self, **message: Any) -> None:
        if self.thoughts and message["role"] == "user":  # the answer was cut off in its reasoning
            self.add(role="assistant", content="")
        if self.thoughts and message["role"] == "assistant":
            message["reasoning_content"] = "\n".join(self.thoughts)
        self.thoughts = []
        self.chat.append(message)


class Function(NamedTuple):
    """A function of a request."""

    place: str  # its field in the body: `tools.2`, `tools.4.tools.0`
    namespace: str | None
    tool: FunctionTool

    @property
    def name(self) -> str:
        """Its name in the prompt."""
        return joined_name(self.namespace, self.tool.name or "")


def joined_name(namespace: str | None, name: str) -> str:
    """Return a function's name in the prompt."""
    return name if namespace is None else f"{namespace}.{name}"


# ---- tools ----------------------------------------------------------------------------------------------------------


def functions_of(tools: Sequence[FlatTool]) -> list[Function]:
    """Return the tools that the model may call. Raises `ApiError` naming an unsupported one."""
    return [one for index, tool in enumerate(tools) for one in _functions(f"tools.{index}", tool)]


def chat_tools(functions: Sequence[Function]) -> list[JSON]:
    """Return a chat's tools."""
    chat: list[JSON] = []
    for one in functions:
        tool = one.tool
        if tool.type == "calculator":
            chat.append({"type": tool.type})
            continue
        fields: JSON = {"name": one.name, "description": tool.description}
        fields |= {"parameters": tool.parameters, "strict": tool.strict}
        function = {name: value for name, value in fields.items() if value is not None}
        chat.append({"type": "function", "function": function})
    return chat


def _functions(place: str, tool: FlatTool) -> Iterator[Function]:
    if is_left_out(tool):
        return
    if tool.type != "namespace":
        yield _checked(Function(place, None, tool))
        return
    for name in ("name", "tools"):
        if getattr(tool, name) is None:
            raise ApiError(400, f"{place}.{name}: field required", param=f"{place}.{name}")
    for index, one in enumerate(tool.tools or ()):
        where = f"{place}.tools.{index}"
        if one.type != "function":
            message = f"{where}.type: {one.type[:64]!r} is not supported in a namespace, only 'function'"
            raise unsupported_field(f"{where}.type", message)
        # A chat template has no place for both descriptions.
        description = "\n".join(text for text in (tool.description, one.description) if text) or None
        yield _checked(Function(where, tool.name, one.model_copy(update={"description": description})))


def _checked(one: Function) -> Function:
    where, kind = f"{one.place}.type", one.tool.type
    if kind == LOCAL_SEARCH:
        message = f"{where}: {kind!r} is not supported by this server; with external_web_access false it is left out"
        raise unsupported_field(where, message)
    if kind not in ("function", "calculator"):
        supported = "only 'function', 'namespace' and 'calculator'"
        raise unsupported_field(where, f"{where}: {kind[:64]!r} is not supported by this server, {supported}")
    if kind == "function" and one.tool.name is None:
        raise ApiError(400, f"{one.place}.name: field required", param=f"{one.place}.name")
    return one


def chat_choice(choice: str | dict[str, Any] | None) -> str | JSON | None:
    """Return a chat's `tool_choice`. Raises `ApiError` for a choice of tools that are not functions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = repr(choice.get("type"))[:64]
        raise unsupported_field("tool_choice.type", f"tool_choice.type: {kind} is not supported by this server")
    if not isinstance(choice.get("name"), str):
        raise ApiError(400, "tool_choice.name: must name a function", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice["name"]}}


def response_format(text: TextFormat) -> JSON:
    """Return a chat's `response_format`."""
    if text.type != "json_schema":
        return {"type": text.type}
    if text.form is None:
        raise ApiError(400, "text.format.schema: field required", param="text.format.schema")
    fields = {"name": text.name, "description": text.description, "schema": text.form, "strict": text.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}


# ---- items ----------------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, earlier: Sequence[InputItem], new: str | Sequence[InputItem]) -> Messages:
    """Return the conversation as a chat's messages. Raises `ApiError` naming the invalid item.

    Reasoning is passed to the chat template only between the calls of the current turn.
    `earlier` are the items of the replies that the request continues.
    """
    messages = Messages()
    if instructions is not None:
        messages.add(role="system", content=instructions)
    calls: set[str] = set()
    for item in earlier:
        _add_item(messages, item, EARLIER, calls)
    if isinstance(new, str):
        messages.add(role="user", content=new)
    for index, item in enumerate(() if isinstance(new, str) else new):
        _add_item(messages, item, f"input.{index}", calls)
    messages.chat = with_current_reasoning(messages.chat)
    return messages


def _add_item(messages: Messages, item: InputItem, place: str, calls: set[str]) -> None:
    """Add an item to the messages; `calls` are the ids of earlier function calls."""
    kind = item.type or "message"
    if kind not in _ITEM_TYPES:
        hint = ": send the item itself, or previous_response_id" if kind == "item_reference" else ""
        raise unsupported_field(f"{place}.type", f"{place}.type: {kind[:64]!r} is not supported by this server{hint}")
    if kind == "message":
        role, content = _required(item, place, "role"), text_parts(_required(item, place, "content"), place, "content")
        messages.add(role=role, content=content, **({} if item.parts is None else {"parts": item.parts}))
    elif kind == "function_call":
        name = joined_name(item.namespace, _required(item, place, "name"))
        function = {"name": name, "arguments": _required(item, place, "arguments")}
        call_id = _required(item, place, "call_id")
        calls.add(call_id)
        _add_call(messages, {"id": call_id, "type": "function", "function": function})
    elif kind == "function_call_output":
        call_id = _required(item, place, "call_id")
        if call_id not in calls:
            message = f"{place}.call_id: no earlier function_call has this id; send earlier turns in input"
            raise ApiError(400, message, param=f"{place}.call_id")
        output = text_parts(_required(item, place, "output"), place, "output")
        messages.add(role="tool", tool_call_id=call_id, content=output)
    elif kind == "reasoning":
        # Another server's item may have only its encrypted form, which cannot be read.
        text = item.content if isinstance(item.content, str) else "".join(one.text or "" for one in item.content or ())
        if not item.content and item.encrypted_content is not None:
            text = text_in(item.encrypted_content) or ""
        messages.thoughts += [text] if text else []


def encoded(text: str) -> str:
    """Return the `encrypted_content` of a text."""
    return _PREFIX + base64.urlsafe_b64encode(to_json({"summary": text})).decode()


def text_in(content: str) -> str | None:
    """Return the text in `encrypted_content`; None if no such server made it."""
    try:
        if not content.startswith(_PREFIX):
            raise ValueError("another server's form")
        value = from_json(base64.urlsafe_b64decode(content.removeprefix(_PREFIX).encode()))
    except (ValueError, binascii.Error):
        value = None
    text = value.get("summary") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _add_call(messages: Messages, call: JSON) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    last = messages.chat[-1] if messages.chat else {}
    if last.get("role") != "assistant":
        messages.add(role="assistant", content="", tool_calls=[call])
        return
    messages.chat[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
    if messages.thoughts:
        thoughts = [last["reasoning_content"]] if "reasoning_content" in last else []
        messages.chat[-1]["reasoning_content"] = "\n".join([*thoughts, *messages.thoughts])
        messages.thoughts = []


def _required(item: InputItem, place: str, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{place}.{name}: field required", param=f"{place}.{name}")
    return value


def text_parts(content: str | Sequence[TextPart], place: str, name: str) -> str | list[JSON]:
    """Return a chat message's `content`. Raises `ApiError` naming a part that is not text."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        where = f"{place}.{name}.{index}"
        if part.type not in _TEXT_TYPES:
            raise unsupported_field(f"{where}.type", f"{where}.type: {part.type[:64]!r} is not supported, only text")
        if part.words is None:
            raise ApiError(400, f"{where}.text: field required", param=f"{where}.text")
    return [{"type": "text", "text": part.words} for part in content]
