"""OpenAI replies without an engine: choices, log-probabilities, usage, chunks, timeouts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from nano_inference.core.outbox import Outbox
from nano_inference.server.events import SERVER_SENT_EVENTS
from nano_inference.server.generation import Generation, Kind
from nano_inference.server.pipeline import Timing, send_stream
from nano_inference.server.replies import OpenAIReply
from nano_inference.server.transcript import Transcript, transcripts_of, usage
from nano_inference.types import Delta, EngineRequest, SamplingParams, TokenLogprob
from tests.server.test_detokenizer import END, PIECES, options, sample_of
from tests.server.tiny import events_in

A, B, BROKEN = PIECES.index(b"a"), PIECES.index(b"b"), PIECES.index(b"\xff")


def call_of(
    kind: Kind = "completion", prompts: Sequence[tuple[int, ...]] = ((A, B),), n: int = 1, **fields: Any
) -> Generation:
    requests = tuple(EngineRequest(prompt=prompt, params=SamplingParams(), num_samples=n) for prompt in prompts)
    return replace(options(), kind=kind, requests=requests, num_samples=n, **fields)


def delta(
    tokens: Sequence[int], top: Sequence[Sequence[tuple[int, float]]] | None = None, sample: Any = None, at: int = 0
) -> Delta:
    tops = None if top is None else tuple(tuple(TokenLogprob(*one) for one in row) for row in top)
    return Delta(
        request_id=0,
        sample_index=at,
        token_ids=tuple(tokens),
        logprobs=(-0.5,) * len(tokens),
        mask=(1,) * len(tokens),
        versions=(0,) * len(tokens),
        top_logprobs=tops,
        sample=sample,
    )


def filled(call: Generation, tokens: Sequence[int], reason: str = "length", **sample: Any) -> list[Transcript]:
    transcripts = transcripts_of(call)
    for transcript in transcripts:
        done = replace(sample_of(tokens, reason, None), **sample)
        transcript.add_delta(delta(tokens, sample=done), call)
    return transcripts


def test_usage_counts_prompts_once_and_cached_ones_of_the_first_sample() -> None:
    call = call_of(prompts=((A,) * 5, (B,) * 3), n=2)
    transcripts = filled(call, [A, B, A], num_cached_tokens=2)
    assert usage(call, transcripts) == {
        "prompt_tokens": 8,
        "completion_tokens": 12,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert "prompt_tokens_details" not in usage(call, transcripts, with_cached=False)
    assert usage(call, transcripts_of(call))["completion_tokens"] == 0


def test_prompt_logprobs() -> None:
    call = call_of(prompts=((A, B, END),), prompt_logprobs=1)
    top = ((TokenLogprob(A, -0.1), TokenLogprob(B, -0.9)), (TokenLogprob(END, -0.2), TokenLogprob(BROKEN, -0.3)))
    done = {
        "prompt_tokens": (A, B, END),
        "prompt_logprobs": (-0.9, -0.2),
        "prompt_top_logprobs": top,
        "prompt_ranks": (7, 1),
    }
    (choice,) = OpenAIReply(call, filled(call, [A], **done)).whole()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(A): {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
            str(B): {"logprob": -0.9, "rank": 7, "decoded_token": "b"},
        },
        {str(END): {"logprob": -0.2, "rank": 1, "decoded_token": "<end>"}},
    ]


def test_cut_short_returns_held_back_text() -> None:
    call = call_of(stops=("abc",))
    (transcript,) = transcripts_of(call)
    assert transcript.add_delta(delta([A, B]), call).text == ""
    written = transcript.cut_short(options(), "timeout")
    assert (written.text, written.finish_reason, written.stop_reason) == ("ab", "length", "timeout")
    assert (transcript.text, transcript.finish_reason, transcript.stop_reason) == ("ab", "length", "timeout")
    text, end = OpenAIReply(call, [transcript]).delta_chunks(transcript, written)
    assert (text["choices"][0]["text"], end["choices"][0]["stop_reason"]) == ("ab", "timeout")
    assert OpenAIReply(call, [transcript]).whole()["usage"]["completion_tokens"] == 2


def test_a_sample_that_was_cut_short_has_no_prompt_logprobs() -> None:
    for kind in ("completion", "chat"):
        call = call_of("chat" if kind == "chat" else "completion", prompt_logprobs=1, logprobs=1, echo=("",))
        (transcript,) = transcripts_of(call)
        transcript.add_delta(delta([A]), call)
        transcript.cut_short(options(), "timeout")
        assert "prompt_logprobs" in json.dumps(OpenAIReply(call, [transcript]).whole())


def test_version_spans_use_trainer_labels() -> None:
    call = call_of(versions=True)
    (transcript,) = transcripts_of(call)
    sample = replace(sample_of([A, B, END], "stop", None), token_versions=(4, 4, 5), version_labels={5: "step-9"})
    first = replace(delta([A, B]), versions=(4, 4))
    transcript.add_delta(first, call)
    written = transcript.add_delta(replace(delta([END], sample=sample, at=2), versions=(5,)), call)
    spans = [
        {"version": "4", "start": 0, "end": 2, "number": 4},
        {"version": "step-9", "start": 2, "end": 3, "number": 5},
    ]
    (choice,) = OpenAIReply(call, [transcript]).whole()["choices"]
    assert choice["weight_versions"] == spans and "mask" not in choice
    *_, end = OpenAIReply(call, [transcript]).delta_chunks(transcript, written)
    assert end["choices"][0]["weight_versions"] == spans


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
