"""Anthropic's replies: a message of thinking, text and tool_use blocks, whole or as named events, and the error body.

A whole reply is assembled from the events of its stream. Cached tokens count as `cache_read_input_tokens`; the others
as `input_tokens`, or as `cache_creation_input_tokens` if the request has `cache_control`. A stream knows the number of
cached tokens only at its end, so its first event counts none and its `message_delta` has the corrected counts.

The signature of a thinking block is a name without meaning: clients expect one, and this server does not check it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic_core import from_json

from nano_inference.server.call import JSON, Call, Reply, Transcript, num_reasoning_tokens, usage
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event
from nano_inference.server.replies import sample_facts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Event, Reasoning

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


Kind = Literal["thinking", "text", "tool_use"]  # type of a content block


_PIECES = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
"""Type of a delta -> its field with text."""


class BlockState(NamedTuple):
    """State of a message's content blocks while they are streamed."""

    num_blocks: int = 0
    open: Kind | None = None  # type of the block that has started and not stopped
    is_omitted: bool = False  # True if blocks of thinking have no text
    has_called: bool = False  # True after the end of a tool call


class MessagesReply(Reply):
    """The reply to POST /v1/messages."""

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        created: int,
        *,
        creates_cache: bool = False,
        edits_context: bool = False,
        omits_thinking: bool = False,
    ) -> None:
        """`creates_cache`: the request has `cache_control`; `edits_context`: it has `context_management`.

        `omits_thinking`: blocks of thinking have no text, as with `thinking.display` omitted.
        """
        self._call = call
        self._creates_cache = creates_cache
        self._edits_context = edits_context
        self._state = BlockState(is_omitted=omits_thinking)

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        state, events = content_events(self._state, transcripts[0].events, self._call.id)
        content = content_of([*events, *_stop_block(state, self._call.id)])
        return message(self._call, content) | self._ending(transcripts, state)

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the `message_start` event."""
        counts = input_usage(self._call, transcripts, creates_cache=self._creates_cache)
        blank = {"stop_reason": None, "stop_sequence": None, "usage": counts}
        return named_events([{"type": "message_start", "message": message(self._call, []) | blank}])

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        self._state, events = content_events(self._state, decoded.events, self._call.id)
        return named_events(events)

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the end of the last block, `message_delta` with the stop reason, and `message_stop`."""
        ending = self._ending(transcripts, self._state)
        delta = {name: ending.pop(name) for name in ("stop_reason", "stop_sequence")}
        last = [{"type": "message_delta", "delta": delta, **ending}, {"type": "message_stop"}]
        return named_events([*_stop_block(self._state, self._call.id), *last])

    def error_events(self, error: ApiError) -> bytes:
        return stream_error(error)

    def _ending(self, transcripts: Sequence[Transcript], state: BlockState) -> JSON:
        """Return the fields of a message that are known at its end."""
        reason, sequence = stop_reason(self._call, transcripts[0], state.has_called)
        counts = input_usage(self._call, transcripts, creates_cache=self._creates_cache)
        end: JSON = {"stop_reason": reason, "stop_sequence": sequence, "usage": counts}
        edits: JSON = {"context_management": {"applied_edits": []}} if self._edits_context else {}
        return end | edits | sample_facts(transcripts[0], self._call.shape)


def stream_error(error: ApiError) -> bytes:
    """Return the event that ends a stream with an error."""
    return named_events([error_body(error)])


def error_body(error: ApiError, request_id: str | None = None) -> JSON:
    """Return Anthropic's error object; code, param and extra fields are in `details`."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: JSON = {"type": kind, "message": shortened(error.message)}
    details = {"error_code": error.code, "param": error.param, **error.extra}
    known = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": fields | ({"details": known} if known else {}), "request_id": request_id}


def content_events(state: BlockState, events: Iterable[Event], call_id: str) -> tuple[BlockState, list[JSON]]:
    """Return the state after some text and tool-call events, and the API's events for them."""
    out: list[JSON] = []
    for one in events:
        state, more = _event(state, one, call_id)
        out += more
    return state, out


def content_of(events: Iterable[JSON]) -> list[JSON]:
    """Return the content blocks described by a stream's events; an incomplete call has partial arguments."""
    content: list[JSON] = []
    pieces: list[list[str]] = []
    for one in events:
        if one["type"] == "content_block_start":
            content.append(dict(one["content_block"]))
            pieces.append([])
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            if delta["type"] == "signature_delta":
                content[-1]["signature"] = delta["signature"]
            else:
                pieces[-1].append(delta[_PIECES[delta["type"]]])
    for block, parts in zip(content, pieces, strict=True):
        text = "".join(parts)
        if block["type"] != "tool_use":
            block[block["type"]] = text
        elif text:
            block["input"] = arguments_of(text)
    return content


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


def message(call: Call, content: list[JSON]) -> JSON:
    """Return a message without stop reason and usage."""
    reply: JSON = {"id": call.id, "type": "message", "role": "assistant", "model": call.model, "content": content}
    return reply | ({"prompt_token_ids": list(call.requests[0].prompt)} if call.shape.token_ids else {})


def input_usage(call: Call, transcripts: Sequence[Transcript], *, creates_cache: bool = False) -> JSON:
    """Return a call's `usage`; cached tokens are counted separately.

    With `creates_cache`, the other tokens count as new in the cache, in which every prompt is kept.
    """
    counts = usage(call, transcripts)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    new = counts["prompt_tokens"] - cached
    fields: JSON = {
        "input_tokens": 0 if creates_cache else new,
        "cache_creation_input_tokens": new if creates_cache else 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }
    thinking = num_reasoning_tokens(transcripts)
    return fields | ({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {})


def stop_reason(call: Call, transcript: Transcript, has_called: bool) -> tuple[str, str | None]:
    """Return (stop_reason, stop_sequence); "max_tokens" also for an aborted sample."""
    if transcript.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(transcript.stop_reason, str) and transcript.stop_reason in call.shape.stops:
        return "stop_sequence", transcript.stop_reason
    return ("tool_use" if has_called else "end_turn"), None


def named_events(values: Iterable[JSON]) -> bytes:
    """Return server-sent events, each named by its `type`."""
    return b"".join(event(value, value["type"]) for value in values)


def _event(state: BlockState, one: Event, call_id: str) -> tuple[BlockState, list[JSON]]:
    if isinstance(one, CallStart):
        tool_use_id = f"toolu_{call_id.removeprefix('msg_')}_{one.index}"
        use = {"type": "tool_use", "id": tool_use_id, "name": one.name, "input": {}}
        return _start_block(state, use, "tool_use", call_id)
    if isinstance(one, CallArguments):
        return state, [_delta(state, {"type": "input_json_delta", "partial_json": one.text})]
    if isinstance(one, CallEnd):
        return state._replace(open=None, has_called=True), _stop_block(state, call_id)
    events: list[JSON] = []
    if isinstance(one, Reasoning):
        if state.open != "thinking":
            state, events = _start_block(
                state, {"type": "thinking", "thinking": "", "signature": ""}, "thinking", call_id
            )
        if not state.is_omitted:
            events.append(_delta(state, {"type": "thinking_delta", "thinking": one.text}))
        return state, events
    text = one.text
    if state.open != "text":
        text = text.lstrip() if state.has_called else text  # the space between two texts, which are two blocks here
        state, events = _start_block(state, {"type": "text", "text": ""}, "text", call_id)
    return state, [*events, _delta(state, {"type": "text_delta", "text": text})]


def _start_block(state: BlockState, block: JSON, kind: Kind, call_id: str) -> tuple[BlockState, list[JSON]]:
    start = {"type": "content_block_start", "index": state.num_blocks, "content_block": block}
    return state._replace(num_blocks=state.num_blocks + 1, open=kind), [*_stop_block(state, call_id), start]


def _delta(state: BlockState, delta: JSON) -> JSON:
    return {"type": "content_block_delta", "index": state.num_blocks - 1, "delta": delta}


def _stop_block(state: BlockState, call_id: str) -> list[JSON]:
    if state.open is None:
        return []
    stop = {"type": "content_block_stop", "index": state.num_blocks - 1}
    if state.open != "thinking":
        return [stop]
    signature = f"sig_{call_id.removeprefix('msg_')}_{state.num_blocks - 1}"
    return [_delta(state, {"type": "signature_delta", "signature": signature}), stop]
