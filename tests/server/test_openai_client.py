"""OpenAI's Python client against the server: parsed replies, exceptions, retries, closed streams."""

from __future__ import annotations

import json
import logging
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from nano_inference.server.config import ServerConfig
from nano_inference.server.log import ACCESS_LOGGER
from tests.server.stepped import Gate, gated, stepped, steps_of
from tests.server.tiny import Running, running

HELLO: Any = [{"role": "user", "content": "hello"}]
LETTERS = [ord(letter) - ord("!") for letter in string.ascii_letters]
"""Ids of the tiny model's tokens that are one letter; its vocabulary is sorted and begins with "!"."""
PATIENCE = 60.0
"""Timeout in seconds."""
ENDLESS = {"ignore_eos": True}
ENDLESS_LETTERS = {"ignore_eos": True, "allowed_token_ids": LETTERS}


@contextmanager
def client_of(server: Running, **options: Any) -> Iterator[openai.OpenAI]:
    """Yield the official client; by default it does not retry."""
    defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
    with openai.OpenAI(base_url=f"{server.url}/v1", **defaults) as client:
        yield client


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until a condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        threading.Event().wait(0.01)


class AccessLog(logging.Handler):
    """Collects the status and the error code of every POST from the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int | None, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = json.loads(record.getMessage())
        if line["method"] == "POST":
            self.answers.append((line.get("status"), line.get("error_code")))


@pytest.fixture
def answers() -> Iterator[list[tuple[int | None, str | None]]]:
    """The status and the error code of every POST; no status if the client disconnected first."""
    logger, handler = logging.getLogger(ACCESS_LOGGER), AccessLog()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.answers
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert isinstance(whole, ChatCompletion) and whole.id.startswith("chatcmpl-")
    message = whole.choices[0].message
    assert message.role == "assistant" and message.refusal is None and not message.tool_calls
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_helper_events(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}, logprobs=True) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert kinds[0] == "chunk" and kinds.count("content.done") == 1
    assert {"content.delta", "logprobs.content.delta", "logprobs.content.done"} <= set(kinds)
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == whole.choices[0].message.content == deltas[-1].snapshot
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_field_raises_bad_request_with_its_name(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=7, stream=stream)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    body: Any = error.body
    assert set(body) == {"message", "type", "param", "code"} and body["message"] in str(error)
    assert error.request_id and error.response.headers["x-request-id"] == error.request_id


def test_wrong_key_and_too_large_body_are_refused(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, api_key=("sk-right",), max_body_bytes=4096)
    with running(tiny_directory, config) as server:
        with client_of(server, api_key="sk-wrong") as unauthorized, pytest.raises(openai.AuthenticationError) as caught:
            unauthorized.models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        assert caught.value.request_id
        with client_of(server, api_key="sk-right") as authorized:
            assert authorized.completions.create(model="tiny", prompt="a", max_tokens=1).choices
            with pytest.raises(openai.APIStatusError) as large:
                authorized.completions.create(model="tiny", prompt="a" * 8192)
            assert (large.value.status_code, large.value.code) == (413, "request_too_large")
            assert large.value.request_id
            assert authorized.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_draining_server_is_reported(tiny_directory: Path) -> None:
    with running(tiny_directory) as server, client_of(server) as client:
        server.on_loop(server.link.drain)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="a", stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            assert caught.value.response.headers["retry-after"] == "5" and caught.value.request_id


@contextmanager
def full_server(directory: Path) -> Iterator[tuple[Running, Gate, threading.Thread]]:
    """Serve with the queue filled by one request, which ends when the gate is opened."""
    config = ServerConfig(port=0, max_queued_requests=0, log_requests=False)
    with running(directory, config, stepped, max_batch_size=1) as server, gated(server) as gate:
        long: Any = {"prompt": "long", "max_tokens": 20, "ignore_eos": True}
        thread = threading.Thread(target=lambda: server.post("/v1/completions", long))
        thread.start()
        wait_until(lambda: num_admitted(server) == 1)
        try:
            yield server, gate, thread
        finally:
            gate.open()
            thread.join(PATIENCE)


def num_admitted(server: Running) -> int:
    """Return the number of admitted samples."""
    return int(server.on_loop(lambda: server.app.pipeline.limits.num_samples if server.app.pipeline.limits else 0))


def test_client_retries_after_a_full_queue(
    tiny_directory: Path, answers: list[tuple[int | None, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with full_server(tiny_directory) as (server, gate, thread), client_of(server, max_retries=2) as client:

        def finish_long_request(seconds: float) -> None:
            waits.append(seconds)
            gate.open()
            thread.join(PATIENCE)
            wait_until(lambda: num_admitted(server) == 0)

        monkeypatch.setattr("openai._base_client.time.sleep", finish_long_request)
        reply = client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert reply.choices and waits == [1.0], "the client waits as Retry-After says"
        wait_until(lambda: len(answers) == 3)
        assert answers == [(503, "queue_full"), (200, None), (200, None)], "refused, the long one, the retry"


def chunk_text(chunk: Any) -> str:
    """Return the text of a chunk of a chat or a completion."""
    choice = chunk.choices[0]
    return str((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")


def loads(server: Running) -> tuple[int, int]:
    """Return the numbers of running and waiting samples."""
    load = server.client.get("/load").json()
    return load["running"], load["waiting"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_closing_a_stream_aborts_its_request(
    tiny_directory: Path, kind: str, answers: list[tuple[int | None, str | None]]
) -> None:
    fields: Any = {"model": "tiny", "max_tokens": 400, "stream": True, "extra_body": ENDLESS_LETTERS}
    with (
        running(tiny_directory, make=stepped) as server,
        client_of(server) as client,
        gated(server, free_steps=3) as gate,
    ):
        create = client.chat.completions.create if kind == "chat" else client.completions.create
        text = {"messages": HELLO} if kind == "chat" else {"prompt": "a"}
        with create(**fields, **text) as stream:
            assert any(chunk_text(chunk) for chunk in stream), "the stream has started"
        wait_until(lambda: bool(answers))
        assert answers[0][0] is None, "recorded as a disconnected client"
        assert server.on_loop(lambda: server.link.num_open) == 0 == num_admitted(server)
        gate.open()
        wait_until(lambda: loads(server) == (0, 0))
        assert gate.num_steps < 20, "the remaining tokens are not computed"
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices


def break_engine(server: Running, *, after: int) -> None:
    """Make the engine raise after `after` steps."""
    steps = iter(range(after))

    def fail() -> None:
        if next(steps, None) is None:
            raise RuntimeError("injected")

    steps_of(server).before_step = fail


def test_engine_failure_raises_in_a_stream(tiny_directory: Path) -> None:
    with running(tiny_directory, make=stepped) as server, client_of(server, max_retries=2) as client:
        break_engine(server, after=4)
        got: list[Any] = []
        with pytest.raises(openai.APIError, match="internal server error") as caught:
            fields: Any = {"max_tokens": 100, "stream": True, "extra_body": ENDLESS}
            got.extend(append_all(got, client.chat.completions.create(model="tiny", messages=HELLO, **fields)))
        body: Any = caught.value.body
        assert got and body["type"] == "server_error" and "injected" not in str(body)
        assert server.client.get("/health").status_code == 503


def append_all(got: list[Any], stream: Any) -> list[Any]:
    """Append a stream's chunks to a list; chunks before an error are kept."""
    for one in stream:
        got.append(one)
    return []
