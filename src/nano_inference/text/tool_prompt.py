"""Functions and their calls in what the model reads: in its chat template's terms, or in words where it has none.

A template that speaks of `tools` writes the functions, calls and results itself, and wants arguments as objects where
OpenAI's API has them as JSON text. For any other the functions are told in the system message and calls are written
the Hermes way, which most small models have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.text.chat import Message, check_messages
from nano_inference.text.tool_format import HERMES, Tool, speaks_of_tools
from nano_inference.types import BadRequest

MAX_CALLS = 1024
"""Calls in one message."""

_RESPONSE = ("<tool_response>\n", "\n</tool_response>")
_WANTS_NONE = re.compile(r"""content['"]?\]?\s+is\s+none""")
_REFUSES_SYSTEM = re.compile(r"""raise_exception\(\s*\\?['"][^'"]*system""", re.IGNORECASE)
_EXPLAINED = (
    "You have these functions, one JSON description to a line:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "To call one, write its name and its arguments as JSON between markers, in exactly this way:\n"
    f'{HERMES.begin}\n{{{{"name": "the function", "arguments": {{{{"argument": "value"}}}}}}}}\n{HERMES.end}\n\n'
    "Several calls are written one after another. What they return comes back between <tool_response> and "
    "</tool_response>. Call a function only where it helps; otherwise answer in words."
)


def plain_calls(messages: Sequence[Message], template_source: str | None = None) -> list[Message]:
    """Return messages with calls as chat templates take them: arguments as objects, no empty list of calls.

    Arguments that are no JSON object (a model's broken call that is sent back) stay as they are. A content of null
    beside calls becomes "", but for a template that asks whether it is none. OpenAI's former `function_call` and role
    "function" become what came after them. Raises `BadRequest` naming messages.N.tool_calls.M for another shape.
    """
    keeps_none = template_source is not None and _WANTS_NONE.search(template_source) is not None
    return [_plain_message(index, message, keeps_none) for index, message in enumerate(messages)]


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], template_source: str | None) -> list[Message]:
    """Return messages that tell a model of its functions, for a template that does not speak of them.

    The functions stand before the system message, in one of their own, or in the first other message where the template
    takes no system message; calls are written into their message, results become a user's. Messages for a template
    that does speak of tools are those of `plain_calls`. Raises as that does, and for a content that is no text.
    """
    plain = plain_calls(messages, template_source)
    if speaks_of_tools(template_source):
        return plain
    check_messages(plain)
    written = _joined_results([_written(message) for message in plain])
    if not tools:
        return written
    text = explained(tools)
    first = written[0]
    if first["role"] != "system" and not _refuses_system(template_source):
        return [{"role": "system", "content": text}, *written]
    both = f"{text}\n\n{first['content']}" if first["content"] else text
    return [{**first, "content": both}, *written[1:]]


def explained(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model of functions and of how to call them."""
    return _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _refuses_system(template_source: str | None) -> bool:
    """Whether a template raises an error at a system message: Gemma's in so many words, others want turns only."""
    if template_source is None:
        return False
    counts_turns = "raise_exception" in template_source and "system" not in template_source
    return counts_turns or _REFUSES_SYSTEM.search(template_source) is not None


# ---- for templates that speak of tools


def _plain_message(index: int, message: Message, keeps_none: bool) -> Message:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
    if plain.get("role") == "function":
        plain["role"] = "tool"
    where, calls = f"messages.{index}.tool_calls", message.get("tool_calls")
    if not calls and message.get("function_call"):
        where, calls = f"messages.{index}.function_call", [{"function": message["function_call"]}]
    if not calls:
        return plain
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes) or len(calls) > MAX_CALLS:
        raise BadRequest(f"{where} must be a list of at most {MAX_CALLS} calls")
    if plain.get("content") is None and not keeps_none:
        plain["content"] = ""
    return {**plain, "tool_calls": [_plain_call(f"{where}.{number}", call) for number, call in enumerate(calls)]}


def _plain_call(where: str, call: object) -> dict[str, Any]:
    """Return a call with its arguments as an object. Raises `BadRequest` naming what is missing."""
    if not isinstance(call, Mapping):
        raise BadRequest(f"{where} must be an object")
    if call.get("type", "function") != "function":
        raise BadRequest(f"{where}.type must be 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}.function must be an object")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRequest(f"{where}.function.name must be a non-empty string")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        raise BadRequest(f"{where}.function.arguments must be a string of JSON")
    return {**call, "type": "function", "function": {**function, "arguments": _object(arguments)}}


def _object(arguments: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """Return arguments as an object; a text that is none as it is, none at all as an empty one."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value: object = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _no_constant(name: str) -> object:
    """Refuse NaN and the infinities, which are not JSON."""
    raise ValueError(name)


# ---- for templates that do not


def _written(message: Message) -> Message:
    """Return a message with its calls, or its being a result, written into its content."""
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "tool", "content": content.join(_RESPONSE)}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [*([content] if content else []), *map(_written_call, calls)]
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(texts)}


def _written_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{HERMES.begin}\n{{"name": {name}, "arguments": {spelled}}}\n{HERMES.end}'


def _joined_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with each run of results as one message of the user's: templates want turns to alternate."""
    joined: list[Message] = []
    for index, message in enumerate(messages):
        if message.get("role") != "tool":
            joined.append(message)
        elif index and messages[index - 1].get("role") == "tool":
            joined[-1] = {"role": "user", "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append({"role": "user", "content": message["content"]})
    return joined
