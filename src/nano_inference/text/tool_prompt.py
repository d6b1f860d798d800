"""Prepare messages with functions and calls for a chat template, with or without support for `tools`.

A template with a variable `tools` writes functions, calls and results itself and expects arguments as objects, where
OpenAI's API has JSON text. For other templates the system message describes the functions, and calls are written in the
Hermes format, which most small models were trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nano_inference.text.chat import Message, check_messages
from nano_inference.text.tool_format import HERMES, Tool, speaks_of_tools
from nano_inference.types import BadRequest

MAX_CALLS = 1024  # limit on the calls in one message

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
    """Return messages with calls as chat templates expect them: arguments as objects, no empty list of calls.

    Arguments that are not a JSON object (a model's malformed call, sent back) are unchanged. A content of null in a
    message with calls becomes "", unless the template compares it with none. OpenAI's deprecated `function_call` and
    role "function" become `tool_calls` and role "tool". Raises `BadRequest` naming messages.N.tool_calls.M for a
    malformed call.
    """
    keeps_none = template_source is not None and _WANTS_NONE.search(template_source) is not None
    return [_plain_message(index, message, keeps_none) for index, message in enumerate(messages)]


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], template_source: str | None) -> list[Message]:
    """Return messages that describe functions, calls and results in text, for a template without support for `tools`.

    The description goes before the text of the system message, into a new system message, or, if the template refuses
    those, into the first message. Calls are appended to their message's content; results become user messages. For a
    template with support for `tools` this is `plain_calls`. Raises as `plain_calls`, and for content that is no text.
    """
    plain = plain_calls(messages, template_source)
    if speaks_of_tools(template_source):
        return plain
    check_messages(plain)
    written: list[Message] = []
    for index, message in enumerate(plain):
        content, calls = message.get("content") or "", message.get("tool_calls")
        if message.get("role") == "tool":
            content = content.join(_RESPONSE)
            if index and plain[index - 1].get("role") == "tool":  # one message a run, because turns must alternate
                content = f"{written.pop()['content']}\n{content}"
            written.append({"role": "user", "content": content})
            continue
        texts = [content] if content else []
        for function in (call["function"] for call in calls or ()):
            name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            texts.append(f'{HERMES.begin}\n{{"name": {name}, "arguments": {text}}}\n{HERMES.end}')
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        written.append({**others, "content": "\n".join(texts)} if calls else message)
    if not tools:
        return written
    text = explained(tools)
    first = written[0]
    refuses_system = template_source is not None and (  # explicitly, or by checking alternating turns
        ("raise_exception" in template_source and "system" not in template_source)
        or _REFUSES_SYSTEM.search(template_source) is not None
    )
    if first["role"] != "system" and not refuses_system:
        return [{"role": "system", "content": text}, *written]
    both = f"{text}\n\n{first['content']}" if first["content"] else text
    return [{**first, "content": both}, *written[1:]]


def explained(tools: Sequence[Tool]) -> str:
    """Return the text that describes functions, and how to call them, to the model."""
    return _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


# ---- for templates with support for tools


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
        raise BadRequest(where, f"must be a list of at most {MAX_CALLS} calls")
    if plain.get("content") is None and not keeps_none:
        plain["content"] = ""
    checked = []
    for place, call in ((f"{where}.{number}", call) for number, call in enumerate(calls)):
        if not isinstance(call, Mapping):
            raise BadRequest(place, "must be an object")
        if call.get("type", "function") != "function":
            raise BadRequest(f"{place}.type", "must be 'function'")
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise BadRequest(f"{place}.function", "must be an object")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"{place}.function.name", "must be a non-empty string")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | Mapping):
            raise BadRequest(f"{place}.function.arguments", "must be a string of JSON")
        checked.append({**call, "type": "function", "function": {**function, "arguments": _object(arguments)}})
    return {**plain, "tool_calls": checked}


def _object(arguments: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """Return arguments as an object: empty for none, unchanged for a text that is not a JSON object."""
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
    """Raise `ValueError` for NaN and the infinities, which are not JSON."""
    raise ValueError(name)
