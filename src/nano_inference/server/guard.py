"""What every request passes before a route sees it, and every answer before a client does: one ASGI middleware.

In order: request id, header sanity, Host, CORS, API key, what a body may be. Only `scope["path"]` decides anything:
a URL put together from the Host header says what the client wants it to say.

`Guard` stands around a router. Around a whole Starlette application it would see failures only after Starlette answered
them in plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano_inference.config import DEFAULT_SHARE, ServerConfig, SettingError
from nano_inference.server.clients import Client, Network, address_of, networks
from nano_inference.server.cors import PREFLIGHT, cors_headers, is_preflight
from nano_inference.server.errors import ApiError, ErrorBody, internal_error
from nano_inference.server.headers import Headers, single, values
from nano_inference.server.hosts import Host, hosts_to_allow, is_loopback_name, parse_host
from nano_inference.server.keys import KeyRing, load_admin_keys

OnResponse = Callable[[Scope, int | None, float, Exception | None], None]
"""Told of each request once: its scope, the status (None: the client went away), the seconds, and what went wrong."""

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/", "/dashboard", "/formulas.js"})
"""What may be read without a key: how the server is, and pages that know nothing before they are given one.

Everything else needs one, whether it exists or not.
"""
MAX_HEADERS = 100
LINGER_SECONDS = 2.0
"""How long an unwanted body is read and dropped: most clients look at an answer only when they have sent theirs."""
LINGER_BYTES = 32 << 20

_LOGGER = logging.getLogger("nano_inference.server")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[\x21-\x2e\x30-\x7e]+")
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
_ALWAYS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_UNLESS_SET = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """Whom the guard lets in. A route finds it in `scope["state"]["policy"]`."""

    keys: KeyRing
    """Whoever may use the ordinary routes; when they need a key at all, an admin key is one, too."""
    admins: KeyRing = KeyRing.of(())
    """Whoever may use `admin_paths`; when there are none, an ordinary key will do."""
    admin_paths: frozenset[str] = frozenset()
    is_loopback: bool
    """Whether only this machine can connect; then a Host that is not this machine's comes from a tricked browser."""
    allowed_hosts: tuple[Host, ...] = ()
    cors_origins: frozenset[str] = frozenset()
    max_body_bytes: int
    body_timeout: float
    client_share: float = 1.0
    """Part of what the others leave that one client may hold; 1 is no quota."""
    trusted_proxies: tuple[Network, ...] = ()
    """Whose X-Forwarded-For is believed."""


def policy_of(config: ServerConfig, keys: KeyRing, admin_paths: frozenset[str]) -> GuardPolicy:
    """Return the policy of a configuration; raise `ValueError` naming a field that makes no sense, or is not safe.

    `admin_paths` need an admin key if `enable_rl` is set; without it they have no effect.
    """
    is_loopback = is_loopback_name(config.host)
    admins = KeyRing.of(load_admin_keys(config))
    if not (is_loopback or not keys.is_empty or config.insecure):
        text = f"host {config.host} can be reached from other machines: set api_key_file or api_key, or insecure"
        raise SettingError(text, "host", "insecure")
    if config.enable_rl and not (is_loopback or not admins.is_empty or config.insecure):
        text = f"enable_rl: host {config.host} can be reached from other machines: set admin_key_file or admin_key"
        raise SettingError(f"{text}, or insecure", "host", "insecure")
    for origin in config.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"cors_origin must be * or like https://example.org, without a path, got {origin!r}")
    return GuardPolicy(
        keys=keys.with_admins(admins),
        admins=admins,
        admin_paths=admin_paths if config.enable_rl else frozenset(),
        is_loopback=is_loopback,
        allowed_hosts=hosts_to_allow(config),
        cors_origins=frozenset(config.cors_origin),
        max_body_bytes=config.max_body_bytes,
        body_timeout=config.header_timeout,
        client_share=client_share(config, keys, admins),
        trusted_proxies=networks(config.trusted_proxy, "trusted_proxy"),
    )


def client_share(config: ServerConfig, keys: KeyRing, admins: KeyRing) -> float:
    """Return the part of the places that one client may hold; 1, no quota, where there is but one client.

    That is a server with a single key, or without keys on loopback behind no proxy, and one whose every client may
    command it as a trainer does.
    """
    if config.client_share is not None:
        return config.client_share
    if config.enable_rl and admins.is_empty:
        return 1.0
    if keys.is_empty:
        is_alone = is_loopback_name(config.host) and not config.trusted_proxy
    else:
        is_alone = keys.num_keys + admins.num_keys == 1
    return 1.0 if is_alone else DEFAULT_SHARE


class Guard:
    """The middleware. `on_response` is called once for each request, when its answer is complete or given up."""

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
        self.error_bodies = error_bodies
        """How errors are told on paths whose dialect has a way of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; lifespan passes, websockets are refused."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(Exchange(scope, receive, send, self.policy, self.error_bodies.get(scope["path"])))
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, exchange: Exchange) -> None:
        error: Exception | None = None
        try:
            error = await self._answer(exchange)
        finally:
            self._tell(exchange, error)

    async def _answer(self, exchange: Exchange) -> Exception | None:
        """Let the request through or refuse it; return what went wrong."""
        try:
            if check_admission(exchange.scope, self.policy) == "preflight":
                await exchange.respond(204, PREFLIGHT)
            else:
                await self.app(exchange.scope, exchange.receive, exchange.send)
            if exchange.status is None and not exchange.is_gone:
                raise RuntimeError("the application returned without an answer")
        except ClientGone as error:
            exchange.is_gone = True
            return error
        except asyncio.CancelledError:
            # Nobody awaits this task but the server that ends: passing it on would only print a traceback.
            return await exchange.refuse(ApiError(503, "the server is shutting down", code="shutting_down"))
        except Exception as error:
            return await self._fail(exchange, error)
        return None

    async def _fail(self, exchange: Exchange, error: Exception) -> Exception:
        """Answer a refusal or failure. An answer that has begun stays unfinished, and so the connection is closed."""
        if isinstance(error, ApiError) and exchange.status is None:
            return await exchange.refuse(error)
        _LOGGER.exception("request %s failed: %s", exchange.request_id, type(error).__name__)
        await exchange.refuse(internal_error())
        return error

    def _tell(self, exchange: Exchange, error: Exception | None) -> None:
        if self.on_response is None:
            return
        status = None if exchange.is_gone else exchange.status
        try:
            self.on_response(exchange.scope, status, exchange.seconds, error)
        except Exception:
            _LOGGER.exception("request %s was served, but could not be noted", exchange.request_id)


class Exchange:
    """One request and its answer: adds the headers every answer has, and knows how far both have come."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, policy: GuardPolicy, error_body: ErrorBody | None = None
    ) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._policy = policy
        self._error_body = error_body
        self._began = time.monotonic()
        self._ended: float | None = None
        self._is_unread = announces_body(scope["headers"])
        self.status: int | None = None
        self.is_gone = False
        self.request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {}).update(request_id=self.request_id, policy=policy, key_index=None)

    @property
    def seconds(self) -> float:
        """How long the request took, or takes so far."""
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    async def receive(self) -> Message:
        """Receive for the application."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = self.is_gone or self._ended is None
        elif not message.get("more_body", False):
            self._is_unread = False
        return message

    async def send(self, message: Message) -> None:
        """Send for the application."""
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

    async def respond(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send a whole answer."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> ApiError:
        """Send an error, unless an answer has begun or nobody is there; return it."""
        if self.status is None and not self.is_gone:
            body = (error if self._error_body is None else error.with_body(self._error_body)).to_json()
            own = [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
            await self.respond(error.status, [*described(body), *own], body)
        return error

    def _completed(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return an answer's headers with those that every answer has."""
        forced = [
            *_ALWAYS,
            (b"x-request-id", self.request_id.encode()),
            *cors_headers(self.scope, self._policy.cors_origins),
        ]
        if self._is_unread:
            # What is left of the body must not be taken for the next request.
            forced.append((b"connection", b"close"))
        replaced = {name for name, _ in forced} - {b"vary"}
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in replaced]
        present = {name for name, _ in kept}
        return [*kept, *forced, *(header for header in _UNLESS_SET if header[0] not in present)]

    async def _drop_body(self) -> None:
        """Read what is left of the body for a moment: closing on bytes in flight can cost the client the answer."""
        room = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while room > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    room -= len(message.get("body", b""))


def check_admission(scope: Scope, policy: GuardPolicy) -> Literal["request", "preflight"]:
    """Return "request", or "preflight" for a browser's question; raise the `ApiError` of what must not come in."""
    headers = scope["headers"]
    check_headers(headers)
    check_host(headers, policy)
    if is_preflight(scope, policy.cors_origins):
        return "preflight"
    if scope["path"] in policy.admin_paths:
        check_admin(scope, policy.admins)
    scope["state"]["key_index"] = check_key(scope, policy.keys)
    scope["state"].update(client=client_of(scope, policy))
    check_path(scope["path"])
    if scope["method"] in _BODY_METHODS and not is_bare_command(scope, policy):
        check_content(headers, policy.max_body_bytes)
    return "request"


def check_path(path: str) -> None:
    """Refuse control characters: a router may find a path where a line ends, which no list of paths has."""
    if any(char < " " or char == "\x7f" for char in path):
        raise ApiError(404, "no such path: it holds a control character")


def request_id_of(headers: Headers) -> str:
    """Return the client's name for the request when it can be logged and sent back as it is, else a new one."""
    given = single(headers, b"x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def announces_body(headers: Headers) -> bool:
    """Whether a request says that a body follows (RFC 9112, 6.3)."""
    lengths = values(headers, b"content-length")
    return bool(values(headers, b"transfer-encoding")) or any(length.strip("0") for length in lengths)


def check_headers(headers: Headers) -> None:
    """Refuse too many headers, and what another server on the way might have read differently."""
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, f"{len(headers)} headers, {MAX_HEADERS} are allowed", code="too_many_headers")
    for name in (b"content-length", b"host"):
        if len(values(headers, name)) > 1:
            raise ApiError(400, f"{name.decode()} header is repeated", code="repeated_header")


def check_host(headers: Headers, policy: GuardPolicy) -> None:
    """Refuse a Host that is malformed, or that is not this server's: a page may have bound its name to our address."""
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
    """Return the index of the request's key; None when none is needed. Raise the 401 when one is."""
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
    """Return whose request it is, once its key was checked."""
    admin = None if policy.admins.is_empty else policy.admins.identify(presented_key(scope["headers"]))
    if admin is not None:
        return Client(f"admin {admin}", is_exempt=True)
    index = scope["state"]["key_index"]
    return Client(address_of(scope, policy.trusted_proxies) if index is None else f"key {index}")


def check_admin(scope: Scope, admins: KeyRing) -> None:
    """Refuse a command without an admin key when there are such keys, and every command of a web page."""
    headers = scope["headers"]
    if values(headers, b"origin") or values(headers, b"sec-fetch-site"):
        raise ApiError(403, "commands are not taken from web pages", code="not_from_pages")
    if admins.is_empty or admins.identify(presented_key(headers)) is not None:
        return
    if presented_key(headers) is None:
        text = "an admin key is needed: Authorization: Bearer KEY"
        raise ApiError(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    raise ApiError(403, "this path needs an admin key", code="admin_key_needed")


def is_bare_command(scope: Scope, policy: GuardPolicy) -> bool:
    """Whether it is a command without a body and without its type, as trainers send some; pages cannot send one."""
    headers = scope["headers"]
    is_bare = not announces_body(headers) and not values(headers, b"content-type")
    return is_bare and scope["path"] in policy.admin_paths


def presented_key(headers: Headers) -> str | None:
    """Return the key that a request brings: as OpenAI's clients send it, or else as Anthropic's do."""
    scheme, _, key = (single(headers, b"authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else single(headers, b"x-api-key")


def check_content(headers: Headers, max_body_bytes: int) -> None:
    """Refuse a body that is not JSON (which a page may send anywhere unasked), or that says it is too large."""
    kind = (single(headers, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the body as JSON, with the header Content-Type: application/json")
    if any(value.strip().lower() != "identity" for value in values(headers, b"content-encoding")):
        raise ApiError(415, "send the body as it is, without Content-Encoding")
    length = single(headers, b"content-length")
    if length is None:
        return
    if not (length.isascii() and length.isdigit()):
        raise ApiError(400, "Content-Length must be a number of bytes")
    digits = length.lstrip("0") or "0"
    # Python refuses to read numbers of thousands of digits.
    if len(digits) > 18 or int(digits) > max_body_bytes:
        raise too_large(max_body_bytes)


def too_large(limit: int) -> ApiError:
    """Return the refusal of a body above the limit."""
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def described(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that say what a JSON body is."""
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]


async def read_body(receive: Receive, limit: int, timeout: float) -> bytes:
    """Return the whole body. `ApiError`: over the limit, or not there in time; `ClientGone`: nobody waits for more."""
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
