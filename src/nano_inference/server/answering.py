"""Answers one call: waits for its deltas, detokenizes them, and sends one JSON reply or a stream of events.

A call ends at once when its client disconnects. At its deadline it ends with the tokens it has by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from nano_inference.server.call import Call, Reply, Transcript, reply_size
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.errors import ApiError, internal_error
from nano_inference.server.guard import ClientGone
from nano_inference.server.model import ServedModel
from nano_inference.server.ticket import Ticket
from nano_inference.server.worker_pool import WorkerPool

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ToEvents = Callable[[Transcript, DecodedDelta], bytes]
"""Returns the events that a client is sent for a delta."""

_SMALL_REPLY = 4000
"""Tokens and alternatives of a reply that is serialized on the event loop; a larger one is serialized in a thread."""
_SERIALIZE_TIMEOUT_S = 60.0
_KEEP_ALIVE = b": keep-alive\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]
_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time limits of an answer."""

    deadline: float
    """On the monotonic clock."""
    keep_alive_s: float
    """Seconds without an event after which a stream sends a comment; 0: never."""


async def answer(
    call: Call,
    ticket: Ticket,
    model: ServedModel,
    timing: Timing,
    pool: WorkerPool,
    receive: Receive,
    send: Send,
    transcripts: list[Transcript],
) -> ApiError | None:
    """Answer a call and fill `transcripts`; return the error that a stream sent as its last event, if any.

    Raises `ApiError` if nothing has been sent yet, and `ClientGone` if the client disconnected.
    """
    reply = call.make_reply(call, model.tokenizer, int(time.time()))
    with _disconnect_watcher(receive, ticket):
        if call.stream:
            return await _stream(call, reply, ticket, model, timing, send, transcripts)
        await _send_body(call, reply, ticket, model, timing, pool, send, transcripts)
        return None


async def _send_body(
    call: Call,
    reply: Reply,
    ticket: Ticket,
    model: ServedModel,
    timing: Timing,
    pool: WorkerPool,
    send: Send,
    transcripts: list[Transcript],
) -> None:
    async for _ in _events(call, ticket, model, timing, transcripts, lambda transcript, decoded: b""):
        pass

    def serialize() -> bytes:
        return to_json(reply.body(transcripts))

    if reply_size(call, transcripts) <= _SMALL_REPLY:
        body = serialize()
    else:
        body = await pool.run(serialize, seconds=_SERIALIZE_TIMEOUT_S)
    headers = [*_JSON_HEADERS, (b"content-length", str(len(body)).encode()), *_max_tokens_header(call)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _max_tokens_header(call: Call) -> list[tuple[bytes, bytes]]:
    """Return the header with the token limit of an answer for which the context has less room than `max_tokens`."""
    return [] if call.reduced_max_tokens is None else [(b"x-max-tokens", str(call.reduced_max_tokens).encode())]


async def _stream(
    call: Call,
    reply: Reply,
    ticket: Ticket,
    model: ServedModel,
    timing: Timing,
    send: Send,
    transcripts: list[Transcript],
) -> ApiError | None:
    """Send events as deltas arrive. A failure is sent as an event, since the status was sent before."""

    def to_events(transcript: Transcript, decoded: DecodedDelta) -> bytes:
        return reply.delta_events(transcript, decoded, transcripts)

    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *_max_tokens_header(call)]})
    await _send_some(send, reply.first_events(transcripts))
    try:
        async for chunk in _events(call, ticket, model, timing, transcripts, to_events):
            await _send_some(send, chunk)
        last = reply.last_events(transcripts)
    except ClientGone:
        raise
    except Exception as error:
        api_error = error if isinstance(error, ApiError) else _unexpected(error)
        await send({"type": "http.response.body", "body": reply.error_events(api_error), "more_body": False})
        return api_error
    await send({"type": "http.response.body", "body": last, "more_body": False})
    return None


async def _send_some(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _events(
    call: Call, ticket: Ticket, model: ServedModel, timing: Timing, transcripts: list[Transcript], to_events: ToEvents
) -> AsyncIterator[bytes]:
    """Add deltas to `transcripts` and yield their events; yield a comment after `timing.keep_alive_s` without any.

    The events of a delta are made before the next delta is added, so that their token counts include no later token.
    At the deadline, started samples end as "length" with the tokens they have; raises `ApiError` if none has started,
    and for a sample that the engine could not finish. A sample that a client aborted ends as "abort".
    """
    keep_alive_s = timing.keep_alive_s or float("inf")
    while not ticket.is_done:
        left = timing.deadline - time.monotonic()
        deltas = await ticket.take(max(0.0, min(keep_alive_s, left)))
        events: list[bytes] = []
        for prompt_index, delta in deltas:
            transcript = transcripts[prompt_index * call.num_samples + delta.sample_index]
            decoded = transcript.add_delta(delta, call.shape, model.tokenizer, keep=not call.stream)
            if transcript.finish_reason == "abort" and transcript.stop_reason is not None:
                yield b"".join(events)
                raise _engine_error(call, transcript)
            events.append(to_events(transcript, decoded))
        if deltas or left > keep_alive_s:
            yield b"".join(events) if deltas else _KEEP_ALIVE
        if left <= 0 and not ticket.is_done:
            ticket.end_reason = "length"
            yield _cut_short(call, transcripts, to_events)
            return


def _cut_short(call: Call, transcripts: Sequence[Transcript], to_events: ToEvents) -> bytes:
    """End all open samples at the deadline; return their events. Raises `ApiError` if no sample has a token."""
    if not any(transcript.token_ids for transcript in transcripts):
        raise ApiError(
            503, "the request timed out before it was started", code="timeout", headers={"x-should-retry": "false"}
        )
    still_open = [transcript for transcript in transcripts if transcript.finish_reason is None]
    return b"".join(to_events(transcript, transcript.cut_short(call.shape, "timeout")) for transcript in still_open)


def _unexpected(error: Exception) -> ApiError:
    """Log a failure of the server; return the client's error."""
    _log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=error)
    return internal_error()


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


@contextmanager
def _disconnect_watcher(receive: Receive, ticket: Ticket) -> Iterator[None]:
    """Fail the ticket with `ClientGone` as soon as the client disconnects."""
    task = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive, ticket))
    try:
        yield
    finally:
        task.cancel()


async def _wait_for_disconnect(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(ClientGone())
