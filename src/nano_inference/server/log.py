"""The server's logs on stderr: one JSON line per finished request, and the messages of the process.

No line contains a prompt or an answer. Lines are ASCII, so that text sent by a client cannot affect a terminal or a
line-based reader. Importing this module configures nothing; the process calls `set_up_logs`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TextIO

from starlette.types import Scope

ACCESS_LOGGER = "nano_inference.access"
QUIET_PATHS = ("/health", "/ready", "/ping", "/liveness", "/metrics", "/load")
"""Polled every few seconds; logged only if answering fails."""
MAX_TEXT = 256  # characters of a field that is not in `MAX_LENGTHS`
MAX_MESSAGE = 8192
MAX_EXCEPTION = 16384  # characters of a traceback; the start is cut, as the error is at the end

MAX_LENGTHS: Mapping[str, int] = {"level": 16, "request_id": 128, "method": 16, "finish_reason": 32}
_DURATIONS = frozenset(("queue_ms", "ttft_ms", "total_ms", "decode_tps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    """One finished HTTP request. Fields that are None are omitted from the line."""

    ts: float  # end of the request, seconds since 1970
    level: str = "info"
    request_id: str | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None  # None if the client disconnected before the response started
    model: str | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    decode_tps: float | None = None  # output tokens per second after the first token
    finish_reason: str | None = None
    client_abort: bool | None = None
    error_type: str | None = None
    error_code: str | None = None
    error_param: str | None = None  # the invalid field


def record_of(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> AccessRecord:
    """Return the record of a request that has just ended, after `seconds`; without the fields of a call."""
    return AccessRecord(
        ts=time.time(),
        level="error" if status is not None and status >= 500 else "info",
        request_id=scope["state"].get("request_id"),
        method=scope["method"],
        path=scope["path"],
        status=status,
        total_ms=seconds * 1e3,
        client_abort=True if status is None else None,
        error_type=None if error is None else getattr(error, "type", type(error).__name__),
        error_code=getattr(error, "code", None),
        error_param=getattr(error, "param", None),
    )


def access_line(record: AccessRecord) -> str:
    """Return the record as one line of JSON without a newline.

    The path is logged without its query, strings are cut and cleaned (`clean`), and negative durations become 0.
    """
    values = {field.name: _value(field.name, getattr(record, field.name)) for field in fields(record)}
    return _line(values)


def is_quiet(path: str, status: int | None) -> bool:
    """Return True for a request that is not logged: a probe or a scrape, unless its status is 500.

    A 503 is the normal answer to a probe while the model is loading.
    """
    bare = path.partition("?")[0].rstrip("/")
    return bare in QUIET_PATHS and status != 500


def log_access(record: AccessRecord) -> None:
    """Log a request, unless its path is quiet or request logging is off."""
    logger = logging.getLogger(ACCESS_LOGGER)
    if logger.isEnabledFor(logging.INFO) and not is_quiet(record.path or "", record.status):
        logger.info(access_line(record), extra={"access": record})


def set_up_logs(
    stream: TextIO | None = None, *, log_requests: bool = True, as_json: bool = False, level: int = logging.INFO
) -> logging.Logger:
    """Send request lines to `stream` (default: stderr); return their logger.

    With `as_json`, all other messages and warnings of `level` and above become JSON lines too, and other handlers of
    the root logger are removed. A later call replaces an earlier one. On a terminal lines are sentences instead of
    JSON, of answers and failures only: a page makes several other requests.
    """
    stream = sys.stderr if stream is None else stream
    access = logging.getLogger(ACCESS_LOGGER)
    access.propagate = False
    access.setLevel(logging.INFO if log_requests else logging.CRITICAL + 1)
    is_read = stream.isatty()
    _only_handler(access, stream, TerminalFormatter() if is_read else logging.Formatter("%(message)s"))
    if is_read:
        access.handlers[0].addFilter(is_of_interest)
    if as_json:
        root = logging.getLogger()
        root.setLevel(level)
        _only_handler(root, stream, TerminalFormatter() if is_read else JsonFormatter())
        logging.captureWarnings(True)
    return access


class JsonFormatter(logging.Formatter):
    """Formats a `logging` record as one line of JSON: ts, level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A message with invalid arguments is written without them."""
        try:
            message = record.getMessage()
        except Exception:  # a faulty log call must not lose its message
            message = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        text = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        lines = (text or "")[-MAX_EXCEPTION:].split("\n")  # the end of the traceback, whose line breaks stay
        values = {
            "ts": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": clean(record.name, MAX_TEXT),
            "message": clean(message, MAX_MESSAGE),
            "exception": "\n".join(clean(line, MAX_EXCEPTION) for line in lines) if text else None,
        }
        return _line(values)


class TerminalFormatter(JsonFormatter):
    """Formats a request or a message as one line for a person."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        request = getattr(record, "access", None)
        if request is not None:
            return f"{at} {sentence(request)}"
        values = json.loads(super().format(record))
        return "\n".join([f"{at} {values['level']}: {values['message']}", *values.get("exception", "").splitlines()])


def is_of_interest(record: logging.LogRecord) -> bool:
    """Return True for the record of an answer or of a failure."""
    request = getattr(record, "access", None)
    return request is None or request.output_tokens is not None or request.status is None or request.status >= 400


def sentence(record: AccessRecord) -> str:
    """Return a request as text: method, path, status, and what was generated or refused."""
    values = json.loads(access_line(record))
    text = f"{values.get('method', '')} {values.get('path', '')} {values.get('status', 'client left')}".strip()
    facts = [f"{values['error_type']} {values.get('error_param', '')}".strip()] if "error_type" in values else []
    if "output_tokens" in values:
        cached = values.get("cached_tokens", 0)
        prompt = f"{values.get('prompt_tokens', 0)} prompt tokens ({cached} cached)"
        facts += [prompt, f"{values['output_tokens']} generated"]
    facts += [f"first token after {values['ttft_ms'] / 1e3:.2f} s"] if "ttft_ms" in values else []
    facts += [f"{values['total_ms'] / 1e3:.2f} s"] if "total_ms" in values else []
    return ", ".join([text, *facts])


def clean(text: str, limit: int) -> str:
    """Return at most `limit` characters, with "\N{REPLACEMENT CHARACTER}" for each that is not printable.

    Those are control characters, line breaks, lone surrogates, and marks that change the text direction.
    """
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def timestamp(seconds: float) -> str | None:
    """Return seconds since 1970 as 2026-01-31T12:00:00.000Z; None if out of range."""
    try:
        time = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(name: str, value: object) -> object:
    """Return a field's value for the line; None omits it."""
    if name == "ts" and isinstance(value, int | float):
        return timestamp(value)
    if isinstance(value, str):
        text = value.partition("?")[0] if name == "path" else value  # a query may contain a key
        return clean(text, MAX_LENGTHS.get(name, MAX_TEXT))
    if name in _DURATIONS and isinstance(value, int | float):
        return round(max(0.0, value), 3) if math.isfinite(value) else None
    return value


def _line(values: Mapping[str, object]) -> str:
    """Return the values that are not None as one line of ASCII JSON."""
    return json.dumps({name: value for name, value in values.items() if value is not None}, separators=(",", ":"))


def _only_handler(logger: logging.Logger, stream: TextIO, formatter: logging.Formatter) -> None:
    """Replace a logger's handlers by one that writes to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
