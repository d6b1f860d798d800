"""Fields that agents send and that have no effect here: accepted and logged once, refused with `--strict`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from tests.server.scripted import make_scripted
from tests.server.test_responses import streamed
from tests.server.tiny import Running, make_tiny, running

JSON = dict[str, Any]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTION: JSON = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
SEARCH: JSON = {"type": "web_search", "external_web_access": False}
SPACE: JSON = {"type": "namespace", "name": "agents", "description": "Work on agents.", "tools": [FUNCTION]}
AGENT: JSON = {
    "input": "hi",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"turn": "1"},
    "tools": [FUNCTION, SPACE, SEARCH],
    "max_output_tokens": 4,
}
"""The fields of an agent's request."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model calls the function in the namespace."""
    with running(make_scripted(tmp_path_factory.mktemp("agent"), "agents.look", {"at": 1}, "Seen.")) as one:
        yield one


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = make_tiny(tmp_path_factory.mktemp("strict"), positions=2048)
    with running(directory, ServerConfig(port=0, log_requests=False, strict=True)) as one:
        yield one


def test_agents_request_is_answered_and_its_hints_are_logged_once(
    scripted: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        replies = [scripted.post(RESPONSES, AGENT) for _ in range(2)]
    assert [one.status_code for one in replies] == [200, 200], replies[0].text
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert lines == [
        "unknown fields are ignored: 'client_metadata'",
        "fields without effect are ignored: 'reasoning.summary', 'tools.web_search'",
    ]
    assert [tool["type"] for tool in replies[0].json()["tools"]] == ["function", "namespace"], "without the search"


def test_call_in_a_namespace_round_trip(scripted: Running) -> None:
    whole = scripted.post(RESPONSES, AGENT).json()
    (call,) = whole["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "look")
    *_, last = streamed(scripted, **AGENT)
    (again,) = last["response"]["output"]
    assert (again["namespace"], again["name"], again["arguments"]) == ("agents", "look", '{"at": 1}')
    items = [{"role": "user", "content": "hi"}, call]
    items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "a"})
    (message,) = scripted.post(RESPONSES, {**AGENT, "input": items}).json()["output"]
    assert message["content"][0]["text"] == "Seen."


def test_namespace_describes_its_functions_in_the_prompt(scripted: Running) -> None:
    def prompt(tool: JSON) -> list[int]:
        body = {"input": "hi", "tools": [tool], "max_output_tokens": 1, "return_token_ids": True}
        ids: list[int] = scripted.post(RESPONSES, body).json()["prompt_token_ids"]
        return ids

    flat = {**FUNCTION, "name": "agents.look", "description": "Work on agents.\nLooks."}
    assert prompt(SPACE) == prompt(flat) != prompt(FUNCTION)


def test_errors_name_the_functions_place(scripted: Running) -> None:
    for tools, param in (
        ([SEARCH, {**SPACE, "tools": [{**FUNCTION, "name": "not a name"}]}], "tools.1.tools.0.name"),
        ([SEARCH, {**FUNCTION, "name": "not a name"}], "tools.1.name"),
        ([{**SPACE, "name": None}], "tools.0.name"),
        ([{"type": "namespace", "name": "n"}], "tools.0.tools"),
    ):
        reply = scripted.post(RESPONSES, {"input": "hi", "tools": tools})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_choice_needs_a_function_that_is_not_left_out(scripted: Running) -> None:
    reply = scripted.post(RESPONSES, {"input": "hi", "tools": [SEARCH], "tool_choice": "required"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (RESPONSES, {"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (RESPONSES, {"tools": [SEARCH]}, "tools.web_search"),
        (RESPONSES, {"client_metadata": {}}, "client_metadata"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_strict_server_refuses_hints(strict: Running, path: str, fields: JSON, param: str) -> None:
    body: JSON = {"input": "a"} if path == RESPONSES else {"messages": [{"role": "user", "content": "a"}]}
    assert strict.post(path, body).status_code == 200
    reply = strict.post(path, {**body, **fields})
    assert (reply.status_code, reply.json()["error"]["param"], reply.json()["error"]["code"]) == (
        400,
        param,
        "unknown_field",
    )


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "some"])
def test_effort_of_any_value_changes_nothing_without_reasoning(server: Running, effort: str) -> None:
    chat: JSON = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    plain, asked = (server.post(CHAT, {**chat, **more}).json() for more in ({}, {"reasoning_effort": effort}))
    assert plain["choices"] == asked["choices"] and plain["usage"]["prompt_tokens"] == asked["usage"]["prompt_tokens"]
    reply = server.post(RESPONSES, {"input": "a", "max_output_tokens": 4, "reasoning": {"effort": effort}}).json()
    assert reply["reasoning"]["effort"] == effort and reply["usage"]["input_tokens"] == plain["usage"]["prompt_tokens"]


def test_progress_is_a_hint_where_no_stream_can_report_it(scripted: Running, strict: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_progress": True}
    assert scripted.post("/v1/messages", body).status_code == 200
    assert strict.post("/v1/messages", body).status_code == 400
