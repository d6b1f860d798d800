"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

A body is translated to a chat completion's, and the names of fields in its errors are translated back. Accepted and
ignored: `cache_control` (all prefixes are cached; it only changes how `usage` counts), `thinking.budget_tokens`,
`context_management` with edits of thinking blocks (which are always left out), the query `beta`, and the headers
`anthropic-version` and `anthropic-beta`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from pydantic_core import from_json, to_json

from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Converting, Dialect, Route
from nano_inference.server.dialects.messages_body import (
    Block,
    CountTokensBody,
    MessagesBody,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    marks_cache,
)
from nano_inference.server.errors import ApiError, refused, shortened, unsupported_value
from nano_inference.server.events import event
from nano_inference.server.generation import JSON, Generation
from nano_inference.server.model import ServedModel
from nano_inference.server.replies import Reply, sample_facts
from nano_inference.server.schema import ChatBody
from nano_inference.server.transcript import Transcript, num_reasoning_tokens, usage
from nano_inference.server.translated import prompt_length, translated, with_current_reasoning
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Event, Reasoning

ANTHROPIC_NAMES: Mapping[str, str] = {
    "messages": "messages",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
}
"""Field of a chat completion -> Anthropic's, for errors."""
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "return_token_ids", "cache_salt")
_IDLE_EDITS = ("clear_thinking_20251015",)  # without effect: thinking of earlier turns is never in the prompt
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ALLOWED = {"user": "text and tool_result", "assistant": "text, tool_use and thinking", "system": "text"}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a block -> type of its deltas, and their field with text."""


class MessagesOptions(NamedTuple):
    creates_cache: bool  # the request has `cache_control`
    edits_context: bool  # it has `context_management`
    omits_thinking: bool  # blocks of thinking have no text, as with `thinking.display` omitted


# ---- from a body to a generation ------------------------------------------------------------------------------------


def ask_messages(body: MessagesBody, model: ServedModel, config: ServerConfig, salt: str) -> Generation:
    """Return what a body of POST /v1/messages asks for. Raises `ApiError` naming the invalid field."""
    generation = translated(chat_fields(body, model), ChatBody, _names(body), model, config, salt)
    options = MessagesOptions(
        creates_cache=marks_cache(body),
        edits_context=body.context_management is not None,
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )
    return replace(generation, id=f"msg_{uuid.uuid4().hex}", options=options)


def count_tokens(body: CountTokensBody, model: ServedModel) -> JSON:
    """Return {"input_tokens"}, also beyond the model's context. Raises `ApiError` as `ask_messages` does."""
    return {"input_tokens": prompt_length(chat_fields(body, model), _names(body), model)}


def _names(body: CountTokensBody) -> Mapping[str, str]:
    is_current = body.output_config is not None and body.output_config.format is not None
    return {**ANTHROPIC_NAMES, "response_format": "output_config.format" if is_current else "output_format"}


def chat_fields(body: CountTokensBody, model: ServedModel) -> JSON:
    """Return the fields of a `ChatBody`. Raises `ApiError` for what this server does not support."""
    for index, edit in enumerate((body.context_management.edits or ()) if body.context_management else ()):
        if edit.type not in _IDLE_EDITS:
            raise unsupported_value(f"context_management.edits.{index}.type", edit.type, "by this server")
    output, choice = body.output_config, body.tool_choice
    form = body.output_format if output is None else output.format or body.output_format
    if output is not None and output.format is not None and body.output_format is not None:
        raise ApiError(400, "output_format and output_config.format exclude each other", param="output_format")
    messages = chat_messages(body)
    fields: JSON = {"messages": messages, "max_tokens": 1}
    fields |= {name: value for name in _SAME if (value := getattr(body, name, None)) is not None}
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if messages[-1]["role"] == "assistant":  # the model continues it
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = _chat_tools(body)
    if choice is not None:
        fields["tool_choice"] = _CHOICES.get(choice.type)
        if choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            if choice.name is None:
                raise refused("tool_choice.name", "field required")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if form is not None:
        schema = {"name": "output", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output is not None and output.effort is not None:
        fields["reasoning_effort"] = output.effort
    variables = body.chat_template_kwargs or {}
    can_think = model.dialogue is not None and model.dialogue.knows("enable_thinking")
    if can_think and body.thinking is not None and body.thinking.type != "adaptive":  # which leaves it to the model
        variables = {"enable_thinking": body.thinking.type == "enabled", **variables}
    return fields | ({"chat_template_kwargs": variables} if variables else {})


def chat_messages(body: CountTokensBody) -> list[JSON]:
    """Return the conversation as a chat's messages. Raises `ApiError` naming an unsupported or invalid block.

    Consecutive messages of one role are one turn, whose texts are joined with line breaks. A tool result becomes a
    separate message in the same position; the text of a failed one begins with "Error: ". Reasoning is kept only in the
    current turn, which has had calls since the user's last text.
    """
    messages: list[JSON] = []
    functions: dict[str, str] = {}  # id of a call -> name of its function
    if body.system is not None:
        messages.append({"role": "system", "content": _joined(body.system, "system")})
    for role, run in groupby(enumerate(body.messages), key=lambda pair: pair[1].role):
        turn: list[JSON] = []
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[JSON] = []
        for index, message in run:
            content = message.content
            blocks: Sequence[Block] = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            for number, block in enumerate(blocks):
                place = f"messages.{index}.content.{number}"
                if role == "assistant" and isinstance(block, ThinkingBlock):
                    thoughts += [block.thinking] if block.thinking else []
                elif role == "assistant" and isinstance(block, ToolUseBlock):
                    if block.id in functions:
                        raise refused(f"{place}.id", "an earlier tool_use has the same id")
                    functions[block.id] = block.name
                    function = {"name": block.name, "arguments": to_json(block.input).decode()}
                    calls.append({"id": block.id, "type": "function", "function": function})
                elif role == "user" and isinstance(block, ToolResultBlock):
                    call = block.tool_use_id
                    if call not in functions:
                        raise refused(f"{place}.tool_use_id", f"no earlier tool_use has the id {call[:64]!r}")
                    turn += [{"role": role, "content": "\n".join(texts)}] if texts else []
                    texts = []
                    text = ("Error: " if block.is_error else "") + _joined(block.content or "", f"{place}.content")
                    # Some templates render the name.
                    turn.append({"role": "tool", "tool_call_id": call, "name": functions[call], "content": text})
                else:
                    texts.append(_text(block, place, _ALLOWED[role]))
        if texts or not turn:
            last: JSON = {"role": role, "content": "\n".join(texts)}
            last |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
            turn.append(last | ({"tool_calls": calls} if calls else {}))
        messages += turn
    if "tool_calls" in messages[-1]:
        place = f"messages.{len(body.messages) - 1}"
        raise refused(place, "tool_use must be followed by a message with its tool_result")
    return with_current_reasoning(messages)


def _joined(content: Texts, place: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{place}.{number}", "text") for number, block in enumerate(content))


def _text(block: Block, place: str, allowed: str) -> str:
    if not isinstance(block, TextBlock):
        raise unsupported_value(f"{place}.type", block.type, f"here, only {allowed}")
    return block.text


def _chat_tools(body: CountTokensBody) -> list[JSON]:
    """Return a chat's tools. Raises `ApiError` for tools that run on Anthropic's servers."""
    tools: list[JSON] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type == "calculator":
            tools.append({"type": "calculator"})
            continue
        if tool.type not in (None, "custom"):
            raise unsupported_value(f"tools.{index}.type", tool.type, "by this server, only custom and calculator")
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise refused(f"tools.{index}.{name}", "field required")
        fields: JSON = {"name": tool.name, "parameters": tool.input_schema}
        fields |= {"description": tool.description, "strict": tool.strict}
        function = {name: value for name, value in fields.items() if value is not None}
        tools.append({"type": "function", "function": function})
    return tools


# ---- replies --------------------------------------------------------------------------------------------------------


@dataclass
class MessagesReply(Reply[MessagesOptions]):
    """The reply to POST /v1/messages: a message of thinking, text and tool_use blocks.

    Whole replies and streams are built by the same code. A stream knows the number of cached tokens only at its end, so
    its first event counts none and its `message_delta` has the corrected counts. The signature of a thinking block is a
    name without meaning: clients expect one, and this server does not check it.
    """

    _content: list[JSON] = field(init=False, default_factory=list)  # blocks, of which the last one may be open
    _pieces: list[str] = field(init=False, default_factory=list)  # text of the open block
    _open: str = field(init=False, default="")  # its type
    _has_called: bool = field(init=False, default=False)  # True after the end of a tool call

    def whole(self) -> JSON:
        self._take(self.transcripts[0].events)
        self._stop()
        return self._message(self._content) | self._ending()

    def start(self) -> bytes:
        blank = {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return _encoded([{"type": "message_start", "message": self._message([]) | blank}])

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        return _encoded(self._take(decoded.events))

    def end(self) -> bytes:
        ending = self._ending()
        delta = {name: ending.pop(name) for name in ("stop_reason", "stop_sequence")}
        return _encoded([*self._stop(), {"type": "message_delta", "delta": delta, **ending}, {"type": "message_stop"}])

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        return _encoded([error_body(error)])

    def _take(self, events: Iterable[Event]) -> list[JSON]:
        """Add text and calls to the blocks; return the API's events for them."""
        out: list[JSON] = []
        for one in events:
            if isinstance(one, CallStart):
                name = f"toolu_{self.generation.id.removeprefix('msg_')}_{one.index}"
                out += self._start({"type": "tool_use", "id": name, "name": one.name, "input": {}})
            elif isinstance(one, CallArguments):
                out.append(self._add(one.text))
            elif isinstance(one, CallEnd):
                out += self._stop()
                self._has_called = True
            elif isinstance(one, Reasoning):
                if self._open != "thinking":
                    out += self._start({"type": "thinking", "thinking": "", "signature": ""})
                out += [] if self.options.omits_thinking else [self._add(one.text)]
            elif self._open == "text":
                out.append(self._add(one.text))
            else:
                out += self._start({"type": "text", "text": ""})
                # Without the space between two texts, which are two blocks here.
                out.append(self._add(one.text.lstrip() if self._has_called else one.text))
        return out

    def _start(self, block: JSON) -> list[JSON]:
        stop = self._stop()
        self._content.append(block)
        self._open = block["type"]
        return [*stop, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}]

    def _add(self, text: str) -> JSON:
        self._pieces.append(text)
        kind, name = _DELTAS[self._open]
        return self._delta({"type": kind, name: text})

    def _delta(self, delta: JSON) -> JSON:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> list[JSON]:
        if not self._open:
            return []
        block, text, index = self._content[-1], "".join(self._pieces), len(self._content) - 1
        signed: list[JSON] = []
        if self._open == "tool_use":
            block["input"] = arguments_of(text) if text else {}
        else:
            block[self._open] = text
        if self._open == "thinking":
            block["signature"] = f"sig_{self.generation.id.removeprefix('msg_')}_{index}"
            signed = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        self._pieces, self._open = [], ""
        return [*signed, {"type": "content_block_stop", "index": index}]

    def _message(self, content: list[JSON]) -> JSON:
        """Return a message without stop reason and usage."""
        one = self.generation
        message: JSON = {"id": one.id, "type": "message", "role": "assistant", "model": one.model, "content": content}
        return message | ({"prompt_token_ids": list(one.requests[0].prompt)} if one.token_ids else {})

    def _ending(self) -> JSON:
        (transcript,), sequence = self.transcripts, None
        reason = "tool_use" if self._has_called else "end_turn"
        if transcript.finish_reason != "stop":  # also an aborted sample
            reason = "max_tokens"
        elif isinstance(transcript.stop_reason, str) and transcript.stop_reason in self.generation.stops:
            reason, sequence = "stop_sequence", transcript.stop_reason
        end: JSON = {"stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}
        end |= {"context_management": {"applied_edits": []}} if self.options.edits_context else {}
        return end | sample_facts(transcript, self.generation)

    def _usage(self) -> JSON:
        """Return `usage`, in which cached tokens are separate; with `cache_control` the others are new in the cache."""
        counts = usage(self.generation, self.transcripts)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        new = counts["prompt_tokens"] - cached
        fields: JSON = {
            "input_tokens": 0 if self.options.creates_cache else new,
            "cache_creation_input_tokens": new if self.options.creates_cache else 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }
        thinking = num_reasoning_tokens(self.transcripts)
        return fields | ({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {})


def arguments_of(text: str) -> JSON:
    """Return a call's arguments, parsed from complete or cut-off JSON.

    Return {"raw_arguments": text} if they cannot be encoded as JSON again: lone surrogates, numbers beyond a float.
    """
    try:
        value = from_json(text, allow_partial=True)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"raw_arguments": text}
    return value if isinstance(value, dict) else {"raw_arguments": text}


def error_body(error: ApiError, request_id: str | None = None) -> JSON:
    """Return Anthropic's error object; code, param and extra fields are in `details`."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: JSON = {"type": kind, "message": shortened(error.message)}
    details = {"error_code": error.code, "param": error.param, **error.extra}
    known = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": fields | ({"details": known} if known else {}), "request_id": request_id}


def _encoded(values: Iterable[JSON]) -> bytes:
    return b"".join(event(value, value["type"]) for value in values)


DIALECT = Dialect(
    generating=(
        Route(
            path="/v1/messages",
            body=MessagesBody,
            ask=ask_messages,
            reply=MessagesReply,
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
)
