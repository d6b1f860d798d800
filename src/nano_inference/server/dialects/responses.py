"""OpenAI's Responses API, translated to a chat completion; field names in errors are translated back.

POST /v1/responses and /v1/responses/input_tokens; GET and DELETE of stored replies. Unless
`store` is false, a reply is stored for the API key of its request (`reply_store`), and `previous_response_id` continues
it. The sampling fields of /v1/chat/completions are extensions. Accepted and ignored: `text.verbosity`,
`reasoning.summary` and `reasoning.generate_summary` (reasoning is returned as it is), `tools.external_web_access`
(false; the tool is left out), and `stream_options.include_usage` (streams always end with the usage).
Reasoning items of `input` reach the prompt only between the calls of the current turn. The count of tokens also ignores
what only the answer depends on: `parallel_tool_calls`, `tools.strict`, `tools.tools.strict`, `text.format.name`,
`text.format.description` and `text.format.strict`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from pydantic_core import from_json, to_json

from nano_inference.server.call import JSON, Call
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Converting, Dialect, Generating, Recalling
from nano_inference.server.dialects.responses_body import (
    ConversationItems,
    InputItem,
    InputTokensBody,
    ResponsesBody,
    is_left_out,
)
from nano_inference.server.dialects.responses_chat import (
    CHAT_NAMES,
    EARLIER,
    Function,
    chat_choice,
    chat_tools,
    functions_of,
    messages_of,
    response_format,
)
from nano_inference.server.dialects.responses_stream import ResponsesReply, stream_error
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.reply_store import ClientReplies, StoredReply
from nano_inference.server.schema import ChatBody, Sampling
from nano_inference.server.translating import as_body, translated_call, unsupported_field

LOGPROBS: Final = "message.output_text.logprobs"  # the value of `include` that adds log-probabilities
_ENCRYPTED = "reasoning.encrypted_content"
"""The value of `include` that adds `encrypted_content` to reasoning items, which agents send back."""

_UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items before the reply to a request."""

    earlier: Sequence[JSON]  # those of the stored reply that it continues, with its output
    new: str | Sequence[InputItem]

    def inputs(self) -> Sequence[InputItem]:
        """Return the earlier items as they are sent in `input`."""
        return as_body({"input": self.earlier}, ConversationItems).input if self.earlier else ()


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A request of this API, translated to a chat completion."""

    fields: JSON  # of a `ChatBody`
    conversation: Conversation
    functions: Sequence[Function]


def translated_chat(body: ResponsesBody, replies: ClientReplies | None = None) -> TranslatedChat:
    """Translate a request to a chat completion. Raises `ApiError` naming the invalid or unsupported field.

    With `replies`, the request may continue one of them.
    """
    for name, instead in CHAT_NAMES.items():
        if getattr(body, name, None):
            raise unsupported_field(name, f"{name} is a field of chat completions; use {instead} instead")
    if body.n not in (None, 1):
        raise unsupported_field("n")
    if body.prompt_logprobs is not None:
        raise unsupported_field("prompt_logprobs")
    include = body.include or ()
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise unsupported_field("stream_options.continuous_usage_stats")
    for index, name in enumerate(include):
        if name not in (LOGPROBS, _ENCRYPTED):
            raise unsupported_field(f"include.{index}", f"include: {name[:64]!r} is not supported by this server")
    if body.top_logprobs and LOGPROBS not in include:
        raise ApiError(400, f'top_logprobs needs include to be ["{LOGPROBS}"]', param="top_logprobs")
    has_functions = any(tool.type in ("function", "namespace") for tool in body.tools or ())
    if LOGPROBS in include and has_functions and body.tool_choice != "none":
        # It is unknown which tokens belong to text and which to a call.
        raise unsupported_field("include", f"include: {LOGPROBS!r} is not supported together with functions")
    earlier: Sequence[JSON] = ()
    if body.previous_response_id is not None:
        if replies is None:
            raise unsupported_field(EARLIER)
        stored = replies.get(body.previous_response_id, EARLIER, "previous_response_not_found")
        earlier = [*from_json(stored.items), *from_json(stored.reply)["output"]]
    conversation = Conversation(earlier, body.input)
    functions = functions_of(body.tools or ())
    messages = messages_of(body.instructions, conversation.inputs(), conversation.new)
    return TranslatedChat(_chat_of(body, messages.chat, functions), conversation, functions)


def responses_call(
    body: ResponsesBody, model: ServedModel, config: ServerConfig, salt: str, replies: ClientReplies | None = None
) -> Call:
    """Return the call of POST /v1/responses. Raises `ApiError` naming the invalid field.

    With `replies`, the call may continue one of them, and adds its reply to them.
    """
    chat = translated_chat(body, replies)
    call = translated_call(chat.fields, ChatBody, CHAT_NAMES, model, config, salt)
    stem = uuid.uuid4().hex
    call = replace(call, id=f"resp_{body.request_id or stem}")
    keep = None
    if replies is not None and body.store is not False:
        items = to_json([*chat.conversation.earlier, *listed_items(chat.conversation.new, stem)])
        keep = partial(_stored, replies, call.id, items)
    functions = chat.functions
    namespaces = {one.name: (space, one.tool.name or "") for one in functions if (space := one.namespace) is not None}
    reply = partial(
        ResponsesReply,
        echo=_echo(body, call) | {"store": keep is not None},
        id_stem=stem,
        namespaces=namespaces,
        keep=keep,
        encodes_reasoning=_ENCRYPTED in (body.include or ()),
    )
    return replace(call, make_reply=reply)


def input_tokens(body: InputTokensBody, model: ServedModel, replies: ClientReplies | None = None) -> JSON:
    """Return the number of tokens of a prompt, also beyond the model's context. Raises `ApiError`."""
    given = {name: getattr(body, name) for name in InputTokensBody.model_fields}
    unlimited = replace(model, limits=replace(model.limits, max_model_len=_UNLIMITED, num_blocks=_UNLIMITED))
    whole = as_body({**given, "max_output_tokens": 1}, ResponsesBody)
    fields = translated_chat(whole, replies).fields
    call = translated_call(fields, ChatBody, CHAT_NAMES, unlimited, ServerConfig(), "")
    return {"object": "response.input_tokens", "input_tokens": len(call.requests[0].prompt)}


# ---- to a chat and back ---------------------------------------------------------------------------------------------


def _chat_of(body: ResponsesBody, messages: Sequence[JSON], functions: Sequence[Function]) -> JSON:
    """Return the fields of a `ChatBody`."""
    fields: JSON = {name: getattr(body, name) for name in Sampling.model_fields if name != "n"}
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    fields["continue_final_message"] = body.continue_final_message
    fields |= {"timings_per_token": body.timings_per_token, "return_progress": body.return_progress}
    fields["stream"] = body.stream
    fields["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    fields["response_format"] = response_format(body.text.format) if body.text and body.text.format else None
    fields["tool_choice"] = chat_choice(body.tool_choice)
    fields["parallel_tool_calls"] = body.parallel_tool_calls
    fields["tools"] = chat_tools(functions) or None
    return {name: value for name, value in fields.items() if value is not None}


def _echo(body: ResponsesBody, call: Call) -> JSON:
    """Return the fields that a response repeats from its request; sampling parameters are the values in effect."""
    params = call.requests[0].params
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


_MISSING = "response_not_found"
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def _stored(replies: ClientReplies, name: str, items: bytes, response: JSON) -> bool:
    """Store a response; return False if it does not fit."""
    return replies.put(StoredReply(id=name, reply=to_json(response), items=items))


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
        fields.setdefault("id", f"{_PREFIXES.get(kind, 'item')}_{stem}in{index:02x}")
        if kind == "message" and isinstance(fields.get("content"), str):
            part = {"type": "input_text", "text": fields["content"]}
            if fields.get("role") == "assistant":
                part = {"type": "output_text", "text": fields["content"], "annotations": []}
            fields["content"] = [part]
        if kind in _PREFIXES:
            fields.setdefault("status", "completed")
        listed.append(fields)
    return listed


def retrieve(replies: ClientReplies, name: str, query: Mapping[str, str]) -> bytes:
    """Return a stored response. Raises `ApiError` 404."""
    if query.get("stream", "false") != "false":
        raise unsupported_field("stream", "stream: a stored response is not streamed again")
    return replies.get(name, "id", _MISSING).reply


def delete(replies: ClientReplies, name: str, query: Mapping[str, str]) -> JSON:
    """Delete a stored response. Raises `ApiError` 404."""
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
            raise ApiError(400, f"after: the response has no input item {after[:200]!r}", param="after")
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
        Generating(
            path=path,
            body=ResponsesBody,
            to_call=responses_call,
            to_stored_call=responses_call,
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
            stored_work=input_tokens,
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
    stream_error=stream_error,
)
