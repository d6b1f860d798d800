"""What a client is told when something cannot be done: OpenAI's error object, and the HTTP status it comes with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

MAX_MESSAGE = 1500
"""Characters of an error's text: an error must not be larger than what it complains of."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
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
"""Addresses in memory and paths of files: nothing a client should learn."""


ErrorBody = Callable[["ApiError"], Mapping[str, Any]]
"""How a dialect tells of errors."""


class ApiError(Exception):
    """A refusal or failure with its HTTP status; what is raised below a route and sent as an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        """The field that is wrong, when there is one: `messages.2.content`."""
        self.code = code
        """A short name for programs: `model_not_found`, `context_length_exceeded`, `queue_full`."""
        self.headers = headers
        self.extra = extra
        """Further fields of the error object, for programs: `n_prompt_tokens`, `n_ctx`."""
        self._shape: ErrorBody | None = None

    def with_body(self, shape: ErrorBody) -> ApiError:
        """Return the same error for a client of another dialect, whose body `shape` makes."""
        told = ApiError(
            self.status, self.message, param=self.param, code=self.code, headers=self.headers, extra=self.extra
        )
        told._shape = shape
        return told

    @property
    def type(self) -> str:
        """The error's class, as its status has it."""
        return error_type(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Return the body: {"error": {message, type, param, code}}."""
        error = {"message": shortened(self.message), "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def to_json(self) -> bytes:
        """Return the body as bytes, in the shape of the dialect that the client speaks."""
        body = self.to_dict() if self._shape is None else self._shape(self)
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def error_type(status: int) -> str:
    """Return the error class of a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def shortened(message: str) -> str:
    """Return a text as one line, without addresses and paths, of bounded length."""
    line = " ".join(_INTERNALS.sub("…", message[: 4 * MAX_MESSAGE]).split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def queue_full(message: str, *, code: str = "queue_full") -> ApiError:
    """Return the refusal of a request that would be welcome later."""
    return ApiError(503, message, code=code, headers={"retry-after": "1"})


def quota_exceeded(message: str) -> ApiError:
    """Return the refusal of a request whose client holds as much as one client may."""
    return ApiError(429, message, code="quota_exceeded", headers={"retry-after": "1"})


def internal_error() -> ApiError:
    """Return what a client learns of a failure that is ours: nothing, and that trying again is no use."""
    return ApiError(500, "internal server error", headers={"x-should-retry": "false"})
