"""The HTTP client: addresses, server-sent events, error replies."""

from __future__ import annotations

import json

import pytest

from nano_inference.cli.chat.conversation import Piece, ServerError
from nano_inference.cli.chat.http import Address, CutOff, Refused, get_json, read_address, stream_json
from nano_inference.cli.chat.remote import PartialReply
from nano_inference.types import BadRequest
from tests.cli.scripted import chunk, scripted


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("https://h/llm/v1/", "https://h/llm/v1"),
        ("http://[::1]:9", "http://[::1]:9/v1"),
    ],
)
def test_read_address(text: str, url: str) -> None:
    assert read_address(text, None).url == url


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("ftp://h", None, "--server must be a URL"),
        ("http://h:x", None, "--server http://h:x: "),
        ("http://u:p@h", None, "without a user"),
        ("http://h/?a=b", None, "without a user, a query"),
        ("http://h/a b", None, "ASCII without blanks"),
        ("http://h", "a\nb", "--api-key must be ASCII"),
        ("http://h", "clé", "--api-key must be ASCII"),
    ],
)
def test_read_address_rejects_invalid_address_or_key(text: str, key: str | None, said: str) -> None:
    with pytest.raises(BadRequest, match=said.replace("?", r"\?")) as raised:
        read_address(text, key)
    assert "\n" not in str(raised.value) and (not key or key not in str(raised.value))


def test_key_is_exposed_by_remote_http_only() -> None:
    urls = ("http://h", "https://h", "http://127.0.0.1", "http://[::1]")
    assert [read_address(url, "key").exposes_key for url in urls] == [True, False, False, False]
    assert "secret" not in repr(read_address("http://h", "secret-key"))


STREAM = '\ufeffdata: "one"\r\n\r\n: hello\r\ndata:["two",\r\ndata:  3]\nid: 4\n\nevent: x\rdata: "é😀"\r\r'
STREAM += "data\n\nretry: 3\n\n\n\ndata: cut off"


@pytest.mark.parametrize("sizes", [[1], [7, 1, 1]])
def test_events_do_not_depend_on_chunking(sizes: list[int]) -> None:
    """Each piece is an HTTP chunk, which the client reads separately."""
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
            for event in stream_json(address(server.url), "/chat", {}):
                found.append(event)
    assert found == ["one", ["two", 3], "é😀"]


def test_event_size_is_limited() -> None:
    for line in (b"data: " + b"x" * 60, b"data: xxxxxxxxx\n" * 7):
        with scripted() as server:
            server.raw(line)
            server.cut()
            with pytest.raises(ServerError, match="event of more than"):
                list(stream_json(address(server.url), "/chat", {}, max_bytes=50))


def test_reply_size_is_limited() -> None:
    with scripted() as server:
        server.head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        server.raw(b"[" + b"1, " * 60)
        server.cut()
        with pytest.raises(ServerError, match="reply has more than"):
            list(stream_json(address(server.url), "/chat", {}, max_bytes=50))


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
        ("401 Who", {"error": {"message": "key?"}}, "401: key?; give the key as --api-key"),
        ("200 OK", b"{", "invalid JSON: '{'"),
        ("200 OK", b"[" * 100_000, "invalid JSON: "),
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


def test_redirect_is_not_followed() -> None:
    with scripted() as server, scripted() as other:
        server.head = f"HTTP/1.1 307 There\r\nLocation: {other.url}/v1\r\nContent-Length: 0\r\n\r\n"
        server.cut()
        with pytest.raises(ServerError, match=f"redirects to {other.url}/v1; give that URL as --server"):
            list(stream_json(address(server.url, "key"), "/chat", {}))
        assert server.asked.get().headers["authorization"] == "Bearer key" and other.asked.empty()


def test_refused_connection() -> None:
    with scripted() as server:
        pass
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+/v1: Connection refused"):
        get_json(address(server.url), "/models")


@pytest.mark.parametrize("head", ["SSH-2.0-x\r\n", "HTTP/1.1 200 OK\r\n" + "a: b\r\n" * 200])
def test_invalid_http_reply(head: str) -> None:
    with scripted() as server:
        server.head = head
        server.cut()
        with pytest.raises(ServerError):
            list(stream_json(address(server.url), "/chat", {}))


@pytest.mark.parametrize(
    "head", ["Content-Type: text/event-stream\r\n", "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"]
)
def test_lost_connection_raises_cut_off(head: str) -> None:
    with scripted() as server:
        server.head = f"HTTP/1.1 200 OK\r\n{head}\r\n"
        data = b'data: {"a": 1}\n\n'
        server.raw(f"{len(data) + 9:x}\r\n".encode() + data if "chunked" in head else data)
        server.cut()
        events = stream_json(address(server.url), "/chat", {})
        assert next(events) == {"a": 1}
        with pytest.raises(CutOff, match="lost in the middle of the answer"):
            next(events)


def test_reply_without_streaming_is_one_event() -> None:
    with scripted() as server:
        server.head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
        server.raw(json.dumps({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}).encode())
        server.cut()
        (event,) = stream_json(address(server.url), "/chat", {})
        partial = PartialReply(start=0.0)
        assert partial.add_event(event) == [Piece("all")] and partial.finish_reason == "stop"


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
def test_malformed_events_add_nothing(event: object) -> None:
    partial = PartialReply(start=0.0)
    assert partial.add_event(event) == [] and partial.text == "" and partial.total() is None


@pytest.mark.parametrize("event", [[], 3, "x", None])
def test_invalid_event_raises(event: object) -> None:
    with pytest.raises(ServerError, match="invalid event"):
        PartialReply(start=0.0).add_event(event)


def test_calculator_results_are_separate_pieces() -> None:
    parts = [("python", "4+4"), ("python_output", "8"), ("text", "8 it is")]
    event = chunk("[4+4 → 8] 8 it is")
    event["choices"][0]["delta"]["parts"] = [{"type": kind, "text": text} for kind, text in parts]
    partial = PartialReply(start=0.0)
    assert partial.add_event(event) == [Piece("[4+4 → "), Piece("8", is_forced=True), Piece("] 8 it is")]
    assert partial.add_event(chunk("\ud83d")) == [Piece("\ufffd")], "half a character"
