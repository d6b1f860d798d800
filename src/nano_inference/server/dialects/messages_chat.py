"""Translation of Anthropic's messages, tools and formats to those of a chat completion. Pure.

The texts of a turn are joined with line breaks, as in a chat's message. Each tool result becomes a separate message in
the same position; the text of a failed one begins with "Error: ". Reasoning blocks of the current turn, which has had
calls since the user's last text, are passed to the chat template (`reasoning_content`); earlier ones are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pydantic_core import to_json

from nano_inference.server.call import JSON
from nano_inference.server.dialects.messages_body import (
    Block,
    CountTokensBody,
    MessagesToolChoice,
    OutputFormat,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from nano_inference.server.errors import ApiError
from nano_inference.server.translating import unsupported_field, with_current_reasoning

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR_PREFIX = "Error: "  # begins the result of a failed tool call: a chat's message has no field for it


class Chat(NamedTuple):
    """The messages of a chat completion."""

    messages: list[JSON]
    is_open: bool  # True if the last message is the assistant's, which the model then continues


class _PlacedBlock(NamedTuple):
    place: str  # its field in the body, for errors
    block: Block


def chat_of(body: CountTokensBody) -> Chat:
    """Return the conversation. Raises `ApiError` naming an unsupported or invalid block."""
    messages: list[JSON] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _joined_text(body.system, "system")})
    names: dict[str, str] = {}
    role = ""
    for role, blocks in _turns(body):
        messages += _turn(role, blocks, names)
    is_open = role == "assistant"
    if is_open and messages[-1].get("tool_calls"):
        place = f"messages.{len(body.messages) - 1}"
        raise ApiError(400, f"{place}: tool_use must be followed by a message with its tool_result", param=place)
    return Chat(with_current_reasoning(messages), is_open)


def tools_of(tools: Sequence[ToolParam]) -> list[JSON]:
    """Return a chat's tools. Raises `ApiError` for tools that run on Anthropic's servers."""
    return [_tool(f"tools.{index}", tool) for index, tool in enumerate(tools)]


def choice_of(choice: MessagesToolChoice) -> JSON:
    """Return a chat's `tool_choice` and `parallel_tool_calls`."""
    fields: JSON = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return fields | {"tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise ApiError(400, "tool_choice.name: field required", param="tool_choice.name")
    return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}


def format_of(output: OutputFormat) -> JSON:
    """Return a chat's `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output.schema_, "strict": True}}


def _turns(body: CountTokensBody) -> Iterator[tuple[str, list[_PlacedBlock]]]:
    """Yield (role, blocks) of each turn: consecutive messages of one role."""
    for role, run in groupby(enumerate(body.messages), key=lambda pair: pair[1].role):
        blocks: list[_PlacedBlock] = []
        for index, message in run:
            content = message.content
            several: Sequence[Any] = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            where = f"messages.{index}.content"
            blocks += [_PlacedBlock(f"{where}.{number}", block) for number, block in enumerate(several)]
        yield role, blocks


def _turn(role: str, blocks: Sequence[_PlacedBlock], names: dict[str, str]) -> list[JSON]:
    """Return a turn's messages. `names` maps ids of earlier calls to tools; this turn's calls are added to it."""
    if role == "assistant":
        return [_assistant(blocks, names)]
    if role == "system":
        return [{"role": role, "content": "\n".join(_text(one, "text") for one in blocks)}]
    messages: list[JSON] = []
    for is_result, run in groupby(blocks, key=lambda one: isinstance(one.block, ToolResultBlock)):
        if is_result:
            messages += [_result(one, names) for one in run]
        else:
            texts = [_text(one, "text and tool_result") for one in run]
            messages.append({"role": role, "content": "\n".join(texts)})
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: Sequence[_PlacedBlock], names: dict[str, str]) -> JSON:
    texts: list[str] = []
    calls: list[JSON] = []
    thoughts: list[str] = []
    for one in blocks:
        block = one.block
        if isinstance(block, ThinkingBlock):
            thoughts += [block.thinking] if block.thinking else []
            continue
        if isinstance(block, ToolUseBlock):
            if block.id in names:
                where = f"{one.place}.id"
                raise ApiError(400, f"{where}: an earlier tool_use has the same id", param=where)
            names[block.id] = block.name
            function = {"name": block.name, "arguments": to_json(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts.append(_text(one, "text, tool_use and thinking"))
    message: JSON = {"role": "assistant", "content": "\n".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _result(one: _PlacedBlock, names: dict[str, str]) -> JSON:
    """Return a tool's message; some templates render its `name`."""
    block = one.block
    assert isinstance(block, ToolResultBlock), "_turn groups blocks by type"
    name = names.get(block.tool_use_id)
    if name is None:
        where = f"{one.place}.tool_use_id"
        raise ApiError(400, f"{where}: no earlier tool_use has the id {block.tool_use_id[:64]!r}", param=where)
    text = "" if block.content is None else _joined_text(block.content, f"{one.place}.content")
    prefix = _ERROR_PREFIX if block.is_error else ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": prefix + text}


def _joined_text(content: Texts, place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(_PlacedBlock(f"{place}.{number}", block), "text") for number, block in enumerate(content))


def _text(one: _PlacedBlock, allowed: str) -> str:
    """Return a block's text. Raises `ApiError` for another type; `allowed` lists the types for its message."""
    if isinstance(one.block, TextBlock):
        return one.block.text
    where = f"{one.place}.type"
    raise unsupported_field(where, f"{where}: {one.block.type[:64]!r} is not supported here, only {allowed}")


def _tool(place: str, tool: ToolParam) -> JSON:
    if tool.type == "calculator":
        return {"type": "calculator"}
    if tool.type not in (None, "custom"):
        message = f"{place}.type: {tool.type!r} is not supported by this server, only custom and calculator"
        raise unsupported_field(f"{place}.type", message)
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise ApiError(400, f"{place}.{name}: field required", param=f"{place}.{name}")
    function: JSON = {"name": tool.name, "parameters": tool.input_schema}
    function |= {name: getattr(tool, name) for name in ("description", "strict") if getattr(tool, name) is not None}
    return {"type": "function", "function": function}
