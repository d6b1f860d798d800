"""Ollama's replies to /api/generate and /api/chat, whole or as lines, and its error body."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pydantic_core import from_json

from nano_inference.server.call import JSON, Call, Reply, Transcript
from nano_inference.server.detokenizer import DecodedDelta, LogprobEntry
from nano_inference.server.errors import ApiError, shortened
from nano_inference.server.events import line
from nano_inference.server.replies import token_logprobs
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.text.tool_events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning


def stream_error(error: ApiError) -> bytes:
    """Return the line that ends a stream with an error."""
    return line(error_body(error))


def error_body(error: ApiError) -> JSON:
    """Return Ollama's error object: the message alone."""
    return {"error": shortened(error.message)}


def durations(transcripts: Sequence[Transcript]) -> dict[str, int]:
    """Return the durations of a reply in nanoseconds; 0 for what did not happen. No model is loaded on request."""
    times = [transcript.times for transcript in transcripts if transcript.times is not None]
    arrived = min((one.arrived for one in times), default=None)
    started = min((one.started for one in times if one.started is not None), default=None)
    first = min((one.first_token for one in times if one.first_token is not None), default=None)
    last = max((one.last_token for one in times if one.last_token is not None), default=None)
    return {
        "total_duration": _nanoseconds(arrived, time.monotonic()),
        "load_duration": 0,
        "prompt_eval_duration": _nanoseconds(started, first),
        "eval_duration": _nanoseconds(first, last),
    }


def _nanoseconds(start: float | None, end: float | None) -> int:
    return 0 if start is None or end is None else round((end - start) * 1e9)


class Pieces:
    """Collects what a reply's text contains: reasoning, content, and complete calls with their arguments as objects.

    The text of a call that does not become complete is content.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._source = ""  # the text of the call that is not complete

    def add(self, events: Iterable[Event], *, is_end: bool = True) -> JSON:
        """Return the fields of a message that these events add; a call is returned when it is complete."""
        content, thinking, calls = "", "", []
        for event in events:
            if isinstance(event, Content):
                content += self._source + event.text
                self._source = ""
            elif isinstance(event, Reasoning):
                thinking += event.text
            elif isinstance(event, CallStart):
                self._names[event.index], self._arguments[event.index] = event.name, []
                content, self._source = content + self._source, event.source
            elif isinstance(event, CallArguments):
                self._arguments[event.index].append(event.text)
                self._source += event.source
            elif isinstance(event, CallEnd):
                arguments = from_json("".join(self._arguments.pop(event.index)))
                function = {"index": event.index, "name": self._names[event.index], "arguments": arguments}
                calls.append({"function": function})
                self._source = ""
        if is_end:
            content, self._source = content + self._source, ""
        fields: JSON = {"content": content}
        if thinking:
            fields["thinking"] = thinking
        return fields | ({"tool_calls": calls} if calls else {})


class OllamaReply(Reply):
    """The reply to /api/chat, with a message, or to /api/generate, with a text.

    `end` is the reason of a reply without an answer: "load" or "unload".
    """

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer,
        created: int,
        *,
        is_chat: bool,
        end: str | None = None,
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._end = end
        self._pieces = Pieces()

    def body(self, transcripts: Sequence[Transcript]) -> JSON:
        if not transcripts:
            return self._part({"content": ""}) | {"done": True, "done_reason": self._end}
        (transcript,) = transcripts
        fields = self._pieces.add(transcript.events)
        return self._part(fields, transcript.entries) | self._ending(transcript)

    def delta_events(self, transcript: Transcript, decoded: DecodedDelta, transcripts: Sequence[Transcript]) -> bytes:
        """Return a line with what a delta adds and, at the end, one with the counts and durations."""
        is_end = decoded.finish_reason is not None
        fields = self._pieces.add(decoded.events, is_end=is_end)
        has_more = len(fields) > 1 or fields["content"] or (self._call.shape.logprobs is not None and decoded.entries)
        data = line(self._part(fields, decoded.entries) | {"done": False}) if has_more else b""
        return data + (line(self._part({"content": ""}) | self._ending(transcript)) if is_end else b"")

    def last_events(self, transcripts: Sequence[Transcript]) -> bytes:
        """Return nothing: the last delta has the last line; without an answer, the only line."""
        return b"" if transcripts else line(self.body(transcripts))

    def error_events(self, error: ApiError) -> bytes:
        return stream_error(error)

    def _part(self, fields: JSON, entries: Sequence[LogprobEntry] = ()) -> JSON:
        """Return an object with a part of the answer."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        part: JSON = {"model": self._call.model, "created_at": now}
        if self._is_chat:
            part["message"] = {"role": "assistant", **fields}
        else:
            part |= {"response" if name == "content" else name: value for name, value in fields.items()}
        if self._call.shape.logprobs is not None and entries:
            part["logprobs"] = token_logprobs(entries, self._call.shape, self._tokenizer)
        return part

    def _ending(self, transcript: Transcript) -> JSON:
        return {
            "done": True,
            "done_reason": transcript.finish_reason,
            **durations([transcript]),
            "prompt_eval_count": len(self._call.requests[0].prompt),
            "eval_count": len(transcript.token_ids),
        }
