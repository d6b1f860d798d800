"""`strict` functions with tool_choice auto: the arguments of a call follow the schema, and text stays free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.taught import make_caller
from tests.server.tiny import Running, running

JSON = dict[str, Any]
HELLO: list[JSON] = [{"role": "user", "content": "hello"}]
SCHEMA: JSON = {"type": "object", "properties": {"x": {"enum": [2]}}, "required": ["x"]}
"""The model's own call has {"x": 1}."""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(make_caller(tmp_path_factory.mktemp("strict_caller"))) as one:
        yield one


def arguments(server: Running, path: str, *, strict: bool | None, schema: JSON) -> Any:
    """Return the arguments of the call that the model writes on its own."""
    more: JSON = {} if strict is None else {"strict": strict}
    common: JSON = {"temperature": 0}
    if path == "/v1/messages":
        tool: JSON = {"name": "f", "input_schema": schema, **more}
        body = {"messages": HELLO, "tools": [tool], "max_tokens": 100, **common}
        return server.post(path, body).json()["content"][0]["input"]
    function: JSON = {"name": "f", "parameters": schema, **more}
    if path == "/v1/responses":
        body = {"input": "hello", "tools": [{"type": "function", **function}], "max_output_tokens": 100, **common}
        return json.loads(server.post(path, body).json()["output"][0]["arguments"])
    if path == "/api/chat":
        asked: JSON = {"messages": HELLO, "stream": False, "options": {**common, "num_predict": 100}}
        reply = server.post(path, {**asked, "tools": [{"type": "function", "function": function}]})
        return reply.json()["message"]["tool_calls"][0]["function"]["arguments"]
    body = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "max_tokens": 100, **common}
    return json.loads(server.post(path, body).json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_strict_arguments_follow_the_schema(caller: Running, path: str) -> None:
    pytest.importorskip("llguidance")
    assert arguments(caller, path, strict=True, schema=SCHEMA) == {"x": 2}
    for strict in (False, None):
        assert arguments(caller, path, strict=strict, schema=SCHEMA) == {"x": 1}
    assert arguments(caller, path, strict=True, schema={"type": "object"}) == {"x": 1}
