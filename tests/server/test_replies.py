"""OpenAI replies without an engine: choices, log-probabilities, usage, chunks, timeouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nano_inference.server.generation import Generation, Kind
from nano_inference.server.replies import OpenAIReply
from nano_inference.server.transcript import Transcript, transcripts_of, usage
from nano_inference.types import Delta, EngineRequest, SamplingParams, TokenLogprob
from tests.server.test_detokenizer import END, PIECES, UNKNOWN, options, sample_of

A, B, BROKEN = PIECES.index(b"a"), PIECES.index(b"b"), PIECES.index(b"\xff")
EMOJI = (PIECES.index(b"\xf0\x9f"), PIECES.index(b"\x98\x80"))
JSON = dict[str, Any]


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
    """Return transcripts that all have the same tokens."""
    transcripts = transcripts_of(call)
    for transcript in transcripts:
        done = replace(sample_of(tokens, reason, None), **sample)
        transcript.add_delta(delta(tokens, sample=done), call)
    return transcripts


def test_transcripts_are_numbered_prompt_by_prompt() -> None:
    transcripts = transcripts_of(call_of(prompts=((A,), (B,)), n=3))
    assert [(transcript.prompt_index, transcript.index) for transcript in transcripts] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 3),
        (1, 4),
        (1, 5),
    ]


def test_completion_body() -> None:
    call = call_of()
    reply = OpenAIReply(replace(call, created=77), filled(call, [A, *EMOJI, END], "stop")).whole()
    assert reply == {
        "id": "id-1",
        "object": "text_completion",
        "created": 77,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "a😀",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "matched_stop": END,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }
    json.dumps(reply)


def test_chat_body() -> None:
    call = call_of("chat", token_ids=True, echo=("Q",), prompt_logprobs=0)
    transcripts = filled(call, [A, B], prompt_logprobs=(), num_cached_tokens=1)
    reply = OpenAIReply(call, transcripts).whole()
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Qab", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "matched_stop": None,
            "token_ids": [A, B],
            "mask": [1, 1],
            "weight_versions": [{"version": "0", "start": 0, "end": 2, "number": 0}],
        }
    ]
    assert (reply["prompt_token_ids"], reply["prompt_logprobs"]) == ([A, B], [None])
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


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


def test_completion_logprobs() -> None:
    call = call_of(logprobs=2, echo=("xy",))
    (transcript,) = transcripts_of(call)
    tokens = [A, *EMOJI, BROKEN]
    top = [[(A, -0.1), (END, -0.2)], [(A, -0.1), (EMOJI[0], -0.2)], [(UNKNOWN, -1.0)], [(B, -0.3), (BROKEN, -0.5)]]
    transcript.add_delta(delta(tokens, top, sample_of(tokens, "length", None)), call)
    (choice,) = OpenAIReply(call, [transcript]).whole()["choices"]
    assert choice["text"] == "xya😀\ufffd"
    assert choice["logprobs"] == {
        "tokens": ["a", "", "😀", "\ufffd"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"a": -0.1, "<end>": -0.2},
            {"a": -0.1, "bytes:\\xf0\\x9f": -0.2},
            {"": -1.0, "bytes:\\x98\\x80": -0.5},
            {"b": -0.3, "bytes:\\xff": -0.5},
        ],
        "text_offset": [2, 3, 3, 4],
    }


def test_first_echoed_logprob_is_null() -> None:
    call = call_of(logprobs=1, echo=("ab",), echo_logprobs=True)
    top = ((TokenLogprob(END, -0.1), TokenLogprob(A, -0.3)),)
    (transcript,) = filled(call, [A], prompt_logprobs=(-2.0,), prompt_top_logprobs=top)
    (choice,) = OpenAIReply(call, [transcript]).whole()["choices"]
    assert choice["text"] == "aba"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"<end>": -0.1, "b": -2.0}, {"a": -0.5}],
        "text_offset": [0, 1, 2],
    }


def test_chat_logprobs() -> None:
    top = [[(A, -0.1), (END, -0.2)], [(UNKNOWN, -0.1), (EMOJI[0], -0.2)]]
    for count, expected in ((0, 0), (1, 1), (2, 2)):
        call = call_of("chat", logprobs=count)
        (transcript,) = transcripts_of(call)
        transcript.add_delta(delta([A, BROKEN], top, sample_of([A, BROKEN], "length", None)), call)
        content = OpenAIReply(call, [transcript]).whole()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", "\ufffd"]
        assert [entry["bytes"] for entry in content] == [[97], [0xFF]]
        assert [len(entry["top_logprobs"]) for entry in content] == [expected] * 2
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.1, "bytes": [97]},
        {"token": "<end>", "logprob": -0.2, "bytes": list(b"<end>")},
    ]
    assert content[1]["top_logprobs"] == [
        {"token": "", "logprob": -0.1, "bytes": []},
        {"token": "bytes:\\xf0\\x9f", "logprob": -0.2, "bytes": [0xF0, 0x9F]},
    ]


def test_tokens_as_token_ids() -> None:
    for kind in ("chat", "completion"):
        call = call_of("chat" if kind == "chat" else "completion", logprobs=1, tokens_as_ids=True)
        (transcript,) = transcripts_of(call)
        transcript.add_delta(delta([A, B], [[(A, -0.5)], [(END, -0.1)]], sample_of([A, B], "length", None)), call)
        text = json.dumps(OpenAIReply(call, [transcript]).whole()["choices"][0]["logprobs"])
        assert f"token_id:{A}" in text and f"token_id:{B}" in text and f"token_id:{END}" in text
        assert '"a"' not in text


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


# ---- chunks


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_chunks(include_usage: bool) -> None:
    call = call_of("chat", n=2, token_ids=True, echo=("Q",), include_usage=include_usage)
    transcripts = transcripts_of(call)
    chunks = OpenAIReply(call, transcripts).first_chunks()
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks] == [
        (0, {"role": "assistant", "content": None}),
        (1, {"role": "assistant", "content": None}),
        (0, {"content": "Q"}),
        (1, {"content": "Q"}),
    ]
    assert [c.get("prompt_token_ids") for c in chunks] == [[A, B], None, None, None]
    for tokens, sample in (([A], None), ([END], sample_of([A, END], "stop", None))):
        written = transcripts[1].add_delta(delta(tokens, sample=sample, at=1), call)
        chunks += OpenAIReply(call, transcripts).delta_chunks(transcripts[1], written)
    rest = [c["choices"][0] for c in chunks[4:]]
    assert rest == [
        {
            "index": 1,
            "delta": {"content": "a"},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [A],
            "mask": [1],
            "token_versions": [0],
        },
        {
            "index": 1,
            "delta": {"content": ""},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [END],
            "mask": [1],
            "token_versions": [0],
        },
        {
            "index": 1,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "matched_stop": END,
            "weight_versions": [{"version": "0", "start": 0, "end": 2, "number": 0}],
        },
    ]
    for chunk in chunks:
        assert ("usage" in chunk, chunk.get("usage")) == (include_usage, None)
        assert (chunk["id"], chunk["object"], chunk["created"]) == ("id-1", "chat.completion.chunk", 5)
    last = OpenAIReply(call, transcripts).usage_chunk()
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_completion_chunks() -> None:
    call = call_of(prompts=((A,), (B,)), logprobs=1, token_ids=True, echo=("a", "b"))
    transcripts = transcripts_of(call)
    heads = [chunk["choices"][0] for chunk in OpenAIReply(call, transcripts).first_chunks()]
    assert [(head["index"], head["text"], head["prompt_token_ids"]) for head in heads] == [(0, "a", [A]), (1, "b", [B])]
    written = transcripts[1].add_delta(delta([EMOJI[0]]), call)
    (chunk,) = OpenAIReply(call, transcripts).delta_chunks(transcripts[1], written)
    assert chunk["choices"][0]["text"] == "" and chunk["choices"][0]["token_ids"] == [EMOJI[0]]
    assert chunk["choices"][0]["logprobs"]["tokens"] == [""]
    written = transcripts[1].add_delta(delta([EMOJI[1]], sample=sample_of(EMOJI, "length", None)), call)
    text, end = OpenAIReply(call, transcripts).delta_chunks(transcripts[1], written)
    assert text["choices"][0]["text"] == "😀"
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "length")
    assert "token_ids" not in end["choices"][0]


def test_empty_delta_sends_no_chunk() -> None:
    call = call_of()
    assert OpenAIReply(call, transcripts_of(call)).first_chunks() == []
    (transcript,) = transcripts_of(call)
    written = transcript.add_delta(delta([EMOJI[0]]), call)
    assert OpenAIReply(call, [transcript]).delta_chunks(transcript, written) == []


def test_first_chunk_has_ids_or_echo() -> None:
    for fields, text, ids in (({"token_ids": True}, "", [A, B]), ({"echo": ("ab",)}, "ab", None)):
        call = call_of(**fields)
        (chunk,) = OpenAIReply(call, transcripts_of(call)).first_chunks()
        assert (chunk["choices"][0]["text"], chunk["choices"][0].get("prompt_token_ids")) == (text, ids)


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
