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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import Scope

from nano_inference.core.outbox import Outbox
from nano_inference.server.generation import Generation
from nano_inference.server.transcript import Transcript, usage

ACCESS_LOGGER = "nano_inference.access"
QUIET_PATHS = ("/health", "/ready", "/ping", "/liveness", "/metrics", "/load")
"""Polled every few seconds; logged only if answering fails."""
MAX_TEXT = 256  # characters of a field that is not in `_LENGTHS`
MAX_MESSAGE = 8192
MAX_EXCEPTION = 16384  # characters of a traceback; the start is cut, as the error is at the end

_LENGTHS = {"level": 16, "request_id": 128, "method": 16, "finish_reason": 32, "message": MAX_MESSAGE}
_DURATIONS = frozenset(("queue_ms", "ttft_ms", "total_ms", "decode_tps"))


def record_of(scope: Scope, status: int | None, seconds: float, error: Exception | None) -> dict[str, Any]:
    """Return the fields of a request that has just ended, after `seconds`; `App` adds `fields_of` its generation.

    `status` is None if the client disconnected before the response started. Fields that are None are not logged.
    """
    return {
        "ts": time.time(),
        "level": "error" if status is not None and status >= 500 else "info",
        "request_id": scope["state"].get("request_id"),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "total_ms": seconds * 1e3,
        "client_abort": True if status is None else None,
        "error_type": None if error is None else getattr(error, "type", type(error).__name__),
        "error_code": getattr(error, "code", None),
        "error_param": getattr(error, "param", None),
    }


def fields_of(
    generation: Generation, transcripts: Sequence[Transcript], outbox: Outbox | None, error: Exception | None
) -> dict[str, Any]:
    """Return the fields of a generation: token counts, timings in ms, and the end."""
    counts = usage(generation, transcripts)
    times = [] if outbox is None else [one for row in outbox.times for one in row]
    first = min((one.first_token for one in times if one.first_token is not None), default=None)
    started = min((one.started for one in times if one.started is not None), default=None)
    last = max((one.last_token for one in times if one.last_token is not None), default=None)
    arrived = None if outbox is None else outbox.arrived
    num_new = counts["completion_tokens"]
    return {
        "model": generation.model,
        "n": generation.num_samples,
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": num_new,
        "queue_ms": None if started is None or arrived is None else (started - arrived) * 1e3,
        "ttft_ms": None if first is None or arrived is None else (first - arrived) * 1e3,
        "decode_tps": (num_new - 1) / (last - first) if first and last and last > first else None,
        "finish_reason": transcripts[0].finish_reason if transcripts else None,
        "error": error,
    }


def log_access(fields: Mapping[str, Any]) -> None:
    """Log a request, unless its path is quiet or request logging is off."""
    logger = logging.getLogger(ACCESS_LOGGER)
    if logger.isEnabledFor(logging.INFO) and not is_quiet(fields["path"], fields["status"]):
        values = cleaned(fields)
        logger.info(_line(values), extra={"access": values})


def is_quiet(path: str, status: int | None) -> bool:
    """Return True for a request that is not logged: a probe or a scrape, unless its status is 500.

    A 503 is the normal answer to a probe while the model is loading.
    """
    return path.partition("?")[0].rstrip("/") in QUIET_PATHS and status != 500


def set_up_logs(
    stream: TextIO | None = None, *, log_requests: bool = True, as_json: bool = False, level: int = logging.INFO
) -> logging.Logger:
    """Send request lines to `stream` (default: stderr); return their logger.

    With `as_json`, all other messages and warnings of `level` and above become JSON lines too, and other handlers of
    the root logger are removed. A later call replaces an earlier one. On a terminal lines are sentences instead of
    JSON, of answers and failures only: a page makes several other requests.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(is_read=stream.isatty()))
    if stream.isatty():
        handler.addFilter(_is_of_interest)
    access = logging.getLogger(ACCESS_LOGGER)
    access.propagate = False
    access.setLevel(logging.INFO if log_requests else logging.CRITICAL + 1)
    access.handlers[:] = [handler]
    if as_json:
        root = logging.getLogger()
        root.setLevel(level)
        root.handlers[:] = [handler]
        logging.captureWarnings(True)
    return access


def _is_of_interest(record: logging.LogRecord) -> bool:
    values = getattr(record, "access", None)
    return values is None or "output_tokens" in values or values.get("status", 400) >= 400


class LineFormatter(logging.Formatter):
    """Formats a request or a message as one line of JSON, or with `is_read` as a sentence for a person."""

    def __init__(self, *, is_read: bool = False) -> None:
        super().__init__()
        self._is_read = is_read

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A message with invalid arguments is written without them."""
        request: Mapping[str, Any] | None = getattr(record, "access", None)
        values = cleaned(self._message(record)) if request is None else request
        if not self._is_read:
            return _line(values)
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        if request is not None:
            return f"{at} {sentence(request)}"
        return "\n".join([f"{at} {values['level']}: {values['message']}", *values.get("exception", "").splitlines()])

    def _message(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            message = record.getMessage()
        except Exception:  # a faulty log call must not lose its message
            message = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        trace = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        fields = {"ts": record.created, "level": record.levelname.lower(), "logger": record.name, "message": message}
        return {**fields, "exception": trace or None}


def sentence(values: Mapping[str, Any]) -> str:
    """Return a request as text: method, path, status, and what was generated or refused."""
    text = f"{values.get('method', '')} {values.get('path', '')} {values.get('status', 'client left')}".strip()
    facts = [f"{values['error_type']} {values.get('error_param', '')}".strip()] if "error_type" in values else []
    if "output_tokens" in values:
        cached = values.get("cached_tokens", 0)
        facts += [f"{values.get('prompt_tokens', 0)} prompt tokens ({cached} cached)"]
        facts += [f"{values['output_tokens']} generated"]
    facts += [f"first token after {values['ttft_ms'] / 1e3:.2f} s"] if "ttft_ms" in values else []
    facts += [f"{values['total_ms'] / 1e3:.2f} s"] if "total_ms" in values else []
    return ", ".join([text, *facts])


def cleaned(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None as JSON values.

    The path loses its query, which may contain a key; strings are cut and cleaned (`clean`), the line breaks of a
    traceback stay; negative durations become 0.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "ts":
            value = timestamp(value)
        elif name == "exception" and value is not None:
            value = "\n".join(clean(line, MAX_EXCEPTION) for line in value[-MAX_EXCEPTION:].split("\n"))
        elif isinstance(value, str):
            value = clean(value.partition("?")[0] if name == "path" else value, _LENGTHS.get(name, MAX_TEXT))
        elif name in _DURATIONS and value is not None:
            value = round(max(0.0, value), 3) if math.isfinite(value) else None
        if value is not None:
            values[name] = value
    return values


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


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))
