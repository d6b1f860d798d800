"""Protocol and guard over real sockets: a server in a thread, and clients that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, BinaryIO

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import LINGER_SECONDS, Guard, read_body
from nano_inference.server.protocol import (
    MAX_HEAD_BYTES,
    LimitedProtocol,
    uvicorn_config,
)
from nano_inference.server.security import KeyRing, load_keys
from tests.cases import failures

PATIENCE = 30.0
"""Timeout in seconds that only a broken test reaches."""
KEY = "first-key-1"
LIMIT = 4096
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
Noted = tuple[str, int | None, Exception | None]


async def request_body(scope: Scope, receive: Receive) -> bytes:
    """Read a body as a route does."""
    policy = scope["state"]["policy"]
    return await read_body(receive, policy.max_body_bytes, policy.body_timeout)


class App:
    """A few routes; records the requested paths."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        routes = {"/late": self.late, "/endless": self.endless, "/talk": self.talk, "/big": self.big}
        if scope["path"] == "/open":
            self.gate.set()
        if scope["path"] == "/wait":
            await self.gate.wait()
        if scope["path"] == "/fail":
            raise ValueError("secret")
        await routes.get(scope["path"], self.echo)(scope, receive, send)

    async def echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await request_body(scope, receive) if scope["method"] == "POST" else b""
        await answer(send, json.dumps({"path": scope["path"], "bytes": len(body)}).encode())

    async def big(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"x" * (8 << 20))

    async def late(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(started())
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        raise ValueError("secret")

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the client disconnects."""
        watch = asyncio.ensure_future(receive_until_gone(receive))
        await send(started())
        while not watch.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    async def talk(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start the response before reading the body."""
        await send(started())
        await send({"type": "http.response.body", "body": b"started", "more_body": True})
        await request_body(scope, receive)


async def receive_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def started(*headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def answer(send: Send, body: bytes) -> None:
    await send(started((b"content-length", b"%d" % len(body))))
    await send({"type": "http.response.body", "body": body})


class TimedLoop(asyncio.SelectorEventLoop):
    """Records timers by their delay."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[tuple[float, asyncio.TimerHandle]] = []
        self.asked: queue.Queue[float] = queue.Queue()

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, **rest: Any) -> asyncio.TimerHandle:
        handle = super().call_later(delay, callback, *args, **rest)
        self.timers.append((delay, handle))
        self.asked.put(delay)
        return handle


@dataclass
class Running:
    """A server that listens."""

    port: int
    app: App
    loop: TimedLoop
    noted: queue.Queue[Noted] = field(default_factory=queue.Queue)


@contextlib.contextmanager
def running(
    *, is_guarded: bool = True, is_shared: bool = False, linger_seconds: float = LINGER_SECONDS, **fields: Any
) -> Iterator[Running]:
    """Run a server in a thread; `is_shared` limits the connections per address."""
    config = ServerConfig(max_body_bytes=LIMIT, **fields)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Running(listener.getsockname()[1], App(), TimedLoop())

        def note(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
            made.noted.put((scope["path"], status, error))

        policy = replace(guard_policy(config, KeyRing.of(load_keys(config))), linger_seconds=linger_seconds)
        guard = Guard(made.app, policy, note)
        app = guard if is_guarded else made.app
        server = uvicorn.Server(uvicorn_config(app, config, policy if is_shared else None))

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: made.loop) as runner:
                runner.run(server.serve(sockets=[listener]))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def reported(server: Running, path: str) -> Noted:
    """Wait for the `on_response` report of the next request to this path."""
    for _ in range(10_000):
        noted = server.noted.get(timeout=PATIENCE)
        if noted[0] == path:
            return noted
    raise AssertionError("the server is too talkative")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running(api_key=(KEY,), cors_origin=("https://page.example",)) as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with running(header_timeout=0.2, write_timeout=0.2, keep_alive_timeout=4000) as made:
        yield made


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class Wire:
    """A client's end of a connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.file: BinaryIO = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> bool:
        """Send; return False if the server has closed the connection."""
        try:
            self.socket.sendall(b"".join(parts))
        except OSError as error:
            assert not isinstance(error, TimeoutError)
            return False
        return True

    def reply(self, method: str = "GET") -> Reply:
        """Read one answer."""
        status = int(self.file.readline().split()[1])
        lines = iter(lambda: self.file.readline().strip(), b"")
        headers = {
            name.lower().decode(): value.strip().decode() for name, _, value in (x.partition(b":") for x in lines)
        }
        if method == "HEAD" or status in (100, 204):
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join(self.chunks()))
        if "content-length" not in headers:
            return Reply(status, headers, self.rest())
        return Reply(status, headers, self.file.read(int(headers["content-length"])))

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.file.readline(), 16):
            yield self.file.read(size)
            self.file.readline()
        self.file.readline()

    def rest(self) -> bytes:
        """Read until the server closes or resets the connection."""
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := self.file.read1(65536):
                parts.append(part)
        return b"".join(parts)

    def is_cut_while_dripping(self, drip: bytes) -> bool:
        """Send a byte whenever nothing was received for a while; return True once the server closes."""
        self.socket.settimeout(0.05)
        for i in range(200):
            try:
                return self.socket.recv(1) == b""
            except TimeoutError:
                if not self.send(drip[i % len(drip) :][:1]):
                    return True
            except ConnectionResetError:
                return True
        return False

    def reset(self) -> None:
        """Close with a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@contextlib.contextmanager
def wire(server: Running) -> Iterator[Wire]:
    client = Wire(server.port)
    try:
        yield client
    finally:
        client.close()


def request(server: Running, *parts: bytes, method: str = "GET") -> Reply:
    """Send bytes over a new connection, and read the response."""
    with wire(server) as client:
        client.send(*parts)
        return client.reply(method)


def get(path: str, *lines: bytes) -> bytes:
    return b"".join((b"GET ", path.encode(), b" HTTP/1.1\r\n", HOST, *(line + b"\r\n" for line in lines), b"\r\n"))


def post(*lines: bytes, body: bytes = b"", path: bytes = b"/echo") -> bytes:
    return b"".join((b"POST ", path, b" HTTP/1.1\r\n", HOST, JSON, *(line + b"\r\n" for line in lines), b"\r\n", body))


def check_error(reply: Reply, *statuses: int) -> None:
    assert reply.status in statuses
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert (
        set(reply.error) >= {"message", "type", "param", "code"}
        and reply.error["type"] == ApiError(reply.status, "").type
    )
    assert "server" not in reply.headers


# Valid requests


def test_requests_are_answered_on_one_connection(server: Running) -> None:
    with wire(server) as client:
        for i in range(5):
            client.send(get(f"/{i}", b"X-Request-Id: r%d" % i))
            reply = client.reply()
            assert (reply.status, json.loads(reply.body)["path"]) == (200, f"/{i}")
            assert reply.headers["x-request-id"] == f"r{i}" and "date" in reply.headers
            assert "server" not in reply.headers and "connection" not in reply.headers
            client.send(post(b"Content-Length: 3", body=b"abc"))
            assert json.loads(client.reply().body)["bytes"] == 3
            client.send(post(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nA: b\r\n\r\n"))
            assert json.loads(client.reply().body)["bytes"] == 5


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with wire(server) as client:
        body = post(b"Content-Length: 2", body=b"{}")
        client.send(b"".join(get(f"/p{i}") + body for i in range(20)))
        for i in range(20):
            assert json.loads(client.reply().body) == {"path": f"/p{i}", "bytes": 0}
            assert json.loads(client.reply().body) == {"path": "/echo", "bytes": 2}


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://localhost/a/b?c=http://d", "/a/b"),
        ("HTTP://127.0.0.1:8000/a", "/a"),
        ("https://localhost", "/"),
        ("http://localhost?q", "/"),
        ("http://localhost//a", "//a"),
    ],
)
def test_a_target_may_be_a_whole_url(server: Running, target: str, path: str) -> None:
    """RFC 9112, 3.2.2: a server must accept it, and ignore the Host header beside it."""
    for host in (b"localhost", b"elsewhere.example", b"no host"):
        reply = request(server, get(target).replace(HOST, b"Host: " + host + b"\r\n"))
        assert reply.status == 200 and json.loads(reply.body)["path"] == path
    with wire(server) as client:
        client.send(post(b"Content-Length: 3", body=b"abc", path=target.encode()), get(target))
        assert [json.loads(client.reply().body)["bytes"] for _ in range(2)] == [3, 0]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://elsewhere.example/a", 403),
        ("http://user@localhost/a", 400),
        ("http:///a", 400),
        ("http://localhost:99999/", 400),
    ],
)
def test_the_host_of_a_whole_url_is_checked_instead_of_the_header(server: Running, target: str, status: int) -> None:
    check_error(request(server, get(target)), status)


def test_a_whole_url_needs_a_key_and_a_host_header_as_its_path_does(keyed: Running) -> None:
    check_error(request(keyed, get("http://localhost/v1/models")), 401)
    assert request(keyed, get("http://localhost/health").replace(HOST, b"")).status == 400
    assert request(keyed, get("http://localhost/health")).status == 200


def test_head_has_no_body(server: Running) -> None:
    with wire(server) as client:
        for path in ("/health", "/fail"):
            client.send(get(path).replace(b"GET", b"HEAD"), get("/after"))
            head = client.reply("HEAD")
            assert int(head.headers["content-length"]) > 0
            assert json.loads(client.reply().body)["path"] == "/after"
    assert request(server, b"HEAD / HTTP/1.1\r\n\r\n").status == 400


def test_expect_continue_is_answered(server: Running) -> None:
    with wire(server) as client:
        client.send(post(b"Content-Length: 5", b"Expect: 100-continue"))
        assert client.reply().status == 100
        client.send(b"hello")
        assert json.loads(client.reply().body)["bytes"] == 5
        client.send(post(b"Content-Length: %d" % (LIMIT + 1), b"Expect: 100-continue"))
        reply = client.reply()
        check_error(reply, 413)
        assert reply.headers["connection"] == "close"


def test_http_1_0_is_served(server: Running) -> None:
    with wire(server) as client:
        client.send(b"GET /old HTTP/1.0\r\n", HOST, b"\r\n")
        assert b'"/old"' in client.rest()
    assert request(server, b"GET /old HTTP/1.0\r\n\r\n").status == 400


def test_upgrade_is_ignored(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for protocol in (b"websocket", b"h2c"):
        reply = request(
            server, get("/up", b"Connection: upgrade", b"Upgrade: " + protocol, b"Sec-WebSocket-Version: 13")
        )
        assert (reply.status, json.loads(reply.body)["path"]) == (200, "/up")
    assert not caplog.records


def test_bytes_after_connection_close_are_dropped(server: Running) -> None:
    with wire(server) as client:
        client.send(get("/last", b"Connection: close"), get("/smuggled"))
        assert json.loads(client.reply().body)["path"] == "/last"
        assert client.rest() == b""
    assert "/smuggled" not in server.app.paths


def test_late_bytes_after_connection_close_are_dropped(server: Running) -> None:
    with wire(server) as client:
        client.send(get("/wait", b"Connection: close"))
        # After two responses the server waits for data; after the next it has read the late bytes.
        assert request(server, get("/x")).status == 200
        client.send(b"\r\n", SMUGGLED)
        assert request(server, get("/open")).status == 200
        assert json.loads(client.reply().body)["path"] == "/wait"
        assert client.rest() == b""
    assert "/smuggled" not in server.app.paths


# Hosts, keys, pages

HOSTS = [b"a/b", b"a?x", b"a#", b"a@b", b"", b" ", b"localhost/health?", b"x/health?", b"a:b", b"a" * 8192, None]
PATHS = [b"/health", b"/", b"/v1/models", b"/v1/chat/completions", b"/metrics", b"/nowhere"]


@pytest.mark.parametrize("path", PATHS)
def test_host_header_does_not_bypass_key(keyed: Running, path: bytes) -> None:
    served = list(keyed.app.paths)
    for host in HOSTS:
        line = b"" if host is None else b"Host: " + host + b"\r\n"
        for key in (b"", b"Authorization: Bearer first-key-1\r\n"):
            assert request(keyed, b"GET ", path, b" HTTP/1.1\r\n", line, key, b"\r\n").status == 400
            assert request(keyed, b"POST ", path, b" HTTP/1.1\r\n", line, key, JSON, b"\r\n").status == 400
    evil = request(keyed, b"GET ", path, b" HTTP/1.1\r\nHost: evil.com\r\n\r\n")
    check_error(evil, 403)
    assert keyed.app.paths == served


METHODS = (b"GET", b"HEAD", b"OPTIONS", b"POST", b"DELETE", b"CONNECT", b"BREW")
TARGETS = (b"/v1/models", b"/metrics", b"/nowhere", b"http://localhost/v1/models", b"/health%2f", b"*")


def test_requests_without_key_are_refused(keyed: Running) -> None:
    def check(method: bytes, target: bytes) -> None:
        for lines in (b"", b"Origin: https://page.example\r\n", b"Authorization: Bearer first-key-\r\n"):
            reply = request(
                keyed, method, b" ", target, b" HTTP/1.1\r\n", HOST, JSON, lines, b"\r\n", method=method.decode()
            )
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")

    assert failures(check, product(METHODS, TARGETS)) == []


def test_keys_and_preflights_over_the_wire(keyed: Running) -> None:
    assert request(keyed, get("/v1/models", b"Authorization: bearer first-key-1")).status == 200
    assert request(keyed, get("/v1/models", b"X-API-Key: first-key-1")).status == 200
    assert request(keyed, get("/health")).status == 200
    requests = (b"Access-Control-Request-Method: POST", b"Origin: https://page.example")
    assert request(keyed, get("/v1/models", *requests).replace(b"GET", b"OPTIONS", 1)).status == 200
    evil = (b"Access-Control-Request-Method: POST", b"Origin: https://evil.example")
    reply = request(keyed, get("/v1/models", *evil).replace(b"GET", b"OPTIONS", 1))
    assert reply.status == 400 and "access-control-allow-origin" not in reply.headers


def test_post_without_preflight_is_refused(server: Running) -> None:
    for kind in (b"text/plain", b"application/x-www-form-urlencoded"):
        reply = request(server, post(b"Content-Length: 2", body=b"{}").replace(b"application/json", kind))
        check_error(reply, 415)


# Invalid HTTP, as h11 refuses it

CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = get("/smuggled")
REFUSED = {
    "two lengths": post(b"Content-Length: 0", b"Content-Length: 5"),
    "negative length": post(b"Content-Length: -1"),
    "signed length": post(b"Content-Length: +0"),
    "length of another name": post(b"Content-Length : 0"),
    "nul in a value": get("/", b"A: b\x00c"),
    "no colon": get("/", b"A"),
    "two hosts": get("/", b"Host: localhost"),
    "no version": b"GET /\r\n" + HOST + b"\r\n",
    "control character": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    "chunk size of letters": post(CHUNKED, body=b"zz\r\n"),
    "negative chunk": post(CHUNKED, body=b"-5\r\nhello\r\n0\r\n\r\n"),
    "bad trailer": post(CHUNKED, body=b"0\r\nA\r\n\r\n"),
    "gzip": post(b"Transfer-Encoding: gzip", body=b"0\r\n\r\n"),
    "two codings": post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
}


def test_invalid_request_is_refused_and_nothing_after_it_is_read(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def check(name: str) -> None:
        with wire(server) as client:
            client.send(REFUSED[name], SMUGGLED)
            reply = client.reply()
            assert reply.status == 400 and reply.headers["connection"] == "close"
            assert client.rest() == b""
        assert "/smuggled" not in server.app.paths
        assert not caplog.records, "any client could fill a log"

    assert failures(check, zip(REFUSED)) == []


def test_garbage_after_an_answer_is_refused_after_it(server: Running) -> None:
    with wire(server) as client:
        client.send(get("/fine"), b"\x00\x01garbage\r\n\r\n")
        assert [client.reply().status for _ in range(2)] == [200, 400]
        assert client.rest() == b""


def test_bad_chunk_disconnects_application(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(post(CHUNKED, path=b"/bad-chunk"), b"zz\r\n")
        assert client.reply().status == 400
        assert reported(hasty, "/bad-chunk")[1] is None


def test_bad_chunk_after_response_start_closes_connection(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with wire(server) as client:
        client.send(post(CHUNKED, path=b"/talk"))
        assert client.file.readline().startswith(b"HTTP/1.1 200")
        client.send(b"zz\r\n")
        rest = client.rest()
        assert b"HTTP/1.1" not in rest and not rest.endswith(b"0\r\n\r\n")
    assert not [record for record in caplog.records if record.exc_info]


# Too much


def test_a_giant_header_is_refused(server: Running) -> None:
    with wire(server) as client:
        client.send(b"GET / HTTP/1.1\r\n", HOST, b"A: ")
        assert sum(client.send(b"a" * 65536) for _ in range(80)) < 80


def test_large_head_in_one_packet_is_refused(server: Running) -> None:
    assert request(server, get("/", b"A: " + b"a" * MAX_HEAD_BYTES)).status == 400
    assert request(server, get("/", b"A: " + b"a" * (MAX_HEAD_BYTES - 100))).status == 200


def test_endless_body_is_refused_and_not_read(server: Running) -> None:
    with wire(server) as client:
        client.send(post(CHUNKED))
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        taken = 0
        while taken < 1024 and client.send(chunk):
            taken += 1
        assert taken < 1024, "64 MiB were taken"
        check_error(client.reply(), 413)


def test_large_body_error_reaches_client(server: Running) -> None:
    with wire(server) as client:
        body = b"x" * (LIMIT + 1)
        client.send(post(b"Content-Length: %d" % len(body), body=body), SMUGGLED)
        check_error(client.reply(), 413)
        assert client.rest() == b""
    assert "/smuggled" not in server.app.paths


def test_client_that_reads_after_sending_gets_error() -> None:
    with running(linger_seconds=PATIENCE) as server, wire(server) as client:
        assert client.send(post(b"Content-Length: %d" % (8 << 20)), b"x" * (8 << 20)), "closed on bytes in flight"
        check_error(client.reply(), 413)


def test_large_content_length_is_refused_before_body(server: Running) -> None:
    check_error(request(server, post(b"Content-Length: 1000000000")), 413)
    with wire(server) as client:
        client.send(get("/no-body", b"Content-Length: 5"), b"hello", SMUGGLED)
        reply = client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert client.rest() == b""
    assert "/smuggled" not in server.app.paths


def test_range_header_is_ignored(server: Running) -> None:
    reply = request(server, get("/", b"Range: bytes=" + b"0-," * 10_000 + b"0-"))
    assert (reply.status, json.loads(reply.body)["path"]) == (200, "/")


# Too slow


@pytest.mark.parametrize("drip", [b"GET / HTTP/1.1\r\n", b"A: " + b"b" * 300])
@pytest.mark.parametrize("before", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_slow_head_is_disconnected(hasty: Running, before: bytes, drip: bytes) -> None:
    with wire(hasty) as client:
        client.send(before)
        assert client.is_cut_while_dripping(drip)


def test_silent_connection_is_closed(hasty: Running) -> None:
    with wire(hasty) as client:
        assert client.rest() == b""


def test_slow_second_head_is_disconnected_but_idle_is_not(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(get("/one"))
        assert client.reply().status == 200
        client.socket.settimeout(0.6)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        client.socket.settimeout(PATIENCE)
        client.file = client.socket.makefile("rb")
        client.send(get("/two"), b"GET /thr")
        assert client.reply().status == 200
        assert client.is_cut_while_dripping(b"ee" * 300)


def test_pipelined_incomplete_head_is_disconnected(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(get("/one"), b"GET /tw")
        assert client.reply().status == 200
        assert client.rest() == b""


def test_an_idle_connection_is_closed() -> None:
    with running(keep_alive_timeout=0.2) as server, wire(server) as client:
        client.send(get("/one"))
        assert client.reply().status == 200
        assert client.rest() == b""


def test_missing_body_is_answered_with_408(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(post(b"Content-Length: 5"), b"he")
        check_error(client.reply(), 408)
    with wire(hasty) as client:
        client.send(post(CHUNKED), b"1\r\n")
        check_error(client.reply(), 408)


def test_unread_body_must_arrive_in_time() -> None:
    with running(is_guarded=False, header_timeout=0.2, keep_alive_timeout=4000) as server, wire(server) as client:
        client.send(get("/no-body", b"Content-Length: 5"), b"he")
        assert client.reply().status == 200
        assert client.rest() == b""


def test_client_that_does_not_read_is_disconnected(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(get("/endless"))
        assert reported(hasty, "/endless")[1] is None
        assert not client.rest().endswith(b"0\r\n\r\n")


def test_unread_end_of_response_does_not_delay_shutdown() -> None:
    with running(write_timeout=0.2) as server:
        client = Wire(server.port)
        client.send(get("/big", b"Connection: close"))
        reported(server, "/big")
        # Leaving the block waits for all connections, although this client never reads.
    client.close()


# Too many


def test_more_connections_than_allowed_are_refused() -> None:
    with running(max_connections=2) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(wire(server)) for _ in range(2))
        for client in (first, second):
            client.send(get("/in"))
            assert client.reply().status == 200
        third = stack.enter_context(wire(server))
        reply = third.reply()
        check_error(reply, 503)
        assert (reply.headers["connection"], reply.headers["retry-after"]) == ("close", "1")
        assert third.rest() == b""
        first.send(get("/still-in"))
        assert first.reply().status == 200
        second.close()
        replies = (request(server, get("/again")).status for _ in range(1000))
        assert 200 in replies


def status_from(server: Running, address: str, stack: contextlib.ExitStack) -> int:
    """Send a request from a local address and stay connected; return the status."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 60, (address, 0)))
    client.sendall(get("/in"))
    return int(client.recv(1 << 16).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not this machine")
def test_connections_per_address_are_limited() -> None:
    with running(max_connections=6, client_share=0.5, is_shared=True) as server, contextlib.ExitStack() as stack:
        assert [status_from(server, "127.0.0.1", stack) for _ in range(4)] == [200, 200, 200, 503]
        assert [status_from(server, "127.0.0.2", stack) for _ in range(2)] == [200, 200]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is not this machine")
def test_trusted_proxy_has_no_connection_limit() -> None:
    trusted = {"client_share": 0.5, "trusted_proxy": ("127.0.0.2",)}
    with running(max_connections=6, is_shared=True, **trusted) as server, contextlib.ExitStack() as stack:
        assert [status_from(server, "127.0.0.2", stack) for _ in range(5)] == [200] * 5


# Failures


def test_a_failure_is_answered_and_printed_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    reply = request(server, get("/fail"))
    check_error(reply, 500)
    assert b"secret" not in reply.body
    assert [record.name for record in caplog.records] == ["nano_inference.server"]


def test_failed_stream_is_cut_without_final_chunk(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with wire(server) as client:
        client.send(get("/late"), SMUGGLED)
        rest = client.rest()
    assert rest.startswith(b"HTTP/1.1 200") and rest.endswith(b"9\r\ndata: 1\n\n\r\n")
    _, status, error = reported(server, "/late")
    assert (status, type(error)) == (200, ValueError)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert "/smuggled" not in server.app.paths


@pytest.mark.parametrize("leave", [Wire.close, Wire.reset])
def test_client_disconnect_is_detected(server: Running, leave: Callable[[Wire], None]) -> None:
    name = f"/{leave.__name__}"
    client = Wire(server.port)
    client.send(post(b"Content-Length: 5", path=name.encode()))
    leave(client)
    assert reported(server, name)[1] is None
    client = Wire(server.port)
    client.send(get("/endless"))
    assert client.file.read(1) == b"H"
    leave(client)
    assert reported(server, "/endless")[1] is None


# Timers

HEAD, WRITE, IDLE = 4001.5, 4002.5, 4003.0


def test_timers_end_with_their_connection(caplog: pytest.LogCaptureFixture) -> None:
    with running(header_timeout=HEAD, write_timeout=WRITE, keep_alive_timeout=IDLE) as server:
        for leave in (Wire.close, Wire.reset):
            for sent in (b"", b"GET ", get("/a"), get("/a") + b"GET /", get("/endless"), b"\x00\r\n\r\n"):
                client = Wire(server.port)
                client.send(sent)
                if sent.startswith(b"GET /e"):
                    while server.loop.asked.get(timeout=PATIENCE) != WRITE:
                        pass
                elif b"/" in sent:
                    assert client.reply().status == 200
                leave(client)
    timers = {delay: [handle for d, handle in server.loop.timers if d == delay] for delay in (HEAD, WRITE, IDLE)}
    assert len(timers[HEAD]) >= 8 and len(timers[IDLE]) >= 4 and timers[WRITE]
    assert all(handle.cancelled() for handles in timers.values() for handle in handles)
    assert not [record for record in caplog.records if record.exc_info]


class Pipe(asyncio.Transport):
    """A transport that keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.calls: list[str] = []

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return "close" in self.calls or "abort" in self.calls

    def note(self, name: str, high: int | None = None) -> None:
        self.calls.append(name if high is None else f"{name} {high}")

    def __getattribute__(self, name: str) -> Any:
        if name in ("close", "abort", "write_eof", "pause_reading", "resume_reading", "set_write_buffer_limits"):
            return partial(self.note, name)
        return super().__getattribute__(name)


@contextlib.contextmanager
def protocol(**fields: Any) -> Iterator[tuple[LimitedProtocol, Pipe, TimedLoop]]:
    """A protocol without a server, its pipe and its loop, which is not run."""
    loop, pipe = TimedLoop(), Pipe()
    config = uvicorn_config(App(), ServerConfig(header_timeout=HEAD, write_timeout=WRITE, **fields))
    config.load()
    made = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    assert isinstance(made, LimitedProtocol)
    try:
        made.connection_made(pipe)
        yield made, pipe, loop
    finally:
        made.connection_lost(None)
        loop.close()


def due(loop: TimedLoop) -> list[float]:
    return [delay for delay, handle in loop.timers if not handle.cancelled()]


def test_read_timer_is_not_restarted_by_bytes() -> None:
    with protocol() as (made, _, loop):
        assert due(loop) == [HEAD]
        for byte in b"GET / HTTP/1.1\r\n":
            made.data_received(bytes([byte]))
        assert (due(loop), len(loop.timers)) == ([HEAD], 1)
    assert due(loop) == []


def test_write_timer_runs_while_client_does_not_read() -> None:
    with protocol() as (made, pipe, loop):
        assert pipe.calls == ["set_write_buffer_limits 0"], "else 64 KiB could wait for ever"
        made.pause_writing()
        made.pause_writing()
        assert due(loop) == [HEAD, WRITE]
        made.resume_writing()
        assert due(loop) == [HEAD]
        made.pause_writing()
        assert due(loop) == [HEAD, WRITE]
    assert due(loop) == []


def test_uvicorn_settings() -> None:
    app = App()
    config = uvicorn_config(app, ServerConfig(port=0, keep_alive_timeout=2.5))
    config.load()
    assert config.loaded_app is app and config.ws == "none"
    assert (config.timeout_keep_alive, config.h11_max_incomplete_event_size) == (3, MAX_HEAD_BYTES)
    assert (config.lifespan, config.loop, config.access_log, config.log_config) == ("off", "asyncio", False, None)
    assert (config.encoded_headers, config.date_header) == ([], True)
    assert not logging.getLogger("uvicorn.access").hasHandlers()
