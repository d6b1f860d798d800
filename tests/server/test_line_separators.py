"""Streams whose text has characters at which Python clients split lines: each line is still a whole value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.server.dialect import Route
from nano_inference.server.dialects.nanochat import WebBody, WebReply, ask_web
from tests.server.mounted import mounted
from tests.server.scripted import make_scripted
from tests.server.tiny import Running

pytestmark = pytest.mark.slow

ANSWER = "a\x85b\u2028c\u2029d"
SAID = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
NANOCHAT = "/nanochat/chat/completions"
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/messages": {"max_tokens": 3},
    "/v1/responses": {"messages": None, "input": "hello"},
    "/api/chat": {"model": "tiny"},
    NANOCHAT: {},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory: Path = make_scripted(tmp_path_factory.mktemp("scripted"), "f", {}, ANSWER)
    with mounted(directory, Route(path=NANOCHAT, body=WebBody, ask=ask_web, reply=WebReply, summary="Talk.")) as one:
        yield one


@pytest.mark.parametrize("path", REQUESTS)
def test_lines_of_httpx_are_whole_values(server: Running, path: str) -> None:
    body = {name: value for name, value in (SAID | REQUESTS[path]).items() if value is not None}
    with server.client.stream("POST", path, json=body) as reply:
        lines = list(reply.iter_lines())
    assert reply.status_code == 200, lines
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    assert {line.partition(":")[0] for line in lines} <= {"", "data", "event", *(one.partition(":")[0] for one in data)}
    assert any(ANSWER in leaf for line in data for leaf in leaves(json.loads(line)))


def leaves(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
