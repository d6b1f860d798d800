"""OpenAI's Responses API, translated to a chat completion; field names in errors are translated back.

POST /v1/responses and /v1/responses/input_tokens; GET and DELETE of stored replies. Unless
`store` is false, a reply is stored for the API key of its request (`reply_store`), and `previous_response_id` continues
it. The sampling fields of /v1/chat/completions are extensions. Accepted and ignored: `text.verbosity`,
`reasoning.summary` and `reasoning.generate_summary` (reasoning is returned as it is), `tools.external_web_access`
(false; the tool is left out), and `stream_options.include_usage` (streams always end with the usage).
Reasoning items of `input` reach the prompt only between the calls of the current turn. The count of tokens also ignores
what only the answer depends on: `parallel_tool_calls`, `tools.strict`, `tools.tools.strict`, `text.format.name`,
`text.format.description` and `text.format.strict`.

A function of a namespace has the name `namespace.function` in the prompt.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic_core import from_json, to_json

from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Converting, Dialect, Recalling, Route
from nano_inference.server.dialects.responses_body import (
    LOCAL_SEARCH,
    FlatTool,
    FunctionTool,
    InputItem,
    InputTokensBody,
    ResponsesBody,
    is_left_out,
)
from nano_inference.server.dialects.responses_reply import (
    ID_PREFIXES,
    ResponsesOptions,
    ResponsesReply,
    text_in,
)
from nano_inference.server.errors import ApiError, refused, unsupported_field, unsupported_value
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.reply_store import ClientReplies, StoredReply
from nano_inference.server.schema import ChatBody, Sampling, TextPart
from nano_inference.server.translated import as_body, prompt_length, translated, with_current_reasoning

CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat completion -> its name in this API."""
LOGPROBS: Final = "message.output_text.logprobs"  # the value of `include` that adds log-probabilities
_ENCRYPTED = "reasoning.encrypted_content"
"""The value of `include` that adds `encrypted_content` to reasoning items, which agents send back."""
_SAME = (
    *(name for name in Sampling.model_fields if name != "n"),
    *("chat_template_kwargs", "continue_final_message", "parallel_tool_calls", "timings_per_token", "return_progress"),
)
"""Fields with the same name in a chat completion."""
_TEXT_TYPES = ("input_text", "output_text", "text", "refusal")
_EARLIER = "previous_response_id"  # the place, in errors, of items that the request did not send
_MISSING = "response_not_found"
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


# ---- from a body to a generation ------------------------------------------------------------------------------------


def ask_responses(
    body: ResponsesBody, model: ServedModel, config: ServerConfig, salt: str, replies: ClientReplies | None = None
) -> Generation:
    """Return what a body of POST /v1/responses asks for. Raises `ApiError` naming the invalid field.

    With `replies`, it may continue one of them, and the reply is added to them.
    """
    earlier = earlier_items(body, replies)
    generation = translated(chat_fields(body, earlier), ChatBody, CHAT_NAMES, model, config, salt)
    stem = uuid.uuid4().hex
    name = f"resp_{body.request_id or stem}"
    keep: Callable[[JSON], bool] | None = None
    if replies is not None and body.store is not False:
        items = to_json([*earlier, *listed_items(body.input, stem)])

        def keep(response: JSON) -> bool:
            return replies.put(StoredReply(id=name, reply=to_json(response), items=items))

    options = ResponsesOptions(
        echo=_echo(body, generation) | {"store": keep is not None},
        id_stem=stem,
        namespaces={
            f"{space.name}.{one.name}": (space.name or "", one.name or "")
            for space in body.tools or ()
            for one in (space.tools or () if space.type == "namespace" else ())
        },
        keep=keep,
        encodes_reasoning=_ENCRYPTED in (body.include or ()),
    )
    return replace(generation, id=name, options=options)


def input_tokens(body: InputTokensBody, model: ServedModel, replies: ClientReplies | None = None) -> JSON:
    """Return the number of tokens of a prompt, also beyond the model's context. Raises `ApiError`."""
    given = {name: getattr(body, name) for name in InputTokensBody.model_fields}
    whole = as_body({**given, "max_output_tokens": 1}, ResponsesBody)
    fields = chat_fields(whole, earlier_items(whole, replies))
    return {"object": "response.input_tokens", "input_tokens": prompt_length(fields, CHAT_NAMES, model)}


def earlier_items(body: ResponsesBody, replies: ClientReplies | None) -> list[JSON]:
    """Return the items of the stored reply that a request continues, with its output. Raises `ApiError`."""
    if body.previous_response_id is None:
        return []
    if replies is None:
        raise unsupported_field(_EARLIER)
    stored = replies.get(body.previous_response_id, _EARLIER, "previous_response_not_found")
    return [*from_json(stored.items), *from_json(stored.reply)["output"]]


def chat_fields(body: ResponsesBody, earlier: Sequence[JSON] = ()) -> JSON:
    """Return the fields of a `ChatBody`. Raises `ApiError` naming the invalid or unsupported field."""
    include, choice, form = body.include or (), body.tool_choice, body.text.format if body.text else None
    for name, instead in CHAT_NAMES.items():
        if getattr(body, name, None):
            raise unsupported_field(name, f"{name} is a field of chat completions; use {instead} instead")
    if body.n not in (None, 1):
        raise unsupported_field("n")
    if body.prompt_logprobs is not None:
        raise unsupported_field("prompt_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise unsupported_field("stream_options.continuous_usage_stats")
    for index, name in enumerate(include):
        if name not in (LOGPROBS, _ENCRYPTED):
            raise unsupported_field(f"include.{index}", f"include: {name[:64]!r} is not supported by this server")
    if body.top_logprobs and LOGPROBS not in include:
        raise ApiError(400, f'top_logprobs needs include to be ["{LOGPROBS}"]', param="top_logprobs")
    has_functions = any(tool.type in ("function", "namespace") for tool in body.tools or ())
    if LOGPROBS in include and has_functions and choice != "none":
        # It is unknown which tokens belong to text and which to a call.
        raise unsupported_field("include", f"include: {LOGPROBS!r} is not supported together with functions")
    fields: JSON = {name: getattr(body, name) for name in _SAME}
    fields["tools"] = _chat_tools(body.tools or ()) or None
    fields["messages"] = _chat_messages(body.instructions, earlier, body.input)
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    if LOGPROBS in include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.form is None:
                raise refused("text.format.schema", "field required")
            schema = {"name": form.name, "description": form.description, "schema": form.form, "strict": form.strict}
            fields["response_format"]["json_schema"] = _given(schema)
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            kind = repr(choice.get("type"))[:64]
            raise unsupported_field("tool_choice.type", f"tool_choice.type: {kind} is not supported by this server")
        if not isinstance(choice.get("name"), str):
            raise refused("tool_choice.name", "must name a function")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    return _given(fields | {"tool_choice": choice})


def _given(fields: JSON) -> JSON:
    return {name: value for name, value in fields.items() if value is not None}


def _chat_tools(tools: Sequence[FlatTool]) -> list[JSON]:
    chat: list[JSON] = []
    for index, tool in enumerate(tools):
        place = f"tools.{index}"
        if is_left_out(tool):
            continue
        several: list[tuple[str, FunctionTool]] = [(place, tool)]
        if tool.type == "namespace":
            for name in ("name", "tools"):
                if getattr(tool, name) is None:
                    raise refused(f"{place}.{name}", "field required")
            several = [(f"{place}.tools.{number}", one) for number, one in enumerate(tool.tools or ())]
        for place, one in several:
            if one is not tool and one.type != "function":
                raise unsupported_value(f"{place}.type", one.type, "in a namespace, only 'function'")
            if one.type == "calculator":
                chat.append({"type": one.type})
                continue
            if one.type != "function":
                hint = ", only 'function', 'namespace' and 'calculator'"
                hint = "; with external_web_access false it is left out" if one.type == LOCAL_SEARCH else hint
                raise unsupported_value(f"{place}.type", one.type, f"by this server{hint}")
            if one.name is None:
                raise refused(f"{place}.name", "field required")
            function: JSON = {"parameters": one.parameters, "strict": one.strict}
            function |= {"name": one.name, "description": one.description}
            if one is not tool:  # a chat template has no place for both descriptions
                texts = [text for text in (tool.description, one.description) if text]
                function |= {"name": f"{tool.name}.{one.name}", "description": "\n".join(texts) or None}
            chat.append({"type": "function", "function": _given(function)})
    return chat


def _chat_messages(instructions: str | None, earlier: Sequence[JSON], new: str | Sequence[InputItem]) -> list[JSON]:
    """Return a conversation as a chat's messages. Raises `ApiError` naming the invalid item.

    A call is added to the assistant's message before it. Reasoning is kept only between the calls of the current turn.
    """
    chat: list[JSON] = [] if instructions is None else [{"role": "system", "content": instructions}]
    thoughts: list[str] = []  # reasoning of the assistant's next message
    calls: set[str] = set()
    given = [InputItem(role="user", content=new)] if isinstance(new, str) else new
    items = [(_EARLIER, as_body(item, InputItem)) for item in earlier]
    items += [(f"input.{index}", item) for index, item in enumerate(given)]
    for place, item in items:
        kind = item.type or "message"
        if kind == "reasoning":
            # Another server's item may have only its encrypted form, which cannot be read.
            parts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content or ()]
            text = "".join(part or "" for part in parts)
            if not item.content and item.encrypted_content is not None:
                text = text_in(item.encrypted_content) or ""
            thoughts += [text] if text else []
            continue
        if kind == "message":
            role, content = _required(item, place, "role"), _required(item, place, "content")
            message = {"role": role, "content": _texts(content, f"{place}.content")}
            message |= {} if item.parts is None else {"parts": item.parts}
        elif kind == "function_call":
            name, arguments = _required(item, place, "name"), _required(item, place, "arguments")
            function = {"name": f"{item.namespace}.{name}" if item.namespace else name, "arguments": arguments}
            calls.add(_required(item, place, "call_id"))
            message = chat.pop() if chat and chat[-1]["role"] == "assistant" else {"role": "assistant", "content": ""}
            call = {"id": item.call_id, "type": "function", "function": function}
            message["tool_calls"] = [*message.get("tool_calls", ()), call]
        elif kind == "function_call_output":
            if _required(item, place, "call_id") not in calls:
                raise refused(f"{place}.call_id", "no earlier function_call has this id; send earlier turns in input")
            output = _texts(_required(item, place, "output"), f"{place}.output")
            message = {"role": "tool", "content": output, "tool_call_id": item.call_id}
        else:
            hint = ": send the item itself, or previous_response_id" if kind == "item_reference" else ""
            raise unsupported_value(f"{place}.type", kind, f"by this server{hint}")
        if thoughts and message["role"] == "user":  # the answer was cut off in its reasoning
            chat.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)})
        elif thoughts and message["role"] == "assistant":
            before = [message["reasoning_content"]] if "reasoning_content" in message else []
            message["reasoning_content"] = "\n".join([*before, *thoughts])
        thoughts = []
        chat.append(message)
    return with_current_reasoning(chat)


def _required(item: InputItem, place: str, name: str) -> Any:
    if getattr(item, name) is None:
        raise refused(f"{place}.{name}", "field required")
    return getattr(item, name)


def _texts(content: str | Sequence[TextPart], place: str) -> str | list[JSON]:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in _TEXT_TYPES:
            where = f"{place}.{index}.type"
            raise unsupported_field(where, f"{where}: {part.type[:64]!r} is not supported, only text")
        if part.words is None:
            raise refused(f"{place}.{index}.text", "field required")
    return [{"type": "text", "text": part.words} for part in content]


def _echo(body: ResponsesBody, generation: Generation) -> JSON:
    """Return the fields that a response repeats from its request; sampling parameters are the values in effect."""
    params = generation.requests[0].params
    given = None if body.text is None else body.text.format
    form: JSON = {"type": "text"}
    if given is not None:
        unset = {"description": None, "strict": False} if given.type == "json_schema" else {}
        form = unset | given.model_dump(by_alias=True, exclude_none=True)
    tools: list[JSON] = []
    for tool in body.tools or ():
        if not is_left_out(tool):  # a function has all of its fields, as in OpenAI's replies
            unset = {"description": None, "parameters": None, "strict": False} if tool.type == "function" else {}
            tools.append(unset | tool.model_dump(by_alias=True, exclude_none=True))
    return {
        "background": False,
        "frequency_penalty": params.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


# ---- stored replies -------------------------------------------------------------------------------------------------


def listed_items(given: str | Sequence[InputItem], stem: str) -> list[JSON]:
    """Return items of `input` as OpenAI's API lists them: with type, id and status, and contents as parts.

    `stem` is the common part of new ids.
    """
    if isinstance(given, str):
        given = [InputItem(type="message", role="user", content=given)]
    listed: list[JSON] = []
    for index, item in enumerate(given):
        fields: JSON = item.model_dump(by_alias=True, exclude_none=True)
        kind = fields.setdefault("type", "message")
        fields.setdefault("id", f"{ID_PREFIXES.get(kind, 'item')}_{stem}in{index:02x}")
        if kind == "message" and isinstance(fields.get("content"), str):
            part = {"type": "input_text", "text": fields["content"]}
            if fields.get("role") == "assistant":
                part = {"type": "output_text", "text": fields["content"], "annotations": []}
            fields["content"] = [part]
        if kind in ID_PREFIXES:
            fields.setdefault("status", "completed")
        listed.append(fields)
    return listed


def retrieve(replies: ClientReplies, name: str, query: Mapping[str, str]) -> bytes:
    if query.get("stream", "false") != "false":
        raise unsupported_field("stream", "stream: a stored response is not streamed again")
    return replies.get(name, "id", _MISSING).reply


def delete(replies: ClientReplies, name: str, query: Mapping[str, str]) -> JSON:
    replies.remove(name, "id", _MISSING)
    return {"id": name, "object": "response", "deleted": True}


def input_items(replies: ClientReplies, name: str, query: Mapping[str, str]) -> JSON:
    """Return one page of the items that a response answers, the latest first. Raises `ApiError`."""
    items: list[JSON] = from_json(replies.get(name, "id", _MISSING).items)
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order[:64]!r}", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_LIMIT):
        raise ApiError(400, f"limit must be 1 to {_MAX_LIMIT}, got {limit[:64]!r}", param="limit")
    if order == "desc":
        items.reverse()
    start, after = 0, query.get("after")
    if after is not None:
        start = next((index for index, item in enumerate(items, start=1) if item["id"] == after), 0)
        if not start:
            raise refused("after", f"the response has no input item {after[:200]!r}")
    page = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


DIALECT = Dialect(
    generating=tuple(
        Route(
            path=path,
            body=ResponsesBody,
            ask=ask_responses,
            stores=True,
            reply=ResponsesReply,
            summary="Answer items; the interface of OpenAI's Responses API.",
            renders=True,
        )
        for path in ("/v1/responses", "/responses")
    ),
    converting=(
        Converting(
            path="/v1/responses/input_tokens",
            body=InputTokensBody,
            work=input_tokens,
            stores=True,
            summary="Count the tokens of a prompt; the interface of OpenAI's Responses API.",
            renders=True,
        ),
    ),
    recalling=(
        Recalling(path="/v1/responses/{id}", work=retrieve, summary="Return a stored response."),
        Recalling(path="/v1/responses/{id}", method="DELETE", work=delete, summary="Delete a stored response."),
        Recalling(
            path="/v1/responses/{id}/input_items",
            work=input_items,
            summary="List the items that a stored response answers.",
        ),
    ),
)
