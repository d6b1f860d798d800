"""nanochat's web chat: limits, exact events, stats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nano_inference
from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialect import Occupancy, Route
from nano_inference.server.dialects.nanochat import WebBody, WebReply, ask_web, health, stats
from nano_inference.server.errors import ApiError
from nano_inference.server.transcript import transcripts_of
from tests.server.mounted import JSON, mounted
from tests.server.tiny import Running, events_in

CALCULATOR = Path(nano_inference.__file__).parent / "nanochat" / "data" / "calculator"
PATH = "/chat/completions"
ROUTE = Route(path=PATH, body=WebBody, ask=ask_web, reply=WebReply, summary="Talk as nanochat does.")
HELLO = [{"role": "user", "content": "hello"}]
TALK = [*HELLO, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "again"}]


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[Running]:
    with mounted(tiny_directory, ROUTE) as one:
        yield one


def texts(events: Sequence[Any]) -> str:
    """Return the text of a stream; its events must have nanochat's form."""
    assert all(set(one) == {"token", "gpu"} and one["gpu"] == 0 and one["token"] for one in events[:-1])
    assert events[-1] == {"done": True}
    return "".join(one["token"] for one in events[:-1])


def said(server: Running, **fields: Any) -> str:
    """Return the chat route's answer to the same messages."""
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "skip_special_tokens": False, **fields}).json()
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("messages", [HELLO, TALK])
def test_stream_equals_model_output(server: Running, messages: list[JSON]) -> None:
    expected = said(server, messages=messages, temperature=0, max_tokens=40).rstrip("\ufffd")
    events = server.events(PATH, {"messages": messages, "temperature": 0, "max_tokens": 40})
    assert texts(events) == expected and len(events) > 3


def test_stream_bytes_equal_nanochat(server: Running) -> None:
    with server.client.stream("POST", PATH, json={"messages": HELLO, "temperature": 0, "max_tokens": 6}) as reply:
        data = reply.read().decode()
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = data.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == 'data: {"done": true}'
    assert all(block.startswith('data: {"token": "') and block.endswith('", "gpu": 0}') for block in blocks[:-2])


def test_defaults_equal_nanochat(server: Running) -> None:
    model = server.opened.model
    params = ask_web(WebBody.model_validate({"messages": HELLO}), model, ServerConfig(), "").requests[0].params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.8, 50, 512, None)
    nulls = {"messages": HELLO, "temperature": None, "top_k": None, "max_tokens": None}
    assert ask_web(WebBody.model_validate(nulls), model, ServerConfig(), "").requests[0].params == params
    short = {"messages": HELLO, "max_tokens": 40}
    assert len({texts(server.events(PATH, short)) for _ in range(3)}) == 3, "every answer has its own seed"


def test_each_field_changes_the_reply(server: Running) -> None:
    greedy = texts(server.events(PATH, {"messages": HELLO, "temperature": 0, "max_tokens": 40}))
    assert texts(server.events(PATH, {"messages": HELLO, "temperature": 2.0, "top_k": 1, "max_tokens": 40})) == greedy
    assert texts(server.events(PATH, {"messages": HELLO, "temperature": 2.0, "top_k": 0, "max_tokens": 40})) != greedy
    assert greedy.startswith(texts(server.events(PATH, {"messages": HELLO, "temperature": 0, "max_tokens": 3})))
    assert texts(server.events(PATH, {"messages": TALK, "temperature": 0, "max_tokens": 40})) != greedy


def test_end_token_is_not_sent(server: Running, tiny_directory: Path) -> None:
    call = ask_web(WebBody.model_validate({"messages": HELLO}), server.opened.model, ServerConfig(), "")
    request = call.requests[0]
    ending = replace(call, requests=(replace(request, params=replace(request.params, logit_bias={257: 100.0})),))
    route = Route(path=PATH, body=WebBody, ask=lambda *_: ending, reply=WebReply, summary="Ends at once.")
    with mounted(tiny_directory, route) as other:
        assert other.events(PATH, {"messages": HELLO}) == [{"done": True}]


LIMITS: list[tuple[JSON, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": HELLO * 501}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a" * 8001}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a" * 8000}] * 4 + HELLO}, "messages must have at most 32000"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": HELLO, "temperature": -0.1}, "temperature"),
    ({"messages": HELLO, "temperature": 2.1}, "temperature"),
    ({"messages": HELLO, "top_k": -1}, "top_k"),
    ({"messages": HELLO, "top_k": 201}, "top_k"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 4097}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "size of 512"),
]
MALFORMED: list[tuple[JSON, str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": "hello"}, "messages"),
    ({}, "messages"),
]


@pytest.mark.parametrize(("body", "reported"), LIMITS)
def test_limits_equal_nanochat(server: Running, body: JSON, reported: str) -> None:
    reply = server.post(PATH, body)
    assert reply.status_code == 400 and set(reply.json()) == {"detail", "error"}
    assert reported in reply.json()["detail"]


@pytest.mark.parametrize(("body", "place"), MALFORMED)
def test_malformed_body_is_422_with_its_place(server: Running, body: JSON, place: str) -> None:
    reply = server.post(PATH, body)
    assert reply.status_code == 422 and set(reply.json()) == {"detail", "error"}
    assert ".".join(map(str, reply.json()["detail"][0]["loc"])) == f"body.{place}"


@pytest.mark.parametrize("fields", [{"temperature": 2}, {"top_k": 200}, {"max_tokens": 4096}, {"top_k": 0}])
def test_values_at_limits_are_accepted(server: Running, fields: JSON) -> None:
    assert texts(server.events(PATH, {"messages": HELLO, "temperature": 0, **fields}))


def test_base_model_is_refused(server: Running) -> None:
    model = replace(server.opened.model, dialogue=None)
    with pytest.raises(ApiError, match="chat template"):
        ask_web(WebBody.model_validate({"messages": HELLO}), model, ServerConfig(), "")


def test_calculator_is_used_if_available() -> None:
    messages = [{"role": "user", "content": "What is 123 plus 456?"}]
    with mounted(CALCULATOR, ROUTE) as server:
        events = server.events(PATH, {"messages": messages, "temperature": 0})
        expected = "<|python_start|>123+456<|python_end|><|output_start|>579<|output_end|>"
        assert expected in texts(events), "upstream decodes the tool's tokens as text"
        reported = [{"role": "assistant", "content": expected}, {"role": "user", "content": "What is 1 plus 2?"}]
        assert texts(server.events(PATH, {"messages": [*messages, *reported], "temperature": 0}))


def test_an_incomplete_character_at_the_end_is_not_sent(server: Running) -> None:
    """Upstream sends text only up to where all tokens so far decode without U+FFFD at the end."""
    call = ask_web(WebBody.model_validate({"messages": HELLO}), server.opened.model, ServerConfig(), "")
    transcripts = transcripts_of(call)
    reply = WebReply(call, transcripts)
    pieces = [DecodedDelta(text, (), (), None, None) for text in ("a", "\ufffd", "b\ufffd", "")]
    sent = b"".join(reply.part(transcripts[0], piece) for piece in pieces)
    assert [event["token"] for event in events_in(sent.decode())] == ["a", "\ufffdb"]


def test_a_failure_is_an_event(server: Running) -> None:
    call = ask_web(WebBody.model_validate({"messages": HELLO}), server.opened.model, ServerConfig(), "")
    transcripts = transcripts_of(call)
    reply = WebReply(call, transcripts)
    assert events_in(reply.fail(ApiError(500, "it broke")).decode()) == [{"error": "it broke"}]
    assert reply.start() == b""
    piece = DecodedDelta("ü\n", (1,), (), None, None)
    assert reply.part(transcripts[0], piece) == 'data: {"token": "ü\\n", "gpu": 0}\n\n'.encode()


def test_stats_and_health(server: Running) -> None:
    def occupied(num_running: int, *, is_ready: bool = True) -> Occupancy:
        return Occupancy(is_ready=is_ready, num_running=num_running, max_running=8)

    assert stats(server.opened.model, occupied(3)) == {
        "total_workers": 8,
        "available_workers": 5,
        "busy_workers": 3,
        "workers": [{"gpu_id": 0, "device": "cpu"}],
    }
    assert stats(server.opened.model, occupied(9))["available_workers"] == 0
    assert health(occupied(3)) == {"ready": True, "num_gpus": 1, "available_workers": 5}
    assert health(occupied(0, is_ready=False))["available_workers"] == 0
    assert health(occupied(9))["available_workers"] == 0
