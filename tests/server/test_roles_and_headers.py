"""Errors of unknown roles; the header of an answer with fewer tokens than `max_tokens`."""

from __future__ import annotations

import pytest

from tests.server.tiny import Running

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("role", ["critic", "User", "", 5])
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/apply-template"])
def test_unknown_role_is_refused_with_list_of_roles(path: str, role: object, server: Running) -> None:
    reply = server.post(path, {"messages": [*HELLO, {"role": role, "content": "x"}]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages.1.role")
    known = "'system', 'developer', 'user', 'assistant', 'tool' or 'function'"
    assert error["message"] == f"messages.1.role: input should be {known}, got {role!r}"


@pytest.mark.parametrize("stream", [False, True])
def test_header_announces_reduced_max_tokens(stream: bool, server: Running) -> None:
    room = server.client.get("/v1/models").json()["data"][0]["max_model_len"] - 40
    body = {"prompt": [65] * 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    reply = server.post("/v1/completions", {**body, "max_tokens": room + 1})
    assert (reply.status_code, reply.headers["x-max-tokens"]) == (200, str(room))
    assert "x-max-tokens" not in server.post("/v1/completions", {**body, "max_tokens": room}).headers
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == room
    unlimited = server.post(CHAT, {"messages": HELLO, "stream": stream})
    assert unlimited.status_code == 200 and "x-max-tokens" not in unlimited.headers
