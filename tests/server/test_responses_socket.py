"""Responses over WebSocket: turns, continuation on the connection, errors, admission and limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from nano_inference.server.config import ServerConfig
from nano_inference.server.log import ACCESS_LOGGER
from tests.server.test_openai_client import ENDLESS, LETTERS, wait_until
from tests.server.tiny import Running, running

pytest.importorskip("wsproto", reason="the extra `websocket`")

from tests.server.sockets import connected

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
JSON = dict[str, Any]
SHORT: JSON = {"temperature": 0, "max_output_tokens": 6, "return_token_ids": True}
KEY = "first-key-1"
INVALID = "invalid_request_error"
"""The code of errors that have none over HTTP."""


@pytest.fixture(scope="module")
def keyed(tiny_directory: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, log_requests=False, api_key=(KEY,), cors_origin=("https://page.example",))
    with running(tiny_directory, config) as one:
        yield one


def failed(received: Any, status: int, code: str | None, param: str | None) -> None:
    (event,) = received
    error = event["error"]
    assert (event["type"], event["status"], error["code"], error["param"]) == ("error", status, code, param), event


def test_turns_have_the_events_of_a_stream(server: Running) -> None:
    whole = server.post("/v1/responses", {**SHORT, "input": "once"}).json()
    with connected(server.url) as client:
        for _ in range(2):
            received = client.turn(**SHORT, input="once")
            for number, event in enumerate(received):
                EVENT.validate_python(event)
                assert event["sequence_number"] == number
            assert received[0]["type"] == "response.created"
            response = received[-1]["response"]
            assert response["output"][0]["content"] == whole["output"][0]["content"]
            assert server.client.get(f"/v1/responses/{response['id']}").json() == response


def test_unstored_response_is_continued_on_its_connection_only(server: Running) -> None:
    with connected(server.url) as client:
        first = client.turn(**SHORT, store=False, input="once")[-1]["response"]
        second = client.turn(**SHORT, store=False, input="more", previous_response_id=first["id"])[-1]["response"]
        assert (first["store"], second["previous_response_id"]) == (False, first["id"])
        items = [{"role": "user", "content": "once"}, *first["output"], {"role": "user", "content": "more"}]
        whole = server.post("/v1/responses", {**SHORT, "store": False, "input": items}).json()
        assert second["prompt_token_ids"] == whole["prompt_token_ids"]
    assert server.client.get(f"/v1/responses/{first['id']}").status_code == 404
    more: JSON = {**SHORT, "store": False, "input": "x", "previous_response_id": first["id"]}
    with connected(server.url) as client:
        failed(client.turn(**more), 404, "previous_response_not_found", "previous_response_id")
        assert client.turn(**SHORT, input="again")[-1]["type"] == "response.incomplete", "the connection works"


def test_failed_continuation_forgets_the_response(server: Running) -> None:
    lost = [{"type": "function_call_output", "call_id": "none", "output": "x"}]
    with connected(server.url) as client:
        first = client.turn(**SHORT, store=False, input="once")[-1]["response"]
        failed(client.turn(input=lost, previous_response_id=first["id"]), 400, INVALID, "input.0.call_id")
        again = client.turn(input="x", previous_response_id=first["id"])
        failed(again, 404, "previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_json", None),
        (b"{}", "invalid_json", None),
        ({"input": "x"}, INVALID, "type"),
        ({"type": "response.cancel"}, INVALID, "type"),
        ({"type": "response.create", "input": "x", "stream": False}, "unsupported_field", "stream"),
        ({"type": "response.create", "input": "x", "background": True}, "unsupported_field", "background"),
        ({"type": "response.create", "input": "x", "generate": False}, "unsupported_field", "generate"),
        ({"type": "response.create", "input": "x", "n": 2}, "unsupported_field", "n"),
        ({"type": "response.create", "input": 5}, INVALID, "input"),
    ],
)
def test_invalid_message_is_answered_by_an_error(server: Running, message: Any, code: str | None, param: str) -> None:
    with connected(server.url) as client:
        client.send(message)
        failed([client.receive()], 400, code, param)
        assert client.turn(**SHORT, input="x")[-1]["type"] == "response.incomplete", "the connection works"


def test_disconnected_client_ends_its_turn(server: Running) -> None:
    with connected(server.url) as client:
        body = {**ENDLESS, "max_output_tokens": 400, "allowed_token_ids": LETTERS, "input": "x"}
        client.send({"type": "response.create", **body})
        assert client.receive()["type"] == "response.created"
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0)


def test_handshake_is_admitted_as_a_request(keyed: Running) -> None:
    mine = {"authorization": f"Bearer {KEY}"}
    for path, headers, status, code in (
        ("/v1/responses", {}, 401, "invalid_api_key"),
        ("/v1/responses", {"authorization": "Bearer wrong-key"}, 401, "invalid_api_key"),
        ("/v1/responses", {**mine, "origin": "https://evil.example"}, 403, "origin_not_allowed"),
        ("/v1/chat/completions", mine, 404, None),
    ):
        with connected(keyed.url, path, **headers) as client:
            got, body = client.rejection()
        assert (got, body["error"]["code"]) == (status, code)
    for headers in (mine, {"x-api-key": KEY}, {**mine, "origin": "https://page.example"}):
        with connected(keyed.url, **headers) as client:
            response = client.turn(**SHORT, input="once")[-1]["response"]
        assert keyed.client.get(f"/v1/responses/{response['id']}", headers=mine).json() == response


def test_refused_handshake_is_logged(tiny_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(port=0, api_key=(KEY,))
    with (
        caplog.at_level(logging.INFO, logger=ACCESS_LOGGER),
        running(tiny_directory, config) as one,
        connected(one.url) as client,
    ):
        assert client.rejection()[0] == 401
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER]
    (line,) = [line for line in lines if line["status"] != 200]  # the server of other tests may log its last reply late
    assert (line["path"], line["status"], line["error_code"]) == ("/v1/responses", 401, "invalid_api_key")


def test_turns_are_counted_as_requests(server: Running) -> None:
    line = 'http_requests_total{handler="/v1/responses",method="POST",status="2xx"}'

    def count() -> float:
        found = [one for one in server.client.get("/metrics").text.splitlines() if one.startswith(line)]
        return float(found[0].split()[-1]) if found else 0.0

    before = count()
    with connected(server.url) as client:
        client.turn(**SHORT, input="once")
    assert count() == before + 1


def test_large_message_and_idle_connection_are_closed(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, max_body_bytes=4096, request_timeout=2.0)
    with running(tiny_directory, config) as server:
        with connected(server.url) as client:
            client.send({"type": "response.create", "input": "x" * 5000})
            with pytest.raises(ConnectionError, match="1009"):
                client.receive()
        with connected(server.url) as client, pytest.raises(ConnectionError, match="no message for too long"):
            client.receive()


def test_client_that_does_not_read_is_disconnected(tiny_directory: Path) -> None:
    """Its turn does not hold a place of the queue."""
    config = ServerConfig(port=0, log_requests=False, write_timeout=1.0)
    with running(tiny_directory, config) as server, connected(server.url) as client:
        large = {"type": "response.create", "input": "once", "metadata": {"name": "x" * 3_000_000}}
        for _ in range(3):  # each is repeated in several events: more than the system's buffers hold
            client.send(large)
        wait_until(lambda: server.on_loop(lambda: server.link.num_open > 0))
        wait_until(lambda: server.on_loop(lambda: server.link.num_open == 0))
        with pytest.raises(OSError):
            while True:
                client.receive()


def test_more_waiting_messages_than_allowed_end_the_connection(server: Running) -> None:
    with connected(server.url) as client:
        for _ in range(40):
            client.send({"type": "response.create", "input": "once", "max_output_tokens": 200, **ENDLESS})
        with pytest.raises(ConnectionError, match="too many messages wait"):
            while True:
                client.receive()


def test_server_stops_with_an_open_connection(tiny_directory: Path) -> None:
    left = ExitStack()
    with running(tiny_directory) as server:
        client = left.enter_context(connected(server.url))
        client.turn(**SHORT, input="x")
    with left, pytest.raises(ConnectionError, match="1012"):
        client.receive()


def test_socket_below_a_root_path(tiny_directory: Path) -> None:
    config = ServerConfig(port=0, log_requests=False, root_path="/llm")
    with running(tiny_directory, config) as server, connected(server.url, "/llm/v1/responses") as client:
        assert client.turn(**SHORT, input="x")[-1]["type"] == "response.incomplete"
