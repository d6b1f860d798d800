"""What the server writes on stderr: one line of JSON for every finished request, and the process's own messages.

No line ever holds a prompt or an answer. Lines are ASCII, so neither a terminal nor a line-based reader can be led
astray by what a client sent. Nothing is configured by importing this; `set_up_logs` does it, once for a process.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

ACCESS_LOGGER = "nano_inference.access"
QUIET_PATHS = ("/health", "/ready", "/ping", "/metrics", "/load")
"""Asked for every few seconds by machines; worth a line only when answering fails."""
MAX_TEXT = 256
"""Characters of a field, unless `MAX_LENGTHS` has it."""
MAX_MESSAGE = 8192
MAX_EXCEPTION = 16384
"""Characters of a traceback; its end is kept, where the error is."""

MAX_LENGTHS: Mapping[str, int] = MappingProxyType({"level": 16, "request_id": 128, "method": 16, "finish_reason": 32})
_DURATIONS = frozenset(("queue_ms", "ttft_ms", "total_ms", "decode_tps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    """One finished HTTP request. What is None is not known and left out of the line."""

    ts: float
    """Seconds since 1970, when it ended."""
    level: str = "info"
    request_id: str | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None
    """None when the client left before there was one."""
    model: str | None = None
    n: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    decode_tps: float | None = None
    """Output tokens in a second, from the first one on."""
    finish_reason: str | None = None
    client_abort: bool | None = None
    error_type: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    """The field that was wrong."""


def access_line(record: AccessRecord) -> str:
    """Return the record as one line of JSON, without its end.

    A path loses its query, texts are cut and cleaned (`clean`), and a time below 0 is 0.
    """
    values = {field.name: _value(field.name, getattr(record, field.name)) for field in fields(record)}
    return _line(values)


def is_quiet(path: str, status: int | None) -> bool:
    """Return whether a request leaves no line: a probe or a scrape, unless answering it was our failure.

    A 503 is no failure but a probe's answer while a model is loaded.
    """
    bare = path.partition("?")[0].rstrip("/")
    return bare in QUIET_PATHS and status != 500


def log_access(record: AccessRecord) -> None:
    """Write a request's line, unless it is a quiet one or requests are not logged."""
    logger = logging.getLogger(ACCESS_LOGGER)
    if logger.isEnabledFor(logging.INFO) and not is_quiet(record.path or "", record.status):
        logger.info(access_line(record))


def set_up_logs(
    stream: TextIO | None = None, *, log_requests: bool = True, as_json: bool = False, level: int = logging.INFO
) -> logging.Logger:
    """Send the lines of requests to `stream` (default: stderr), and return their logger. For the process to call.

    With `as_json` every other message, and every warning, of `level` and above becomes a line of JSON too, and nothing
    else that was set up for the root logger writes any more. May be called again; the last call counts.
    """
    stream = sys.stderr if stream is None else stream
    access = logging.getLogger(ACCESS_LOGGER)
    access.propagate = False
    access.setLevel(logging.INFO if log_requests else logging.CRITICAL + 1)
    _only_handler(access, stream, logging.Formatter("%(message)s"))
    if as_json:
        root = logging.getLogger()
        root.setLevel(level)
        _only_handler(root, stream, JsonFormatter())
        logging.captureWarnings(True)
    return access


class JsonFormatter(logging.Formatter):
    """Writes a record of the standard library as one line of JSON: ts, level, logger, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A message whose arguments do not fit it is written without them."""
        try:
            message = record.getMessage()
        except Exception:  # a log call with a mistake in it must not lose its message, nor write what is no JSON
            message = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        values = {
            "ts": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": clean(record.name, MAX_TEXT),
            "message": clean(message, MAX_MESSAGE),
            "exception": self._exception(record),
        }
        return _line(values)

    def _exception(self, record: logging.LogRecord) -> str | None:
        """Return the end of the traceback, its lines kept apart, or None when there is none."""
        text = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        lines = (text or "")[-MAX_EXCEPTION:].split("\n")
        return "\n".join(clean(line, MAX_EXCEPTION) for line in lines) if text else None


def clean(text: str, limit: int) -> str:
    """Return at most `limit` characters, with "\N{REPLACEMENT CHARACTER}" for each that does not print.

    Those are control characters, ends of lines, half characters, and marks that change the direction of writing.
    """
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def timestamp(seconds: float) -> str | None:
    """Return seconds since 1970 as 2026-01-31T12:00:00.000Z; None when they are no date."""
    try:
        time = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return None
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(name: str, value: object) -> object:
    """Return a field as it stands in the line; None leaves it out."""
    if name == "ts" and isinstance(value, int | float):
        return timestamp(value)
    if isinstance(value, str):
        text = value.partition("?")[0] if name == "path" else value  # a query may hold a key
        return clean(text, MAX_LENGTHS.get(name, MAX_TEXT))
    if name in _DURATIONS and isinstance(value, int | float):
        return round(max(0.0, value), 3) if math.isfinite(value) else None
    return value


def _line(values: Mapping[str, object]) -> str:
    """Return the values that are not None as one line of ASCII JSON."""
    return json.dumps({name: value for name, value in values.items() if value is not None}, separators=(",", ":"))


def _only_handler(logger: logging.Logger, stream: TextIO, formatter: logging.Formatter) -> None:
    """Make a stream the only place a logger writes to itself."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
