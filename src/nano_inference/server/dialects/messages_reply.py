"""Anthropic's dialect: a message of text and tool_use blocks, whole or as named events; errors in its form.

A whole reply is put together from the very events of its stream. The tokens that were found in the cache are counted
in `cache_read_input_tokens` and not in `input_tokens`; a stream knows them only at its end, so its first event counts
the whole prompt as `input_tokens` and its `message_delta` corrects that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic_core import from_json

from nano_inference.server.call import JSON, Call, Transcript, usage
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event
from nano_inference.server.replies import sample_facts
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_calls import CallArguments, CallEnd, CallStart, Event

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


class Blocks(NamedTuple):
    """Where the writing of a message's blocks stands."""

    number: int = 0
    """Blocks so far."""
    inside: Literal["", "text", "tool_use"] = ""
    has_called: bool = False
    """A call came to its end."""


class MessagesReply:
    """The reply to POST /v1/messages."""

    def __init__(self, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._call = call
        self._blocks = Blocks()

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the message."""
        blocks, told = written_blocks(Blocks(), transcripts[0].events, self._call.id)
        content = content_of([*told, *_closed(blocks)])
        return message(self._call, content) | _ending(self._call, transcripts, blocks)

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the message without content."""
        blank = {"stop_reason": None, "stop_sequence": None, "usage": input_usage(self._call, transcripts)}
        return named([{"type": "message_start", "message": message(self._call, []) | blank}])

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events of a delta."""
        self._blocks, told = written_blocks(self._blocks, decoded.events, self._call.id)
        return named(told)

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the end of the last block, why the message ended, and its end."""
        ending = _ending(self._call, transcripts, self._blocks)
        delta = {name: ending.pop(name) for name in ("stop_reason", "stop_sequence")}
        last = [{"type": "message_delta", "delta": delta, **ending}, {"type": "message_stop"}]
        return named([*_closed(self._blocks), *last])

    def error_events(self, error: ApiError) -> bytes:
        """Return the error."""
        return named([error_body(error)])


def error_body(error: ApiError, request_id: str | None = None) -> JSON:
    """Return an error in Anthropic's form; what programs may want to know of it is in `details`."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: JSON = {"type": kind, "message": shortened(error.message)}
    details = {"error_code": error.code, "param": error.param, **error.extra}
    known = {name: value for name, value in details.items() if value is not None}
    return {"type": "error", "error": told | ({"details": known} if known else {}), "request_id": request_id}


def written_blocks(blocks: Blocks, events: Iterable[Event], call_id: str) -> tuple[Blocks, list[JSON]]:
    """Return the state behind some events, and what a stream tells of them."""
    told: list[JSON] = []
    for one in events:
        blocks, more = _write(blocks, one, call_id)
        told += more
    return blocks, told


def content_of(told: Iterable[JSON]) -> list[JSON]:
    """Return the blocks that a stream's events make. The arguments of a call that was cut off are what is there."""
    content: list[JSON] = []
    pieces: list[list[str]] = []
    for one in told:
        if one["type"] == "content_block_start":
            content.append(dict(one["content_block"]))
            pieces.append([])
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            pieces[-1].append(delta["text"] if delta["type"] == "text_delta" else delta["partial_json"])
    for block, parts in zip(content, pieces, strict=True):
        text = "".join(parts)
        if block["type"] == "text":
            block["text"] = text
        elif text:
            block["input"] = arguments_of(text)
    return content


def arguments_of(text: str) -> JSON:
    """Return a call's arguments, as far as they go; what no JSON can tell again is there as {"raw_arguments"}.

    That is half of a surrogate pair, and a number beyond what floats hold: models write both.
    """
    try:
        value = from_json(text, allow_partial=True)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"raw_arguments": text}
    return value if isinstance(value, dict) else {"raw_arguments": text}


def message(call: Call, content: list[JSON]) -> JSON:
    """Return a message with its head; why it ended comes later."""
    reply: JSON = {"id": call.id, "type": "message", "role": "assistant", "model": call.model, "content": content}
    return reply | ({"prompt_token_ids": list(call.requests[0].prompt)} if call.shape.token_ids else {})


def input_usage(call: Call, transcripts: Sequence[Transcript]) -> JSON:
    """Return the tokens of a call, those from the cache apart."""
    counts = usage(call, transcripts)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }


def stop_reason(call: Call, transcript: Transcript, has_called: bool) -> tuple[str, str | None]:
    """Return why a message ended, and the stop sequence. What was cut off or aborted ended as "max_tokens"."""
    if transcript.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(transcript.stop_reason, str) and transcript.stop_reason in call.shape.stops:
        return "stop_sequence", transcript.stop_reason
    return ("tool_use" if has_called else "end_turn"), None


def named(values: Iterable[JSON]) -> bytes:
    """Return events, each under the name of its type."""
    return b"".join(event(value, value["type"]) for value in values)


def _ending(call: Call, transcripts: Sequence[Transcript], blocks: Blocks) -> JSON:
    reason, sequence = stop_reason(call, transcripts[0], blocks.has_called)
    end: JSON = {"stop_reason": reason, "stop_sequence": sequence, "usage": input_usage(call, transcripts)}
    return end | sample_facts(transcripts[0], call.shape)


def _write(blocks: Blocks, one: Event, call_id: str) -> tuple[Blocks, list[JSON]]:
    """Return the state behind one event, and what is told of it."""
    if isinstance(one, CallStart):
        use = {"type": "tool_use", "id": tool_use_id(call_id, one.index), "name": one.name, "input": {}}
        return _opened(blocks, use, "tool_use")
    if isinstance(one, CallArguments):
        return blocks, [_delta(blocks, {"type": "input_json_delta", "partial_json": one.text})]
    if isinstance(one, CallEnd):
        return blocks._replace(inside="", has_called=True), _closed(blocks)
    told: list[JSON] = []
    if blocks.inside != "text":
        blocks, told = _opened(blocks, {"type": "text", "text": ""}, "text")
    return blocks, [*told, _delta(blocks, {"type": "text_delta", "text": one.text})]


def tool_use_id(call_id: str, index: int) -> str:
    """Return the id of a message's call: the same in every form of the reply."""
    return f"toolu_{call_id.removeprefix('msg_')}_{index}"


def _opened(blocks: Blocks, block: JSON, kind: Literal["text", "tool_use"]) -> tuple[Blocks, list[JSON]]:
    start = {"type": "content_block_start", "index": blocks.number, "content_block": block}
    return blocks._replace(number=blocks.number + 1, inside=kind), [*_closed(blocks), start]


def _delta(blocks: Blocks, delta: JSON) -> JSON:
    return {"type": "content_block_delta", "index": blocks.number - 1, "delta": delta}


def _closed(blocks: Blocks) -> list[JSON]:
    return [{"type": "content_block_stop", "index": blocks.number - 1}] if blocks.inside else []
