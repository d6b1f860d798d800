"""HTTP client of an OpenAI-compatible server: addresses, requests, server-sent events.

Redirects, and proxies and passwords from the environment, are ignored, so that the API key is sent to the given address
only. Every failure is a `ServerError` of one line.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from nano_inference.cli.chat.conversation import ServerError
from nano_inference.cli.terminal import one_line
from nano_inference.server.security import is_loopback_name
from nano_inference.types import BadRequest

_TIMEOUT = httpx2.Timeout(300, connect=10)  # seconds between two chunks of a reply; a busy server may queue a request
MAX_BODY_BYTES = 16 << 20  # limit of a reply, and of an event
_HEADERS = {
    "Accept": "text/event-stream, application/json",
    "Accept-Encoding": "identity",
    "User-Agent": "nano-inference",
}

OnHeaders = Callable[[Mapping[str, str]], None]


class Refused(ServerError):
    """The server replied with an error status."""

    def __init__(self, text: str, code: str = "", param: str = "") -> None:
        super().__init__(text)
        self.code, self.param = code, param


class CutOff(ServerError):
    """The connection was lost before the end of the stream."""

    def __init__(self) -> None:
        super().__init__("the connection was lost in the middle of the answer")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address; `url` is the prefix of all paths and ends in /v1."""

    url: str
    key: str | None = field(default=None, repr=False)

    @property
    def exposes_key(self) -> bool:
        """True if the key is sent unencrypted over a network."""
        url = httpx2.URL(self.url)
        return self.key is not None and url.scheme == "http" and not is_loopback_name(url.host)


def read_address(text: str, key: str | None) -> Address:
    """Parse a URL, with or without http://, /v1 and a sub-path. Raises `BadRequest` naming the option."""
    text = text.strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest("--server", f"must be ASCII without blanks, got {one_line(text)!r}")
    try:
        url = httpx2.URL(text if "://" in text else f"http://{text}")
    except httpx2.InvalidURL as error:
        raise BadRequest("", f"--server {one_line(text)}: {one_line(str(error))}") from None
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        raise BadRequest("--server", f"must be a URL such as http://127.0.0.1:8000, got {one_line(text)!r}")
    if url.userinfo or url.query or url.fragment:
        raise BadRequest("--server", "must be a URL without a user, a query and a fragment; --api-key takes the key")
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise BadRequest("--api-key", "must be ASCII without blanks")
    return Address(str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") + "/v1")), key)


def get_json(address: Address, path: str) -> Any:
    """GET a path below the address and return its JSON. Raises `ServerError`."""
    with _response(address, "GET", path, None) as response:
        return parsed(_read(response))


def stream_json(
    address: Address,
    path: str,
    body: dict[str, Any],
    on_headers: OnHeaders = lambda headers: None,
    *,
    max_bytes: int = MAX_BODY_BYTES,
) -> Generator[Any, None, None]:
    """POST JSON and yield the JSON of every event until [DONE]. Raises `ServerError`, `CutOff` without [DONE].

    The reply of a server that does not stream is yielded as one event. An event has at most `max_bytes`. Closing the
    generator closes the connection, which makes the server abort the answer.
    """
    with _response(address, "POST", path, body) as response:
        on_headers(response.headers)
        if response.headers.get("content-type", "").partition(";")[0].strip().lower() != "text/event-stream":
            yield parsed(_read(response, max_bytes))
            return
        response.encoding = "utf-8-sig"  # the HTML standard: UTF-8 regardless of the header
        try:
            for event in httpx2.EventSource(response, max_event_size=max_bytes):
                if event.data.strip() == "[DONE]":
                    return
                if event.data.strip():
                    yield parsed(event.data)
        except httpx2.SSEError as error:
            raise ServerError(f"the server sent an event of more than {max_bytes >> 20} MiB") from error
        except httpx2.RemoteProtocolError as error:
            raise CutOff from error
        raise CutOff


@contextmanager
def _response(address: Address, method: str, path: str, body: dict[str, Any] | None) -> Iterator[httpx2.Response]:
    """Send a request on a new connection, which is closed at the end of the block."""
    headers = _HEADERS | ({} if address.key is None else {"Authorization": f"Bearer {address.key}"})
    verify = ssl.create_default_context()  # the system's certificates, or those of SSL_CERT_FILE
    try:
        with (
            httpx2.Client(headers=headers, timeout=_TIMEOUT, trust_env=False, verify=verify) as client,
            client.stream(method, f"{address.url}{path}", json=body) as response,
        ):
            if response.is_redirect:
                target = one_line(response.headers["location"], 120)
                raise Refused(f"{address.url}: redirects to {target}; give that URL as --server")
            if response.status_code != httpx2.codes.OK:
                text = _read(response)
                try:
                    message, code, param = error_of(json.loads(text)) or (text, "", "")
                except (ValueError, RecursionError):
                    message, code, param = text, "", ""
                reason = one_line(message) or response.reason_phrase
                if response.status_code == httpx2.codes.UNAUTHORIZED and address.key is None:
                    reason += "; give the key as --api-key"
                raise Refused(f"{address.url}: {response.status_code}: {reason}", code, param)
            yield response
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ServerError(f"{address.url}: {_reason(error)}") from error


def error_of(data: Any) -> tuple[str, str, str] | None:
    """Return message, code and field of an error object, in the formats of several servers; None for other objects."""
    if not isinstance(data, dict):
        return None
    error = data.get("error") or ("choices" not in data and (data.get("message") or data.get("detail")))
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("code") or ""), str(error.get("param") or "")
    return (str(error), "", "") if error else None


def _read(response: httpx2.Response, max_bytes: int = MAX_BODY_BYTES) -> str:
    """Return the body's text. Raises `ServerError` for a long body."""
    data = b""
    for piece in response.iter_bytes():
        data += piece
        if len(data) > max_bytes:
            raise ServerError(f"the server's reply has more than {max_bytes >> 20} MiB")
    return data.decode("utf-8", "replace")


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
