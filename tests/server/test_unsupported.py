"""Unsupported fields of other servers: refused on every route unless their value is neutral."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from nano_inference.server.errors import ApiError
from nano_inference.server.unsupported import NEUTRAL, REASONS, refuse_unsupported, unknown_fields
from tests.cases import failures
from tests.server.mounted import CONVERTING, GENERATING
from tests.server.tiny import Running, running

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
}

DECLARED = {one.path: frozenset(one.body.model_fields) for one in (*GENERATING, *CONVERTING)}
"""Fields of `NEUTRAL` that each path supports."""


def asking(name: str) -> list[Any]:
    """Return values that are not neutral for a field."""
    tried = [True, False, 1, 0, 2, 0.5, "x", "required", ["x"], {"type": "json_object"}, [{"type": "function"}], "", []]
    neutral = {json.dumps([type(one).__name__, one]) for one in NEUTRAL[name]}
    return [one for one in tried if json.dumps([type(one).__name__, one]) not in neutral]


@pytest.fixture(scope="module")
def strict(tiny_directory: Path) -> Iterator[Running]:
    with running(tiny_directory, ServerConfig(port=0, log_requests=False, strict=True)) as one:
        yield one


@pytest.mark.parametrize("path", BODIES)
def test_non_neutral_fields_are_refused(server: Running, path: str) -> None:
    for index, name in enumerate(NEUTRAL):
        if name in DECLARED[path]:
            continue  # supported: see the tests of tools and structures
        values = asking(name)
        reply = server.post(path, {**BODIES[path], name: values[index % len(values)]})
        assert reply.status_code == 400
        error = reply.json()["error"]
        message, _, reason = error.pop("message").partition(": ")
        assert message == f"{name} is not supported here" and bool(reason) == (name in REASONS)
        assert error == {"type": "invalid_request_error", "param": name, "code": "unsupported_field"}


@pytest.mark.parametrize("path", BODIES)
def test_neutral_fields_are_accepted(server: Running, path: str) -> None:
    for column in range(max(map(len, NEUTRAL.values()))):
        others = ((name, values) for name, values in NEUTRAL.items() if name not in DECLARED[path])
        neutral = {name: values[column % len(values)] for name, values in others}
        reply = server.post(path, {**BODIES[path], **neutral})
        assert reply.status_code == 200, reply.text


def test_non_neutral_values_are_refused() -> None:
    def check(name: str) -> None:
        for value in asking(name):
            with pytest.raises(ApiError):
                refuse_unsupported({name: value})
        for value in NEUTRAL[name]:
            refuse_unsupported({name: value})

    assert failures(check, zip(NEUTRAL)) == []


def test_refusal_names_location() -> None:
    with pytest.raises(ApiError, match=r"^body\.grammar is not supported"):
        refuse_unsupported({"grammar": "root"}, "body.")


def test_streams_refuse_in_the_same_way(server: Running) -> None:
    reply = server.post(CHAT, {**BODIES[CHAT], "stream": True, "suffix": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")


def test_unknown_fields_are_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nano_inference.server"):
        for _ in range(3):
            reply = server.post(CHAT, {**BODIES[CHAT], "sparkle": 1, "evil\nname": {}})
            assert reply.status_code == 200
    messages = [record.getMessage() for record in caplog.records]
    assert sum("'sparkle'" in message for message in messages) == 1
    assert sum("'evil\\nname'" in message for message in messages) == 1, "no line break gets into the log"


def test_number_of_logged_unknown_fields_is_bounded(server: Running) -> None:
    flood = {f"field{index}": 1 for index in range(3000)}
    assert server.post(CHAT, {**BODIES[CHAT], **flood}).status_code == 200
    assert len(server.app.ignored.logged) <= 1000


@pytest.mark.parametrize("path", BODIES)
def test_a_strict_server_refuses_unknown_fields(strict: Running, path: str) -> None:
    assert strict.post(path, BODIES[path]).status_code == 200
    assert strict.post(path, {**BODIES[path], "tools": []}).status_code == 200, "known, and neutral"
    reply = strict.post(path, {**BODIES[path], "zebra": 1, "x" * 500: 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"], error["message"]) == (
        "x" * 64,
        "unknown_field",
        f"unknown fields: {'x' * 64!r}, 'zebra'",
    )


def test_unknown_fields_by_name() -> None:
    assert unknown_fields({"b": 1, "a": 1, "tools": []}) == ["a", "b"]
