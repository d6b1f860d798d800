"""Answering without an engine: the events of a stream with several deltas at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from nano_inference.core.outbox import Outbox
from nano_inference.server.events import SERVER_SENT_EVENTS
from nano_inference.server.pipeline import Timing, send_stream
from nano_inference.server.replies import OpenAIReply
from nano_inference.server.transcript import transcripts_of
from tests.server.test_detokenizer import sample_of
from tests.server.test_replies import A, B, call_of, delta
from tests.server.tiny import events_in


def streamed(outbox: Outbox, seconds_left: float = 3600.0) -> list[Any]:
    """Stream a outbox's deltas with usage in every chunk; return the chunks."""
    call = call_of("chat", n=2, stream=True, include_usage=True, continuous_usage=True, token_ids=True)
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def main() -> None:
        reply, timing = OpenAIReply(call, transcripts_of(call)), Timing(time.monotonic() + seconds_left, 0.0)
        await send_stream(reply, outbox, timing, SERVER_SENT_EVENTS, send)

    asyncio.run(main())
    return [one for one in events_in(b"".join(sent).decode()) if one != "[DONE]"]


def ids_of(chunk: Any) -> list[int]:
    """Return the tokens of a chunk."""
    return [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


def test_usage_excludes_unsent_tokens() -> None:
    call = call_of(n=2)
    outbox = Outbox(call.requests)
    for sample in (0, 1, 0, 1):
        outbox.put(0, delta((A, B, A), at=sample), 1.0)
    for sample in (0, 1):
        outbox.put(0, delta((B,), sample=sample_of((A, B, A) * 2 + (B,), "length", None), at=sample), 1.0)
    sent = [(len(ids_of(chunk)), chunk["usage"]["completion_tokens"]) for chunk in streamed(outbox)]
    counts = [(tokens, count) for tokens, count in sent if tokens]
    assert counts == [(3, 3), (3, 6), (3, 9), (3, 12), (1, 13), (1, 14)]
    assert sent[0] == (0, 0) and sent[-1] == (0, 14)


def test_timeout_sends_tokens_received_before_deadline() -> None:
    call = call_of(n=2)
    outbox = Outbox(call.requests)
    outbox.put(0, delta((A, B)), 1.0)
    outbox.put(0, delta((A,), sample=sample_of((A,), "length", None), at=1), 1.0)
    chunks = streamed(outbox, seconds_left=-1.0)
    assert [ids_of(chunk) for chunk in chunks if ids_of(chunk)] == [[A, B], [A]]
    ends = [(one["index"], one["stop_reason"]) for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    assert ends == [(1, None), (0, "timeout")] and outbox.end_reason == "length"


def test_tokens_before_engine_error_are_sent() -> None:
    call = call_of(n=2)
    outbox = Outbox(call.requests)
    outbox.put(0, delta((A, B)), 1.0)
    outbox.put(0, delta((), sample=sample_of((A, B), "abort", "out of memory: 1 of 2 blocks")), 1.0)
    *chunks, last = streamed(outbox)
    assert [ids_of(chunk) for chunk in chunks if ids_of(chunk)] == [[A, B]]
    assert last["error"]["code"] == "out_of_memory"
