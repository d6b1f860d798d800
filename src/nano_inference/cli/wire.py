"""HTTP client of an OpenAI-compatible server: addresses, requests, server-sent events.

Redirects, and proxies and passwords from the environment, are ignored, so that the API key is sent to the given address
only. Every failure is a `ServerError` of one line.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from nano_inference.cli.conversation import ServerError
from nano_inference.cli.printable import one_line
from nano_inference.types import BadRequest

_CONNECT_TIMEOUT_S = 10
_SILENCE_TIMEOUT_S = 300  # between two chunks of a reply; a busy server may queue a request
_MAX_ERROR_BYTES = 1 << 16
MAX_BODY_BYTES = 16 << 20  # limit of a reply, and of an event
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")
"""Events of httpx2's `trace` extension whose result is the connection's stream."""

OnConnect = Callable[[Callable[[], None]], None]  # receives a function that closes the connection immediately
OnHeaders = Callable[[Mapping[str, str]], None]


class Refused(ServerError):
    """The server replied with an error status. `status` is 0 for a redirect."""

    def __init__(self, text: str, status: int, code: str = "", param: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param


class CutOff(ServerError):
    """The connection was lost before the end of the stream."""

    def __init__(self) -> None:
        super().__init__("the connection was lost in the middle of the answer")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address; `base` is the prefix of all paths and ends in /v1."""

    scheme: str
    host: str
    port: int
    base: str
    key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """URL without the key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"

    @property
    def exposes_key(self) -> bool:
        """True if the key is sent unencrypted over a network."""
        return self.key is not None and self.scheme == "http" and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """True if a host is this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def read_address(text: str, key: str | None) -> Address:
    """Parse a URL, with or without http://, /v1 and a sub-path. Raises `BadRequest` naming the option."""
    text = text.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise BadRequest("", f"--server {one_line(text)}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest("--server", f"must be a URL such as http://127.0.0.1:8000, got {one_line(text)!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadRequest("--server", "must be a URL without a user, a query and a fragment; --api-key takes the key")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest("--server", f"must be ASCII without blanks, got {one_line(text)!r}")
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise BadRequest("--api-key", "must be ASCII without blanks")
    path = parts.path.rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    return Address(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), base, key)


def get_json(address: Address, path: str) -> Any:
    """GET a path below the address and return its JSON. Raises `ServerError`."""
    with _response(address, "GET", path, None, lambda end: None) as response:
        return parsed(_read(response))


def stream_json(
    address: Address,
    path: str,
    body: dict[str, Any],
    on_connect: OnConnect,
    on_headers: OnHeaders = lambda headers: None,
    *,
    max_bytes: int = MAX_BODY_BYTES,
) -> Generator[Any, None, None]:
    """POST JSON and yield the JSON of every event until [DONE]. Raises `ServerError`, `CutOff` without [DONE].

    The reply of a server that does not stream is yielded as one event. An event has at most `max_bytes`.
    """
    with _response(address, "POST", path, body, on_connect, max_bytes) as response:
        on_headers(response.headers)
        if response.headers.get("content-type", "").partition(";")[0].strip().lower() != "text/event-stream":
            yield parsed(_read(response, max_bytes))
            return
        response.encoding = "utf-8-sig"  # the HTML standard: UTF-8 regardless of the header
        for event in httpx2.EventSource(response, max_event_size=max_bytes):
            if event.data.strip() == "[DONE]":
                return
            if event.data.strip():
                yield parsed(event.data)
        raise CutOff


@contextmanager
def _response(
    address: Address,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    on_connect: OnConnect,
    max_bytes: int = MAX_BODY_BYTES,
) -> Iterator[httpx2.Response]:
    """Send a request on a new connection; closing it at the end of the block makes the server abort the answer."""

    def trace(name: str, info: Mapping[str, Any]) -> None:
        if name in _CONNECTED:
            on_connect(_make_closer(info["return_value"].get_extra_info("socket")))

    headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
    headers |= {"User-Agent": "nano-inference"}
    headers |= {"Authorization": f"Bearer {address.key}"} if address.key is not None else {}
    timeout = httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    verify = ssl.create_default_context()  # the system's certificates, or those of SSL_CERT_FILE
    has_started = False
    try:
        with (
            httpx2.Client(headers=headers, timeout=timeout, trust_env=False, verify=verify) as client,
            client.stream(method, f"{address.url}{path}", json=body, extensions={"trace": trace}) as response,
        ):
            if response.status_code != httpx2.codes.OK:
                raise _refusal(address, response)
            has_started = True
            yield response
    except httpx2.SSEError as error:
        raise ServerError(f"the server sent an event of more than {max_bytes >> 20} MiB") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        if has_started and isinstance(error, httpx2.RemoteProtocolError):
            raise CutOff from error
        raise ServerError(f"{address.url}: {_reason(error)}") from error
    finally:
        on_connect(lambda: None)


def _make_closer(sock: socket.socket) -> Callable[[], None]:
    """Return a function that shuts down a connection, so that a blocked read returns."""

    def end() -> None:
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # also for TLS, without its close handshake

    return end


def _refusal(address: Address, response: httpx2.Response) -> ServerError:
    """Return the error of a reply with a status other than 200."""
    status = response.status_code
    if response.is_redirect:
        target = one_line(response.headers["location"], 120)
        return Refused(f"{address.url}: redirects to {target}; give that URL as --server", 0)
    text = _read(response, cut_at=_MAX_ERROR_BYTES)
    message, code, param = _error_fields(text)
    reason = one_line(message or text) or one_line(response.reason_phrase)
    hint = "; give the key as --api-key" if status == httpx2.codes.UNAUTHORIZED and address.key is None else ""
    return Refused(f"{address.url}: {status}: {reason}{hint}", status, code, param)


def _error_fields(text: str) -> tuple[str, str, str]:
    """Return message, code and field of an error body; empty strings if it is not JSON or has another format."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return "", "", ""
    return error_of(data) or ("", "", "")


def error_of(data: Any) -> tuple[str, str, str] | None:
    """Return message, code and field of an error object, in the formats of several servers; None for other objects."""
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("code") or ""), str(error.get("param") or "")
    if error:
        return str(error), "", ""
    if isinstance(data, dict) and "choices" not in data and (data.get("message") or data.get("detail")):
        return str(data.get("message") or data["detail"]), "", ""
    return None


def _read(response: httpx2.Response, max_bytes: int = MAX_BODY_BYTES, *, cut_at: int | None = None) -> str:
    """Return the body's text, truncated at `cut_at` bytes; if that is None, raises `ServerError` for a long body."""
    limit = max_bytes if cut_at is None else cut_at
    data = b""
    for piece in response.iter_bytes():
        data += piece
        if len(data) > limit and cut_at is None:
            raise ServerError(f"the server's reply has more than {limit >> 20} MiB")
        if len(data) > limit:
            break
    return data[:limit].decode("utf-8", "replace")


def parsed(text: str) -> Any:
    """Parse JSON from a server. Raises `ServerError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServerError(f"the server sent invalid JSON: {one_line(text, 80)!r}") from None


def _reason(error: Exception) -> str:
    """Return the reason of a failed request, the operating system's if it is the cause."""
    if isinstance(error, httpx2.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx2.ProtocolError):
        return f"this is not HTTP ({one_line(str(error), 80)})"
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__cause__ or cause.__context__
    return one_line(str(getattr(cause, "strerror", None) or error) or type(error).__name__)
