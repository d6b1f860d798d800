"""Answers one call: waits for its deltas, writes them down, and sends the reply whole or as a stream of events.

A client that goes away ends its call at once, streamed or not; so does the deadline, with what there is by then.
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
Tell = Callable[[Transcript, DecodedDelta], bytes]
"""What a client is sent of a delta."""

_SMALL_REPLY = 4000
"""Tokens and alternatives of a reply that is put together on the event loop; a larger one is in a thread."""
_WRITING_S = 60.0
_STILL_HERE = b": keep-alive\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]
_log = logging.getLogger("nano_inference.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long an answer may take; seconds."""

    deadline: float
    """Of the monotonic clock."""
    keep_alive_s: float
    """After so long without an event a stream says that it is still there; 0 never does."""


async def answer(
    call: Call,
    ticket: Ticket,
    model: ServedModel,
    timing: Timing,
    workshop: WorkerPool,
    receive: Receive,
    send: Send,
    transcripts: list[Transcript],
) -> ApiError | None:
    """Answer a call; `transcripts` are filled as it goes. Return the error that a stream told of in its last event.

    Raises `ApiError` before anything was sent, and `ClientGone` when the client left.
    """
    reply = call.make_reply(call, model.tokenizer, int(time.time()))
    with _watched(receive, ticket):
        if call.stream:
            return await _stream(call, reply, ticket, model, timing, send, transcripts)
        await _whole(call, reply, ticket, model, timing, workshop, send, transcripts)
        return None


async def _whole(
    call: Call,
    reply: Reply,
    ticket: Ticket,
    model: ServedModel,
    timing: Timing,
    workshop: WorkerPool,
    send: Send,
    transcripts: list[Transcript],
) -> None:
    async for _ in _written(call, ticket, model, timing, transcripts, lambda transcript, got: b""):
        pass

    def compose() -> bytes:
        return to_json(reply.body(transcripts))

    if reply_size(call, transcripts) <= _SMALL_REPLY:
        body = compose()
    else:
        body = await workshop.run(compose, seconds=_WRITING_S)
    headers = [*_JSON_HEADERS, (b"content-length", str(len(body)).encode()), *_room_header(call)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _room_header(call: Call) -> list[tuple[bytes, bytes]]:
    """Return the header that announces a shorter answer than `max_tokens` asks for; none where there is room."""
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
    """Send events as they come. What fails on the way is told in an event: the status has long been sent."""

    def tell(transcript: Transcript, got: DecodedDelta) -> bytes:
        return reply.delta_events(transcript, got, transcripts)

    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, *_room_header(call)]})
    await _send_some(send, reply.first_events(transcripts))
    try:
        async for added in _written(call, ticket, model, timing, transcripts, tell):
            await _send_some(send, added)
        closing = reply.last_events(transcripts)
    except ClientGone:
        raise
    except Exception as error:
        told = error if isinstance(error, ApiError) else _unexpected(error)
        await send({"type": "http.response.body", "body": reply.error_events(told), "more_body": False})
        return told
    await send({"type": "http.response.body", "body": closing, "more_body": False})
    return None


async def _send_some(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _written(
    call: Call, ticket: Ticket, model: ServedModel, timing: Timing, transcripts: list[Transcript], tell: Tell
) -> AsyncIterator[bytes]:
    """Write down what comes, and yield what `tell` makes of it; after each stretch of silence a sign of life.

    Each delta is told before the next is written down: what is told counts nothing that the client has yet to get.
    When the deadline passes, what has begun ends as "length" with what it has; raises `ApiError` when nothing has, and
    for a sample that the engine gave up. One that somebody aborted ends as "abort" with what it has.
    """
    silence = timing.keep_alive_s or float("inf")
    while not ticket.is_done:
        left = timing.deadline - time.monotonic()
        pieces = await ticket.take(max(0.0, min(silence, left)))
        told: list[bytes] = []
        for prompt_index, delta in pieces:
            transcript = transcripts[prompt_index * call.num_samples + delta.sample_index]
            got = transcript.add_delta(delta, call.shape, model.tokenizer, keep=not call.stream)
            if transcript.finish_reason == "abort" and transcript.stop_reason is not None:
                yield b"".join(told)
                raise _given_up(call, transcript)
            told.append(tell(transcript, got))
        if pieces or left > silence:
            yield b"".join(told) if pieces else _STILL_HERE
        if left <= 0 and not ticket.is_done:
            ticket.end_reason = "length"
            yield _cut_short(call, transcripts, tell)
            return


def _cut_short(call: Call, transcripts: Sequence[Transcript], tell: Tell) -> bytes:
    """End everything that is open, because the time is up."""
    if not any(transcript.token_ids for transcript in transcripts):
        raise ApiError(
            503, "the request's time was up before its turn came", code="timeout", headers={"x-should-retry": "false"}
        )
    still_open = [transcript for transcript in transcripts if transcript.finish_reason is None]
    return b"".join(tell(transcript, transcript.cut_short(call.shape, "timeout")) for transcript in still_open)


def _unexpected(error: Exception) -> ApiError:
    """Log a failure that is ours; return what the client is told."""
    _log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=error)
    return internal_error()


def _given_up(call: Call, transcript: Transcript) -> ApiError:
    """Say why the engine ended a sample that nobody aborted."""
    reason = str(transcript.stop_reason or "the engine gave the request up")
    if reason.startswith("no token can be drawn") and call.forbids_tokens:
        return ApiError(400, "no token can be drawn: allowed_token_ids, bad_words and min_tokens leave none")
    if "grammar: " in reason:
        return ApiError(400, f"the answer could not be held to its structure: {reason.partition('grammar: ')[2]}")
    if reason.startswith("out of memory"):
        return ApiError(503, reason, code="out_of_memory", headers={"retry-after": "5"})
    return ApiError(500, f"generation failed: {reason}", headers={"x-should-retry": "false"})


@contextmanager
def _watched(receive: Receive, ticket: Ticket) -> Iterator[None]:
    """Fail the ticket with `ClientGone` as soon as the client has left."""
    task = asyncio.get_running_loop().create_task(_wait_for_end(receive, ticket))
    try:
        yield
    finally:
        task.cancel()


async def _wait_for_end(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(ClientGone())
