"""Log lines: one JSON object each for any input of a client, with only the intended fields."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.server import log
from nano_inference.server.log import LineFormatter, cleaned, is_quiet, log_access, set_up_logs, timestamp


def request_of(**fields: Any) -> dict[str, Any]:
    return {"ts": 0.0, "level": "info", **fields}


FULL = request_of(
    ts=1700000000.125, request_id="req-1", method="POST", path="/v1/completions", status=200, model="m", n=2,
    prompt_tokens=7, cached_tokens=0, output_tokens=10, queue_ms=1.23456, ttft_ms=20.0, total_ms=100.0,
    decode_tps=99.5, finish_reason="stop", client_abort=False, error_type="none"
)  # fmt: skip
HOSTILE = st.text(st.characters(exclude_categories=()), max_size=400) | st.sampled_from(
    ["\r\n{}", '"}\n{"level":"error"', "\x1b[2J", "\u2028\u2029\x85", "\ud800\udfff\ud800", "\u202eabc", "\x00" * 9]
)


def access_line(fields: dict[str, Any]) -> str:
    record = logging.LogRecord("a", logging.INFO, "f.py", 1, "request", (), None)
    record.access = cleaned(fields)
    return LineFormatter().format(record)


def parsed(line: str) -> dict[str, Any]:
    """Return a line's object; the line must be single, ASCII and strict JSON."""
    assert line.isascii() and line.isprintable()
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(value, dict)
    return value


def test_access_line_has_request_and_result_fields() -> None:
    rounded = {**FULL, "ts": "2023-11-14T22:13:20.125Z", "queue_ms": 1.235}
    assert list(parsed(access_line(FULL)).items()) == list(rounded.items())


@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
def test_arbitrary_text_stays_on_one_line(a: str, b: str, c: str, d: str, e: str, f: str, g: str) -> None:
    record = request_of(
        ts=1.0, level=a, request_id=b, method=c, path=d, model=e, finish_reason=f, error_type=g, status=200
    )
    values = parsed(access_line(record))
    assert values["status"] == 200
    for name, given_text in (("request_id", b), ("path", d), ("model", e), ("error_type", g)):
        assert values[name].isprintable()
        assert len(values[name]) <= min(len(given_text), 256)
    assert len(values["request_id"]) <= 128


@pytest.mark.parametrize("path", ["/health", "/metrics", "/health/", "/health?x=1"])
def test_probes_are_logged_only_on_failure(path: str) -> None:
    assert all(is_quiet(path, status) for status in (200, 404, 499, None, 503)), "503 while loading or draining"
    assert not is_quiet(path, 500)


def test_a_time_is_utc_in_milliseconds() -> None:
    assert timestamp(1700000000.1239) == "2023-11-14T22:13:20.123Z"
    assert timestamp(1e20) is None
    assert timestamp(float("inf")) is None


@pytest.mark.usefixtures("restored_logging")
def test_requests_are_written_to_the_stream_once() -> None:
    stream, other = io.StringIO(), io.StringIO()
    root = logging.StreamHandler(other)
    logging.getLogger().addHandler(root)
    set_up_logs(io.StringIO())
    assert set_up_logs(stream) is logging.getLogger("nano_inference.access")
    log_access(FULL)
    log_access(request_of(ts=0.0, path="/health", status=200))
    log_access(request_of(ts=0.0, path="/health", status=500))
    lines = [parsed(line) for line in stream.getvalue().splitlines()]
    assert [line["path"] for line in lines] == ["/v1/completions", "/health"]
    assert not other.getvalue()


@pytest.mark.usefixtures("restored_logging")
def test_all_logs_are_json_with_as_json() -> None:
    stream, other = io.StringIO(), io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(other))
    set_up_logs(stream, as_json=True)
    logging.getLogger("some.library").info("two\nlines %s", "\x1b[31m")
    logging.getLogger("x").debug("not asked for")
    log_access(FULL)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("look out", stacklevel=1)
    first, second, third = [parsed(line) for line in stream.getvalue().splitlines()]
    assert (first["level"], first["logger"], first["message"]) == ("info", "some.library", "two�lines �[31m")
    assert second["path"] == "/v1/completions"
    assert (third["level"], third["logger"]) == ("warning", "py.warnings")
    assert "look out" in third["message"]
    assert not other.getvalue()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("restored_logging")
def test_terminal_has_sentences_about_answers_and_failures() -> None:
    """The page's own requests (itself, /info, /tokenize) are not logged there."""
    stream = FakeTerminal()
    set_up_logs(stream, as_json=True)
    for path in ("/", "/info", "/tokenize"):
        log_access(request_of(ts=0.0, method="GET", path=path, status=200))
    facts = {"prompt_tokens": 36, "cached_tokens": 3, "output_tokens": 8, "ttft_ms": 120.0, "total_ms": 900.0}
    log_access(request_of(ts=0.0, method="POST", path="/v1/chat/completions?k=v", status=200, **facts))
    log_access(request_of(ts=0.0, method="POST", path="/\x1b", status=404, error_type="not_found", error_param="model"))
    logging.getLogger("x").warning("look\nout")
    lines = [re.fullmatch(r"\d\d:\d\d:\d\d (.*)", line) for line in stream.getvalue().splitlines()]
    assert [line and line[1] for line in lines] == [
        "POST /v1/chat/completions 200, 36 prompt tokens (3 cached), 8 generated, first token after 0.12 s, 0.90 s",
        "POST /\N{REPLACEMENT CHARACTER} 404, not_found model",
        "warning: look\N{REPLACEMENT CHARACTER}out",
    ]


def formatted(message: object, *args: object, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("a", logging.ERROR, "f.py", 1, message, args, exc_info)
    record.created = 0.0
    return parsed(LineFormatter().format(record))


def test_an_exception_is_one_field() -> None:
    try:
        raise ValueError("bad\x1b\r thing")
    except ValueError:
        values = formatted("it %s", "failed", exc_info=sys.exc_info())
    assert list(values) == ["ts", "level", "logger", "message", "exception"]
    assert (values["ts"], values["message"]) == ("1970-01-01T00:00:00.000Z", "it failed")
    assert values["exception"].startswith("Traceback (most recent call last):\n  File ")
    assert values["exception"].endswith("ValueError: bad�� thing")
    assert "exception" not in formatted("fine")


def test_a_long_traceback_keeps_its_end() -> None:
    try:
        raise ValueError("x" * 30_000 + "END")
    except ValueError:
        values = formatted("m" * 30_000, exc_info=sys.exc_info())
    assert len(values["exception"]) == log.MAX_EXCEPTION
    assert values["exception"].endswith("xEND")
    assert len(values["message"]) == log.MAX_MESSAGE


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_invalid_log_arguments_still_write_json() -> None:
    assert formatted("%d tokens", "seven")["message"] == "%d tokens"
    assert formatted(Unprintable())["message"] == "Unprintable"
