"""Answers one call: waits for its deltas, detokenizes them, and sends one JSON reply or a stream of events.

A call ends at once when its client disconnects. At its deadline it ends with the tokens it has by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from nano_inference.core.outbox import Outbox
from nano_inference.server.call import Call, Reply, Transcript, reply_size
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.guard import ClientGone, until_gone
from nano_inference.server.worker_pool import WorkerPool
from nano_inference.text.tokenizer import Tokenizer
from nano_inference.types import BadRequest

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ToEvents = Callable[[Transcript, DecodedDelta], bytes]  # returns the events that a client is sent for a delta

_SMALL_REPLY = 4000
"""Tokens and alternatives of a reply that is serialized on the event loop; a larger one is serialized in a thread."""
_SERIALIZE_TIMEOUT_S = 60.0
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON_HEADERS = [(b"content-type", b"application/json")]
_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time limits of an answer."""

    deadline: float  # on the monotonic clock
    keep_alive_s: float  # seconds without an event after which a stream sends its form's `keep_alive`; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Sends the reply to one call, and fills `transcripts` with its samples."""

    call: Call
    outbox: Outbox
    tokenizer: Tokenizer
    timing: Timing
    pool: WorkerPool
    send: Send
    transcripts: list[Transcript]

    async def run(self, receive: Receive) -> ApiError | None:
        """Send the reply; return the error that a stream sent as its last event, if any.

        Raises `ApiError` if nothing has been sent yet, and `ClientGone` if the client disconnected.
        """
        reply = self.call.make_reply(self.call, self.tokenizer, int(time.time()))

        async def watch() -> None:
            await until_gone(receive)
            self.outbox.fail(ClientGone())

        watching = asyncio.get_running_loop().create_task(watch())
        try:
            if self.call.stream:
                return await self._stream(reply)
            await self._send_body(reply)
            return None
        finally:
            watching.cancel()

    async def _send_body(self, reply: Reply) -> None:
        async for _ in self._events(lambda transcript, decoded: b""):
            pass

        def serialize() -> bytes:
            return to_json(reply.body(self.transcripts))

        if reply_size(self.call, self.transcripts) <= _SMALL_REPLY:
            body = serialize()
        else:
            body = await self.pool.run(serialize, seconds=_SERIALIZE_TIMEOUT_S)
        await self._start([*_JSON_HEADERS, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body})

    async def _stream(self, reply: Reply) -> ApiError | None:
        """Send events as deltas arrive. A failure is sent as an event, since the status was sent before."""

        def to_events(transcript: Transcript, decoded: DecodedDelta) -> bytes:
            return reply.delta_events(transcript, decoded, self.transcripts)

        await self._start([(b"content-type", self.call.form.media_type.encode()), *_STREAM_HEADERS])
        await self._send_some(reply.first_events(self.transcripts))
        api_error = None
        try:
            async for chunk in self._events(to_events):
                await self._send_some(chunk)
            last = reply.last_events(self.transcripts)
        except ClientGone:
            raise
        except Exception as error:
            api_error = error if isinstance(error, ApiError) else internal_error()
            if error is not api_error:
                _log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=error)
            last = reply.error_events(api_error)
        await self.send({"type": "http.response.body", "body": last, "more_body": False})
        return api_error

    async def _start(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send status and headers, with the token limit of an answer that was reduced to the context."""
        limit = self.call.reduced_max_tokens
        extra = [] if limit is None else [(b"x-max-tokens", str(limit).encode())]
        await self.send({"type": "http.response.start", "status": 200, "headers": [*headers, *extra]})

    async def _send_some(self, body: bytes) -> None:
        if body:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def _events(self, to_events: ToEvents) -> AsyncIterator[bytes]:
        """Add deltas to `transcripts` and yield their events, and the form's `keep_alive` after `timing.keep_alive_s`.

        The events of a delta are made before the next delta is added, so that their token counts include no later
        token. At the deadline, started samples end as "length" with the tokens they have; raises `ApiError` if none has
        started, and for a sample that the engine could not finish. A sample that a client aborted ends as "abort".
        """
        outbox, keep_alive_s = self.outbox, self.timing.keep_alive_s or float("inf")
        while not outbox.is_done:
            left = self.timing.deadline - time.monotonic()
            try:
                deltas = await outbox.take(max(0.0, min(keep_alive_s, left)))
            except BadRequest as error:
                raise ApiError(400, str(error)) from None
            events: list[bytes] = []
            for prompt_index, delta in deltas:
                transcript = self.transcripts[prompt_index * self.call.num_samples + delta.sample_index]
                decoded = transcript.add_delta(delta, self.call.shape, self.tokenizer, keep=not self.call.stream)
                if transcript.finish_reason == "abort" and transcript.stop_reason is not None:
                    yield b"".join(events)
                    raise _engine_error(self.call, transcript)
                events.append(to_events(transcript, decoded))
            if deltas or left > keep_alive_s:
                yield b"".join(events) if deltas else self.call.form.keep_alive
            if left <= 0 and not outbox.is_done:
                outbox.end_reason = "length"
                if not any(transcript.token_ids for transcript in self.transcripts):
                    message = "the request timed out before it was started"
                    raise ApiError(503, message, code="timeout", headers={"x-should-retry": "false"})
                still_open = [transcript for transcript in self.transcripts if transcript.finish_reason is None]
                yield b"".join(to_events(one, one.cut_short(self.call.shape, "timeout")) for one in still_open)
                return


def _engine_error(call: Call, transcript: Transcript) -> ApiError:
    """Return the error of a sample that the engine ended without a client's request."""
    reason = str(transcript.stop_reason or "the engine ended the request")
    if reason.startswith("no token can be drawn") and call.forbids_tokens:
        return ApiError(400, "no token can be drawn: allowed_token_ids, bad_words and min_tokens leave none")
    if "grammar: " in reason:
        return ApiError(400, f"the answer cannot follow its grammar: {reason.partition('grammar: ')[2]}")
    if reason.startswith("out of memory"):
        return ApiError(503, reason, code="out_of_memory", headers={"retry-after": "5"})
    return ApiError(500, f"generation failed: {reason}", headers={"x-should-retry": "false"})
