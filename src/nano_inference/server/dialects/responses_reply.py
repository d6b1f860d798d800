"""Replies of OpenAI's Responses API, whole or as a stream of events.

Form and order of the events as in OpenAI's API (openai/types/responses). Whole replies and streams are built by the
same code: the response in a stream's last event equals the whole reply, which has `timings` inside if requested.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import event as named_event
from nano_inference.server.generation import JSON
from nano_inference.server.replies import Reply, joined, sample_facts, token_logprobs
from nano_inference.server.timings import prefill_reports, requested_timings
from nano_inference.server.transcript import Transcript, num_reasoning_tokens, usage
from nano_inference.text.dialogue import Part
from nano_inference.text.tool_events import CallArguments, CallStart, Content, Event, Reasoning

ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
"""Type of an item -> start of its id."""
_ENDS = {"length": "incomplete", "abort": "cancelled"}  # finish reason -> status of the response, if not "completed"
_RUNNING, _TEXT = "response.in_progress", "response.output_text.delta"
_PREFIX = "nano1."  # begins the `encrypted_content` of this package's servers


def encoded(text: str) -> str:
    """Return the `encrypted_content` of a text: JSON in base64.

    It is not secret from the client, whose conversation it is, and another server of this package reads it.
    """
    return _PREFIX + base64.urlsafe_b64encode(to_json({"summary": text})).decode()


def text_in(content: str) -> str | None:
    """Return the text in `encrypted_content`; None if no such server made it."""
    try:
        is_ours = content.startswith(_PREFIX)
        value = from_json(base64.urlsafe_b64decode(content.removeprefix(_PREFIX).encode())) if is_ours else None
    except ValueError:
        value = None
    text = value.get("summary") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


class ResponsesOptions(NamedTuple):
    """What the reply depends on beside the generation."""

    echo: JSON  # fields repeated from the request
    id_stem: str  # common part of the items' ids
    namespaces: Mapping[str, tuple[str, str]] = {}
    """Name of a function in the prompt -> its namespace and name."""
    keep: Callable[[JSON], bool] | None = None
    """Stores the final response, and returns False if it cannot be retrieved later."""
    encodes_reasoning: bool = False
    """True if reasoning items have `encrypted_content`, for clients that send back only this field."""
    clock: Callable[[], float] = time.time


@dataclass
class ResponsesReply(Reply[ResponsesOptions]):
    """The reply to POST /v1/responses."""

    _items: list[JSON] = field(init=False, default_factory=list)  # completed items
    _open: JSON = field(init=False, default_factory=dict)  # the item in progress as it started; what it has since:
    _pieces: list[str] = field(init=False, default_factory=list)
    _logprobs: list[JSON] = field(init=False, default_factory=list)
    _parts: list[Part] = field(init=False, default_factory=list)
    _entries: list[LogprobEntry] = field(init=False, default_factory=list)  # of tokens that may be reasoning
    _num_reasoned: int = field(init=False, default=0)  # tokens of reasoning whose log-probabilities were left out
    _num_events: int = field(init=False, default=0)

    # ---- whole replies and streams ----------------------------------------------------------------------------------

    def whole(self) -> JSON:
        (transcript,) = self.transcripts
        self._take(transcript.events, self._of_content(transcript, transcript.entries), transcript.parts)
        self._finish(transcript)
        return self._ended(transcript) | requested_timings(self.generation, transcript)

    def start(self) -> bytes:
        response = self._response("in_progress")
        return self._encode({"type": name, "response": response} for name in ("response.created", _RUNNING))

    def part(self, transcript: Transcript, decoded: DecodedDelta) -> bytes:
        states = [
            {"type": _RUNNING, "response": self._response("in_progress"), "prompt_progress": report}
            for report in prefill_reports(self.generation, transcript, decoded)
        ]
        timings = requested_timings(self.generation, transcript)
        events = self._take(decoded.events, self._of_content(transcript, decoded.entries), decoded.parts)
        return self._encode([*states, *(one | timings if one["type"] == _TEXT else one for one in events)])

    def end(self) -> bytes:
        (transcript,) = self.transcripts
        ends = self._finish(transcript)
        response = self._ended(transcript)
        name = "response.completed" if response["status"] == "completed" else "response.incomplete"
        timings = requested_timings(self.generation, transcript)
        return self._encode([*ends, {"type": name, "response": response, **timings}])

    def fail(self, error: ApiError) -> bytes:
        """Return the response with its items so far, and the error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # the API allows a fixed set of codes
        fields = {"code": code, "message": shortened(error.message), "type": error.type, "param": error.param}
        output = [*self._items, *([self._item("incomplete")] if self._open else [])]
        response = self._response("failed", output=output, error=fields)
        return self._encode([{"type": "response.failed", "response": response}])

    # ---- output items -----------------------------------------------------------------------------------------------

    def _take(self, events: Iterable[Event], entries: Sequence[LogprobEntry], parts: Sequence[Part]) -> list[JSON]:
        """Add reasoning, text and calls to the items; return the API's events for them."""
        out: list[JSON] = []
        logprobs = token_logprobs(entries, self.generation)
        for one in events:
            if isinstance(one, Content):
                out += self._text(one.text, logprobs, parts)
                logprobs, parts = [], ()
            elif isinstance(one, Reasoning):
                if self._open.get("type") != "reasoning":
                    encrypted = {"encrypted_content": None} if self.options.encodes_reasoning else {}
                    out += [*self._close(), *self._start("reasoning", summary=[], content=[], **encrypted)]
                self._pieces.append(one.text)
                out.append(self._content_event("reasoning_text.delta", delta=one.text))
            elif isinstance(one, CallStart):
                out += self._close()
                space, name = self.options.namespaces.get(one.name, (None, one.name))
                own = {} if space is None else {"namespace": space}
                out += self._start("function_call", call_id=self._id("call"), **own, name=name, arguments="")
            elif isinstance(one, CallArguments):
                self._pieces.append(one.text)
                delta = {"item_id": self._open["id"], "delta": one.text}
                out.append(self._item_event("function_call_arguments.delta", **delta))
            else:
                self._open["status"] = "completed"
                out.append(self._arguments_done())
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

    def _text(self, text: str, logprobs: list[JSON], parts: Sequence[Part]) -> list[JSON]:
        start = self._message()
        if start and self._items and self._items[-1]["type"] == "function_call":
            text = text.lstrip()  # the space between two texts, which are two items here
        self._pieces.append(text)
        self._logprobs += logprobs
        self._parts += parts
        return [*start, self._content_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _message(self) -> list[JSON]:
        if self._open.get("type") == "message":
            return []
        return [*self._close(), *self._start("message", role="assistant", content=[])]

    def _start(self, kind: str, **fields: Any) -> list[JSON]:
        self._open = {"id": self._id(ID_PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self._pieces, self._logprobs, self._parts = [], [], []
        start = [self._item_event("output_item.added", item={**self._open})]
        has_parts = kind != "function_call"
        return [*start, *([self._content_event("content_part.added", part=self._part())] if has_parts else [])]

    def _part(self) -> JSON:
        text = "".join(self._pieces)
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _item(self, status: str) -> JSON:
        item = self._open | {"status": status}
        if item["type"] == "function_call":
            return item | {"arguments": "".join(self._pieces)}
        item["content"] = [self._part()]
        if self._parts:
            item["parts"] = [part._asdict() for part in joined(self._parts)]
        if "encrypted_content" in item:
            item["encrypted_content"] = encoded("".join(self._pieces))
        return item

    def _close(self, status: str = "completed", **facts: Any) -> list[JSON]:
        if not self._open:
            return []
        if self._open["type"] == "function_call":
            is_complete = self._open["status"] == "completed"
            status = "completed" if is_complete else "incomplete"
            ends = [] if is_complete else [self._arguments_done()]
        else:
            part = self._part()
            shown = {name: part[name] for name in ("text", "logprobs") if name in part}
            ends = [self._content_event(f"{part['type']}.done", **shown)]
            ends.append(self._content_event("content_part.done", part=part))
        item = self._item(status) | facts
        ends.append(self._item_event("output_item.done", item=item))
        self._items.append(item)
        self._open = {}
        return ends

    def _arguments_done(self) -> JSON:
        arguments = "".join(self._pieces)
        return self._item_event("function_call_arguments.done", item_id=self._open["id"], arguments=arguments)

    def _finish(self, transcript: Transcript) -> list[JSON]:
        """End the last item and add the facts about the sample's tokens to it; an empty answer becomes a message."""
        is_cut = transcript.finish_reason in _ENDS
        is_missing = not self._open or (self._open["type"] == "reasoning" and not is_cut)
        start = self._message() if is_missing else []
        facts = sample_facts(transcript, self.generation)
        return [*start, *self._close("incomplete" if is_cut else "completed", **facts)]

    # ---- responses and events ---------------------------------------------------------------------------------------

    def _ended(self, transcript: Transcript) -> JSON:
        status = _ENDS.get(transcript.finish_reason or "", "completed")
        counts = usage(self.generation, [transcript])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        counted: JSON = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens([transcript])},
            "total_tokens": counts["total_tokens"],
        }
        fields: JSON = {"output": self._items, "usage": counted, "stop_reason": transcript.stop_reason}
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.generation.token_ids:
            fields["prompt_token_ids"] = list(self.generation.requests[0].prompt)
        if status == "completed":
            fields["completed_at"] = int(self.options.clock())
        response = self._response(status, **fields)
        if self.options.keep is not None and not self.options.keep(response):
            response["store"] = False
        return response

    def _response(self, status: str, **fields: Any) -> JSON:
        one = self.generation
        head: JSON = {"id": one.id, "object": "response", "created_at": one.created, "status": status}
        unset: JSON = {"completed_at": None, "error": None, "incomplete_details": None, "output": [], "usage": None}
        return head | {"model": one.model} | unset | self.options.echo | fields

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.options.id_stem}{len(self._items):02x}"

    def _item_event(self, name: str, **fields: Any) -> JSON:
        return {"type": f"response.{name}", "output_index": len(self._items)} | fields

    def _content_event(self, name: str, **fields: Any) -> JSON:
        return self._item_event(name, item_id=self._open["id"], content_index=0) | fields

    def _encode(self, events: Iterable[JSON]) -> bytes:
        data = b""
        for one in events:
            data += named_event({**one, "sequence_number": self._num_events}, one["type"])
            self._num_events += 1
        return data

    @staticmethod
    def broken(error: ApiError, first: bytes = b"", number: int = 0) -> bytes:
        """Return the response as failed, if `first` has the event with it, or else an error."""
        text = shortened(error.message)
        start = b'data: {"type":"response.created"'
        created = next((line for line in first.splitlines() if line.startswith(start)), b"")
        if not created:
            fields = {"code": "server_error", "message": text, "param": error.param, "sequence_number": number}
            return named_event({"type": "error", **fields}, "error")
        response = from_json(created.removeprefix(b"data: "))["response"]
        failed = {**response, "status": "failed", "error": {"code": "server_error", "message": text}}
        last: JSON = {"type": "response.failed", "response": failed, "sequence_number": number}
        return named_event(last, last["type"])
