"""Fields that agents send and that have no effect here: accepted and logged once, refused with `--strict`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from nano_inference.server.config import ServerConfig
from tests.server.mounted import GENERATING
from tests.server.scripted import make_scripted
from tests.server.test_every_parameter import BASES
from tests.server.test_responses import streamed
from tests.server.tiny import Running, make_tiny, running

JSON = dict[str, Any]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTION: JSON = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
SEARCH: JSON = {"type": "web_search", "external_web_access": False}
SPACE: JSON = {"type": "namespace", "name": "agents", "description": "Work on agents.", "tools": [FUNCTION]}
HELLO: list[JSON] = [{"role": "user", "content": "a"}]
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
        "fields without effect are ignored: 'prompt_cache_key', 'reasoning.summary', 'tools.web_search'",
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
        ([SEARCH, {**SPACE, "tools": [{**FUNCTION, "name": "not a name"}]}], "tools.0.function.name"),
        ([SEARCH, {**FUNCTION, "name": "not a name"}], "tools.0.function.name"),
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
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"user": "u"}, "user"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        *((CHAT, {name: "x"}, name) for name in ("user", "prompt_cache_key", "safety_identifier", "verbosity")),
        (CHAT, {"metadata": {"a": "b"}}, "metadata"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        *((path, {"prompt_cache_retention": "24h"}, "prompt_cache_retention") for path in (CHAT, RESPONSES)),
        (RESPONSES, {"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        (CHAT, {"id_slot": 3}, "id_slot"),
        (CHAT, {"n_discard": 3}, "n_discard"),
        (CHAT, {"repeat_last_n": 64}, "repeat_last_n"),
    ],
)
def test_strict_server_refuses_hints(strict: Running, path: str, fields: JSON, param: str) -> None:
    said = [{"role": "user", "content": "a"}]
    body: JSON = {"input": "a", "max_output_tokens": 1} if path == RESPONSES else {"messages": said, "max_tokens": 1}
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


DECLARED: list[tuple[str, JSON, str]] = [
    ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "metadata": {"user_id": "u"}}, "metadata"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "service_tier": "priority"}, "service_tier"),
    ("/v1/messages/count_tokens", {"messages": HELLO, "workspace_id": "w"}, "workspace_id"),
    *(
        (RESPONSES, {"model": "tiny", "input": "a", name: value}, name)
        for name, value in (("prompt_cache_options", {"mode": "explicit"}), ("prompt_cache_retention", "24h"))
    ),
    ("/v1/embeddings", {"input": "a", "user": "u"}, "user"),
    ("/generate", {"text": "a", "log_metrics": False}, "log_metrics"),
    ("/generate", {"text": "a", "no_logs": True}, "no_logs"),
    ("/generate", {"text": "a", "background": True}, "background"),
    *(
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {name: value}}, f"sampling_params.{name}")
        for name, value in (("detokenize", False), ("flat_logprobs", True), ("skip_clone", True))
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), DECLARED)
def test_declared_hint_is_accepted_and_refused_by_a_strict_server(
    server: Running, strict: Running, path: str, body: JSON, param: str
) -> None:
    assert server.post(path, body).status_code == 200
    reply = strict.post(path, body)
    assert reply.status_code == 400 and repr(param) in reply.text, reply.text


@pytest.mark.parametrize("path", [one.path for one in GENERATING])
def test_spaces_between_special_tokens_are_a_hint_on_every_route(server: Running, strict: Running, path: str) -> None:
    name, base = "spaces_between_special_tokens", BASES[path]
    for value in (True, False):
        body = {**base, name: value}
        if "sampling_params" in base:
            body = {**base, "sampling_params": {**base["sampling_params"], name: value}}
        reply, refusal = server.post(path, body), strict.post(path, body)
        assert reply.status_code == 200 and name not in reply.text, reply.text
        assert (refusal.status_code, name in refusal.text) == ((200, False) if value else (400, True)), refusal.text


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, RESPONSES, "/v1/messages"])
@pytest.mark.parametrize("name", ["repeat_last_n", "penalty_last_n"])
def test_window_of_penalties_is_refused_with_a_penalty(server: Running, path: str, name: str) -> None:
    body = {**BASES[path], name: 64}
    assert server.post(path, body).status_code == 200
    if path == "/v1/messages":
        return  # it has no penalties
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        reply = server.post(path, {**body, **penalty})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), reply.text
        assert server.post(path, {**body, **penalty, name: -1}).status_code == 200


def test_progress_is_a_hint_where_no_stream_can_report_it(scripted: Running, strict: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_progress": True}
    assert scripted.post("/v1/messages", body).status_code == 200
    assert strict.post("/v1/messages", body).status_code == 400
