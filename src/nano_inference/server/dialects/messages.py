"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens. Pure.

A body is translated to a chat completion's, and the names of fields in its errors are translated back. Accepted and
ignored: `cache_control` (all prefixes are cached; it only changes how `usage` counts), `thinking.budget_tokens`,
`context_management` with edits of thinking blocks (which are always left out), the query `beta`, and the headers
`anthropic-version` and `anthropic-beta`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from nano_inference.server.call import JSON, Call
from nano_inference.server.config import ServerConfig
from nano_inference.server.dialect import Converting, Dialect, Generating
from nano_inference.server.dialects.messages_body import CountTokensBody, MessagesBody, marks_cache
from nano_inference.server.dialects.messages_chat import chat_of, choice_of, format_of, tools_of
from nano_inference.server.dialects.messages_reply import MessagesReply, error_body, stream_error
from nano_inference.server.errors import ApiError
from nano_inference.server.model import ServedModel
from nano_inference.server.schema import ChatBody
from nano_inference.server.translating import translated_call, unsupported_field

_IDLE_EDITS = frozenset({"clear_thinking_20251015"})
"""Edits of the context without effect: thinking of earlier turns is never in the prompt."""
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "return_token_ids", "cache_salt")
"""Fields with the same name in a chat completion."""
ANTHROPIC_NAMES: Mapping[str, str] = {
    "messages": "messages",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
}
"""Field of a chat completion -> Anthropic's, for errors."""
_UNLIMITED = 1 << 40


def messages_call(body: MessagesBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    """Return the call of POST /v1/messages. Raises `ApiError` naming the invalid field."""
    call = _chat_call(body, model, config, salt)
    reply = partial(
        MessagesReply,
        creates_cache=marks_cache(body),
        edits_context=body.context_management is not None,
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )
    return replace(call, id=f"msg_{uuid.uuid4().hex}", make_reply=reply)


def count_tokens(body: CountTokensBody, model: ServedModel) -> JSON:
    """Return {"input_tokens"}, also beyond the model's context. Raises `ApiError` as `messages_call` does."""
    unlimited = replace(model, limits=replace(model.limits, max_model_len=_UNLIMITED, num_blocks=_UNLIMITED))
    call = _chat_call(body, unlimited, ServerConfig(), "")
    return {"input_tokens": len(call.requests[0].prompt)}


def chat_fields(body: CountTokensBody, model: ServedModel) -> JSON:
    """Return the fields of a `ChatBody`. Raises `ApiError` for what this server does not support."""
    _refuse(body)
    chat = chat_of(body)
    fields: JSON = {"messages": chat.messages, "max_tokens": 1}
    fields |= {name: getattr(body, name) for name in _SAME if getattr(body, name, None) is not None}
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if chat.is_open:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = tools_of(body.tools)
    if body.tool_choice is not None:
        fields |= choice_of(body.tool_choice)
    format_ = body.output_format if body.output_config is None else body.output_config.format or body.output_format
    if format_ is not None:
        fields["response_format"] = format_of(format_)
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    variables = body.chat_template_kwargs or {}
    can_think = model.dialogue is not None and model.dialogue.knows("enable_thinking")
    if can_think and body.thinking is not None and body.thinking.type != "adaptive":  # which leaves it to the model
        variables = {"enable_thinking": body.thinking.type == "enabled", **variables}
    return fields | ({"chat_template_kwargs": variables} if variables else {})


def _chat_call(body: CountTokensBody, model: ServedModel, config: ServerConfig, salt: str) -> Call:
    fields = chat_fields(body, model)
    is_current = body.output_config is not None and body.output_config.format is not None
    names = {**ANTHROPIC_NAMES, "response_format": "output_config.format" if is_current else "output_format"}
    return translated_call(fields, ChatBody, names, model, config, salt)


def _refuse(body: CountTokensBody) -> None:
    """Raise `ApiError` naming the first field with an unsupported value."""
    for index, edit in enumerate((body.context_management.edits or ()) if body.context_management else ()):
        if edit.type not in _IDLE_EDITS:
            where = f"context_management.edits.{index}.type"
            raise unsupported_field(where, f"{where}: {edit.type!r} is not supported by this server")
    if body.output_config is not None and body.output_config.format is not None and body.output_format is not None:
        raise ApiError(400, "output_format and output_config.format exclude each other", param="output_format")


DIALECT = Dialect(
    generating=(
        Generating(
            path="/v1/messages",
            body=MessagesBody,
            to_call=messages_call,
            summary="Answer messages; the interface of Anthropic's API.",
            renders=True,
        ),
    ),
    converting=(
        Converting(
            path="/v1/messages/count_tokens",
            body=CountTokensBody,
            work=count_tokens,
            summary="Count the tokens of messages; the interface of Anthropic's API.",
            renders=True,
        ),
    ),
    error_body=error_body,
    stream_error=lambda error, first, number: stream_error(error),
)
