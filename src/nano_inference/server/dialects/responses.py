"""OpenAI's Responses API as a dialect: its body becomes a chat's, refusals come back under its own names.

Fields as in openai/types/responses/response_create_params.py. Nothing is kept between requests: `store` is taken, and
the reply says false; `previous_response_id` and `conversation` are refused. Taken without effect are what only informs
(`metadata`, `user`, `safety_identifier`, `prompt_cache_key`, `service_tier`, `verbosity` and `text.verbosity`,
`stream_options.include_obfuscation`), `stream_options.include_usage`, for a stream ends with the usage anyway, and, in
`input`, reasoning items: no chat template shows a model what it thought in earlier turns. The sampling fields of
/v1/chat/completions are extensions here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field

from nano_inference.config import ServerConfig
from nano_inference.server.call import JSON, Call
from nano_inference.server.calls import chat_call
from nano_inference.server.dialect import Dialect, Generating
from nano_inference.server.dialects.responses_stream import Asked, ResponsesReply
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import MAX_MESSAGES, Alternatives, Body, ChatBody, Samples, Sampling, TextPart
from nano_inference.server.ticket import PromptRequest
from nano_inference.server.translating import as_body, refuse
from nano_inference.server.unsupported import is_one_of, refuse_unsupported

LOGPROBS: Final = "message.output_text.logprobs"
"""What `include` may name."""
_ENCRYPTED = "reasoning.encrypted_content"
"""What it may name besides, because agents always do: no reply has items of reasoning, so there is nothing to add."""

_MAX_TOOLS = 1024
_EMPTY: tuple[Any, ...] = (None, False, [], {})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
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
)
"""Field -> the values with which it changes nothing."""
_CHAT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": "include",
        "reasoning_effort": "reasoning.effort",
    }
)
"""A chat's field -> what it is called here."""
_CHAT_FIELD = re.compile(
    rf"(?<![\w.])(?P<head>{'|'.join(_CHAT_NAMES)}|tools|tool_choice)(?P<rest>(?:\.\w+|\[\d+\])*)(?!\w)"
)
"""A chat's field in a refusal, with what is in it: `messages[2].content`, `response_format.json_schema.schema`."""
_ITEM_TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_TOOL_TYPES = frozenset({"function", "calculator"})
_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})


class InputItem(Body):
    """One of `input`'s: a message (whose type may be left out), a call of a function or what it gave back."""

    type: str | None = None
    role: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")] | None = None
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    parts: list[Any] | None = None
    """Ours: of a message in which a calculator was called, as this server told it."""
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
    """How the answer's text is to be formed."""

    type: str
    name: str | None = None
    description: str | None = None
    form: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """What is asked of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body):
    """How much the model is to think; only models whose template knows of it."""

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
    """A chat's messages, and for each the item of `input` that it began with."""

    plain: list[JSON] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, **message: Any) -> None:
        """Add one."""
        self.plain.append(message)
        self.places.append(place)


def responses_call(body: ResponsesBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/responses. Raises `ApiError` naming the field that is wrong."""
    _refuse(body)
    messages = _messages_of(body)
    with _own_names(messages.places):
        chat = as_body(_chat_of(body, messages.plain), ChatBody)
        call = chat_call(chat, model, config, salt)
    stem = uuid.uuid4().hex
    asked = Asked(echo=_echo(body, call), stem=stem)
    requests = tuple(map(_with_own_field, call.requests))
    return replace(
        call, id=f"resp_{body.request_id or stem}", requests=requests, make_reply=partial(ResponsesReply, asked)
    )


def _with_own_field(request: PromptRequest) -> PromptRequest:
    """Return what the engine is asked for; a structure that cannot be compiled is told of later, by its field."""
    if request.structure is None or request.structure.field != "response_format":
        return request
    return replace(request, structure=request.structure._replace(field=_CHAT_NAMES["response_format"]))


# ---- what is refused ------------------------------------------------------------------------------------------------


def _refuse(body: ResponsesBody) -> None:
    """Refuse what is not done here, and fields of a chat that have another name here."""
    refuse({name: getattr(body, name) for name in _NEUTRAL}, _NEUTRAL)
    for name in (*_CHAT_NAMES, *(ChatBody.model_fields.keys() - ResponsesBody.model_fields.keys())):
        if getattr(body, name, None) is not None:
            here = f"; here it is {_CHAT_NAMES[name]}" if name in _CHAT_NAMES else ""
            raise ApiError(400, f"{name} is a field of chats{here}", param=name, code="unsupported_field")
    refuse_unsupported(body.model_extra or {})
    _refuse_extras(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise _unsupported("stream_options.continuous_usage_stats")
    for index, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, _ENCRYPTED):
            raise _unsupported(f"include.{index}", f"include: {name[:64]!r} is not supported by this server")
    _refuse_lone_logprobs(body)


def _refuse_extras(body: ResponsesBody) -> None:
    """Refuse what asks for something in the objects whose fields are all known."""
    objects: list[tuple[str, Body | None]] = [("text", body.text), ("reasoning", body.reasoning)]
    objects.append(("text.format", body.text.format if body.text else None))
    objects += [(f"tools.{index}", tool) for index, tool in enumerate(body.tools or ()) if tool.type in _TOOL_TYPES]
    for where, one in objects:
        for name, value in ((one.model_extra if one else None) or {}).items():
            if not is_one_of(value, _EMPTY) and (name, value) != ("allowed_callers", ["direct"]):
                raise _unsupported(f"{where}.{name[:64]}")


def _refuse_lone_logprobs(body: ResponsesBody) -> None:
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise ApiError(400, f'top_logprobs needs include to be ["{LOGPROBS}"]', param="top_logprobs")
    functions = [tool for tool in body.tools or () if tool.type == "function"]
    if LOGPROBS in (body.include or ()) and functions and body.tool_choice != "none":
        # which tokens are text and which are a call is not known of each token
        raise _unsupported("include", f"include: {LOGPROBS!r} is not supported together with functions")


def _unsupported(param: str, message: str | None = None) -> ApiError:
    return ApiError(400, message or f"{param} is not supported by this server", param=param, code="unsupported_field")


# ---- to a chat ------------------------------------------------------------------------------------------------------


def _chat_of(body: ResponsesBody, messages: Sequence[JSON]) -> JSON:
    """Return the same request as the body of a chat."""
    given: JSON = {name: getattr(body, name) for name in Sampling.model_fields if name not in ("n", "verbosity")}
    given["messages"] = messages
    given["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    given["chat_template_kwargs"] = body.chat_template_kwargs
    given["continue_final_message"] = body.continue_final_message
    given["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    given["response_format"] = _response_format(body.text.format) if body.text and body.text.format else None
    given |= _tools_of(body)
    return {name: value for name, value in given.items() if value is not None}


def _tools_of(body: ResponsesBody) -> JSON:
    """Return the fields that say what the model may call."""
    given: JSON = {"tool_choice": _tool_choice(body.tool_choice), "parallel_tool_calls": body.parallel_tool_calls}
    return given | {"tools": [_tool(index, tool) for index, tool in enumerate(body.tools or ())] or None}


def _tool(index: int, tool: FlatTool) -> JSON:
    where = f"tools.{index}"
    if tool.type == "calculator":
        return {"type": tool.type}
    if tool.type != "function":
        message = f"{where}.type: {tool.type[:64]!r} is not supported by this server, only 'function' and 'calculator'"
        raise _unsupported(f"{where}.type", message)
    if tool.name is None:
        raise ApiError(400, f"{where}.name: field required", param=f"{where}.name")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | JSON | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = repr(choice.get("type"))[:64]
        raise _unsupported("tool_choice.type", f"tool_choice.type: {kind} is not supported by this server")
    if not isinstance(choice.get("name"), str):
        raise ApiError(400, "tool_choice.name: must name a function", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(given: TextFormat) -> JSON:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.form is None:
        raise ApiError(400, "text.format.schema: field required", param="text.format.schema")
    fields = {"name": given.name, "description": given.description, "schema": given.form, "strict": given.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}


def _messages_of(body: ResponsesBody) -> _Messages:
    """Return the conversation as a chat's messages. Raises `ApiError` naming the item that is none."""
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
    """Add an item to the messages; `calls` are the ids of the calls so far."""
    kind = item.type or "message"
    if kind not in _ITEM_TYPES:
        hint = ": nothing is stored, send the item itself" if kind == "item_reference" else ""
        raise _unsupported(f"{place}.type", f"{place}.type: {kind[:64]!r} is not supported by this server{hint}")
    if kind == "message":
        role, content = _required(item, place, "role"), _text_parts(_required(item, place, "content"), place, "content")
        messages.add(place, role=role, content=content, **({} if item.parts is None else {"parts": item.parts}))
    elif kind == "function_call":
        call = _call_of(item, place)
        calls.add(call["id"])
        _add_call(messages, call, place)
    elif kind == "function_call_output":
        call_id = _required(item, place, "call_id")
        if call_id not in calls:
            message = f"{place}.call_id: no function_call before it has this id; earlier turns are sent in input"
            raise ApiError(400, message, param=f"{place}.call_id")
        output = _text_parts(_required(item, place, "output"), place, "output")
        messages.add(place, role="tool", tool_call_id=call_id, content=output)


def _add_call(messages: _Messages, call: JSON, place: str) -> None:
    """Add a call to the assistant's message that it belongs to."""
    if messages.plain and messages.plain[-1]["role"] == "assistant":
        last = messages.plain[-1]
        messages.plain[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
    else:
        messages.add(place, role="assistant", content="", tool_calls=[call])


def _call_of(item: InputItem, place: str) -> JSON:
    function = {"name": _required(item, place, "name"), "arguments": _required(item, place, "arguments")}
    return {"id": _required(item, place, "call_id"), "type": "function", "function": function}


def _required(item: InputItem, place: str, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"{place}.{name}: field required", param=f"{place}.{name}")
    return value


def _text_parts(given: str | Sequence[TextPart], place: str, name: str) -> str | list[JSON]:
    """Return a content as a chat's. Raises `ApiError` naming the part that is no text."""
    if isinstance(given, str):
        return given
    for index, part in enumerate(given):
        where = f"{place}.{name}.{index}"
        if part.type not in _TEXT_TYPES:
            raise _unsupported(f"{where}.type", f"{where}.type: {part.type[:64]!r} is not supported, only text")
        if part.text is None:
            raise ApiError(400, f"{where}.text: field required", param=f"{where}.text")
    return [{"type": "text", "text": part.text} for part in given]


# ---- back to this API's names ---------------------------------------------------------------------------------------


@contextmanager
def _own_names(places: Sequence[str]) -> Iterator[None]:
    """Raise refusals of a chat under the names that the client gave."""

    def own(found: re.Match[str]) -> str:
        # as a word of a sentence a field is told by its index or by standing first
        is_field = found["head"] != "messages" or found["rest"] or not found.start()
        return _own_name(found["head"], found["rest"], places) if is_field else found.group()

    try:
        yield
    except ApiError as error:
        param = None if error.param is None else _CHAT_FIELD.sub(own, error.param)
        message, code, headers, extra = _CHAT_FIELD.sub(own, error.message), error.code, error.headers, error.extra
        raise ApiError(error.status, message, param=param, code=code, headers=headers, extra=extra) from None


def _own_name(head: str, rest: str, places: Sequence[str]) -> str:
    """Return what a chat's field is called here; `rest` is what follows its first name, dots and brackets included."""
    if head == "messages" and rest:
        number, _, rest = rest.replace("[", ".").replace("]", "")[1:].partition(".")
        place = places[int(number)] if number.isdigit() and int(number) < len(places) else "input"
        return f"{place}.{rest}" if rest and place.startswith("input.") else place
    if head == "response_format":
        rest = rest.removeprefix(".json_schema")
    elif head != "messages":
        rest = rest.replace(".function", "")
    return _CHAT_NAMES.get(head, head) + rest


def _echo(body: ResponsesBody, call: Call) -> JSON:
    """Return what a response repeats of its request; of temperature and top_p what is in force."""
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
    generating=(
        Generating(
            path="/v1/responses",
            body=ResponsesBody,
            to_call=responses_call,
            summary="Answer items, as OpenAI's Responses API has them.",
            renders=True,
        ),
    ),
)
