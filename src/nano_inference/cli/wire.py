"""HTTP to an OpenAI-compatible server by the standard library: addresses, requests, server-sent events.

Redirects are never followed: the key is for the address that was given. Every failure is a `ServerError` of one line.
"""

from __future__ import annotations

import codecs
import http.client
import ipaddress
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from nano_inference.cli.printable import one_line
from nano_inference.cli.talk import ServerError
from nano_inference.types import BadRequest

_CONNECT_TIMEOUT_S = 10
_SILENCE_TIMEOUT_S = 300
"""Between two pieces of an answer; a busy server may let a request wait."""
_MAX_ERROR_BYTES = 1 << 16
_MAX_BODY_BYTES = 16 << 20
"""Of a whole reply, and of a single event."""
_CUT_OFF = "the connection was lost in the middle of the answer"
_READ_BYTES = 1 << 16

OnConnect = Callable[[Callable[[], None]], None]
"""Takes what ends the connection at once."""
OnHeaders = Callable[[Message], None]


class Refused(ServerError):
    """The server answered with an error. Its parts, for whoever can do something about it."""

    def __init__(self, text: str, status: int, code: str = "", param: str = "") -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param


class CutOff(ServerError):
    """The connection was lost before the server said that its answer was over."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is; its paths begin with `base`, which ends in /v1."""

    scheme: str
    host: str
    port: int
    base: str
    key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The address as it is shown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"

    @property
    def tells_key(self) -> bool:
        """Whether others on the way can read the key."""
        return self.key is not None and self.scheme == "http" and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def read_address(text: str, key: str | None) -> Address:
    """Return an address: a URL with or without http://, /v1 and a sub-path. Raises `BadRequest` naming the option."""
    text = text.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"--server {one_line(text)}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"--server must be a URL such as http://127.0.0.1:8000, got {one_line(text)!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadRequest("--server must be a URL without a user, a query and a fragment; --api-key takes the key")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest(f"--server must be ASCII without blanks, got {one_line(text)!r}")
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise BadRequest("--api-key must be ASCII without blanks")
    path = parts.path.rstrip("/")
    base = path if path.endswith("/v1") else f"{path}/v1"
    return Address(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), base, key)


def get_json(address: Address, path: str) -> Any:
    """Return the JSON at a path below the address. Raises `ServerError`."""
    with _response(address, "GET", path, None, lambda end: None) as response:
        return parsed(_read(response, _MAX_BODY_BYTES))


def stream_json(
    address: Address,
    path: str,
    body: dict[str, Any],
    on_connect: OnConnect,
    on_headers: OnHeaders = lambda headers: None,
) -> Iterator[Any]:
    """POST JSON and yield the JSON of every event until [DONE] or the end of the reply. Raises `ServerError`.

    A server that does not stream sends its whole reply, which then is the only event.
    """
    with _response(address, "POST", path, json.dumps(body).encode(), on_connect) as response:
        on_headers(response.headers)
        if not response.headers.get_content_type().endswith("event-stream"):
            yield parsed(_read(response, _MAX_BODY_BYTES))
            return
        events = Events()
        while data := response.read1(_READ_BYTES):
            for event in events.push(data):
                if event.strip() == "[DONE]":
                    return
                yield parsed(event)
        raise CutOff(_CUT_OFF)


@contextmanager
def _response(
    address: Address, method: str, path: str, body: bytes | None, on_connect: OnConnect
) -> Iterator[HTTPResponse]:
    """Open a connection for one request; it is closed when the block ends, which tells the server to stop."""
    make = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection: HTTPConnection = make(address.host, address.port, timeout=_CONNECT_TIMEOUT_S)
    headers = {"Accept": "text/event-stream, application/json", "User-Agent": "nano-inference"}
    headers |= {"Content-Type": "application/json"} if body is not None else {}
    headers |= {"Authorization": f"Bearer {address.key}"} if address.key is not None else {}
    try:
        connection.connect()
        connection.sock.settimeout(_SILENCE_TIMEOUT_S)
        on_connect(_ender(connection.sock))
        connection.request(method, f"{address.base}{path}", body, {**headers, "Connection": "close"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refusal(address, response)
        yield response
    except IncompleteRead as error:
        raise CutOff(_CUT_OFF) from error
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"{address.url}: {_reason(error)}") from error
    finally:
        on_connect(lambda: None)
        connection.close()


def _ender(sock: socket.socket) -> Callable[[], None]:
    """Return what ends a connection in the middle of a read, which then sees its end."""

    def end() -> None:
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS or not: the reader is not to wait for a goodbye

    return end


def _refusal(address: Address, response: HTTPResponse) -> ServerError:
    """Return what a reply with another status than 200 says."""
    if 300 <= response.status < 400:
        target = one_line(response.headers.get("Location", "nowhere"), 120)
        return Refused(f"{address.url}: redirects to {target}, which is not followed; --server can name it", 0)
    text = response.read(_MAX_ERROR_BYTES).decode("utf-8", "replace")
    message, code, param = _told(text)
    told = one_line(message or text) or one_line(response.reason or "")
    hint = "; --api-key gives the key" if response.status == 401 and address.key is None else ""
    return Refused(f"{address.url}: {response.status}: {told}{hint}", response.status, code, param)


def _told(text: str) -> tuple[str, str, str]:
    """Return message, code and field of an error body, in any of the shapes that servers have for it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return "", "", ""
    return error_of(data) or ("", "", "")


def error_of(data: Any) -> tuple[str, str, str] | None:
    """Return message, code and field of what speaks of an error, None when it does not."""
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("code") or ""), str(error.get("param") or "")
    if error:
        return str(error), "", ""
    if isinstance(data, dict) and "choices" not in data and (data.get("message") or data.get("detail")):
        return str(data.get("message") or data["detail"]), "", ""
    return None


def _read(response: HTTPResponse, limit: int) -> str:
    data = response.read(limit + 1)
    if len(data) > limit:
        raise ServerError(f"the server's reply has more than {limit >> 20} MiB")
    return data.decode("utf-8", "replace")


def parsed(text: str) -> Any:
    """Return JSON that a server sent. Raises `ServerError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ServerError(f"the server sent what is no JSON: {one_line(text, 80)!r}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, HTTPException):
        return f"this is not HTTP ({type(error).__name__})"
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)


class Events:
    """Server-sent events out of bytes, however they are cut: the data of each, as the HTML standard reads them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = ""
        self._data: list[str] = []
        self._size = 0

    def push(self, data: bytes) -> list[str]:
        """Take bytes; return the data of the events that they end. Raises `ServerError` for one without an end."""
        self._text += self._decoder.decode(data)
        done = []
        while (line := self._line()) is not None:
            if line:
                self._field(line)
            elif self._data:
                done.append("\n".join(self._data))
                self._data, self._size = [], 0
        if len(self._text) + self._size > _MAX_BODY_BYTES:
            raise ServerError(f"the server sent an event of more than {_MAX_BODY_BYTES >> 20} MiB")
        return done

    def _line(self) -> str | None:
        """Return the next whole line: it ends with CR, LF or both."""
        at = min((i for i in (self._text.find("\n"), self._text.find("\r")) if i >= 0), default=-1)
        if at < 0 or (self._text[at] == "\r" and at + 1 == len(self._text)):
            return None  # what follows may be the LF of a CR LF
        line, end = self._text[:at], at + (2 if self._text[at : at + 2] == "\r\n" else 1)
        self._text = self._text[end:]
        return line

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            value = value.removeprefix(" ")
            self._data.append(value)
            self._size += len(value)
