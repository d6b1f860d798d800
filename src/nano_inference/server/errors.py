"""`ApiError`: an HTTP status with OpenAI's error object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

MAX_MESSAGE = 1500  # characters of an error's message

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_INTERNALS = re.compile(
    r"0x[0-9a-fA-F]{4,}"
    r"|(?<!\w)/(?:usr|home|root|tmp|var|opt|etc|lib|lib64|proc|mnt|srv|private|Users)/[^\s'\"]*"
    r"|[\w./\\-]+\.pyc?\b(?::\d+)?"
)
"""Memory addresses and file paths, which clients must not learn."""
_FIELD = re.compile(r"(?P<head>[a-z_]+)(?P<path>(\.\w+|\[\d+\])*)")


ErrorBody = Callable[["ApiError"], Mapping[str, Any]]  # returns the body of an error in a dialect


class ApiError(Exception):
    """A refusal or failure with its HTTP status; raised below a route and sent as an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = _NOTHING,
        extra: Mapping[str, Any] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param  # the invalid field: `messages.2.content`
        self.code = code  # a constant for programs: `model_not_found`, `context_length_exceeded`, `queue_full`
        self.headers = headers
        self.extra = extra  # further fields of the error object, for programs: `n_prompt_tokens`, `n_ctx`

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def to_dict(self) -> dict[str, Any]:
        error = {"message": shortened(self.message), "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def to_json(self, make_body: ErrorBody | None = None) -> bytes:
        """Return the body as bytes; `make_body` makes it for a client's dialect."""
        body = self.to_dict() if make_body is None else make_body(self)
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def shortened(message: str) -> str:
    """Return a message as one line of at most `MAX_MESSAGE` characters, without memory addresses and file paths."""
    line = " ".join(_INTERNALS.sub("…", message[: 4 * MAX_MESSAGE]).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def refused(field: str, what: str) -> ApiError:
    """Return the 400 of a field that is invalid."""
    return ApiError(400, f"{field}: {what}", param=field)


def unsupported_field(param: str, message: str | None = None) -> ApiError:
    """Return the error for a field that this server does not support."""
    text = message or f"{param} is not supported here"
    return ApiError(400, text, param=param, code="unsupported_field")


def unsupported_value(param: str, value: str, where: str) -> ApiError:
    """Return the error for a value that is not supported `where`: "here", "by this server"."""
    return unsupported_field(param, f"{param}: {value[:64]!r} is not supported {where}")


def queue_full(message: str, *, code: str = "queue_full") -> ApiError:
    """Return the 503 of a request that the client should send again later."""
    return ApiError(503, message, code=code, headers={"retry-after": "1"})


def quota_exceeded(message: str) -> ApiError:
    """Return the 429 of a request that exceeds its client's quota."""
    return ApiError(429, message, code="quota_exceeded", headers={"retry-after": "1"})


def internal_error() -> ApiError:
    """Return the 500 of a failure of the server, without details; the client should not retry."""
    return ApiError(500, "internal server error", headers={"x-should-retry": "false"})


def reworded(error: ApiError, reword: Callable[[str], str]) -> ApiError:
    """Return the error with its message and `param` reworded."""
    param = None if error.param is None else reword(error.param)
    text = reword(error.message)
    return ApiError(error.status, text, param=param, code=error.code, headers=error.headers, extra=error.extra)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error whose field has a dialect's name; `names`: this server's name -> the dialect's.

    A message that is about one field begins with it. Messages of a chat are renamed without their index: a dialect may
    have them in another order.
    """

    def own(field: re.Match[str]) -> str:
        return names[field["head"]] + ("" if field["head"] == "messages" else field["path"])

    param = _FIELD.match(error.param or "")
    if param is None or param["head"] not in names:
        return error
    start = _FIELD.match(error.message)
    is_first = start is not None and start["head"] == param["head"]
    text = own(start) + error.message[start.end() :] if start is not None and is_first else error.message
    return ApiError(error.status, text, param=own(param), code=error.code, headers=error.headers, extra=error.extra)
