"""The replies of OpenAI's Responses API: output items, the events that they grow by, the response around them.

Forms and order of the events as in OpenAI's API (openai/types/responses). A whole reply is put together by the same
steps as a stream, all at once, so that a stream always ends with the reply that would have been sent whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_inference.server.call import JSON, Call, Transcript, usage
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event as named_event
from nano_inference.server.replies import joined, sample_facts, token_logprobs
from nano_inference.text.dialogue import Part
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_calls import CallArguments, CallEnd, CallStart, Content, Event

_ENDS = {"length": "incomplete", "abort": "cancelled"}
"""Why a sample ended -> the status of its response, where that is not "completed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a response repeats of its request, and what its items' ids are made of."""

    echo: JSON
    stem: str


@dataclass(slots=True)
class _Message:
    """A message that grows."""

    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[JSON] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def to_dict(self, status: str, *, is_begun: bool = True) -> JSON:
        """Return the item; its content is missing while it is not begun."""
        content = [self.content()] if is_begun else []
        item: JSON = {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}
        return item | ({"parts": [part._asdict() for part in joined(self.parts)]} if self.parts else {})

    def content(self) -> JSON:
        """Return the only part of its content."""
        return _content("".join(self.texts), self.logprobs)


@dataclass(slots=True)
class _Function:
    """A call of a function that grows."""

    id: str
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    is_whole: bool = False

    def to_dict(self, status: str) -> JSON:
        """Return the item."""
        head: JSON = {"id": self.id, "type": "function_call", "status": status, "call_id": self.call_id}
        return head | {"name": self.name, "arguments": "".join(self.arguments)}


class ResponsesReply:
    """The reply to one call of POST /v1/responses."""

    def __init__(self, asked: Asked, call: Call, tokenizer: Tokenizer, created: int) -> None:
        self._asked = asked
        self._call = call
        self._tokenizer = tokenizer
        self._created = created
        self._items: list[JSON] = []
        """Those that are done."""
        self._open: _Message | _Function | None = None
        self._num_events = 0

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        """Return the response."""
        (transcript,) = transcripts
        self._take(transcript.events, transcript.entries, transcript.parts)
        self._finish(transcript)
        return self._ended(transcript)

    def first_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return that there is a response, and that it is being worked on."""
        response = self._response("in_progress")
        return self._told([_about("response.created", response), _about("response.in_progress", response)])

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return the events of a delta."""
        return self._told(self._take(decoded.events, decoded.entries, decoded.parts))

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return the end of what is open, and the response."""
        (transcript,) = transcripts
        ends = self._finish(transcript)
        response = self._ended(transcript)
        name = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return self._told([*ends, _about(name, response)])

    def error_events(self, error: ApiError) -> bytes:
        """Return the response with what there is of it, and the error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # of those that the API knows
        told = {"code": code, "message": shortened(error.message), "type": error.type, "param": error.param}
        unfinished = [] if self._open is None else [self._open.to_dict("incomplete")]
        response = self._response("failed", output=[*self._items, *unfinished], error=told)
        return self._told([_about("response.failed", response)])

    # ---- output items -----------------------------------------------------------------------------------------------

    def _take(self, said: Iterable[Event], entries: Sequence[LogprobEntry], parts: Sequence[Part]) -> list[JSON]:
        """Add what was written; return the events that tell of it."""
        told: list[JSON] = []
        scores = token_logprobs(entries, self._call.shape, self._tokenizer)
        for one in said:
            if isinstance(one, Content):
                told += self._text(one.text, scores, parts)
                scores, parts = [], ()
            else:
                told += self._function(one)
        return told + (self._text("", scores, parts) if scores else [])

    def _text(self, text: str, scores: list[JSON], parts: Sequence[Part]) -> list[JSON]:
        """Add to the message, or begin one."""
        told, message = self._message()
        message.texts.append(text)
        message.logprobs += scores
        message.parts += parts
        return [*told, self._content_event("output_text.delta", message, delta=text, logprobs=scores)]

    def _message(self) -> tuple[list[JSON], _Message]:
        """Return the message that is open and the events that began it, if it had to be."""
        if isinstance(self._open, _Message):
            return [], self._open
        told = self._close()
        message = self._open = _Message(self._id("msg"))
        begun = self._item_event("output_item.added", item=message.to_dict("in_progress", is_begun=False))
        return [*told, begun, self._content_event("content_part.added", message, part=_content("", []))], message

    def _function(self, said: CallStart | CallArguments | CallEnd) -> list[JSON]:
        """Begin a call of a function, or add to the one that is open."""
        if isinstance(said, CallStart):
            told = self._close()
            function = self._open = _Function(self._id("fc"), self._id("call"), said.name)
            return [*told, self._item_event("output_item.added", item=function.to_dict("in_progress"))]
        assert isinstance(self._open, _Function), "a call goes on before anything else is said"
        if isinstance(said, CallArguments):
            self._open.arguments.append(said.text)
            return [self._item_event("function_call_arguments.delta", item_id=self._open.id, delta=said.text)]
        self._open.is_whole = True
        return [self._arguments_done(self._open)]

    def _close(self, status: str = "completed", **facts: Any) -> list[JSON]:
        """End the item that is open, if there is one; return the events that tell of it."""
        one = self._open
        if one is None:
            return []
        if isinstance(one, _Message):
            ends, item = self._text_done(one), one.to_dict(status) | facts
        else:
            ends = [] if one.is_whole else [self._arguments_done(one)]
            item = one.to_dict("completed" if one.is_whole else "incomplete") | facts
        done = self._item_event("output_item.done", item=item)
        self._items.append(item)
        self._open = None
        return [*ends, done]

    def _text_done(self, message: _Message) -> list[JSON]:
        content = message.content()
        told = {"text": content["text"], "logprobs": content["logprobs"]}
        return [
            self._content_event("output_text.done", message, **told),
            self._content_event("content_part.done", message, part=content),
        ]

    def _arguments_done(self, function: _Function) -> JSON:
        arguments = "".join(function.arguments)
        return self._item_event("function_call_arguments.done", item_id=function.id, arguments=arguments)

    def _finish(self, transcript: Transcript) -> list[JSON]:
        """End the last item, which tells what is known of the sample's tokens; an answer without any is a message."""
        begun: list[JSON] = []
        if self._open is None:
            begun, _ = self._message()
        status = "incomplete" if transcript.finish_reason in _ENDS else "completed"
        return [*begun, *self._close(status, **sample_facts(transcript, self._call.shape))]

    # ---- responses and events ---------------------------------------------------------------------------------------

    def _ended(self, transcript: Transcript) -> JSON:
        """Return the response, now that the sample has ended."""
        status = _ENDS.get(transcript.finish_reason or "", "completed")
        fields: JSON = {
            "output": self._items,
            "usage": _usage(self._call, transcript),
            "stop_reason": transcript.stop_reason,
        }
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._call.shape.token_ids:
            fields["prompt_token_ids"] = list(self._call.requests[0].prompt)
        return self._response(status, **fields)

    def _response(self, status: str, **fields: Any) -> JSON:
        head: JSON = {"id": self._call.id, "object": "response", "created_at": self._created, "status": status}
        unset: JSON = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return head | {"model": self._call.model} | unset | self._asked.echo | fields

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._asked.stem}{len(self._items):02x}"

    def _item_event(self, name: str, **fields: Any) -> JSON:
        """Return an event of the item that is open."""
        return {"type": f"response.{name}", "output_index": len(self._items)} | fields

    def _content_event(self, name: str, message: _Message, **fields: Any) -> JSON:
        return self._item_event(name, item_id=message.id, content_index=0) | fields

    def _told(self, told: Iterable[JSON]) -> bytes:
        """Number events and return their bytes."""
        data = b""
        for one in told:
            data += named_event({**one, "sequence_number": self._num_events}, one["type"])
            self._num_events += 1
        return data


def _about(name: str, response: JSON) -> JSON:
    return {"type": name, "response": response}


def _content(text: str, logprobs: list[JSON]) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(call: Call, transcript: Transcript) -> JSON:
    """Return the counts under this API's names. Nothing is kept for a fee, and reasoning is not told apart."""
    counts = usage(call, [transcript])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
