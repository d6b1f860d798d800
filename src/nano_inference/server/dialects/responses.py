"""OpenAI's POST /v1/responses, translated to a chat completion; field names in errors are translated back.

Fields as in openai/types/responses/response_create_params.py; the sampling fields of /v1/chat/completions are
extensions. Nothing is stored: `store` is ignored and false in the reply; `previous_response_id` and `conversation` are
rejected. Accepted and ignored: `metadata`, `user`, `safety_identifier`, `prompt_cache_key`, `service_tier`,
`verbosity`, `text.verbosity`, `stream_options.include_obfuscation`, `stream_options.include_usage` (streams always end
with the usage), and reasoning items of `input` (chat templates do not render earlier reasoning).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field

from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import chat_call
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.dialects.responses_stream import ResponsesReply
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import MAX_MESSAGES, Alternatives, Body, ChatBody, Samples, Sampling, TextPart
from nano_inference.server.translating import as_body, errors_reworded, refuse, rename_structures, unsupported_field
from nano_inference.server.unsupported import is_one_of, refuse_unsupported

LOGPROBS: Final = "message.output_text.logprobs"
"""The value of `include` that adds log-probabilities."""
_ENCRYPTED = "reasoning.encrypted_content"
"""A value of `include` that agents always send; it has no effect, because replies have no reasoning items."""

_MAX_TOOLS = 1024
_EMPTY: tuple[Any, ...] = (None, False, [], {})
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None, "in_memory"),
    "truncation": (None, "disabled"),
    "access_programs": (None,),
    "image": (None,),
    "n": (None, 1),
    "prompt_logprobs": (None,),
}
"""Unsupported field -> the values that are accepted because they have no effect."""
CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat completion -> its name in this API."""
_CHAT_FIELD = re.compile(
    rf"(?<![\w.])(?P<head>{'|'.join(CHAT_NAMES)}|tools|tool_choice)(?P<rest>(?:\.\w+|\[\d+\])*)(?!\w)"
)
"""A chat's field in an error, with its path: `messages[2].content`, `response_format.json_schema.schema`."""
_ITEM_TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_TOOL_TYPES = frozenset({"function", "calculator"})
_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})


class InputItem(Body):
    """An item of `input`: a message (its type may be omitted), a function call or a function's output."""

    type: str | None = None
    role: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    parts: list[Any] | None = None
    """Extension: the parts of an assistant message with calculator calls, as in this server's reply."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None


class FlatTool(Body):
    """A function that the model may call, or the calculator."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Body):
    """The format of the answer's text."""

    type: str
    name: str | None = None
    description: str | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options for the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """Reasoning effort, for models whose chat template uses it."""

    effort: str | None = None


class ResponsesBody(Sampling):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Samples | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    top_logprobs: Alternatives | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    truncation: Any = None
    access_programs: Any = None
    image: Any = None


@dataclass(slots=True)
class _Messages:
    """A chat's messages, and the item of `input` that each began with."""

    chat: list[JSON] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, **message: Any) -> None:
        self.chat.append(message)
        self.places.append(place)


def responses_call(body: ResponsesBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/responses. Raises `ApiError` naming the invalid field."""
    _refuse(body)
    messages = _messages_of(body)
    with errors_reworded(lambda text: _with_own_names(text, messages.places)):
        call = chat_call(as_body(_chat_of(body, messages.chat), ChatBody), model, config, salt)
    call = rename_structures(call, CHAT_NAMES)
    stem = uuid.uuid4().hex
    make_reply = partial(ResponsesReply, echo=_echo(body, call), id_stem=stem)
    return replace(call, id=f"resp_{body.request_id or stem}", make_reply=make_reply)


# ---- refusals -------------------------------------------------------------------------------------------------------


def _refuse(body: ResponsesBody) -> None:
    """Raise `ApiError` for unsupported values and for fields of a chat that this API lacks or names otherwise."""
    refuse({name: getattr(body, name) for name in UNSUPPORTED}, UNSUPPORTED)
    for name in (*CHAT_NAMES, *(ChatBody.model_fields.keys() - ResponsesBody.model_fields.keys())):
        if getattr(body, name, None) is not None:
            instead = f"; use {CHAT_NAMES[name]} instead" if name in CHAT_NAMES else ""
            raise unsupported_field(name, f"{name} is a field of chat completions{instead}")
    refuse_unsupported(body.model_extra or {})
    _refuse_extras(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise unsupported_field("stream_options.continuous_usage_stats")
    for index, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, _ENCRYPTED):
            raise unsupported_field(f"include.{index}", f"include: {name[:64]!r} is not supported by this server")
    _refuse_logprobs(body)


def _refuse_extras(body: ResponsesBody) -> None:
    """Raise `ApiError` for unknown fields of nested objects, unless they are empty."""
    objects: list[tuple[str, Body | None]] = [("text", body.text), ("reasoning", body.reasoning)]
    objects.append(("text.format", body.text.format if body.text else None))
    objects += [(f"tools.{index}", tool) for index, tool in enumerate(body.tools or ()) if tool.type in _TOOL_TYPES]
    for where, one in objects:
        for name, value in ((one.model_extra if one else None) or {}).items():
            if not is_one_of(value, _EMPTY) and (name, value) != ("allowed_callers", ["direct"]):
                raise unsupported_field(f"{where}.{name[:64]}")


def _refuse_logprobs(body: ResponsesBody) -> None:
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise ApiError(400, f'top_logprobs needs include to be ["{LOGPROBS}"]', param="top_logprobs")
    functions = [tool for tool in body.tools or () if tool.type == "function"]
    if LOGPROBS in (body.include or ()) and functions and body.tool_choice != "none":
        # It is unknown which tokens belong to text and which to a call.
        raise unsupported_field("include", f"include: {LOGPROBS!r} is not supported together with functions")


# ---- to a chat ------------------------------------------------------------------------------------------------------


def _chat_of(body: ResponsesBody, messages: Sequence[JSON]) -> JSON:
    """Return the fields of a `ChatBody`."""
    fields: JSON = {name: getattr(body, name) for name in Sampling.model_fields if name not in ("n", "verbosity")}
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    fields["continue_final_message"] = body.continue_final_message
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    fields["response_format"] = _response_format(body.text.format) if body.text and body.text.format else None
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["tools"] = [_tool(index, tool) for index, tool in enumerate(body.tools or ())] or None
    return {name: value for name, value in fields.items() if value is not None}


def _tool(index: int, tool: FlatTool) -> JSON:
    where = f"tools.{index}"
    if tool.type == "calculator":
        return {"type": tool.type}
    if tool.type != "function":
        message = f"{where}.type: {tool.type[:64]!r} is not supported by this server, only 'function' and 'calculator'"
        raise unsupported_field(f"{where}.type", message)
    if tool.name is None:
        raise ApiError(400, f"{where}.name: field required", param=f"{where}.name")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | JSON | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = repr(choice.get("type"))[:64]
        raise unsupported_field("tool_choice.type", f"tool_choice.type: {kind} is not supported by this server")
    if not isinstance(choice.get("name"), str):
        raise ApiError(400, "tool_choice.name: must name a function", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: TextFormat) -> JSON:
    if text.type != "json_schema":
        return {"type": text.type}
    if text.form is None:
        raise ApiError(400, "text.format.schema: field required", param="text.format.schema")
    fields = {"name": text.name, "description": text.description, "schema": text.form, "strict": text.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}


def _messages_of(body: ResponsesBody) -> _Messages:
    """Return the conversation as a chat's messages. Raises `ApiError` naming the invalid item."""
    messages = _Messages()
    if body.instructions is not None:
        messages.add("instructions", role="system", content=body.instructions)
    if isinstance(body.input, str):
        messages.add("input", role="user", content=body.input)
        return messages
    calls: set[str] = set()
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input.{index}", calls)
    return messages


def _add_item(messages: _Messages, item: InputItem, place: str, calls: set[str]) -> None:
    """Add an item to the messages; `calls` are the ids of earlier function calls."""
    kind = item.type or "message"
    if kind not in _ITEM_TYPES:
        hint = ": the server stores nothing, send the item itself" if kind == "item_reference" else ""
        raise unsupported_field(f"{place}.type", f"{place}.type: {kind[:64]!r} is not supported by this server{hint}")
    if kind == "message":
        role, content = _required(item, place, "role"), _text_parts(_required(item, place, "content"), place, "content")
        messages.add(place, role=role, content=content, **({} if item.parts is None else {"parts": item.parts}))
    elif kind == "function_call":
        function = {"name": _required(item, place, "name"), "arguments": _required(item, place, "arguments")}
        call_id = _required(item, place, "call_id")
        calls.add(call_id)
        _add_call(messages, {"id": call_id, "type": "function", "function": function}, place)
    elif kind == "function_call_output":
        call_id = _required(item, place, "call_id")
        if call_id not in calls:
            message = f"{place}.call_id: no earlier function_call has this id; send earlier turns in input"
            raise ApiError(400, message, param=f"{place}.call_id")
        output = _text_parts(_required(item, place, "output"), place, "output")
        messages.add(place, role="tool", tool_call_id=call_id, content=output)


def _add_call(messages: _Messages, call: JSON, place: str) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    last = messages.chat[-1] if messages.chat else {}
    if last.get("role") == "assistant":
        messages.chat[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
    else:
        messages.add(place, role="assistant", content="", tool_calls=[call])


def _required(item: InputItem, place: str, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{place}.{name}: field required", param=f"{place}.{name}")
    return value


def _text_parts(content: str | Sequence[TextPart], place: str, name: str) -> str | list[JSON]:
    """Return a chat message's `content`. Raises `ApiError` naming a part that is not text."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        where = f"{place}.{name}.{index}"
        if part.type not in _TEXT_TYPES:
            raise unsupported_field(f"{where}.type", f"{where}.type: {part.type[:64]!r} is not supported, only text")
        if part.text is None:
            raise ApiError(400, f"{where}.text: field required", param=f"{where}.text")
    return [{"type": "text", "text": part.text} for part in content]


# ---- the reply's names and fields -----------------------------------------------------------------------------------


def _with_own_names(text: str, places: Sequence[str]) -> str:
    """Return a chat's error text with this API's field names; `places` are the items that its messages are from."""

    def own_name(found: re.Match[str]) -> str:
        # "messages" is also an English word: it is a field if it has an index or begins the text.
        is_field = found["head"] != "messages" or found["rest"] or not found.start()
        return _own_name(found["head"], found["rest"], places) if is_field else found.group()

    return _CHAT_FIELD.sub(own_name, text)


def _own_name(head: str, rest: str, places: Sequence[str]) -> str:
    """Return this API's name of the chat field `head`; `rest`: the rest of its path, with dots and brackets."""
    if head == "messages" and rest:
        number, _, rest = rest.replace("[", ".").replace("]", "")[1:].partition(".")
        place = places[int(number)] if number.isdigit() and int(number) < len(places) else "input"
        return f"{place}.{rest}" if rest and place.startswith("input.") else place
    if head == "response_format":
        rest = rest.removeprefix(".json_schema")
    elif head != "messages":
        rest = rest.replace(".function", "")
    return CHAT_NAMES.get(head, head) + rest


def _echo(body: ResponsesBody, call: Call) -> JSON:
    """Return the fields that a response repeats from its request; temperature and top_p are the values in effect."""
    params = call.requests[0].params
    text = body.text or TextOptions()
    form = {"type": "text"} if text.format is None else _plain(text.format)
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": form, "verbosity": text.verbosity or "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_plain(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _plain(one: FlatTool | TextFormat) -> JSON:
    return one.model_dump(by_alias=True, exclude_none=True)


DIALECT = Dialect(
    generating=tuple(
        Generating(
            path=path,
            body=ResponsesBody,
            to_call=responses_call,
            summary="Answer items; the interface of OpenAI's Responses API.",
            renders=True,
        )
        for path in ("/v1/responses", "/responses")
    ),
)
