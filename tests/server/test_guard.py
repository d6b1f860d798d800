"""The guard, called in process: admission, errors, and the headers of every response."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.server.app import guard_policy
from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.guard import OPEN_PATHS, ClientGone, Guard, GuardPolicy, OnResponse, read_body
from nano_inference.server.security import KeyRing
from tests.cases import failures

KEY = "first-key-1"
HOST = ("host", "localhost:8000")
JSON = ("content-type", "application/json")
BEARER = ("authorization", f"Bearer {KEY}")
END = {"type": "http.request", "body": b"", "more_body": False}
GONE = {"type": "http.disconnect"}
Header = tuple[str, str]
Noted = tuple[Scope, int | None, float, Exception | None]


@dataclass(frozen=True)
class Answer:
    """Messages sent by the application."""

    sent: list[Message]
    noted: list[Noted]

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode("latin-1") for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    @property
    def is_whole(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False) and len(self.sent) > 1


def policy_of(*keys: str, **fields: Any) -> GuardPolicy:
    fields.setdefault("insecure", True)
    return guard_policy(ServerConfig(**fields), KeyRing.of(keys))


def ask(
    app: ASGIApp,
    policy: GuardPolicy,
    *headers: Header,
    method: str = "GET",
    path: str = "/v1/models",
    messages: Iterable[Message] = (END,),
    host: Sequence[Header] = (HOST,),
    on_response: OnResponse | None = None,
) -> Answer:
    """Send one request through the guard; after its messages the client disconnects."""
    answer = Answer([], [])
    incoming = itertools.chain(messages, itertools.repeat(GONE))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in (*host, *headers)]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "http_version": "1.1", "query_string": b""}

    async def receive() -> Message:
        return next(incoming)

    async def send(message: Message) -> None:
        answer.sent.append(message)

    guard = Guard(app, policy, on_response or (lambda *noted: answer.noted.append(noted)))
    asyncio.run(asyncio.wait_for(guard(scope, receive, send), 30))
    return answer


async def request_body(scope: Scope, receive: Receive) -> bytes:
    """Read a body as a route does."""
    policy = scope["state"]["policy"]
    return await read_body(receive, policy.max_body_bytes, policy.body_timeout)


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 200 with the guard's state; read a possible body."""
    body = await request_body(scope, receive) if scope["method"] in ("POST", "PUT", "PATCH") else b""
    state = scope["state"]
    value = {"bytes": len(body), "key": state["key_index"], "id": state["request_id"], "path": scope["path"]}
    await JSONResponse(value)(scope, receive, send)


def failing(error: BaseException, *, after: Sequence[Message] = ()) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in after:
            await send(message)
        raise error

    return app


def sending(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


STARTED = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PART = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False}


def check_refused(answer: Answer, status: int) -> None:
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert set(answer.error) >= {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] and answer.headers["x-content-type-options"] == "nosniff"
    assert answer.is_whole


@pytest.mark.parametrize("given", ["", " ", "a b", "é", "x" * 129, "a\tb", "a\x7f"])
def test_invalid_request_id_is_replaced(given: str) -> None:
    answer = ask(served, policy_of(), ("x-request-id", given))
    made = answer.headers["x-request-id"]
    assert made != given and len(made) == 32 and int(made, 16) >= 0
    assert json.loads(answer.body)["id"] == made


MALFORMED = [
    *("", " ", "a/b", "a?x", "a@b", "a\tb", " localhost", "localhost/", "localhost?/health", "localhost,localhost"),
    *("localhost:", "localhost:x", "localhost:0", "localhost:65536", "localhost:80:80", "[::1", "::1", "[::g]", "[]"),
    *("http://localhost", "local%68ost", "a" * 256, "..", "a..b", ".a", "\x00", "lócalhost", "localhost\u00a0"),
]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/health/../v1/models"])
@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_malformed_host_is_refused(path: str, keys: tuple[str, ...]) -> None:
    policy = policy_of(*keys, host="0.0.0.0")
    for text in MALFORMED:
        check_refused(ask(served, policy, BEARER, path=path, host=[("host", text)]), 400)
    check_refused(ask(served, policy, BEARER, path=path, host=[]), 400)


def test_host_header_does_not_affect_path() -> None:
    policy = policy_of(KEY, host="0.0.0.0")
    for text in ("localhost", "health", "x.health", "localhost:8000"):
        assert ask(served, policy, path="/v1/models", host=[("host", text)]).status == 401
        assert ask(served, policy, path="/health", host=[("host", text)]).status == 200


OURS = ["localhost", "LocalHost:1", "localhost.", "127.0.0.1", "127.255.1.2:65535", "[::1]", "[::1]:80", "[0:0::1]"]
THEIRS = ["evil.com", "localhost.evil.com", "evil.com:8000", "0.0.0.0", "128.0.0.1", "[::2]", "[::ffff:127.0.0.1]"]
THEIRS += ["127.1", "2130706433", "0x7f000001", "127.0.0.01", "evillocalhost", "127.0.0.1.evil.com", "foo.localhost"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_loopback_serves_only_loopback_and_allowed_hosts(bound: str) -> None:
    policy = policy_of(host=bound)
    assert [ask(served, policy, host=[("host", text)]).status for text in OURS] == [200] * len(OURS)
    for text in THEIRS:
        refused = ask(served, policy, path="/health", host=[("host", text)])
        check_refused(refused, 403)
        assert refused.error["code"] == "host_not_allowed"
    allowing = policy_of(host=bound, allowed_host=("Evil.com",))
    got = [ask(served, allowing, host=[("host", text)]).status for text in (*OURS, "evil.COM:9", "x.evil.com")]
    assert got == [200] * (len(OURS) + 1) + [403]


def test_other_addresses_serve_any_host_unless_allowed_host_is_set() -> None:
    everybody = policy_of(host="0.0.0.0")
    assert {ask(served, everybody, host=[("host", text)]).status for text in OURS + THEIRS} == {200}
    named = policy_of(host="192.168.1.5", allowed_host=("nano.example", "[2001:db8::1]", "proxy:8443"))
    good = ["nano.example", "nano.example.:80", "[2001:DB8:0::1]:9", "192.168.1.5:8000", "proxy:8443", *OURS]
    assert {ask(served, named, host=[("host", text)]).status for text in good} == {200}
    v6 = policy_of(host="2001:DB8:0::1", allowed_host=("nano.example",))
    assert ask(served, v6, host=[("host", "[2001:db8::1]:80")]).status == 200
    bad = ["evil.com", "proxy", "proxy:1", "x.nano.example", "nano.example.evil.com", "192.168.1.6", "0.0.0.0"]
    assert {ask(served, named, host=[("host", text)]).status for text in bad} == {403}


def test_non_loopback_host_needs_a_key() -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert guard_policy(ServerConfig(), KeyRing.of(())).is_loopback
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "::ffff:127.0.0.1", "128.0.0.1"):
        with pytest.raises(ValueError, match=r"^host .*api_key"):
            guard_policy(ServerConfig(host=host), KeyRing.of(()))
        assert not guard_policy(ServerConfig(host=host), KeyRing.of((KEY,))).is_loopback
        assert not guard_policy(ServerConfig(host=host, insecure=True), KeyRing.of(())).is_loopback


@pytest.mark.parametrize("origin", ["evil", "https://a/", "null", "HTTPS://a", "https://a b", "https://"])
def test_invalid_cors_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"^cors_origin"):
        policy_of(cors_origin=(origin,))


@pytest.mark.parametrize("host", ["a/b", "http://a", "a b", "*"])
def test_invalid_allowed_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"^allowed_host"):
        policy_of(allowed_host=(host,))


METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "BREW", "get"]


async def plain(request: Request) -> Response:
    return Response("secret")


def routed() -> Starlette:
    """An application with routes and a mount."""
    routes = [Route(path, plain, methods=["GET", "POST"]) for path in (*sorted(OPEN_PATHS - {"/"}), "/v1/models")]
    mount = Mount("/metrics", routes=[Route("/", plain)])
    return Starlette(routes=[*routes, mount, Route("/", plain)])


GUARDED = [
    *("/v1/models", "/metrics", "/metrics/", "/nowhere", "/health/", "//health", "/Health", "/health/x", "/healthz"),
    *("/v1/../health", "/health?", "/health#", "/ready\n", "", "*", "/ping%00", "http://localhost/health", "/static/x"),
]


def test_all_but_open_paths_need_a_key() -> None:
    def check(method: str, path: str) -> None:
        policy = policy_of(KEY)
        for headers in ((), (("authorization", "Bearer wrong-key"),), (("origin", "http://localhost"),)):
            answer = ask(routed(), policy, JSON, *headers, method=method, path=path)
            check_refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"

    assert failures(check, product(METHODS, GUARDED)) == []


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_allow_only_get_and_head(path: str) -> None:
    policy = policy_of(KEY)
    taken = {method for method in METHODS if ask(routed(), policy, JSON, method=method, path=path).status == 200}
    assert taken == {"GET", "HEAD"}
    assert {"/health", "/ready", "/ping", "/liveness", "/", "/dashboard", "/docs", "/formulas.js"} == OPEN_PATHS


WRONG_KEYS = [
    *(("authorization", text) for text in (KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer{KEY}")),
    *(("authorization", f"Bearer {text}") for text in (KEY[:-1], KEY + KEY, KEY.upper(), "\xff\xfe")),
    *(("x-api-key", text) for text in ("", f"Bearer {KEY}", "x" * 60_000)),
    *((name, KEY) for name in ("cookie", "api-key")),
]


@pytest.mark.parametrize("header", WRONG_KEYS)
def test_wrong_key_is_refused_and_not_echoed(header: Header) -> None:
    answer = ask(served, policy_of(KEY), header)
    check_refused(answer, 401)
    assert KEY not in answer.body.decode() and len(answer.body) < 500


PAGE = "https://page.example"
EVIL = ("host", "evil.example")
ASKS = ("access-control-request-method", "POST")


@pytest.mark.parametrize("origin", ["null", "http://localhost:8000"])
def test_cors_is_off_by_default(origin: str) -> None:
    answer = ask(served, policy_of(), ("origin", origin))
    preflight = ask(routed(), policy_of(KEY), ("origin", origin), ASKS, method="OPTIONS")
    for headers in (answer.headers, preflight.headers):
        assert not [name for name in headers if name.startswith("access-control") or name == "vary"]
    assert preflight.status == 401


@pytest.mark.parametrize("app", [served, failing(ApiError(400, "no")), failing(RuntimeError())])
def test_allowed_origin_gets_cors_headers(app: ASGIApp) -> None:
    answer = ask(app, policy_of(cors_origin=(PAGE, "https://b.example")), ("origin", PAGE))
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


OTHERS = [PAGE + ".evil.com", PAGE + ":443", "http://page.example", PAGE + "/", PAGE.upper(), "null"]


@pytest.mark.parametrize("origin", OTHERS)
def test_other_origin_gets_no_cors_headers(origin: str) -> None:
    policy = policy_of(KEY, cors_origin=(PAGE,))
    answer = ask(served, policy, BEARER, ("origin", origin))
    assert "access-control-allow-origin" not in answer.headers and answer.headers["vary"] == "Origin"
    preflight = ask(failing(AssertionError("reached")), policy, ("origin", origin), ASKS, method="OPTIONS")
    assert (preflight.status, preflight.headers.get("access-control-allow-origin")) == (400, None)


LOCAL = ("http://localhost", "http://localhost:8080", "https://127.0.0.1", "http://[::1]:3000")
STRANGE = ("http://localhost.evil.com", "http://notlocalhost", "http://127.0.0.1.evil.com:80", "ftp://localhost")


@pytest.mark.parametrize("origin", [*LOCAL, *STRANGE, "http://localhost/", "http://localhost:", "http://127.0.0.2"])
def test_localhost_allows_pages_of_this_machine(origin: str) -> None:
    policy = policy_of(KEY, cors_origin=("localhost", PAGE))
    preflight = ask(served, policy, ("origin", origin), ASKS, method="OPTIONS")
    answer = ask(served, policy, BEARER, ("origin", origin))
    granted = [one.headers.get("access-control-allow-origin") for one in (preflight, answer)]
    assert granted == ([origin, origin] if origin in LOCAL else [None, None])
    assert preflight.status == (200 if origin in LOCAL else 400)
    assert ask(served, policy, BEARER, ("origin", PAGE)).headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere"])
def test_only_preflight_of_allowed_origin_needs_no_key(path: str) -> None:
    policy = policy_of(KEY, cors_origin=(PAGE,))
    wanted = ("access-control-request-headers", "authorization,content-type")
    reached = failing(AssertionError("reached"))
    answer = ask(reached, policy, ("origin", PAGE), ASKS, wanted, method="OPTIONS", path=path)
    assert (answer.status, answer.body, answer.is_whole) == (200, b"OK", True)
    assert answer.headers["access-control-allow-origin"] == PAGE and answer.headers["vary"].startswith("Origin")
    assert answer.headers["x-request-id"] and answer.headers["x-content-type-options"] == "nosniff"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    foreign = ask(reached, policy, ("origin", PAGE), ASKS, method="OPTIONS", host=(EVIL,))
    check_refused(foreign, 403)
    for headers in ((), (("origin", PAGE),), (ASKS,)):
        assert ask(routed(), policy, *headers, method="OPTIONS", path=path).status == 401
        with_key = ask(routed(), policy, BEARER, *headers, method="OPTIONS", path=path)
        assert with_key.status == {"/v1/models": 405, "/metrics": 307, "/nowhere": 404}[path]
    for method in ("GET", "POST", "DELETE"):
        assert ask(served, policy, JSON, ("origin", PAGE), ASKS, method=method, path=path).status == 401


BAD_KINDS = ["", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json"]
BAD_KINDS += ["text/plain; application/json", "application/jsonp", "application/json, text/plain"]


@pytest.mark.parametrize("method", ["POST", "PATCH"])
@pytest.mark.parametrize("kind", BAD_KINDS)
def test_content_types_without_preflight_are_refused(method: str, kind: str) -> None:
    answer = ask(failing(AssertionError("reached")), policy_of(), ("content-type", kind), method=method)
    check_refused(answer, 415)
    assert "application/json" in answer.error["message"]
    assert ask(served, policy_of(), JSON, ("content-type", "text/plain"), method=method).status == 415


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_missing_content_type_means_json_except_from_pages(method: str) -> None:
    body = {"type": "http.request", "body": b"{}", "more_body": False}
    answer = ask(served, policy_of(), ("content-length", "2"), method=method, messages=[body])
    assert (answer.status, json.loads(answer.body)["bytes"]) == (200, 2)
    for header in (("origin", PAGE), ("origin", "null"), ("sec-fetch-site", "cross-site")):
        check_refused(ask(failing(AssertionError("reached")), policy_of(), header, method=method), 415)
    large = ask(served, policy_of(), ("content-length", "1" + "0" * 18), method=method)
    check_refused(large, 413)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, gzip", ""])
def test_compressed_bodies_are_refused(coding: str) -> None:
    check_refused(ask(served, policy_of(), JSON, ("content-encoding", coding), method="POST"), 415)
    assert ask(served, policy_of(), JSON, ("content-encoding", "Identity"), method="POST").status == 200


@pytest.mark.parametrize("length", ["1025", "01025", str(2**63), "9" * 5000, "1" + "0" * 30])
def test_a_length_over_the_limit_is_refused_without_reading(length: str) -> None:
    policy = policy_of(max_body_bytes=1024)
    headers = (JSON, ("content-length", length))
    answer = ask(failing(AssertionError("reached")), policy, *headers, method="POST", messages=[])
    check_refused(answer, 413)
    assert "1024" in answer.error["message"] and answer.headers["connection"] == "close"
    assert ask(served, policy, JSON, ("content-length", "1024"), method="POST").status == 200


def test_a_body_is_counted_while_it_is_read() -> None:
    part = {"type": "http.request", "body": b"x" * 512, "more_body": True}
    policy = replace(policy_of(max_body_bytes=1024), linger_bytes=1024)
    chunked = ("transfer-encoding", "chunked")
    assert ask(served, policy, JSON, chunked, method="POST", messages=[part, part, END]).status == 200
    taken: list[Message] = []
    endless = (taken.append(part) or part for _ in range(10_000))
    answer = ask(served, policy, JSON, chunked, method="POST", messages=endless)
    check_refused(answer, 413)
    assert answer.headers["connection"] == "close"
    assert len(taken) <= 3 + 2, "three to see that it is too large, two to be polite"


def test_unread_body_is_dropped_for_limited_time() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(b"host", b"localhost"), (b"content-length", b"5"), (b"content-type", b"text/plain")]
    scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": raw}
    asyncio.run(asyncio.wait_for(Guard(served, replace(policy_of(), linger_seconds=0.01))(scope, receive, send), 60))
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert sent[0]["status"] == 415 and sent[1]["body"] and not sent[2]["body"]


class Clock(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("method", "size", "num_read"),
    [("POST", 1, 20), ("POST", 4096, 1000), ("POST", 64 << 10, 1000), ("GET", 64 << 10, 3)],
)
def test_the_rest_of_a_stream_is_dropped_while_it_flows(method: str, size: int, num_read: int) -> None:
    """A message comes every 0.7 s: of an endless body of single bytes no more is read than `body_timeout` allows."""
    count = itertools.count()
    part = {"type": "http.request", "body": b"x" * size, "more_body": True}
    policy = replace(policy_of(), stream_paths=frozenset({"/stream"}), body_timeout=20 * 0.7)
    kind = (b"content-type", b"application/octet-stream")
    headers = [(b"host", b"localhost"), kind, (b"transfer-encoding", b"chunked")]
    sent: list[Message] = []

    async def receive() -> Message:
        clock.now += 0.7
        await asyncio.sleep(0)
        return part if next(count) < 999 else END

    async def send(message: Message) -> None:
        sent.append(message)

    guard = Guard(failing(ApiError(409, "busy")), policy)
    scope = {"type": "http", "method": method, "path": "/stream", "headers": headers}
    clock = Clock()
    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(guard(scope, receive, send))
    assert sent[0]["status"] == 409 and not sent[-1].get("more_body", False)
    assert abs(next(count) - num_read) <= 1


@pytest.mark.parametrize("app", [served, failing(ApiError(404, "no")), failing(ValueError("no"))])
def test_every_response_has_security_headers(app: ASGIApp) -> None:
    headers = ask(app, policy_of()).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert "server" not in headers


def test_application_can_override_csp_but_not_nosniff() -> None:
    own = [(b"Cache-Control", b"max-age=9"), (b"content-security-policy", b"default-src 'self'")]
    start = {**STARTED, "headers": [*own, (b"X-Content-Type-Options", b"no"), (b"Vary", b"accept")]}
    answer = ask(sending(start, LAST), policy_of(cors_origin=(PAGE,)))
    names = [name for name, _ in answer.sent[0]["headers"]]
    assert answer.headers["cache-control"] == "max-age=9"
    assert answer.headers["content-security-policy"] == "default-src 'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert sorted(name for name in set(names) if names.count(name) > 1) == [b"vary"]


@pytest.mark.parametrize("error", [ValueError("late"), ApiError(400, "late")])
def test_failure_after_response_start_leaves_it_incomplete(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(failing(error, after=[STARTED, PART]), policy_of())
    assert [message["type"] for message in answer.sent] == ["http.response.start", "http.response.body"]
    assert not answer.is_whole and b"late" not in answer.body
    assert len(caplog.records) == 1
    assert [(status, noted) for _, status, _, noted in answer.noted] == [(200, error)]


def test_cancelled_task_answers_503_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(failing(asyncio.CancelledError()), policy_of())
    check_refused(answer, 503)
    assert not ask(failing(asyncio.CancelledError(), after=[STARTED, PART]), policy_of()).is_whole
    assert not caplog.records


def reported_of(app: ASGIApp, *headers: Header, **fields: Any) -> tuple[int | None, type | None]:
    answer = ask(app, policy_of(KEY), *headers, **fields)
    ((scope, status, seconds, error),) = answer.noted
    assert seconds >= 0 and scope["state"]["request_id"]
    return status, None if error is None else type(error)


def test_on_response_is_called_once_per_request() -> None:
    assert reported_of(served, BEARER) == (200, None)
    assert reported_of(served) == (401, ApiError)
    assert reported_of(served, host=[]) == (400, ApiError)
    assert reported_of(served, BEARER, ("content-type", "text/plain"), method="POST") == (415, ApiError)
    assert reported_of(failing(ApiError(503, "no")), BEARER) == (503, ApiError)
    assert reported_of(failing(KeyError("no")), BEARER) == (500, KeyError)
    assert reported_of(sending(STARTED, PART, LAST), BEARER) == (200, None)
    assert reported_of(sending(STARTED, PART), BEARER) == (200, None)


def test_disconnected_client_has_no_status() -> None:
    post = {"method": "POST", "messages": [GONE]}
    assert reported_of(served, BEARER, JSON, **post) == (None, ClientGone)
    assert not ask(served, policy_of(), JSON, **post).sent
    assert reported_of(failing(ClientGone(), after=[STARTED, PART]), BEARER) == (None, ClientGone)

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        await send(STARTED)
        assert (await receive())["type"] == "http.disconnect"

    async def watch_after(scope: Scope, receive: Receive, send: Send) -> None:
        await send(STARTED)
        await send(LAST)
        assert (await receive())["type"] == "http.disconnect"

    async def complain(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ApiError(400, "not delivered")

    assert not ask(complain, policy_of(), messages=[GONE]).sent
    assert reported_of(complain, BEARER, messages=[GONE]) == (None, ApiError)
    assert reported_of(watch, BEARER, messages=[GONE]) == (None, None)
    assert reported_of(watch_after, BEARER, messages=[GONE]) == (200, None)


def test_failing_on_response_does_not_break_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    answer = ask(served, policy_of(), on_response=fail)
    assert answer.status == 200 and answer.is_whole
    assert [record.getMessage().endswith("logging it failed") for record in caplog.records] == [True]


def test_websocket_is_refused() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    guard = Guard(failing(AssertionError("reached")), policy_of())
    asyncio.run(guard({"type": "websocket", "path": "/v1/models", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
