"""ASGI middleware that checks every request before it is routed, and completes the headers of every response.

In order: request id, Host, CORS, API key, content type and length. Decisions use only `scope["path"]`,
never a URL made from the Host header, which the client controls.

`Guard` wraps a router: around a Starlette application it would see failures after Starlette had answered them as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.server.config import DEFAULT_SHARE, ServerConfig, SettingError
from nano_inference.server.errors import ApiError, ErrorBody, internal_error
from nano_inference.server.security import (
    BYTES_TYPE,
    Client,
    Headers,
    Host,
    KeyRing,
    Network,
    address_of,
    announces_body,
    check_content,
    hosts_to_allow,
    is_from_page,
    is_loopback_name,
    load_admin_keys,
    networks,
    parse_host,
    presented_key,
    single,
    too_large,
    values,
)

_T = TypeVar("_T")
OnResponse = Callable[[Scope, int | None, float, Exception | None], None]
"""Called once per request with (scope, status, seconds, error); the status is None if the client disconnected."""

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/liveness", "/", "/dashboard", "/docs", "/formulas.js"})
"""Paths readable without a key: the server's health, and pages that ask their user for a key.

All other paths need one, including paths that do not exist.
"""
LINGER_SECONDS, LINGER_BYTES = 2.0, 32 << 20
"""How much of an unwanted body is read and dropped: most clients read the response only after sending their body."""
_FLOW_BYTES = 64 << 10  # of an unwanted stream must arrive within each `body_timeout`
LOCALHOST = "localhost"  # in a list of origins: those of this machine, any port of a loopback name with http or https
_MAX_STREAM = 1 << 50

_LOGGER = logging.getLogger("nano_inference.server")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[\x21-\x2e\x30-\x7e]+")
_LOOPBACK = r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?"
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_ALWAYS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_UNLESS_SET = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class ClientGone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """Which requests the guard admits. Routes read it from `scope["state"]["policy"]`."""

    keys: KeyRing  # of the ordinary routes; includes the admin keys. Empty: no key is needed
    admins: KeyRing = KeyRing.of(())  # of `admin_paths`; if empty, these take an ordinary key
    admin_paths: frozenset[str] = frozenset()
    stream_paths: frozenset[str] = frozenset()
    """Those of `admin_paths` whose body is bytes of any length, which the route bounds itself."""
    is_loopback: bool
    """True if only this machine can connect; another machine's Host then means DNS rebinding in a browser."""
    allowed_hosts: tuple[Host, ...] = ()
    cors_origins: frozenset[str] = frozenset()
    max_body_bytes: int
    body_timeout: float
    client_share: float = 1.0  # fraction of the capacity not held by others that one client may hold; 1: no quota
    trusted_proxies: tuple[Network, ...] = ()  # whose X-Forwarded-For is used
    linger_bytes: int = LINGER_BYTES
    linger_seconds: float = LINGER_SECONDS


def policy_of(
    config: ServerConfig, keys: KeyRing, admin_paths: frozenset[str], stream_paths: frozenset[str] = frozenset()
) -> GuardPolicy:
    """Return the policy of a configuration. Raises `ValueError` naming an invalid or unsafe field.

    `admin_paths` need an admin key if the configuration opens some of them; without it they have no effect.
    """
    is_loopback = is_loopback_name(config.host)
    admins = KeyRing.of(load_admin_keys(config))
    if not (is_loopback or not keys.is_empty or config.insecure):
        text = f"host {config.host} can be reached from other machines: set api_key_file or api_key, or insecure"
        raise SettingError(text, "host", "insecure")
    if config.takes_commands and not (is_loopback or not admins.is_empty or config.insecure):
        opened = "enable_rl" if config.enable_rl else "enable_lora"
        text = f"{opened}: host {config.host} can be reached from other machines: set admin_key_file or admin_key"
        raise SettingError(f"{text}, or insecure", "host", "insecure")
    for origin in config.cors_origin:
        if origin not in ("*", LOCALHOST) and not _ORIGIN.fullmatch(origin):
            form = "an origin such as https://example.org, without a path"
            raise ValueError(f"cors_origin must be *, localhost or {form}, got {origin!r}")
    return GuardPolicy(
        keys=keys.with_admins(admins),
        admins=admins,
        admin_paths=admin_paths if config.takes_commands else frozenset(),
        stream_paths=stream_paths if config.takes_commands else frozenset(),
        is_loopback=is_loopback and config.uds is None,  # web pages reach no Unix socket, whatever name it has
        allowed_hosts=hosts_to_allow(config),
        cors_origins=frozenset(config.cors_origin),
        max_body_bytes=config.max_body_bytes,
        body_timeout=config.header_timeout,
        client_share=_client_share(config, keys, admins),
        trusted_proxies=networks(config.trusted_proxy, "trusted_proxy"),
    )


def _client_share(config: ServerConfig, keys: KeyRing, admins: KeyRing) -> float:
    """Return the share as configured, else 1 if there is a single client, else `DEFAULT_SHARE`."""
    if config.client_share is not None:
        return config.client_share
    is_alone = len(keys.digests) + len(admins.digests) == 1
    if keys.is_empty:
        is_alone = is_loopback_name(config.host) and not config.trusted_proxy
    has_open_commands = config.takes_commands and admins.is_empty  # any client can end what others have
    return 1.0 if is_alone or has_open_commands else DEFAULT_SHARE


class Guard:
    """The middleware. `on_response` is called once per request, when its response is complete or abandoned."""

    def __init__(
        self,
        app: ASGIApp,
        policy: GuardPolicy,
        on_response: OnResponse | None = None,
        error_bodies: Mapping[str, ErrorBody] = MappingProxyType({}),
    ) -> None:
        self.app = app
        self.policy = policy
        self.on_response = on_response
        self.error_bodies = error_bodies  # path -> error body, for paths that do not use OpenAI's error object
        self._after_host = with_cors(self._answer, policy.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; pass lifespan events, refuse websockets."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        exchange = Exchange(scope, receive, send, self.policy, self.error_bodies.get(scope["path"]))
        try:
            check_host(scope["headers"], self.policy)
            await self._after_host(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.refuse(error, exchange.send)
        finally:
            status = None if exchange.is_gone else exchange.status
            try:
                if self.on_response is not None:
                    self.on_response(scope, status, exchange.seconds, exchange.error)
            except Exception:
                _LOGGER.exception("request %s was answered, but logging it failed", exchange.request_id)
            # Both would refer back to this exchange: only the garbage collector would free it.
            exchange.error = None
            del scope["state"]["exchange"]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request with a valid Host to the application, or refuse it."""
        exchange: Exchange = scope["state"]["exchange"]
        try:
            check_admission(scope, self.policy)
            exchange.drops_all = scope["method"] == "POST" and scope["path"] in self.policy.stream_paths
            await self.app(scope, receive, send)
            if exchange.status is None and not exchange.is_gone:
                raise RuntimeError("the application returned without an answer")
        except ClientGone as error:
            exchange.is_gone, exchange.error = True, error
        except asyncio.CancelledError:
            # Only the stopping server awaits this task: raising would only print a traceback.
            await exchange.refuse(ApiError(503, "the server is shutting down", code="shutting_down"), send)
        except Exception as error:
            if isinstance(error, ApiError) and exchange.status is None:
                await exchange.refuse(error, send)
                return
            # A started response stays incomplete, so that the connection is closed.
            _LOGGER.exception("request %s failed: %s", exchange.request_id, type(error).__name__)
            await exchange.refuse(internal_error(), send)
            exchange.error = error


def with_cors(app: ASGIApp, origins: frozenset[str]) -> ASGIApp:
    """Return an application that answers preflights, and lets pages of these origins read its responses.

    No credentials are allowed: a page sends its key in a header, which a browser adds to no request by itself.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=tuple(origins - {LOCALHOST}),
        allow_origin_regex=_LOOPBACK if LOCALHOST in origins else None,
        allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
        allow_headers=("*",),
        allow_private_network="*" not in origins,  # else any public page could reach a server in a private network
        expose_headers=("x-request-id", "x-max-tokens", "retry-after"),
    )


class Exchange:
    """One request and its response: adds the common headers, and tracks the progress of both."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, policy: GuardPolicy, error_body: ErrorBody | None = None
    ) -> None:
        self._receive = receive
        self._send = send
        self._policy = policy
        self._error_body = error_body
        self._started = time.monotonic()
        self._ended: float | None = None
        self._is_unread = announces_body(scope["headers"])
        self.status: int | None = None
        self.error: Exception | None = None
        self.is_gone = False
        self.drops_all = False
        """An unwanted body is read to its end, as long as it flows: its client may read the response only then."""
        given = single(scope["headers"], b"x-request-id")
        self.request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state.update(request_id=self.request_id, policy=policy, key_index=None, exchange=self)

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = self.is_gone or self._ended is None
        elif not message.get("more_body", False):
            self._is_unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._completed(message.get("headers", ()))}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = time.monotonic()
            if self._is_unread:
                await self._send({**message, "more_body": True})
                await self._drop_body()
                message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def refuse(self, error: ApiError, send: Send) -> None:
        """Send an error, unless a response has started or the client has disconnected."""
        self.error = error
        if self.status is None and not self.is_gone:
            body = error.to_json(self._error_body)
            extra = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *extra]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _completed(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return a response's headers with the common ones added."""
        forced = [*_ALWAYS, (b"x-request-id", self.request_id.encode())]
        if self._is_unread:
            # The rest of the body must not be parsed as the next request.
            forced.append((b"connection", b"close"))
        replaced = {name for name, _ in forced}
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in replaced]
        present = {name for name, _ in kept}
        return [*kept, *forced, *(header for header in _UNLESS_SET if header[0] not in present)]

    async def _drop_body(self) -> None:
        """Read and drop the rest of the body: closing with unread bytes can make the client lose the response."""
        room, new, loop = self._policy.linger_bytes, 0, asyncio.get_running_loop()
        seconds = self._policy.body_timeout if self.drops_all else self._policy.linger_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as limit:
                while room > 0 or self.drops_all:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    size = len(message.get("body", b""))
                    room, new = room - size, new + size
                    if self.drops_all and new >= _FLOW_BYTES:
                        new = 0
                        limit.reschedule(loop.time() + seconds)


def check_admission(scope: Scope, policy: GuardPolicy) -> None:
    """Note the request's key and client. Raises `ApiError` for a request that is refused."""
    headers, state = scope["headers"], scope["state"]
    if scope["path"] in policy.admin_paths:
        check_admin(scope, policy.admins)
    state["key_index"] = check_key(scope, policy.keys)
    state.update(client=client_of(scope, policy))
    # A router's `$` matches before a final newline, a set of paths does not.
    if any(char < " " or char == "\x7f" for char in scope["path"]):
        raise ApiError(404, "no such path: it contains a control character")
    # Trainers send admin commands without body and content type; web pages cannot.
    is_bare = not announces_body(headers) and not values(headers, b"content-type")
    if scope["method"] in _BODY_METHODS and not (is_bare and scope["path"] in policy.admin_paths):
        if scope["path"] in policy.stream_paths:
            check_content(headers, _MAX_STREAM, BYTES_TYPE)
        else:
            check_content(headers, policy.max_body_bytes)


def check_host(headers: Headers, policy: GuardPolicy) -> None:
    """Refuse a malformed Host, and one that is not this server's (DNS rebinding)."""
    text = single(headers, b"host")
    if not text:
        raise ApiError(400, "Host header is missing", code="bad_host")
    try:
        host = parse_host(text)
    except ValueError:
        raise ApiError(400, "Host header must be a name or address, with a port or without", code="bad_host") from None
    is_open = not policy.is_loopback and not policy.allowed_hosts
    is_listed = any(name == host[0] and port in (None, host[1]) for name, port in policy.allowed_hosts)
    if not (is_open or is_listed or is_loopback_name(host[0])):
        raise ApiError(403, f"host {host[0]!r} is not served here; see --allowed-host", code="host_not_allowed")


def check_key(scope: Scope, keys: KeyRing) -> int | None:
    """Return the index of the request's key, None if it has none and needs none. Raises `ApiError` 401."""
    if keys.is_empty:
        return None
    presented = presented_key(scope["headers"])
    found = keys.identify(presented)
    is_open = scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
    if found is None and not is_open:
        text = "this API key is not known" if presented else "an API key is needed: Authorization: Bearer KEY"
        raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return found


def client_of(scope: Scope, policy: GuardPolicy) -> Client:
    admin = None if policy.admins.is_empty else policy.admins.identify(presented_key(scope["headers"]))
    if admin is not None:
        return Client(f"admin {admin}", is_exempt=True)
    index = scope["state"]["key_index"]
    return Client(address_of(scope, policy.trusted_proxies) if index is None else f"key {index}")


def check_admin(scope: Scope, admins: KeyRing) -> None:
    """Refuse a command of a web page, and one without an admin key if there are admin keys."""
    headers = scope["headers"]
    is_read = scope["method"] in ("GET", "HEAD") and presented_key(headers) is None
    if is_from_page(headers) or (is_read and values(headers, b"accept-language")):  # a page's image has no other mark
        raise ApiError(403, "commands from web pages are not accepted", code="not_from_pages")
    if admins.is_empty or admins.identify(presented_key(headers)) is not None:
        return
    if presented_key(headers) is None:
        text = "an admin key is needed: Authorization: Bearer KEY"
        raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    raise ApiError(403, "this path needs an admin key", code="admin_key_needed")


async def until_gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Awaitable[_T], receive: Receive) -> _T:
    """Return the result of `work`. Raises `ClientGone` if the client leaves first, which cancels it."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def read_body(receive: Receive, limit: int, timeout: float) -> bytes:
    """Return the body. Raises `ApiError` if it exceeds `limit` bytes or `timeout` seconds; `ClientGone`."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout:g} seconds", code="body_timeout") from None
