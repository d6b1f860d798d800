"""Protocol and guard over real sockets: a server in a thread, and clients that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import LINGER_SECONDS, Guard, read_body
from nano_inference.server.protocol import MAX_HEAD_BYTES, uvicorn_config
from nano_inference.server.security import KeyRing, load_keys

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


@dataclass
class Running:
    """A server that listens."""

    port: int
    app: App
    noted: queue.Queue[Noted] = field(default_factory=queue.Queue)


@contextlib.contextmanager
def running(
    *, is_guarded: bool = True, is_shared: bool = False, linger_seconds: float = LINGER_SECONDS, **fields: Any
) -> Iterator[Running]:
    """Run a server in a thread; `is_shared` limits the connections per address."""
    config = ServerConfig(max_body_bytes=LIMIT, **fields)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Running(listener.getsockname()[1], App())

        def note(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> None:
            made.noted.put((scope["path"], status, error))

        policy = replace(guard_policy(config, KeyRing.of(load_keys(config))), linger_seconds=linger_seconds)
        guard = Guard(made.app, policy, note)
        app = guard if is_guarded else made.app
        server = uvicorn.Server(uvicorn_config(app, config, policy if is_shared else None))

        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
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
    with running(header_timeout=1.0, write_timeout=0.2, keep_alive_timeout=4000) as made:
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

    def reply(self) -> Reply:
        """Read one answer."""
        status = int(self.file.readline().split()[1])
        lines = iter(lambda: self.file.readline().strip(), b"")
        headers = {
            name.lower().decode(): value.strip().decode() for name, _, value in (x.partition(b":") for x in lines)
        }
        size = headers.get("content-length")
        return Reply(status, headers, self.rest() if size is None else self.file.read(int(size)))

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


def request(server: Running, *parts: bytes) -> Reply:
    """Send bytes over a new connection, and read the response."""
    with wire(server) as client:
        client.send(*parts)
        return client.reply()


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


CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = get("/smuggled")


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


@pytest.mark.parametrize(
    ("before", "drip"), [(b"", b"GET / HTTP/1.1\r\n"), (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"A: " + b"b" * 300)]
)
def test_slow_head_is_disconnected(hasty: Running, before: bytes, drip: bytes) -> None:
    with wire(hasty) as client:
        client.send(before)
        assert client.is_cut_while_dripping(drip)


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


def test_client_that_does_not_read_is_disconnected(hasty: Running) -> None:
    with wire(hasty) as client:
        client.send(get("/endless"))
        assert reported(hasty, "/endless")[1] is None
        assert not client.rest().endswith(b"0\r\n\r\n")


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
