"""The official client against the server: what it parses, what it raises, when it tries again."""

from __future__ import annotations

import asyncio
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from nano_inference.config import ServerConfig
from tests.server.tiny import Running, running

HELLO: Any = [{"role": "user", "content": "hello"}]
LETTERS = [ord(letter) - ord("!") for letter in string.ascii_letters]
"""Tokens of the tiny model that are a letter each: its vocabulary is sorted and begins with the exclamation mark."""
PATIENCE = 60.0
"""Seconds that no test waits unless something is broken."""
ENDLESS = {"ignore_eos": True}
ENDLESS_LETTERS = {"ignore_eos": True, "allowed_token_ids": LETTERS}


@contextmanager
def client_of(server: Running, **options: Any) -> Iterator[openai.OpenAI]:
    """Return the official client, which asks once unless told otherwise."""
    given: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
    with openai.OpenAI(base_url=f"{server.url}/v1", **given) as client:
        yield client


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with client_of(server) as one:
        yield one


def wait_until(is_so: Callable[[], bool]) -> None:
    """Ask again and again until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        threading.Event().wait(0.01)


def spy_on_answers(server: Running) -> list[tuple[int | None, Any]]:
    """Return a list that gets the status and the error of every POST from now on."""
    guard: Any = server.app.asgi
    before, seen = guard.on_response, []

    def note(scope: Any, status: int | None, seconds: float, error: Exception | None) -> None:
        if scope["method"] == "POST":
            seen.append((status, error))
        before(scope, status, seconds, error)

    server.on_loop(lambda: setattr(guard, "on_response", note))
    return seen


class Gate:
    """Lets the engine make so many steps, then holds it until it is opened."""

    def __init__(self, server: Running, *, free_steps: int = 0) -> None:
        engine: Any = server.opened.engine
        self.num_steps = 0
        self._tick, self._free_steps = engine.tick, free_steps
        self._is_open = threading.Event()
        server.on_engine(lambda: setattr(engine, "tick", self.tick))

    def tick(self) -> Any:
        if self.num_steps >= self._free_steps:
            assert self._is_open.wait(PATIENCE)
        self.num_steps += 1
        return self._tick()

    def open(self) -> None:
        self._is_open.set()


@contextmanager
def gated(server: Running, **options: Any) -> Iterator[Gate]:
    gate = Gate(server, **options)
    try:
        yield gate
    finally:
        gate.open()


# ---- what is parsed ------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found_under_every_name(tiny_directory: Path) -> None:
    names = ("tiny", "org/tiny")
    with running(tiny_directory, ServerConfig(port=0, served_model_name=names)) as server, client_of(server) as client:
        assert tuple(model.id for model in client.models.list()) == names
        for name in names:
            model = client.models.retrieve(name)
            assert (model.id, model.object, model.owned_by) == (name, "model", "nano-inference")
            assert isinstance(model.created, int)
            reply = client.completions.create(model=name, prompt="a", max_tokens=1)
            assert reply.model == name
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"


def test_a_completion_streamed_is_the_completion(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": "once", "max_tokens": 24, "temperature": 0, "seed": 1}
    whole = client.completions.create(**asked)
    assert isinstance(whole, Completion) and whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert whole.usage is not None and whole.usage.prompt_tokens == 4
    assert whole.usage.total_tokens == 4 + whole.usage.completion_tokens
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert set(reasons[:-1]) == {None} and reasons[-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_streamed_is_the_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert isinstance(whole, ChatCompletion) and whole.id.startswith("chatcmpl-")
    message = whole.choices[0].message
    assert message.role == "assistant" and message.refusal is None and not message.tool_calls
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_samples_have_numbers_and_no_more_than_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "seed": 3, "n": 3, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_logprobs_are_the_types_that_the_client_has(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=3, temperature=0)
    table = reply.choices[0].logprobs
    assert table is not None and table.tokens is not None and table.top_logprobs is not None
    assert table.token_logprobs is not None and table.text_offset is not None
    assert "".join(table.tokens) == reply.choices[0].text
    assert all(isinstance(score, float) and score <= 0 for score in table.token_logprobs)
    assert all(3 <= len(top) <= 4 for top in table.top_logprobs)
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2, temperature=0
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content, "a chat that was asked for log-probabilities has them"
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert all(isinstance(top.bytes, list) for top in entry.top_logprobs)


def test_a_raw_response_has_the_request_id(client: openai.OpenAI) -> None:
    given = {"X-Request-Id": "mine-1"}
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=2, extra_headers=given
    )
    assert raw.request_id == "mine-1" == raw.headers["x-request-id"]
    parsed = raw.parse()
    assert isinstance(parsed, ChatCompletion) and parsed._request_id == "mine-1"
    fresh = client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
    assert fresh.request_id and fresh.request_id != "mine-1"
    with client.completions.with_streaming_response.create(model="tiny", prompt="a", max_tokens=1) as streamed:
        assert streamed.request_id and b'"text_completion"' in streamed.read()


class Answer(pydantic.BaseModel):
    """A schema that a client may ask for."""

    value: int


def test_parse_works_without_a_schema_and_tells_of_answers_cut_off(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=0, extra_body={"allowed_token_ids": LETTERS}
    )
    text = free.choices[0].message.content or ""
    stop = text[4:6]
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stop=stop,
        extra_body={"allowed_token_ids": LETTERS},
    )
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].message.content == text[: text.index(stop)]
    assert parsed.choices[0].message.parsed is None
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HELLO, max_tokens=1, extra_body=ENDLESS)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HELLO, max_tokens=4, response_format=Answer)


def test_the_stream_helper_tells_its_events(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}, logprobs=True) as stream:
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


# ---- what is raised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_a_bad_request_that_names_it(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=7, stream=stream)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (400, "temperature", "invalid_request_error")
    body: Any = error.body
    assert set(body) == {"message", "type", "param", "code"} and body["message"] in str(error)
    assert error.request_id and error.response.headers["x-request-id"] == error.request_id


def test_a_prompt_that_is_too_long_says_how_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 4000, stream=True)
    body: Any = caught.value.body
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (4000, 512)


def test_an_unknown_model_and_path_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        client.moderations.create(model="tiny", input="a")
    assert caught.value.request_id and caught.value.type == "not_found_error"


def test_a_content_type_that_is_not_json_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="a", extra_headers={"Content-Type": "text/plain"})
    assert (caught.value.status_code, caught.value.type) == (415, "unsupported_media_type")
    assert caught.value.request_id


def test_a_key_is_asked_for_and_a_body_may_be_too_large(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, api_key=("sk-right",), max_body_bytes=4096)
    with running(tiny_directory, config) as server:
        with client_of(server, api_key="sk-wrong") as stranger, pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
        assert caught.value.request_id
        with client_of(server, api_key="sk-right") as friend:
            assert friend.completions.create(model="tiny", prompt="a", max_tokens=1).choices
            with pytest.raises(openai.APIStatusError) as large:
                friend.completions.create(model="tiny", prompt="a" * 8192)
            assert (large.value.status_code, large.value.code) == (413, "request_too_large")
            assert large.value.request_id
            assert friend.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_a_server_that_shuts_down_says_so(tiny_directory: Path) -> None:
    with running(tiny_directory) as server, client_of(server) as client:
        server.on_loop(server.link.drain)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="a", stream=stream)
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            assert caught.value.response.headers["retry-after"] == "5" and caught.value.request_id


# ---- when it tries again -------------------------------------------------------------------------------------------


@contextmanager
def full_server(directory: Path) -> Iterator[tuple[Running, Gate, threading.Thread]]:
    """Serve with the only place taken by a request that ends when the gate is opened."""
    config = ServerConfig(port=0, max_queued_requests=0, log_requests=False)
    with running(directory, config, max_batch_size=1) as server, gated(server) as gate:
        long: Any = {"prompt": "long", "max_tokens": 20, "ignore_eos": True}
        thread = threading.Thread(target=lambda: server.post("/v1/completions", long))
        thread.start()
        wait_until(lambda: places_taken(server) == 1)
        try:
            yield server, gate, thread
        finally:
            gate.open()
            thread.join(PATIENCE)


def places_taken(server: Running) -> int:
    """Return how many samples the server has let in."""
    return int(server.on_loop(lambda: server.app.serving.queue_limits.num_samples if server.app.serving else 0))


def test_a_full_queue_is_tried_again_when_the_server_says_and_then_succeeds(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with full_server(tiny_directory) as (server, gate, thread), client_of(server, max_retries=2) as client:

        def end_the_long_one(seconds: float) -> None:
            waits.append(seconds)
            gate.open()
            thread.join(PATIENCE)
            wait_until(lambda: places_taken(server) == 0)

        monkeypatch.setattr("openai._base_client.time.sleep", end_the_long_one)
        answers = spy_on_answers(server)
        reply = client.completions.create(model="tiny", prompt="a", max_tokens=3)
        assert reply.choices and waits == [1.0], "Retry-After: 1 is obeyed"
        wait_until(lambda: len(answers) == 3)
        statuses = [(status, getattr(error, "code", None)) for status, error in answers]
        assert statuses == [(503, "queue_full"), (200, None), (200, None)], "refused, the long one, the second try"


def test_a_queue_that_stays_full_is_tried_three_times(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    with full_server(tiny_directory) as (server, _, _), client_of(server, max_retries=2) as client:
        answers = spy_on_answers(server)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, stream=True)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
        wait_until(lambda: len(answers) == 3)
        assert [status for status, _ in answers] == [503, 503, 503] and waits == [1.0, 1.0]
        assert places_taken(server) == 1, "there was no fourth, and the long one is still there"


# ---- when something goes away --------------------------------------------------------------------------------------


def chunk_text(chunk: Any) -> str:
    """Return the text that a chunk of either kind of stream brings."""
    choice = chunk.choices[0]
    return str((choice.delta.content if hasattr(choice, "delta") else choice.text) or "")


def loads(server: Running) -> tuple[int, int]:
    """Return how many samples run and wait."""
    load = server.client.get("/load").json()
    return load["running"], load["waiting"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_that_is_closed_early_ends_its_request(tiny_directory: Path, kind: str) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 400, "stream": True, "extra_body": ENDLESS_LETTERS}
    with running(tiny_directory) as server, client_of(server) as client, gated(server, free_steps=3) as gate:
        answers = spy_on_answers(server)
        create = client.chat.completions.create if kind == "chat" else client.completions.create
        text = {"messages": HELLO} if kind == "chat" else {"prompt": "a"}
        with create(**asked, **text) as stream:
            assert any(chunk_text(chunk) for chunk in stream), "it has begun"
        wait_until(lambda: bool(answers))
        assert answers[0][0] is None, "noted as a client that left"
        assert server.on_loop(lambda: server.link.num_open) == 0 == places_taken(server)
        gate.open()
        wait_until(lambda: loads(server) == (0, 0))
        assert gate.num_steps < 20, "the other tokens were never made"
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices


def break_engine(server: Running, *, after: int) -> None:
    """Let the engine fail in one of its next steps."""
    engine: Any = server.opened.engine
    tick, steps = engine.tick, iter(range(after))

    def failing() -> Any:
        if next(steps, None) is None:
            raise RuntimeError("injected")
        return tick()

    server.on_engine(lambda: setattr(engine, "tick", failing))


def test_an_engine_that_dies_is_an_error_in_a_stream(tiny_directory: Path) -> None:
    with running(tiny_directory) as server, client_of(server, max_retries=2) as client:
        break_engine(server, after=4)
        got: list[Any] = []
        with pytest.raises(openai.APIError, match="internal server error") as caught:
            asked: Any = {"max_tokens": 100, "stream": True, "extra_body": ENDLESS}
            got.extend(iter_into(got, client.chat.completions.create(model="tiny", messages=HELLO, **asked)))
        body: Any = caught.value.body
        assert got and body["type"] == "server_error" and "injected" not in str(body)
        assert server.client.get("/health").status_code == 503


def iter_into(got: list[Any], stream: Any) -> list[Any]:
    """Read a stream into a list, so that what came before an error is kept."""
    for one in stream:
        got.append(one)
    return []


def test_an_engine_that_dies_is_an_error_that_is_not_tried_again(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    with running(tiny_directory) as server, client_of(server, max_retries=2) as client:
        break_engine(server, after=4)
        answers = spy_on_answers(server)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=100, extra_body=ENDLESS)
        assert caught.value.status_code == 500 and caught.value.request_id
        with pytest.raises(openai.InternalServerError) as after:
            client.completions.create(model="tiny", prompt="a")
        assert (after.value.status_code, after.value.code) == (503, "engine_dead")
        wait_until(lambda: len(answers) == 2)
        assert [status for status, _ in answers] == [500, 503] and waits == []


# ---- asynchronously ------------------------------------------------------------------------------------------------


def test_the_asynchronous_client_says_the_same(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0}

    async def request() -> tuple[Any, ...]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            models = [model.id async for model in client.models.list()]
            completion = await client.completions.create(**asked, prompt="a")
            chat = await client.chat.completions.create(**asked, messages=HELLO)
            raw = await client.chat.completions.with_raw_response.create(**asked, messages=HELLO)
            async with client.chat.completions.stream(**asked, messages=HELLO) as stream:
                await stream.until_done()
            final = stream.current_completion_snapshot
            with pytest.raises(openai.BadRequestError, match="top_p"):
                await client.completions.create(model="tiny", prompt="a", top_p=2)
            return models, completion, chat, raw, final

    models, completion, chat, raw, final = asyncio.run(request())
    assert models == ["tiny"] and raw.request_id
    assert completion.choices[0].text == client.completions.create(**asked, prompt="a").choices[0].text
    assert chat.choices[0].message.content == final.choices[0].message.content


def test_sixteen_streams_at_once(server: Running, client: openai.OpenAI) -> None:
    prompts = [f"number {index} of many" for index in range(16)]
    asked: Any = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    alone = [client.completions.create(**asked, prompt=prompt).choices[0] for prompt in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await client.completions.create(**asked, prompt=prompt, stream=True):
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    async def all_of_them() -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    together = asyncio.run(asyncio.wait_for(all_of_them(), PATIENCE))
    assert together == [(choice.text, choice.finish_reason) for choice in alone]
    wait_until(lambda: loads(server) == (0, 0))


def test_an_asynchronous_stream_that_is_closed_early_ends_its_request(tiny_directory: Path) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 400, "extra_body": ENDLESS_LETTERS}
    with running(tiny_directory) as server, gated(server, free_steps=3) as gate:
        answers = spy_on_answers(server)

        async def leave() -> None:
            async with (
                openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
                await client.chat.completions.create(**asked, stream=True) as stream,
            ):
                async for chunk in stream:
                    if chunk_text(chunk):
                        break

        asyncio.run(asyncio.wait_for(leave(), PATIENCE))
        wait_until(lambda: bool(answers))
        assert answers[0][0] is None, "noted as a client that left"
        gate.open()
        wait_until(lambda: loads(server) == (0, 0))
        assert gate.num_steps < 20, "the other tokens were never made"
