"""HTTP to a server: addresses, server-sent events however they are cut, error bodies of every shape."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.cli.remote import Taken
from nano_inference.cli.talk import Piece, ServerError
from nano_inference.cli.wire import Address, CutOff, Refused, get_json, read_address, stream_json
from nano_inference.types import BadRequest
from tests.cli.scripted import chunk, scripted


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://h/v1", "http://h:80/v1"),
        ("https://h/llm/v1/", "https://h:443/llm/v1"),
        ("https://h/llm", "https://h:443/llm/v1"),
        ("http://[::1]:9", "http://[::1]:9/v1"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert read_address(text, None).url == url


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("ftp://h", None, "--server must be a URL"),
        ("http://", None, "--server must be a URL"),
        ("http://h:x", None, "--server http://h:x: "),
        ("http://h:99999", None, "--server http://h:99999: "),
        ("http://u:p@h", None, "without a user"),
        ("http://h/?a=b", None, "without a user, a query"),
        ("http://h/a b", None, "ASCII without blanks"),
        ("http://hé", None, "ASCII without blanks"),
        ("http://h", "a\nb", "--api-key must be ASCII"),
        ("http://h", "", "--api-key must be ASCII"),
        ("http://h", "clé", "--api-key must be ASCII"),
    ],
)
def test_bad_addresses_and_keys_are_named(text: str, key: str | None, said: str) -> None:
    with pytest.raises(BadRequest, match=said.replace("?", r"\?")) as raised:
        read_address(text, key)
    assert "\n" not in str(raised.value) and (not key or key not in str(raised.value))


def test_who_can_read_the_key() -> None:
    told = [
        read_address(text, "key").tells_key for text in ("http://h", "https://h", "http://127.0.0.1", "http://[::1]")
    ]
    assert (
        told == [True, False, False, False] and "key" not in repr(read_address("http://h", "secret-key")).lower()[:60]
    )
    assert "secret" not in repr(read_address("http://h", "secret-key"))


STREAM = '\ufeffdata: "one"\r\n\r\n: hello\r\ndata:["two",\r\ndata:  3]\nid: 4\n\nevent: x\rdata: "é😀"\r\r'
STREAM += "data\n\nretry: 3\n\n\n\ndata: cut off"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_events_however_they_are_cut(sizes: list[int]) -> None:
    """Each piece is a chunk of the reply, so that the client reads it by itself."""
    data, found, at, turn = STREAM.encode(), [], 0, 0
    with scripted() as server:
        server.head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        while at < len(data):
            piece = data[at : at + sizes[turn % len(sizes)]]
            server.raw(b"%x\r\n%s\r\n" % (len(piece), piece))
            at, turn = at + len(piece), turn + 1
        server.raw(b"0\r\n\r\n")
        server.cut()
        with pytest.raises(CutOff):
            for event in stream_json(address(server.url), "/chat", {}, lambda end: None):
                found.append(event)
    assert found == ["one", ["two", 3], "é😀"]


def test_an_event_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.cli.wire._MAX_BODY_BYTES", 50)
    for line in (b"data: " + b"x" * 60, b"data: xxxxxxxxx\n" * 7):
        with scripted() as server:
            server.raw(line)
            server.cut()
            with pytest.raises(ServerError, match="event of more than"):
                list(stream_json(address(server.url), "/chat", {}, lambda end: None))


def test_a_reply_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.cli.wire._MAX_BODY_BYTES", 50)
    with scripted() as server:
        server.head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        server.raw(b"[" + b"1, " * 60)
        server.cut()
        with pytest.raises(ServerError, match="reply has more than"):
            list(stream_json(address(server.url), "/chat", {}, lambda end: None))


def address(url: str, key: str | None = None) -> Address:
    return read_address(url, key)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            "400 Bad",
            {"error": {"message": "no\nsuch \x1b[31mthing", "code": "c", "param": "p"}},
            "400: no such ␛[31mthing",
        ),
        ("404 Gone", {"error": "plain"}, "404: plain"),
        ("422 Odd", {"detail": [{"loc": 1}]}, "422: [{'loc': 1}]"),
        ("503 Busy", {"object": "error", "message": "sglang"}, "503: sglang"),
        ("500 Oops", b"<html>\n  broken", "500: <html> broken"),
        ("502 Bad Gateway", b"", "502: Bad Gateway"),
        ("401 Who", {"error": {"message": "key?"}}, "401: key?; --api-key gives the key"),
        ("200 OK", b"{", "no JSON: '{'"),
        ("200 OK", b"[" * 100_000, "no JSON: "),
    ],
)
def test_errors_are_one_line(status: str, body: object, said: str) -> None:
    with scripted() as server:
        server.models, server.models_status = body, status
        with pytest.raises(ServerError) as raised:
            get_json(address(server.url), "/models")
        text = str(raised.value)
        assert said in text and "\n" not in text and "\x1b" not in text and len(text) < 500
        if status.startswith("400"):
            assert isinstance(raised.value, Refused) and (raised.value.code, raised.value.param) == ("c", "p")


def test_a_redirect_is_not_followed_and_the_key_stays_here() -> None:
    with scripted() as server, scripted() as other:
        server.head = f"HTTP/1.1 307 There\r\nLocation: {other.url}/v1\r\nContent-Length: 0\r\n\r\n"
        server.cut()
        with pytest.raises(ServerError, match=f"redirects to {other.url}/v1, which is not followed"):
            list(stream_json(address(server.url, "key"), "/chat", {}, lambda end: None))
        assert server.asked.get().headers["authorization"] == "Bearer key" and other.asked.empty()


def test_nobody_there() -> None:
    with scripted() as server:
        pass
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+/v1: Connection refused"):
        get_json(address(server.url), "/models")


@pytest.mark.parametrize(
    "head", ["SSH-2.0-x\r\n", "HTTP/1.1 nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\n" + "a: b\r\n" * 200]
)
def test_what_is_no_http(head: str) -> None:
    with scripted() as server:
        server.head = head
        server.cut()
        with pytest.raises(ServerError):
            list(stream_json(address(server.url), "/chat", {}, lambda end: None))


@pytest.mark.parametrize(
    "head", ["Content-Type: text/event-stream\r\n", "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"]
)
def test_a_connection_that_is_cut_is_told_from_an_end(head: str) -> None:
    with scripted() as server:
        server.head = f"HTTP/1.1 200 OK\r\n{head}\r\n"
        data = b'data: {"a": 1}\n\n'
        server.raw(f"{len(data) + 9:x}\r\n".encode() + data if "chunked" in head else data)
        server.cut()
        events = stream_json(address(server.url), "/chat", {}, lambda end: None)
        assert next(events) == {"a": 1}
        with pytest.raises(CutOff, match="lost in the middle of the answer"):
            next(events)


def test_a_server_that_does_not_stream() -> None:
    with scripted() as server:
        server.head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        server.raw(json.dumps({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}).encode())
        server.cut()
        (event,) = stream_json(address(server.url), "/chat", {}, lambda end: None)
        taken = Taken(start=0.0)
        assert taken.take(event) == [Piece("all")] and taken.finish_reason == "stop"


@pytest.mark.parametrize(
    "event",
    [
        *({}, {"choices": []}, {"choices": None}, {"choices": [None]}, {"choices": [{"delta": None}]}),
        *({"choices": [{"delta": {"content": 7}}]}, {"choices": [{"delta": {"role": "x", "content": None}}]}),
        *(
            {"choices": [{"logprobs": 3, "mask": 4, "weight_versions": [5]}], "usage": 6},
            {"usage": {"prompt_tokens": "x"}},
        ),
        {"choices": [{"logprobs": {"content": [7, {"token": None, "logprob": "x", "top_logprobs": [8]}]}}]},
    ],
)
def test_events_of_odd_shapes_add_nothing(event: object) -> None:
    taken = Taken(start=0.0)
    assert taken.take(event) == [] and taken.text == "" and taken.total() is None


@pytest.mark.parametrize("event", [[], 3, "x", None])
def test_what_is_no_event_is_an_error(event: object) -> None:
    with pytest.raises(ServerError, match="no part of an answer"):
        Taken(start=0.0).take(event)


def test_the_results_of_a_calculator_are_told_apart() -> None:
    parts = [("python", "4+4"), ("python_output", "8"), ("text", "8 it is")]
    event = chunk("[4+4 → 8] 8 it is")
    event["choices"][0]["delta"]["parts"] = [{"type": kind, "text": text} for kind, text in parts]
    taken = Taken(start=0.0)
    assert taken.take(event) == [Piece("[4+4 → "), Piece("8", is_forced=True), Piece("] 8 it is")]
    assert taken.take(chunk("\ud83d")) == [Piece("\ufffd")], "half a character"
