"""Replies are accepted as history, in every dialect; malformed calls of a model are text in whole replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.server.reasoner import make_reasoner
from tests.server.tiny import Running, running

JSON = dict[str, Any]
HELLO: JSON = {"role": "user", "content": "hello"}
SCHEMA: JSON = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION: JSON = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOL: JSON = {"type": "function", "function": FUNCTION}
BROKEN = '<tool_call>\n{"name": "look", "arguments": {"at": 1, nothing}}\n</tool_call> so'
"""A call that becomes invalid after its arguments have started."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """A model that calls, and one whose calls are malformed."""
    with (
        running(make_reasoner(tmp_path_factory.mktemp("caller"))) as calling,
        running(make_reasoner(tmp_path_factory.mktemp("broken"), call=BROKEN)) as broken,
    ):
        yield calling, broken


class Dialect(NamedTuple):
    """How a client asks, and appends a reply to its messages."""

    path: str
    field: str
    fields: Callable[[int, bool], JSON]
    """The fields of a request with this many tokens, and with tools."""
    appended: Callable[[JSON], list[JSON]]
    """Return what a client sends of a reply, with results of its calls."""


def of_chat(reply: JSON) -> list[JSON]:
    message = reply["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return [message, *({"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in calls)]


def of_responses(reply: JSON) -> list[JSON]:
    calls = [one for one in reply["output"] if one["type"] == "function_call"]
    outputs = ({"type": "function_call_output", "call_id": one["call_id"], "output": "ok"} for one in calls)
    return [*reply["output"], *outputs]


def of_messages(reply: JSON) -> list[JSON]:
    results = [
        {"type": "tool_result", "tool_use_id": one["id"]} for one in reply["content"] if one["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": reply["content"]}
    return [said, *([{"role": "user", "content": results}] if results else [])]


def of_ollama(reply: JSON) -> list[JSON]:
    calls = reply["message"].get("tool_calls", [])
    return [
        reply["message"],
        *({"role": "tool", "tool_name": one["function"]["name"], "content": "ok"} for one in calls),
    ]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        "messages",
        lambda count, tools: {"max_tokens": count} | ({"tools": [TOOL]} if tools else {}),
        of_chat,
    ),
    "responses": Dialect(
        "/v1/responses",
        "input",
        lambda count, tools: (
            {"max_output_tokens": count, "store": False}
            | ({"tools": [{"type": "function", **FUNCTION}]} if tools else {})
        ),
        of_responses,
    ),
    "messages": Dialect(
        "/v1/messages",
        "messages",
        lambda count, tools: (
            {"max_tokens": count} | ({"tools": [{"name": "look", "input_schema": SCHEMA}]} if tools else {})
        ),
        of_messages,
    ),
    "ollama": Dialect(
        "/api/chat",
        "messages",
        lambda count, tools: (
            {"stream": False, "options": {"num_predict": count}} | ({"tools": [TOOL]} if tools else {})
        ),
        of_ollama,
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("with_tools", [False, True])
def test_replies_cut_anywhere_are_accepted_as_history(
    servers: tuple[Running, Running], name: str, with_tools: bool
) -> None:
    one = DIALECTS[name]
    for server in servers:
        for count in range(1, 7):
            body = {"model": "tiny", **one.fields(count, with_tools)}
            reply = server.post(one.path, {**body, one.field: [HELLO]})
            assert reply.status_code == 200, reply.text
            again = server.post(one.path, {**body, one.field: [HELLO, *one.appended(reply.json()), HELLO]})
            assert again.status_code == 200, (count, reply.text, again.text)


def test_null_content_and_refusals_of_an_assistant_are_accepted(servers: tuple[Running, Running]) -> None:
    server = servers[0]

    def prompt_of(*messages: JSON) -> str:
        reply = server.post("/apply-template", {"messages": [HELLO, *messages, HELLO]})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["prompt"])

    empty = prompt_of({"role": "assistant", "content": ""})
    assert prompt_of({"role": "assistant", "content": None}) == prompt_of({"role": "assistant"}) == empty
    refused = prompt_of({"role": "assistant", "content": "No."})
    assert prompt_of({"role": "assistant", "content": None, "refusal": "No."}) == refused
    assert prompt_of({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}) == refused
    items = [HELLO, {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO]
    assert server.post("/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 1}).status_code == 200
    user = {"messages": [{"role": "user", "content": None}]}
    assert server.post("/apply-template", user).status_code == 400


def texts_of(name: str, reply: JSON) -> str:
    """Return the text of a whole reply, which has no call."""
    if name == "chat":
        message = reply["choices"][0]["message"]
        assert not message.get("tool_calls") and reply["choices"][0]["finish_reason"] == "stop"
        return str(message["content"])
    if name == "responses":
        kinds = [one["type"] for one in reply["output"]]
        assert kinds == ["reasoning", "message"]
        return str(reply["output"][1]["content"][0]["text"])
    if name == "messages":
        assert [one["type"] for one in reply["content"]] == ["thinking", "text"] and reply["stop_reason"] == "end_turn"
        return str(reply["content"][1]["text"])
    assert "tool_calls" not in reply["message"]
    return str(reply["message"]["content"])


@pytest.mark.parametrize("name", DIALECTS)
def test_malformed_call_is_all_text_in_a_whole_reply(servers: tuple[Running, Running], name: str) -> None:
    one = DIALECTS[name]
    body = {"model": "tiny", **one.fields(20, True), one.field: [HELLO]}
    assert texts_of(name, servers[1].post(one.path, body).json()).strip() == BROKEN


def test_stream_of_ollama_loses_nothing_of_a_malformed_call(servers: tuple[Running, Running]) -> None:
    body = {"model": "tiny", "tools": [TOOL], "messages": [HELLO], "options": {"num_predict": 20}}
    text = "".join(line["message"]["content"] for line in servers[1].lines("/api/chat", body))
    assert text.strip() == BROKEN
