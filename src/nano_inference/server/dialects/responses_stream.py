"""Replies of OpenAI's Responses API, whole or as a stream of events.

Form and order of the events as in OpenAI's API (openai/types/responses). Whole replies and streams are built by the
same code: the response in a stream's last event equals the whole reply, which has `timings` inside if requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from nano_inference.server.call import JSON, Call, Reply, Transcript, num_reasoning_tokens, usage
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.dialects.responses_chat import encoded
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event as named_event
from nano_inference.server.replies import joined, sample_facts, token_logprobs
from nano_inference.server.timings import PrefillProgress, timings_of
from nano_inference.text.dialogue import Part
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

_ENDS = {"length": "incomplete", "abort": "cancelled"}  # finish reason -> status of the response, if not "completed"
_RUNNING, _TEXT = "response.in_progress", "response.output_text.delta"
_NONE: Mapping[str, tuple[str, str]] = {}


@dataclass(slots=True)
class _Message:
    """A message item in progress."""

    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[JSON] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def to_dict(self, status: str, *, has_content: bool = True) -> JSON:
        content = [self.content()] if has_content else []
        item: JSON = {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}
        return item | ({"parts": [part._asdict() for part in joined(self.parts)]} if self.parts else {})

    def content(self) -> JSON:
        """Return the only element of the item's `content`."""
        return _content("".join(self.texts), self.logprobs)


@dataclass(slots=True)
class _Function:
    """A function call item in progress."""

    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: list[str] = field(default_factory=list)
    is_complete: bool = False

    def to_dict(self, status: str) -> JSON:
        head: JSON = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        head |= {} if self.namespace is None else {"namespace": self.namespace}
        return head | {"name": self.name, "arguments": "".join(self.arguments)}


@dataclass(slots=True)
class _Reasoning:
    """A reasoning item in progress."""

    id: str
    texts: list[str] = field(default_factory=list)
    is_encoded: bool = False
    """True if the item has its text as `encrypted_content` too, for clients that send back only this field."""

    def to_dict(self, status: str, *, has_content: bool = True) -> JSON:
        content = [self.content()] if has_content else []
        item: JSON = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if not self.is_encoded:
            return item
        return item | {"encrypted_content": encoded("".join(self.texts)) if has_content else None}

    def content(self) -> JSON:
        """Return the only element of the item's `content`."""
        return {"type": "reasoning_text", "text": "".join(self.texts)}


class ResponsesReply(Reply):
    """The reply to one call of POST /v1/responses."""

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        created: int,
        *,
        echo: JSON,
        id_stem: str,
        namespaces: Mapping[str, tuple[str, str]] = _NONE,
        keep: Callable[[JSON], bool] | None = None,
        encodes_reasoning: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`echo`: fields repeated from the request; `id_stem`: common part of the items' ids.

        `namespaces`: name of a function in the prompt -> its namespace and name. `keep` stores the final response, and
        returns False if it cannot be retrieved later. `encodes_reasoning`: reasoning items have `encrypted_content`.
        """
        self._echo = echo
        self._id_stem = id_stem
        self._namespaces = namespaces
        self._keep = keep
        self._encodes_reasoning = encodes_reasoning
        self._clock = clock
        self._call = call
        self._tokenizer = tokenizer
        self._created = created
        self._items: list[JSON] = []  # completed items
        self._open: _Message | _Function | _Reasoning | None = None
        self._entries: list[LogprobEntry] = []  # log-probabilities of tokens that may be reasoning
        self._num_reasoned = 0  # tokens of reasoning whose log-probabilities were left out
        self._num_events = 0
        self._prefill = PrefillProgress(call)

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        (transcript,) = transcripts
        self._take(transcript.events, self._of_content(transcript, transcript.entries), transcript.parts)
        self._finish(transcript)
        return self._ended(transcript) | self._timings(transcript)

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events `response.created` and `response.in_progress`."""
        response = self._response("in_progress")
        return self._encode([_response_event("response.created", response), _response_event(_RUNNING, response)])

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        reports = self._prefill.reports(transcript, decoded)
        states = [
            _response_event(_RUNNING, self._response("in_progress")) | {"prompt_progress": one} for one in reports
        ]
        timings = self._timings(transcript)
        events = self._take(decoded.events, self._of_content(transcript, decoded.entries), decoded.parts)
        return self._encode([*states, *(one | timings if one["type"] == _TEXT else one for one in events)])

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the end of the open item, and the response."""
        (transcript,) = transcripts
        ends = self._finish(transcript)
        response = self._ended(transcript)
        name = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return self._encode([*ends, _response_event(name, response) | self._timings(transcript)])

    def error_events(self, error: ApiError) -> bytes:
        """Return the response with its items so far, and the error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # the API allows a fixed set of codes
        fields = {"code": code, "message": shortened(error.message), "type": error.type, "param": error.param}
        unfinished = [] if self._open is None else [self._open.to_dict("incomplete")]
        response = self._response("failed", output=[*self._items, *unfinished], error=fields)
        return self._encode([_response_event("response.failed", response)])

    # ---- output items -----------------------------------------------------------------------------------------------

    def _take(self, events: Iterable[Event], entries: Sequence[LogprobEntry], parts: Sequence[Part]) -> list[JSON]:
        """Add text and calls to the items; return the API's events for them."""
        out: list[JSON] = []
        logprobs = token_logprobs(entries, self._call.shape, self._tokenizer)
        for one in events:
            if isinstance(one, Content):
                out += self._text(one.text, logprobs, parts)
                logprobs, parts = [], ()
            elif isinstance(one, Reasoning):
                out += self._thought(one.text)
            else:
                out += self._function(one)
        return out + (self._text("", logprobs, parts) if logprobs else [])

    def _of_content(self, transcript: Transcript, entries: Sequence[LogprobEntry]) -> Sequence[LogprobEntry]:
        """Return the log-probabilities of tokens after the reasoning; none while it is unknown whether there is any."""
        if transcript.reasoning is None:
            return entries
        self._entries += entries
        if transcript.reasoning.is_undecided and transcript.finish_reason is None:
            return ()
        new = transcript.reasoning.num_tokens - self._num_reasoned
        self._num_reasoned += min(new, len(self._entries))
        kept, self._entries = self._entries[new:], []
        return kept

    def _thought(self, text: str) -> list[JSON]:
        """Add text to the open reasoning, or to a new one."""
        start: list[JSON] = []
        if not isinstance(self._open, _Reasoning):
            end = self._close()
            self._open = _Reasoning(self._id("rs"), is_encoded=self._encodes_reasoning)
            added = self._item_event("output_item.added", item=self._open.to_dict("in_progress", has_content=False))
            part = self._content_event("content_part.added", self._open, part=self._open.content())
            start = [*end, added, part]
        self._open.texts.append(text)
        return [*start, self._content_event("reasoning_text.delta", self._open, delta=text)]

    def _text(self, text: str, logprobs: list[JSON], parts: Sequence[Part]) -> list[JSON]:
        """Add text to the open message, or to a new one."""
        start, message = self._message()
        if start and len(self._items) > 0 and self._items[-1]["type"] == "function_call":
            text = text.lstrip()  # the space between two texts, which are two items here
        message.texts.append(text)
        message.logprobs += logprobs
        message.parts += parts
        return [*start, self._content_event("output_text.delta", message, delta=text, logprobs=logprobs)]

    def _message(self) -> tuple[list[JSON], _Message]:
        """Return the open message; if there is none, a new one and the events that start it."""
        if isinstance(self._open, _Message):
            return [], self._open
        end = self._close()
        message = self._open = _Message(self._id("msg"))
        start = self._item_event("output_item.added", item=message.to_dict("in_progress", has_content=False))
        return [*end, start, self._content_event("content_part.added", message, part=_content("", []))], message

    def _function(self, event: CallStart | CallArguments | CallEnd) -> list[JSON]:
        """Start a function call, or add to the open one."""
        if isinstance(event, CallStart):
            end = self._close()
            namespace, name = self._namespaces.get(event.name, (None, event.name))
            function = self._open = _Function(self._id("fc"), self._id("call"), name, namespace)
            return [*end, self._item_event("output_item.added", item=function.to_dict("in_progress"))]
        assert isinstance(self._open, _Function), "CallStart precedes the other events of a call"
        if isinstance(event, CallArguments):
            self._open.arguments.append(event.text)
            return [self._item_event("function_call_arguments.delta", item_id=self._open.id, delta=event.text)]
        self._open.is_complete = True
        return [self._arguments_done(self._open)]

    def _close(self, status: str = "completed", **facts: Any) -> list[JSON]:
        """End the open item, if any; return the events of its end."""
        one = self._open
        if one is None:
            return []
        if isinstance(one, _Message | _Reasoning):
            content, item = one.content(), one.to_dict(status) | facts
            if isinstance(one, _Message):
                end = self._content_event("output_text.done", one, text=content["text"], logprobs=content["logprobs"])
            else:
                end = self._content_event("reasoning_text.done", one, text=content["text"])
            ends = [end, self._content_event("content_part.done", one, part=content)]
        else:
            ends = [] if one.is_complete else [self._arguments_done(one)]
            item = one.to_dict("completed" if one.is_complete else "incomplete") | facts
        done = self._item_event("output_item.done", item=item)
        self._items.append(item)
        self._open = None
        return [*ends, done]

    def _arguments_done(self, function: _Function) -> JSON:
        arguments = "".join(function.arguments)
        return self._item_event("function_call_arguments.done", item_id=function.id, arguments=arguments)

    def _finish(self, transcript: Transcript) -> list[JSON]:
        """End the last item and add the facts about the sample's tokens to it; an empty answer becomes a message."""
        start: list[JSON] = []
        is_cut = transcript.finish_reason in _ENDS
        if self._open is None or (isinstance(self._open, _Reasoning) and not is_cut):
            start, _ = self._message()
        status = "incomplete" if is_cut else "completed"
        return [*start, *self._close(status, **sample_facts(transcript, self._call.shape))]

    def _timings(self, transcript: Transcript) -> JSON:
        """Return llama.cpp's `timings` if they are requested."""
        if not self._call.shape.timings:
            return {}
        return {"timings": timings_of(self._call, transcript, len(transcript.token_ids))}

    # ---- responses and events ---------------------------------------------------------------------------------------

    def _ended(self, transcript: Transcript) -> JSON:
        """Return the final response."""
        status = _ENDS.get(transcript.finish_reason or "", "completed")
        fields: JSON = {
            "output": self._items,
            "usage": response_usage(self._call, transcript),
            "stop_reason": transcript.stop_reason,
        }
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._call.shape.token_ids:
            fields["prompt_token_ids"] = list(self._call.requests[0].prompt)
        if status == "completed":
            fields["completed_at"] = int(self._clock())
        response = self._response(status, **fields)
        if self._keep is not None and not self._keep(response):
            response["store"] = False
        return response

    def _response(self, status: str, **fields: Any) -> JSON:
        head: JSON = {"id": self._call.id, "object": "response", "created_at": self._created, "status": status}
        unset: JSON = {"completed_at": None, "error": None, "incomplete_details": None, "output": [], "usage": None}
        return head | {"model": self._call.model} | unset | self._echo | fields

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._id_stem}{len(self._items):02x}"

    def _item_event(self, name: str, **fields: Any) -> JSON:
        """Return an event of the open item."""
        return {"type": f"response.{name}", "output_index": len(self._items)} | fields

    def _content_event(self, name: str, item: _Message | _Reasoning, **fields: Any) -> JSON:
        return self._item_event(name, item_id=item.id, content_index=0) | fields

    def _encode(self, events: Iterable[JSON]) -> bytes:
        """Return numbered server-sent events."""
        data = b""
        for one in events:
            data += named_event({**one, "sequence_number": self._num_events}, one["type"])
            self._num_events += 1
        return data


def stream_error(error: ApiError, first: bytes, number: int) -> bytes:
    """Return the event that ends a stream whose server died: the response as failed, if `first` has the event with it.

    `number`: events before it.
    """
    text = shortened(error.message)
    created = next((line for line in first.splitlines() if line.startswith(b'data: {"type":"response.created"')), b"")
    if not created:
        fields = {"code": "server_error", "message": text, "param": error.param, "sequence_number": number}
        return named_event({"type": "error", **fields}, "error")
    response = from_json(created.removeprefix(b"data: "))["response"]
    failed = {**response, "status": "failed", "error": {"code": "server_error", "message": text}}
    return named_event({**_response_event("response.failed", failed), "sequence_number": number}, "response.failed")


def _response_event(name: str, response: JSON) -> JSON:
    return {"type": name, "response": response}


def _content(text: str, logprobs: list[JSON]) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def response_usage(call: Call, transcript: Transcript) -> JSON:
    """Return the token counts under this API's names."""
    counts = usage(call, [transcript])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens([transcript])},
        "total_tokens": counts["total_tokens"],
    }
