"""nanochat's POST /chat/completions against statuses and prompts recorded from upstream's server.

Recorded from scripts/chat_web.py in the parent of da32e1d, with FastAPI 0.165.0 and a tokenizer of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.detokenizer import DecodedDelta
from nano_inference.server.dialects.nanochat import WebBody, WebReply, ask_web
from nano_inference.server.errors import ApiError
from nano_inference.server.transcript import transcripts_of
from tests.nanochat.tiny import SPECIAL_IDS, model_config, state_dict, write_checkpoint, write_tokenizer
from tests.server.tiny import Running, events_in, running

pytestmark = pytest.mark.slow

PATH = "/chat/completions"
PAGE = "http://localhost:3000"
JSON = dict[str, Any]


def user(text: object) -> JSON:
    return {"role": "user", "content": text}


def assistant(text: object) -> JSON:
    return {"role": "assistant", "content": text}


HELLO = [user("hello")]
U, V, A, B = (SPECIAL_IDS[name] for name in ("user_start", "user_end", "assistant_start", "assistant_end"))
BOS, H = SPECIAL_IDS["bos"], list(b"hello")
PROMPTS: list[tuple[list[JSON], list[int]]] = [
    (HELLO, [BOS, U, *H, V, A]),
    ([user("a"), user("b")], [BOS, U, 97, V, U, 98, V, A]),
    ([assistant("a"), user("b")], [BOS, A, 97, B, U, 98, V, A]),
    (
        [user("a"), assistant("b"), assistant("c"), user("d"), user("e")],
        [BOS, U, 97, V, A, 98, B, A, 99, B, U, 100, V, U, 101, V, A],
    ),
    ([user("a"), assistant("b")], [BOS, U, 97, V, A, 98, B, A]),
    ([user("🙂 ü")], [BOS, U, 240, 159, 153, 130, 32, 195, 188, V, A]),
    ([user("<|bos|>")], [BOS, U, *b"<|bos|>", V, A]),
]
"""Messages -> the prompt's tokens."""
NUMBERS: list[tuple[JSON, tuple[float, int, int]]] = [
    ({}, (0.8, 512, 50)),
    ({"temperature": "0.5"}, (0.5, 512, 50)),
    ({"temperature": 1}, (1.0, 512, 50)),
    ({"max_tokens": 7.0}, (0.8, 7, 50)),
    ({"top_k": " 9 "}, (0.8, 512, 9)),
    ({"top_k": True}, (0.8, 512, 1)),
    ({"temperature": None, "max_tokens": None, "top_k": None}, (0.8, 512, 50)),
    ({"user": "me", "stream": True}, (0.8, 512, 50)),
]
"""Fields -> temperature, max_tokens, top_k."""
STATUSES: list[tuple[JSON, int]] = [
    ({"messages": HELLO * 500}, 200),
    ({"messages": [{**user("a"), "name": "x", "id": 3}]}, 200),
    ({"messages": [user("")]}, 400),
    ({"messages": []}, 400),
    ({"messages": HELLO * 501}, 400),
    ({"messages": [{"role": "system", "content": "a"}]}, 400),
    ({"messages": [user("a" * 8001)]}, 400),
    ({"messages": [user("a" * 8000)] * 5}, 400),
    ({"messages": "hello"}, 422),
    ({}, 422),
    ({"messages": [1]}, 422),
    ({"messages": [{"role": "user"}]}, 422),
    ({"messages": [{"content": "a"}]}, 422),
    ({"messages": [user(5)]}, 422),
    ({"messages": [user([{"type": "text", "text": "a"}])]}, 422),
    ({"messages": [{"role": "system", "content": "a"}], "temperature": "x"}, 422),
    *(
        ({"messages": HELLO, "temperature": value}, status)
        for value, status in (("2.5", 400), (-1, 400), ("warm", 422))
    ),
    *(({"messages": HELLO, "top_k": value}, status) for value, status in ((-1, 400), (201, 400), ("many", 422))),
    *(({"messages": HELLO, "max_tokens": value}, status) for value, status in ((0, 400), (4097, 400), (7.5, 422))),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("nanochat")
    config = model_config("G4", sequence_len=4096)
    write_checkpoint(directory, "G4", config=config, state=state_dict("G4", config))
    write_tokenizer(directory)
    with running(directory, ServerConfig(port=0, log_requests=False, cors_origin=(PAGE,))) as one:
        yield one


def ask(server: Running, body: JSON) -> Any:
    return server.post(PATH, {"temperature": 0, "max_tokens": 1, **body})


@pytest.mark.parametrize(("messages", "expected"), PROMPTS)
def test_prompt_equals_recorded_tokens(server: Running, messages: list[JSON], expected: list[int]) -> None:
    body = WebBody.model_validate({"messages": messages})
    call = ask_web(body, server.opened.model, ServerConfig(), "")
    assert list(call.requests[0].prompt) == expected
    reply = ask(server, {"messages": messages})
    assert reply.status_code == 200 and reply.text.endswith('data: {"done": true}\n\n')


@pytest.mark.parametrize(("fields", "expected"), NUMBERS)
def test_numbers_equal_recorded_ones(server: Running, fields: JSON, expected: tuple[float, int, int]) -> None:
    body = WebBody.model_validate({"messages": HELLO, **fields})
    params = ask_web(body, server.opened.model, ServerConfig(), "").requests[0].params
    assert (params.temperature, params.max_tokens, params.top_k) == expected
    with server.client.stream("POST", PATH, json={"messages": HELLO, **fields}) as reply:
        assert reply.status_code == 200  # most answers are as long as the context


@pytest.mark.parametrize(("body", "status"), STATUSES)
def test_status_equals_recorded_one(server: Running, body: JSON, status: int) -> None:
    reply = ask(server, body)
    assert reply.status_code == status, reply.text
    if status != 200:
        detail = reply.json()["detail"]
        assert isinstance(detail, str) if status == 400 else detail[0]["loc"][0] == "body" and detail[0]["msg"]
    if body.get("messages") == [{"role": "user"}]:
        assert detail[0]["loc"] == ["body", "messages", 0, "content"]


@pytest.mark.parametrize("data", ["{", "[]", '"x"', ""])
def test_body_that_is_no_object_is_422(server: Running, data: str) -> None:
    reply = server.client.post(PATH, content=data, headers={"content-type": "application/json"})
    assert reply.status_code == 422 and reply.json()["detail"][0]["type"] == "json_invalid"


def test_bodies_that_name_a_model_keep_openais_statuses(server: Running) -> None:
    reply = server.post(PATH, {"messages": "hello", "model": server.opened.model.name})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"


def test_failed_answer_does_not_lock_a_conversation(server: Running) -> None:
    """The page sends an empty answer after one that failed, or two messages of the user in a row."""
    after_failure = [user("a"), assistant(""), user("b")]
    body = WebBody.model_validate({"messages": after_failure})
    prompt = ask_web(body, server.opened.model, ServerConfig(), "").requests[0].prompt
    assert list(prompt) == PROMPTS[1][1], "the empty answer is left out"
    assert ask(server, {"messages": after_failure}).status_code == 200
    assert ask(server, {"messages": [user("a"), user("b")]}).status_code == 200


def test_page_of_another_origin_can_chat(server: Running) -> None:
    """With --cors-origin, a browser sends a preflight and the page reads streams, errors and /health."""
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight = server.client.options(PATH, headers={"origin": PAGE, **asks})
    assert preflight.status_code < 300 and preflight.headers["access-control-allow-origin"] == PAGE
    assert "content-type" in preflight.headers["access-control-allow-headers"]
    for body, status in (({"messages": HELLO, "max_tokens": 2}, 200), ({"messages": []}, 400), ({}, 422)):
        reply = server.client.post(PATH, json=body, headers={"origin": PAGE})
        assert reply.status_code == status and reply.headers["access-control-allow-origin"] == PAGE
    health = server.client.get("/health", headers={"origin": PAGE})
    assert health.headers["access-control-allow-origin"] == PAGE and health.json()["ready"] is True
    other = server.client.post(PATH, json={"messages": HELLO}, headers={"origin": "http://example.org"})
    assert "access-control-allow-origin" not in other.headers


def texts(events: Sequence[Any]) -> str:
    """Return the text of a stream; its events must have nanochat's form."""
    assert all(set(one) == {"token", "gpu"} and one["gpu"] == 0 and one["token"] for one in events[:-1])
    assert events[-1] == {"done": True}
    return "".join(one["token"] for one in events[:-1])


def test_defaults_equal_nanochat(server: Running) -> None:
    model = server.opened.model
    params = ask_web(WebBody.model_validate({"messages": HELLO}), model, ServerConfig(), "").requests[0].params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.8, 50, 512, None)
    nulls = {"messages": HELLO, "temperature": None, "top_k": None, "max_tokens": None}
    assert ask_web(WebBody.model_validate(nulls), model, ServerConfig(), "").requests[0].params == params
    short = {"messages": HELLO, "max_tokens": 40}
    assert len({texts(server.events(PATH, short)) for _ in range(3)}) == 3, "every answer has its own seed"


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
